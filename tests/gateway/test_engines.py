"""Engines of others behind the gateway: the stand-ins of `stand_in` behave as the engines document it."""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from oriel_gateway.call.engine_body import READ_BYTES
from oriel_gateway.core import Gateway
from oriel_gateway.shared.hidden_usage import WithoutUsage
from oriel_policies.documents import compile_documents

from ..waiting import until
from .openai_answers import CHAT, chat
from .stack import BRONZE, GOLD, Client, Seen, Upstream, digest, documents, gateway, upstream
from .stand_in import Engine, Sequence, engine

LOW = "key-low"
TENANT = f"""
[tenants.low]
tier = "bronze"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{digest(LOW)}" }}]
"""


def pool(kind: str, more: str = "") -> str:
    return f'engine = "{kind}"\nprobe = ""\n{more}'


async def numbers(kind: str, *bodies: bytes, key: str = GOLD) -> list[Any]:
    """Return the priorities that the engine gets for these bodies with this key."""
    async with (
        engine(kind) as stand_in,
        gateway(documents([stand_in.port], pool=pool(kind), extra=TENANT)) as (port, _),
    ):
        got = []
        for body in bodies:
            async with Client(port) as client:
                client.send(CHAT, body, key=key)
                await until(lambda: stand_in.waiting)
                got.append(stand_in.seen[-1].body.get("priority"))
                assert json.loads(stand_in.seen[-1].raw)
            await until(lambda: not stand_in.waiting)
        return got


def last(up: Upstream) -> Seen:
    """Return the latest call, which is no read of the engine's metrics."""
    return [each for each in up.seen if each.body][-1]


async def test_body_has_the_number_of_tier_and_deadline_in_place_of_the_clients() -> None:
    disguised = [
        b'{"messages":[],"priority":-5}',
        b'{"priority":-5,"messages":[],"priority":-6}',
        b'{"messages":[],"\\u0070riority":-5} \r\n',
        b'{"messages":[],"tools":[{"priority":1}],"temperature":NaN,"priority":-5}',
        chat(text='"priority": 1'),
    ]
    got = await numbers("vllm", chat(), *disguised)
    assert all(number is not None and number > 0 for number in got)
    assert got == sorted(got)  # all of one tier: by their deadlines
    low = await numbers("vllm", chat(), key=LOW)
    assert low[0] > max(got) + (1 << 44)


@pytest.mark.parametrize(("kind", "least", "most"), [("sglang", 8160, 8169), ("trtllm", 0.99, 1.0)])
async def test_sglang_and_tensorrt_llm_get_larger_numbers_for_urgent_tiers(
    kind: str, least: float, most: float
) -> None:
    (gold,) = await numbers(kind, chat(priority=0))
    (bronze,) = await numbers(kind, chat(), key=LOW)
    assert least <= gold <= most
    assert bronze < gold


async def test_text_that_is_no_object_reaches_no_engine_as_one_of_its_own_priority() -> None:
    async with upstream() as up, gateway(documents([up.port], pool=pool("vllm"))) as (port, _), Client(port) as client:
        open_ended = b'{"messages":[],"max_tokens":9', b'{"messages":[],"priority":-5'
        for body in ('{"priority":-5}'.encode("utf-16-le"), b"\xef\xbb\xbf[]", b"{", *open_ended):
            await client.ask(CHAT, body)
            with pytest.raises(ValueError):
                json.loads(last(up).body)


async def test_other_bodies_and_other_pools_stay_as_they_are() -> None:
    for kind, path in (("openai", CHAT), ("trtllm", "/v1/responses"), ("v2", CHAT), ("vllm", "/v1/audio/speech")):
        async with upstream() as up, gateway(documents([up.port], pool=pool(kind))) as (port, _):
            async with Client(port) as client:
                await client.ask(path, b'{"input":"x","priority":3}')
            assert json.loads(last(up).body) == {"input": "x", "priority": 3}


