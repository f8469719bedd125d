"""`oriel top`: what it draws, and what it reads from a gateway's admin port."""

import argparse
import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_cli.errors import CommandFailed
from oriel_cli.watch import top
from oriel_cli.watch.top_screen import MOST, RED, SORTS, WIDTH, draw

COUNTS = {"rate": 1.5, "met": 90, "late": 8, "missed": 2, "excused": 0}


def tier(name: str = "gold") -> dict[str, Any]:
    promise = {"attainment": {"5m": 0.99, "1h": 0.9999}, "budget_left": 0.5, "burn": {"1h": 2.5}, "causes": {}}
    return {"tier": name, "target_ms": 60.0, "objective": 0.995, "waiting": 3, "oldest_ms": 12.0, **COUNTS, **promise}


def pool(name: str = "vision", waiting: int = 2) -> dict[str, Any]:
    endpoints = {"ready": 2, "ejected": 1}
    return {
        "pool": name,
        "permits": 3,
        "inflight": 3,
        "waiting": {"gold": waiting},
        "parked": 1,
        "oldest_ms": 5.0,
        "endpoints": endpoints,
    }


def target(name: str = "ranker", p99_ms: float | None = 8.0) -> dict[str, Any]:
    return {
        "kind": "model",
        "name": name,
        "p50_ms": 4.0,
        "p99_ms": p99_ms,
        "rows": None,
        "provider": "CPU",
        "version": "3",
        **COUNTS,
    }


def tenant(name: str = "storefront", late: int = 8) -> dict[str, Any]:
    return {"tenant": name, "tier": "gold", "refused": 4, "used": 0.31, **COUNTS, "late": late}


def call(name: str = "storefront") -> dict[str, Any]:
    ids = {
        "id": "r",
        "trace": "t",
        "at": 1.0,
        "tier": "gold",
        "target": "model:ranker",
        "status": 200,
        "target_ms": 60.0,
    }
    return {**ids, "tenant": name, "result": "late", "reason": "answered", "took_ms": 80.0}


def snapshot(**more: Any) -> dict[str, Any]:
    made = {"tiers": [tier()], "pools": [pool()], "targets": [target()], "tenants": [tenant()], "calls": [call()]}
    head = {
        "at": 1.0,
        "version": "1.2",
        "rates": {"met": 4.0, "late": 1.0, "missed": 0.0, "excused": 0.0},
        "lag_ms": 0.4,
    }
    return {**head, "more": dict.fromkeys(made, 0), **made, **more}


def test_every_section_is_drawn_with_what_is_not_known_as_a_dash() -> None:
    text = "\n".join(draw(snapshot()))
    assert "5 calls/s, 1 late or missed" in text and "3 waiting" in text
    (gold,) = [line for line in text.splitlines() if line.startswith("gold")]
    assert "!99.00%" in gold and " 99.99%" in gold and "50%" in gold and "2.50" in gold
    assert gold.split()[6] == "-", "30 days are not known"
    assert "gold 2, no server" in text and "2 ready, 1 eject" in text and "\x1b" not in text


def test_below_its_objective_a_tier_has_a_mark_and_with_colours_a_colour() -> None:
    assert "\x1b[31m!99.00%\x1b[0m" in "\n".join(draw(snapshot(), colour=True))


def test_a_screen_that_is_wide_enough_shows_which_answers_agree_where_they_are_compared() -> None:
    made = snapshot(targets=[target() | {"agrees": 0.9876}, target("other")])
    lines = draw(made, width=140)
    assert any("AGREES" in line for line in lines) and any(line.endswith("98.7%") for line in lines)
    assert all(len(line) <= 120 for line in draw(made, width=120))
    assert "AGREES" not in "".join(draw(made, width=110)) + "".join(draw(snapshot(), width=140))


