"""No kind of call leaves objects that only the garbage collector can free, for which it would stop all calls."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import grpc
import httpx
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from ..uncollected import left_by
from ..waiting import until
from .gate import INFER, idle
from .grpc_stack import Backend, stack
from .grpc_streams import INFER as RPC
from .grpc_streams import STREAM
from .openai_answers import CHAT, JSON, chat, streamed
from .raw_grpc import framed, raw_call
from .special_routes import CACHED, FLOWN, SHADOWED, Held, answering, house, ok
from .special_routes import ask as ask_alone
from .stack import BRONZE, GOLD, LIMITED, Client, Reply, Seen, documents, gateway, upstream

EVENTS = streamed(["{}"] * 5 + ["[DONE]"])
NUMBERS = count()


async def said(_: Seen) -> bytes:
    return EVENTS


Ask = Callable[[Client], Awaitable[Reply]]
KINDS: dict[str, Ask] = {
    "a call": lambda client: client.ask(INFER, b"{}"),
    "a client of its own": lambda client: client.ask(
        INFER, b"{}", headers=f"user-agent: {next(NUMBERS)}\r\naccept-language: {next(NUMBERS) % 3}\r\n"
    ),
    "ids": lambda client: client.ask(INFER, b"{}", headers=f"x-request-id: {next(NUMBERS)}\r\n"),
    "a large body": lambda client: client.ask(INFER, bytes(300_000)),
    "a service": lambda client: client.ask("/v1/services/digits", b"{}"),
    "a missing path": lambda client: client.ask("/nothing", b"{}"),
    "no model": lambda client: client.ask("/v2/models/other/infer", b"{}", key=BRONZE),
    "too large": lambda client: client.ask("/v2/health/live", b"", method="GET"),
    "too many": lambda client: client.ask(INFER, b"{}", key=LIMITED),
    "a timeout": lambda client: client.ask(INFER, b"{}", headers="x-request-timeout-ms: 5000\r\n"),
    "a bad timeout": lambda client: client.ask(INFER, b"{}", headers="x-request-timeout-ms: soon\r\n"),
    "a list": lambda client: client.ask("/v1/limits", method="GET"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_over_http_1_1_leaves_nothing_in_cycles(kind: str) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        assert await left_by(lambda: KINDS[kind](client)) == {}


async def test_a_stream_of_events_leaves_nothing_in_cycles() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        up.answer = said
        assert await left_by(lambda: client.ask(CHAT, chat(stream=True), headers=JSON)) == {}


async def test_a_connection_leaves_nothing_in_cycles() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _):

        async def connect() -> None:
            async with Client(port) as client:
                await client.ask(INFER, b"{}")

        assert await left_by(connect) == {}


@pytest.mark.parametrize(
    ("path", "key", "size"),
    [(INFER, GOLD, 2), (INFER, GOLD, 300_000), (INFER, "", 2), ("/nothing", GOLD, 2), ("/v1/services/x", GOLD, 2)],
)
async def test_a_call_over_http_2_leaves_nothing_in_cycles(path: str, key: str, size: int) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, http1=False, http2=True, trust_env=False, timeout=60) as client:

            async def ask() -> httpx.Response:
                return await client.post(path, headers={"x-api-key": key} if key else {}, content=bytes(size))

            assert await left_by(ask) == {} and idle(core)


@pytest.mark.parametrize("kind", ["unary", "stream", "no key", "no model", "pieces", "compressed", "web"])
async def test_a_call_over_grpc_leaves_nothing_in_cycles(kind: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
    large = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(200_000)])
    async with stack(Backend()) as (address, _), aio.insecure_channel(address) as channel:
        key = (("x-api-key", GOLD),)

        async def ask() -> None:
            unary, stream = channel.unary_unary(RPC), channel.stream_stream(STREAM, None, None)
            match kind:
                case "unary":
                    await unary(message, metadata=key)
                case "stream":
                    assert len([each async for each in stream(iter([message] * 3), metadata=key)]) == 3
                case "no key":
                    assert await unary(message).code() is grpc.StatusCode.UNAUTHENTICATED
                case "no model":
                    call = unary(b"\n\x01x", metadata=(("x-api-key", BRONZE),))
                    assert await call.code() is grpc.StatusCode.NOT_FOUND
                case "pieces":
                    await unary(large.SerializeToString(), metadata=key)
                case _:
                    web = "application/grpc-web" if kind == "web" else "application/grpc"
                    await raw_call(address, RPC, {"x-api-key": GOLD}, framed(message), kind=web)

        assert await left_by(ask) == {}


PLAIN = '[[routes]]\nmodel = "*"\nname = "p"\npool = "p0"\n'
HEDGED = '[[routes]]\nmodel = "*"\nname = "h"\npool = "p0"\nidempotent = true\nhedge_ms = 1\n'
TRIED = '[[routes]]\nmodel = "*"\nname = "i"\npool = "p0"\nidempotent = true\n'
BROKEN = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
SPECIAL: dict[str, tuple[str, bytes, int]] = {  # the routes, the answer of the first server, the status of the call's
    "from the cache": (CACHED, ok(), 200),
    "alone in its flight": (FLOWN, ok(), 200),
    "copied": (SHADOWED, ok(), 200),
    "hedged": (HEDGED, ok(), 200),
    "tried again": (TRIED, b"", 502),
    "not answered": (PLAIN, b"", 502),
    "answered in part": (PLAIN, BROKEN, 200),
    "not HTTP": (PLAIN, b"\x00\r\n\r\n", 502),
}


@pytest.mark.parametrize("kind", SPECIAL)
async def test_a_call_of_a_special_route_leaves_nothing_in_cycles(kind: str) -> None:
    routes, answer, status = SPECIAL[kind]
    async with house(routes, per_pool=2) as it:
        for up in it.ups:
            up.answer = answering(answer)

        async def call() -> None:
            async with Client(it.port) as client:
                client.send(INFER, b"x")
                head = await client.reader.readuntil(b"\r\n\r\n")
                assert int(head.split()[1]) == status
                if answer is BROKEN:
                    for up in it.ups:
                        await up.close()
                await (client.reader.read() if answer is BROKEN else client.reader.read(1))
            await until(it.idle)

        assert await left_by(call) == {}


async def test_calls_of_one_flight_leave_nothing_in_cycles() -> None:
    async with house(FLOWN) as it:
        it.ups[0].answer = held = Held()

        async def call() -> None:
            asked = [asyncio.ensure_future(ask_alone(it.port)) for _ in range(3)]
            await until(lambda: it.members() == 3)
            held.go.release()
            assert {(await each).status for each in asked} == {200}
            await until(it.idle)

        assert await left_by(call) == {}


@pytest.mark.parametrize("kind", ["late", "left", "left while it waits", "no place", "left during events"])
async def test_a_call_that_is_cut_off_leaves_nothing_in_cycles(kind: str) -> None:
    queue = 0 if kind == "no place" else 100
    async with upstream() as up, gateway(documents([up.port], max_inflight=1, max_queue=queue)) as (port, core):
        up.answer = Held()
        if kind == "left during events":
            up.answer = answering(EVENTS[: EVENTS.index(b"[DONE]")])

        async def call() -> None:
            async with Client(port) as first, Client(port) as client:
                match kind:
                    case "late":
                        answer = await client.ask(INFER, b"{}", headers="x-request-timeout-ms: 5\r\n")
                        assert answer.status == 504
                    case "left":
                        client.send(INFER, b"{}")
                        await until(lambda: core.pools["p"].admission.inflight)
                    case "left during events":
                        client.send(CHAT, chat(stream=True), headers=JSON)
                        await client.reader.readuntil(b"data: ")
                    case _:
                        first.send(INFER, b"{}")
                        await until(lambda: core.pools["p"].admission.inflight)
                        client.send(INFER, b"{}")
                        if queue:
                            await until(lambda: len(core.pools["p"].admission.queue))
                        else:
                            assert (await client.reply()).status == 503
            await until(lambda: idle(core))

        assert await left_by(call) == {}


@pytest.mark.parametrize("kind", ["late", "left"])
async def test_a_call_over_http_2_that_is_cut_off_leaves_nothing_in_cycles(kind: str) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core):
        up.answer = Held()
        url = f"http://127.0.0.1:{port}"

        async def call() -> None:
            late = {"x-request-timeout-ms": "5"} if kind == "late" else {}
            async with httpx.AsyncClient(base_url=url, http1=False, http2=True, trust_env=False, timeout=60) as client:
                asked = asyncio.ensure_future(client.post(INFER, headers={"x-api-key": GOLD} | late, content=b"{}"))
                if kind == "late":
                    assert (await asked).status_code == 504
                else:
                    await until(lambda: core.pools["p"].admission.inflight)
                    asked.cancel()
            await until(lambda: idle(core))

        assert await left_by(call) == {}


@pytest.mark.parametrize("kind", ["late", "left", "left stream"])
async def test_a_call_over_grpc_that_is_cut_off_leaves_nothing_in_cycles(kind: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
    backend = Backend()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:
        key = (("x-api-key", GOLD),)
        if kind != "left stream":
            backend.hold = asyncio.Event()

        async def call() -> None:
            if kind == "left stream":
                stream = channel.stream_stream(STREAM, None, None)(metadata=key)
                await stream.write(message)
                await stream.read()
                stream.cancel()
            elif kind == "late":
                unary = channel.unary_unary(RPC)(message, metadata=key, timeout=0.05)
                assert await unary.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                seen = len(backend.seen)
                unary = channel.unary_unary(RPC)(message, metadata=key)
                await until(lambda: len(backend.seen) > seen)
                unary.cancel()
            await until(lambda: idle(core))

        assert await left_by(call) == {}