async def test_triton_over_http_gets_priority_and_timeout_as_parameters() -> None:
    plain = b'{"inputs":[],"parameters":{"sequence_id":7,"priority":1,"timeout":1}}'
    tensor = b'{"inputs":[{"parameters":{"binary_data_size":3}}]}'
    async with (
        upstream() as up,
        gateway(documents([up.port], pool=pool("triton"))) as (port, _),
        Client(port) as client,
    ):
        await client.ask("/v2/models/digits/infer", plain)
        parameters = json.loads(last(up).body)["parameters"]
        assert parameters.pop("timeout") > 1_000_000
        assert parameters == {"priority": 1, "sequence_id": 7}
        head = f"inference-header-content-length: {len(tensor)}\r\n"
        await client.ask("/v2/models/digits/infer", tensor + b"\0\1\2", headers=head, key=BRONZE)
        seen = last(up)
        size = int(seen.get("inference-header-content-length") or 0)
        assert seen.head.lower().count("inference-header-content-length") == 1
        assert seen.body[size:] == b"\0\1\2"
        assert json.loads(seen.body[:size])["parameters"]["priority"] == 3
        await client.ask("/v2/models/digits/generate", b'{"text_input":"x"}')
        assert last(up).body == b'{"text_input":"x"}'


async def test_large_parameters_for_triton_have_no_priority_of_the_clients() -> None:
    tensor = b'"inputs":[{"data":["%b"]}]' % (b"x" * READ_BYTES)
    async with upstream() as up, gateway(documents([up.port], pool=pool("triton"))) as (port, core):
        core.pools["p"].pool = replace(core.pools["p"].pool, max_body_bytes=2 * READ_BYTES)
        for given in (b'"priority":1', b'"\\u0070riority":1', b'"sequence_id":7'):
            async with Client(port) as client:
                await client.ask("/v2/models/digits/infer", b'{%b,"parameters":{%b}}' % (tensor, given), key=BRONZE)
            first = dict(json.loads(last(up).body, object_pairs_hook=lambda pairs: dict(reversed(pairs))))
            assert first["parameters"].get("priority") == (None if b"sequence_id" in given else 3)


@pytest.mark.parametrize(("kind", "path"), [("triton", "/v2/models/digits/infer"), ("vllm", CHAT)])
async def test_body_that_nothing_can_be_written_into_is_refused(kind: str, path: str) -> None:
    async with upstream() as up, gateway(documents([up.port], pool=pool(kind))) as (port, _), Client(port) as client:
        for more in ("", "content-encoding: identity\r\n"):
            reply = await client.ask(path, gzip.compress(chat()), headers=f"{more}content-encoding: gzip\r\n")
            assert (reply.status, json.loads(reply.body)["error"]) and reply.status == 415
        assert not up.seen
        assert (await client.ask(path, b"{}", headers="content-encoding: identity\r\n")).status == 200


SHORT = """
[tiers.gold]
band = 0
target_ms = 200
give_up_ms = 400
stream_idle_ms = IDLE
stream_max_ms = 700
"""


def short(port: int, idle_ms: int) -> dict[str, bytes]:
    """Return documents whose gold tier gives a first token 400 ms, and a stream 700."""
    (text,) = documents([port], pool=pool("vllm")).values()
    _, _, rest = text.decode().partition("[tiers.bronze]")
    return {"all.toml": f"{SHORT.replace('IDLE', str(idle_ms))}[tiers.bronze]{rest}".encode()}


@pytest.mark.parametrize("streams", [True, False])
async def test_call_that_is_late_inside_the_engine_is_aborted_there_and_answered(streams: bool) -> None:
    async with engine() as stand_in, gateway(short(stand_in.port, 600)) as (port, core), Client(port) as client:
        reply = await client.ask(CHAT, chat(stream=streams))
        assert (reply.status, json.loads(reply.body)["error"]["reason"]) == (504, "deadline_exceeded")
        await until(lambda: stand_in.aborted)
        assert core.pools["p"].admission.inflight == 0


