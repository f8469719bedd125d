"""HTTP/1.1 from hostile clients: properties, and the page that compares Oriel with nginx and h11."""

import asyncio
import random
import re
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from . import http1, http1_differences
from .http1_cases import CASES, WHY

_NAME = st.text(alphabet="abcXYZ019-_.!~", min_size=1, max_size=12).map(lambda name: f"q{name}")
_VALUE = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=255, exclude_categories=("Cc",)), max_size=40)
_BODY = st.one_of(st.none(), st.binary(max_size=300))


@st.composite
def _messages(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, str, list[tuple[str, str]], bytes]]]:
    """Generate well-formed requests on one connection, together with what they mean."""
    data, said = b"", []
    for _ in range(draw(st.integers(1, 4))):
        fields = [("host", "x"), *draw(st.lists(st.tuples(_NAME, _VALUE), max_size=8))]
        fields = [(name.lower(), value.strip(" \t")) for name, value in fields]
        body = draw(_BODY)
        coded = b""
        if body is not None and draw(st.booleans()):
            fields.append(("transfer-encoding", "chunked"))
            sizes = draw(st.lists(st.integers(1, 50), max_size=5))
            rest = body
            for size in sizes:
                piece, rest = rest[:size], rest[size:]
                coded += b"%X\r\n%b\r\n" % (len(piece), piece) if piece else b""
            coded += (b"%x;e=1\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\nx-t: 1\r\n\r\n"
        elif body is not None:
            fields.append(("content-length", str(len(body))))
            coded = body
        method, target = (
            draw(st.sampled_from(["GET", "POST", "FROB"])),
            draw(st.sampled_from(["/", "/a/b?c=d", "/%41"])),
        )
        lines = [
            f"{method} {target} HTTP/1.1",
            *(f"{name}:{draw(st.sampled_from(['', ' ', '  ']))}{value}" for name, value in fields),
        ]
        data += "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + coded
        said.append((method, target, fields, body or b""))
    return data, said


@given(_messages(), st.randoms(use_true_random=False), st.booleans())
def test_what_is_well_formed_is_read_as_it_was_meant(message: tuple, rng: random.Random, late: bool) -> None:  # type: ignore[type-arg]
    data, said = message
    requests, refusal = http1.drive(http1.cut(data, rng), late=late)
    assert [(each.head.method, each.head.target, each.head.items(), each.body) for each in requests] == said
    assert refusal == ""


@given(
    st.lists(st.sampled_from([case.data for case in CASES if len(case.data) < 2000]), max_size=3),
    st.binary(max_size=60),
)
@example([b"GET / HTTP/1.1\r\nhost: x\r\nq: " + b"a" * (4096 - 29) + b"\r\n\r\n"], b"")
def test_whatever_follows_whatever_the_rules_hold(parts: list[bytes], tail: bytes) -> None:
    assert http1.judge(b"".join([*parts, tail]))[1] == ""


def test_the_rules_can_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules find a server that passes the framing on to its upstream."""
    from oriel_wire.h1 import request as h1

    monkeypatch.setitem(h1._REQUEST_KINDS, "transfer-encoding", 0)
    monkeypatch.setattr(http1, "with_h11", lambda _: ([], 0))
    both = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert http1.judge(both)[1] == "passed on: ['transfer-encoding']"


def _page() -> tuple[dict[tuple[str, str], list[str]], dict[tuple[str, str], str]]:
    """Return the rows by group and case, and of the cases that are alike the first digit of the status."""
    text, _, reasons = http1_differences.PAGE.read_text().partition("## Reasons of several rows")
    shared = [" ".join(each.split()) for each in re.split(r"^\d+\. ", reasons, flags=re.MULTILINE)]
    rows: dict[tuple[str, str], list[str]] = {}
    alike: dict[tuple[str, str], str] = {}
    for section in text.split("\n## ")[1:]:
        group, _, lines = section.partition("\n")
        for line in lines.splitlines():
            if line.startswith("| ") and not line.startswith("| case |"):
                cells = [cell.strip() for cell in line.strip("|").replace("\\|", "\0").split("|")]
                name, *cells = [cell.replace("\0", "|") for cell in cells]
                cells[-1] = re.sub(r"\[(\d+)\]", lambda number: shared[int(number[1])], cells[-1])
                rows[group.lower(), name] = cells
        for paragraph in lines.split("\n\n"):
            for begin, first in http1_differences.ALIKE.items():
                if paragraph.startswith(begin):
                    names = " ".join(paragraph.split()).removeprefix(begin).removesuffix(".")
                    alike.update({(group.lower(), name): first for name in names.split("; ")})
    return rows, alike


async def test_the_page_says_what_oriel_and_h11_do() -> None:
    rows, alike = _page()
    ours = await asyncio.gather(*map(http1_differences.by_gateway, CASES))
    assert len(CASES) >= 80 and {f"{case.group}: {case.name}" for case in CASES} >= set(WHY)
    assert {(case.group, case.name) for case in CASES} == {*rows, *alike} and not {*rows} & {*alike}
    for case, found in zip(CASES, ours, strict=True):
        h11 = http1_differences.by_h11(case)
        if case.group in ("framing", "chunks", "lines", "host") and found[0] == "4":
            assert found == "400, close", f"{case.name}: what cannot be framed ends its connection"
        if (case.group, case.name) in alike:
            assert http1_differences.agree(found, h11) and found[0] == alike[case.group, case.name], case.name
            assert not case.why, f"{case.name}: a reason without a difference"
            continue
        oriel, nginx, said, why = rows[case.group, case.name]
        assert (case.name, found, h11) == (case.name, oriel, said)
        assert not (http1_differences.agree(oriel, nginx) and http1_differences.agree(oriel, said)), case.name
        assert why and why == case.why, f"{case.name}: a difference without a reason"


@pytest.mark.skipif(http1_differences.NGINX is None, reason="compares with nginx")
async def test_the_page_says_what_nginx_does() -> None:
    assert http1_differences.NGINX is not None
    version = subprocess.run([http1_differences.NGINX, "-v"], capture_output=True, text=True, check=True).stderr
    if version.strip().split(": ")[1] not in http1_differences.PAGE.read_text():
        pytest.skip("the page was written with another version of nginx")
    rows, alike = _page()
    ours = await asyncio.gather(*map(http1_differences.by_gateway, CASES))
    for case, found, oriel in zip(CASES, await http1_differences.by_nginx(CASES), ours, strict=True):
        if (case.group, case.name) in alike:
            assert http1_differences.agree(found, oriel), case.name
        else:
            assert (case.name, found) == (case.name, rows[case.group, case.name][1])