@pytest.mark.parametrize("url", ["http://127.0.0.1:65536", "http://[::1", "ftp://h"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(CommandFailed, match="address of an admin port"):
        top._base(argparse.Namespace(url=url))


def test_calls_that_find_no_server_are_red_unless_one_is_starting() -> None:
    def cells(**more: Any) -> list[str]:
        lines = draw(snapshot(pools=[pool() | more]), colour=True, width=MOST)
        return [each for each in re.findall(rf"{re.escape(RED)}([^\x1b]*)", "\n".join(lines)) if "no server" in each]

    assert cells() and not cells(parked=0) and not cells(phase="starting")
    nobody = draw(snapshot(pools=[pool() | {"endpoints": {}, "parked": 1}]), colour=True)
    assert f"{RED}none" in "\n".join(nobody)


def test_troubles_are_named_below_the_title() -> None:
    lines = draw(snapshot(troubles=["p: 127.0.0.1:1 is ejected (stuck)"]))
    assert lines[1] == "p: 127.0.0.1:1 is ejected (stuck)"
    text = " ".join(["the usage ledger cannot be written"] * 3)
    long = draw(snapshot(troubles=[text] * 9), height=20)
    assert all(len(line) <= WIDTH for line in long) and " ".join(long[1:3]) == text


def test_one_of_several_gateways_says_which_figures_are_of_all() -> None:
    lines = draw(snapshot(gateways=3))
    assert lines[1] == "one of 3 gateways: 5 min and more, and budgets, are of all"
    assert draw(snapshot(gateways=1)) == draw(snapshot())


def test_canaries_that_were_rolled_back_are_named_below_the_title() -> None:
    made = snapshot(rolled_back=["digits: canary@8 (errors)", "x" * 200])
    for height in (0, 20):
        lines = draw(made, height=height)
        assert lines[1] == "canary rolled back: digits: canary@8 (errors)" and len(lines[2]) == WIDTH
        assert not height or len(lines) <= height


NAMES = st.one_of(st.text(max_size=200), st.just("\x1b[2J\n"), st.just("名前" * 60))


@settings(max_examples=60, deadline=None)
@given(
    name=NAMES,
    width=st.integers(0, 300),
    height=st.integers(0, 60),
    sort=st.sampled_from(list(SORTS)),
    rows=st.integers(0, 30),
)
def test_no_line_is_wider_than_the_screen_and_no_name_controls_it(
    name: str, width: int, height: int, sort: str, rows: int
) -> None:
    made = {"tiers": tier, "pools": pool, "targets": target, "tenants": tenant, "calls": call}
    shown = snapshot(**{key: [make(name) for _ in range(rows)] for key, make in made.items()})
    lines = draw(shown, sort=sort, width=width, height=height)
    assert all(len(line) <= min(max(width, WIDTH), MOST) and line.isprintable() for line in lines)
    assert not height or len(lines) <= max(height, 11)


def test_a_wide_screen_shows_more_and_cuts_less() -> None:
    waiting = pool() | {"waiting": {"gold": 2, "silver": 120}, "phase": "loading", "expected_ms": 9000.0}
    made = snapshot(tiers=[tier() | {"causes": {"queue": 1, "model_wait": 3}}], pools=[waiting])
    narrow, wide = ("\n".join(draw(made, width=width)) for width in (80, 140))
    assert "model wait" in narrow and "loading" in narrow and "r" not in narrow.split()
    for text in (
        "model wait 75%, queue 25%",
        "gold 2, silver 120, no server 1",
        "loading, about 9.00 s",
        "2 ready, 1 ejected",
    ):
        assert text in wide and text not in narrow
    assert "REQUEST" in wide


def test_a_table_without_rows_shows_that_there_are_none() -> None:
    assert "\n".join(draw(snapshot(tenants=[], calls=[]))).count("\nnone") == 2


def order(found: list[str], names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: next(n for n, line in enumerate(found) if line.startswith(name)))


def test_keys_choose_the_order() -> None:
    tenants = [tenant("b", late=1), tenant("c", late=9), tenant("a", late=3)]
    targets = [target("slow", 90.0), target("unknown", None), target("slowest", 900.0)]
    pools = [pool("empty", 0), pool("full", 80)]
    made = snapshot(tenants=tenants, targets=targets, pools=pools)
    assert order(draw(made), ["a ", "b ", "c "]) == ["b ", "c ", "a "], "the gateway's own order"
    assert order(draw(made, sort="m"), ["a ", "b ", "c "]) == ["c ", "a ", "b "]
    assert order(draw(made, sort="n"), ["a ", "b ", "c "]) == ["a ", "b ", "c "]
    assert order(draw(made, sort="l"), ["slow ", "unknown ", "slowest "]) == ["slowest ", "slow ", "unknown "]
    assert order(draw(made, sort="w"), ["empty ", "full "]) == ["full ", "empty "]


@asynccontextmanager
async def gateway(head: bytes, body: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve one answer, whatever is asked for."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(head + b"connection: close\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


async def test_snapshots_are_read_of_the_stream_with_the_token(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("ORIEL_ADMIN_TOKEN", "an-operators-token")
    event = json.dumps(snapshot()).encode()
    async with gateway(OK, b"data: " + event + b"\n\n: the stream is open\n\ndata: " + event + b"\n\n") as (
        base,
        heads,
    ):
        assert await top._print(base, as_json=True, once=True, sort="i") == 0
        assert json.loads(capsys.readouterr().out) == snapshot()
        with pytest.raises(CommandFailed, match="has stopped"):
            await top._print(base, as_json=False, once=False, sort="i")
        assert capsys.readouterr().out.count("TENANT ") == 4, "each of two snapshots has two tables with tenants"
    assert all(
        b"authorization: Bearer an-operators-token" in head.replace(b"Authorization", b"authorization")
        for head in heads
    )


@pytest.mark.parametrize(
    ("status", "says"),
    [(b"401 Unauthorized", "ORIEL_ADMIN_TOKEN"), (b"503 Full", "viewers"), (b"404 No", "no console")],
)
async def test_what_is_wrong_is_said(status: bytes, says: str) -> None:
    async with gateway(b"HTTP/1.1 " + status + b"\r\n", b"") as (base, _):
        with pytest.raises(CommandFailed, match=says):
            await top._print(base, as_json=True, once=True, sort="i")


async def test_a_gateway_that_is_not_there_is_named() -> None:
    with pytest.raises(CommandFailed, match="no gateway answers at"):
        await top._print("http://127.0.0.1:1", as_json=True, once=True, sort="i")


def test_a_pool_with_language_models_shows_its_calls_by_tier() -> None:
    language = {"cache": 0.255, "calls": {"gold": [2, 0, 0], "all": [8, 4, 3]}}
    lines = draw(snapshot(tiers=[tier() | {"tokens_s": 50.0}], pools=[pool() | {"language": language}]))
    at = next(index for index, line in enumerate(lines) if line.startswith("DECODING IN"))
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["vision", "gold", "2", "0", "0", "25%", "50"],
        ["vision", "all", "8", "4", "3", "25%", "-"],
    ]