@pytest.mark.parametrize("idle_ms", [100, 700])
async def test_stream_that_is_silent_or_too_long_is_aborted_in_the_engine(idle_ms: int) -> None:
    async with engine() as stand_in, gateway(short(stand_in.port, idle_ms)) as (port, _), Client(port) as client:
        client.send(CHAT, chat(100_000, stream=True))
        await until(lambda: stand_in.waiting)
        stand_in.step()
        await until(lambda: stand_in.aborted or (idle_ms == 700 and stand_in.step()))
        assert b"deadline_exceeded" in (await client.reply()).body


async def leaves_over_http_1(port: int, stand_in: Engine, body: bytes) -> None:
    async with Client(port) as client:
        client.send(CHAT, body)
        await until(lambda: stand_in.waiting)


async def leaves_over_http_2(port: int, stand_in: Engine, body: bytes) -> None:
    async with httpx.AsyncClient(http1=False, http2=True) as client:
        url, headers = f"http://127.0.0.1:{port}{CHAT}", {"x-api-key": GOLD}
        asking = asyncio.ensure_future(client.post(url, content=body, headers=headers))
        await until(lambda: stand_in.waiting)
        asking.cancel()  # resets the stream, and leaves the connection open
        await until(lambda: stand_in.aborted)


@pytest.mark.parametrize("leaves", [leaves_over_http_1, leaves_over_http_2])
@pytest.mark.parametrize("streams", [True, False])
async def test_engine_aborts_the_call_of_a_client_that_leaves(leaves: Any, streams: bool) -> None:
    async with engine() as stand_in, gateway(documents([stand_in.port], pool=pool("vllm"))) as (port, core):
        await leaves(port, stand_in, chat(stream=streams))
        await until(lambda: stand_in.aborted)
        assert core.pools["p"].admission.inflight == 0


async def test_early_head_of_a_stream_does_not_begin_its_answer() -> None:
    async with engine() as stand_in, gateway(documents([stand_in.port], pool=pool("vllm"))) as (port, core):
        async with Client(port) as client:
            client.send(CHAT, chat(2, stream=True))
            await until(lambda: stand_in.waiting)
            endpoint = core.pools["p"].endpoints[0]
            await until(lambda: endpoint.heard)
            assert core.pools["p"].admission.inflight == 1
            stand_in.step()
            stand_in.step()
            assert (await client.reply()).body.endswith(b"data: [DONE]\n\n")


async def streamed_by_engine(kind: str, **more: object) -> tuple[bytes, dict[str, Any], Any]:
    """Return the events that the client gets, the body that the engine has got, and the usage of the call."""
    async with engine(kind) as stand_in, gateway(documents([stand_in.port], pool=pool(kind))) as (port, core):
        async with Client(port) as client:
            client.send(CHAT, chat(3, stream=True, **more))
            await until(lambda: stand_in.waiting)
            reply = asyncio.ensure_future(client.reply())
            await until(lambda: reply.done() or stand_in.step())
        usage = core.records.stats.usage.tokens.read()
        return reply.result().body, stand_in.seen[-1].body, {kind: n for of in usage.values() for kind, n in of.items()}


async def test_usage_of_a_stream_is_asked_for_counted_and_kept_from_the_client() -> None:
    for kind in ("vllm", "sglang"):
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False, "other": 1}}):
            events, sent, used = await streamed_by_engine(kind, **options)
            assert sent["stream_options"]["include_usage"] is True
            assert b"usage" not in events and events.count(b"data:") == 4 and events.endswith(b"[DONE]\n\n")
            assert used["output"] == 3 and used["input"] > 0, kind


async def test_usage_that_the_client_asks_for_reaches_it() -> None:
    events, _, used = await streamed_by_engine("vllm", stream_options={"include_usage": True})
    assert events.count(b"data:") == 5 and b'"completion_tokens": 3' in events
    assert used["output"] == 3


