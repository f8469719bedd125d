"""The time to the first token and the time per token of streams, where a tier has `token_ms`."""

import asyncio
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.call.stream import Pace
from oriel_gateway.observe.records import Records
from oriel_policies.documents import Tier
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .openai_answers import CHAT, chat
from .operators import admin
from .records import record, target
from .stack import BRONZE, GOLD, Client, documents, gateway
from .stand_in import engine

EVENTS = b"data: {}\n\ndata: {}\n\n: waiting\n\ndata: {}\n\ndata: [DONE]\n\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\ntrailer: x-oriel-cost\r\n\r\n"
)
TIER = Tier(name="gold", band=0, target_s=1.0, give_up_s=4.0, token_s=0.05)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=4))
def test_events_are_counted_wherever_they_are_cut(cuts: list[int]) -> None:
    pace = Pace()
    edges = [0, *sorted(cuts), len(EVENTS)]
    for start, end in zip(edges, edges[1:], strict=False):
        pace.sent(EVENTS[start:end])
    assert 0.0 < pace.first_s <= pace.last_s
    pace.first_s, pace.last_s = 1.0, 2.0
    assert pace.token_s(0) in (0.5, 1 / 3), "an end that came in two pieces counts as an event"
    assert (pace.token_s(5), pace.token_s(1)) == (0.25, 0.0)


def test_comments_are_no_tokens() -> None:
    pace = Pace()
    pace.sent(b": waiting\n\n")
    assert (pace.first_s, pace.token_s(0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("token_s", "answered_s", "result", "cause"),
    [
        (0.05, 1.5, None, ""),
        (0.06, 1.5, "late", "tokens"),
        (0.06, 2.5, "late", "upstream"),
        (0.0, 1.5, None, ""),
        (-1.0, 1.5, None, ""),
    ],
)
def test_a_stream_with_slow_tokens_is_late(token_s: float, answered_s: float, result: str | None, cause: str) -> None:
    it = Records(ListSink())
    who: Any = SimpleNamespace(name="a", tier=TIER, caller="")
    times = {"queued_s": 1.0, "permit_s": 1.0, "sent_s": 1.0, "response_s": answered_s, "answered_s": answered_s}
    made = record(who, target(), token_s=token_s, ended_s=answered_s + 6.0, opened=True, **times)
    made.status = 200
    it.finished(made, who, "model:m")
    judged = made.judged
    assert (None if judged is None else judged.result, "" if judged is None else judged.cause) == (result, cause)
    if cause == "tokens":
        assert judged is not None and judged.excess_s == pytest.approx(1.0), "100 tokens, 10 ms too long each"
    it.stats.count()
    found = it.stats.streams.get(("p", "gold"))
    assert found is None if token_s < 0.0 else found is not None
    if found is not None:
        assert (sum(found[0].counts), sum(found[1].counts)) == (1, int(token_s > 0.0))


@pytest.mark.parametrize("key", [GOLD, BRONZE])
async def test_a_stream_is_answered_by_its_first_event_and_not_by_its_head(key: str) -> None:
    """Servers send the head of a stream before they have a token. Tiers without a time per token pay for no count."""
    steps = [asyncio.Event() for _ in range(2)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for go, more in zip(
            steps, (b"", b"0\r\nx-oriel-cost: dev=5;cpu=2;class=cpu;tin=3;tout=5\r\n\r\n"), strict=True
        ):
            await go.wait()
            writer.write(b"a\r\ndata: {}\n\n\r\n" + more)
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        text = documents([server.sockets[0].getsockname()[1]])["all.toml"]
        text = text.replace(b"[tiers.gold]", b"[tiers.gold]\nstream_idle_ms = 90000\ntoken_ms = 90000")
        async with gateway({"all.toml": text}) as (port, core), Client(port) as client, admin(core) as admins:
            client.send("/v2/models/digits/generate_stream", key=key, headers="connection: close\r\n")
            await client.reader.readuntil(b"\r\n\r\n")
            went_s = monotonic()
            for go in steps:
                go.set()
                await client.reader.readuntil(b"\n\n")
            await client.reader.read()
            await until(lambda: bool(core.records.stats.finished_count))
            (ended,) = core.records.decisions.where(limit=9)
            assert ended.judged is None
            if key == BRONZE:
                assert ended.token_s == -1.0 and ended.answered_s < went_s
                return
            assert went_s < ended.answered_s <= ended.ended_s
            assert 0.0 < ended.token_s * 4 <= ended.ended_s - ended.answered_s, "the server's five tokens count"
            page = (await admins.get("/metrics")).text
            for name in ("first_token", "time_per_token"):
                assert f'oriel_gateway_{name}_seconds_count{{pool="p",tier="gold"}} 1.0' in page


async def test_a_stream_that_keeps_its_permit_is_measured_too() -> None:
    async with engine() as stand_in:
        text = documents([stand_in.port], pool='engine = "vllm"\nprobe = ""')["all.toml"]
        text = text.replace(b"[tiers.gold]", b"[tiers.gold]\nstream_idle_ms = 90000\ntoken_ms = 90000")
        async with gateway({"all.toml": text}) as (port, core), Client(port) as client:
            gate = core.pools["p"]
            assert gate.engines is not None
            gate.engines.readable = True
            client.send(CHAT, chat(3, stream=True))
            await until(lambda: stand_in.waiting)
            reply = asyncio.create_task(client.reply())
            await until(lambda: reply.done() or stand_in.step())
            (ended,) = core.records.decisions.where(limit=9)
            assert ended.token_s >= 0.0 and ended.judged is None
