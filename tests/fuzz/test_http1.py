"""HTTP/1.1 from hostile clients: properties, and the page that compares Oriel with nginx and h11."""

import asyncio
import random
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
    from oriel_wire.h1.request import request as h1

    monkeypatch.setitem(h1._REQUEST_KINDS, "transfer-encoding", 0)
    monkeypatch.setattr(http1, "with_h11", lambda _: ([], 0))
    both = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert http1.judge(both)[1] == "passed on: ['transfer-encoding']"


def _rows() -> dict[tuple[str, str], list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    group = ""
    for line in http1_differences.PAGE.read_text().splitlines():
        if line.startswith("## "):
            group = line[3:].lower()
        elif line.startswith("| ") and group:
            name, *cells = [
                cell.strip().replace("\\|", "|") for cell in line.strip("|").replace("\\|", "\0").split("|")
            ]
            rows[group, name.replace("\0", "|")] = cells
    return rows


async def test_the_page_says_what_oriel_and_h11_do() -> None:
    rows = _rows()
    ours = await asyncio.gather(*map(http1_differences.by_gateway, CASES))
    assert len(CASES) >= 80 and {f"{case.group}: {case.name}" for case in CASES} >= set(WHY)
    for case, found in zip(CASES, ours, strict=True):
        oriel, nginx, h11, why = rows[case.group, case.name]
        assert (case.name, found, http1_differences.by_h11(case)) == (case.name, oriel, h11)
        alike = http1_differences.agree(oriel, nginx) and http1_differences.agree(oriel, h11)
        if case.group in ("framing", "chunks", "lines", "host") and oriel[0] == "4":
            assert oriel == "400, close", f"{case.name}: what cannot be framed ends its connection"
        assert alike != bool(why) and why == case.why, f"{case.name}: a difference without a reason, or the reverse"


@pytest.mark.skipif(http1_differences.NGINX is None, reason="compares with nginx")
async def test_the_page_says_what_nginx_does() -> None:
    assert http1_differences.NGINX is not None
    version = subprocess.run([http1_differences.NGINX, "-v"], capture_output=True, text=True, check=True).stderr
    if version.strip().split(": ")[1] not in http1_differences.PAGE.read_text():
        pytest.skip("the page was written with another version of nginx")
    rows = _rows()
    for case, found in zip(CASES, await http1_differences.by_nginx(CASES), strict=True):
        assert (case.name, found) == (case.name, rows[case.group, case.name][1])