async def test_usage_is_taken_out_of_a_stream_of_known_length_and_left_in_a_compressed_one() -> None:
    stream = b'data: {"choices":[{}]}\n\ndata: {"choices":[],"usage":{"total_tokens":3}}\n\ndata: [DONE]\n\n'
    packed = gzip.compress(stream)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    whole = head + b"content-length: %d\r\n\r\n%b" % (len(stream), stream)
    begun = head + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(packed), packed)

    async def answer(seen: Seen) -> bytes:
        return begun if seen.get("x-packed") else whole

    async with upstream() as up, gateway(documents([up.port], pool=pool("vllm"))) as (port, _), Client(port) as client:
        up.answer = answer
        got = (await client.ask(CHAT, chat(stream=True))).body
        assert got == b'data: {"choices":[{}]}\n\ndata: [DONE]\n\n'
        client.send(CHAT, chat(stream=True), headers="x-packed: 1\r\n")
        await client.reader.readuntil(packed)


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n"])
def test_event_of_the_usage_is_found_however_the_stream_is_cut(mark: bytes) -> None:
    kept = [b'data: {"choices":[{"usage":1}],"usage":null}', b": ping", b'data: {"choices":[],"x":"\\"usage\\""}']
    stream = mark.join(
        [*kept[:2], b'data: {"choices" : [],"usage":{"total_tokens":3}}', kept[2], b"data: [DONE]", b"rest"]
    )
    for size in (1, 2, 3, 7, len(stream)):
        hides = WithoutUsage()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        got = b"".join([hides.feed(piece, False) for piece in pieces]) + hides.feed(b"", True)
        assert got == mark.join([*kept, b"data: [DONE]", b"rest"])


def test_event_that_never_ends_is_passed_on() -> None:
    hides = WithoutUsage()
    assert b"".join([hides.feed(b"x" * 1000, False) for _ in range(100)]).count(b"x") > 60_000


async def read_load(core: Gateway) -> None:
    """Let the gateway read the metrics of its engines once, and not by itself any more."""
    steering = core.pools["p"].engines
    assert steering is not None
    await until(lambda: not steering.awaited)
    steering.due_s = 0.0
    steering.read(core.pools["p"].endpoints.usable, monotonic())
    steering.due_s = inf
    await until(lambda: not steering.awaited)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
async def test_no_more_calls_are_inside_than_keep_the_engine_busy_and_the_order_stays_ours(kind: str) -> None:
    async with (
        engine(kind, seats=4) as stand_in,
        gateway(documents([stand_in.port], pool=pool(kind), extra=TENANT)) as (port, core),
        AsyncExitStack() as stack,
    ):
        await read_load(core)
        clients = [await stack.enter_async_context(Client(port)) for _ in range(21)]
        for client in clients[:-1]:
            client.send(CHAT, chat(8, stream=True), key=LOW)
        await until(lambda: len(stand_in.waiting) == 8)  # the limit that a pool begins with
        await read_load(core)
        clients[-1].send(CHAT, chat(8, stream=True))
        await until(lambda: core.pools["p"].admission.queue.items == 13)
        stand_in.step()
        await read_load(core)
        assert core.pools["p"].admission.limit == 5
        while len(stand_in.seen) < 21 or stand_in.running or stand_in.waiting:
            stand_in.step()
            await read_load(core)
        assert [each.body["priority"] for each in stand_in.seen].index(gold_of(kind, stand_in)) == 8
        assert {(await client.reply()).status for client in clients} == {200}


def gold_of(kind: str, stand_in: Engine) -> float:
    numbers = [each.body["priority"] for each in stand_in.seen]
    return min(numbers) if kind == "vllm" else max(numbers)


async def test_metrics_that_go_missing_leave_the_limit_to_what_is_learned(caplog: pytest.LogCaptureFixture) -> None:
    async with engine(seats=1) as stand_in, gateway(documents([stand_in.port], pool=pool("vllm"))) as (port, core):
        gate = core.pools["p"]
        assert gate.engines is not None and gate.learned is not None
        async with Client(port) as client:
            client.send(CHAT, chat())
            await until(lambda: stand_in.waiting)
            await read_load(core)
            assert gate.engines.readable and gate.keeps_permits()
            stand_in.metrics, gate.engines.limit.limit = False, 6
            for _ in range(3):
                assert gate.keeps_permits()  # an engine that is busy may answer late
                await read_load(core)
            assert (gate.engines.missing, gate.keeps_permits()) == (True, False)
            assert gate.admission.limit == gate.learned.limit
            assert len([each for each in caplog.records if "learned from latency" in each.message]) == 1
            stand_in.metrics = True
            await read_load(core)
            assert not gate.engines.missing


async def test_engine_in_which_calls_wait_is_avoided() -> None:
    async with engine() as busy, engine() as free, AsyncExitStack() as stack:
        core = (await stack.enter_async_context(gateway(documents([busy.port, free.port], pool=pool("vllm")))))[1]
        gate = core.pools["p"]
        busy.waiting = [Sequence(0, chat())] * 3  # another gateway's
        await read_load(core)
        assert {gate.endpoints.pick(1.0).address[1] for _ in range(50)} == {free.port}  # type: ignore[union-attr]
        busy.waiting = []


@pytest.fixture
async def pair() -> AsyncIterator[tuple[list[Engine], int, Gateway]]:
    """Two engines, the gateway's port, and the gateway."""
    async with engine(seats=8) as one, engine(seats=8) as other:
        async with gateway(documents([one.port, other.port], pool=pool("vllm"))) as (port, core):
            yield [one, other], port, core


async def asked(port: int, engines: list[Engine], text: str) -> Engine:
    """Let a prompt be answered; returns the engine that it went to."""
    before = [len(each.seen) for each in engines]
    async with Client(port) as client:
        reply = asyncio.ensure_future(client.ask(CHAT, chat(1, text)))
        await until(lambda: reply.done() or any(each.step() for each in engines))
        assert reply.result().status == 200
    return next(each for each, count in zip(engines, before, strict=True) if len(each.seen) > count)


async def test_prompts_with_one_beginning_go_to_the_engine_that_has_it(
    pair: tuple[list[Engine], int, Gateway],
) -> None:
    engines, port, core = pair
    await read_load(core)
    for talk in "ab":
        texts = [talk * 700 * turn for turn in range(1, 5)]
        assert len({(await asked(port, engines, text)).port for text in texts}) == 1
    assert sum(each.cached for each in engines) > 0.4 * sum(each.asked for each in engines)


async def test_prompt_goes_elsewhere_while_it_would_have_to_wait_where_its_beginning_is(
    pair: tuple[list[Engine], int, Gateway],
) -> None:
    engines, port, core = pair
    await read_load(core)
    home = await asked(port, engines, "a" * 2000)
    (endpoint,) = [each for each in core.pools["p"].endpoints if each.address[1] == home.port]
    endpoint.waiting = 1
    assert await asked(port, engines, "a" * 2000) is not home
    endpoint.waiting = 0
    assert await asked(port, engines, "a" * 2000) is not home  # the other one has it now as well, and got it last


def test_documents_of_the_page_describe_pools_of_engines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    pools = compile_documents({"engines.toml": block.encode()}).pools
    assert [(each.engine, each.probe, each.max_inflight) for each in pools.values()] == [("vllm", "/health", 1024)]


async def test_metrics_are_read_at_the_port_that_the_documents_name_now() -> None:
    async with engine() as calls, engine() as metrics:
        files = documents([calls.port], pool=pool("vllm", f"metrics_port = {metrics.port}"))
        async with gateway(files) as (_, core):
            await read_load(core)
            assert (calls.scraped, metrics.scraped) == (0, 1)
            core.adopt(compile_documents(documents([calls.port], pool=pool("vllm"))))
            await read_load(core)
            assert (calls.scraped, metrics.scraped) == (1, 1)
