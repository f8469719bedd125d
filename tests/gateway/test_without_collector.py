"""No kind of call leaves objects that only the garbage collector can free, for which it would stop all calls."""

from collections.abc import Awaitable, Callable
from itertools import count

import grpc
import httpx
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from ..uncollected import left_by
from .gate import INFER, idle
from .grpc_stack import Backend, stack
from .grpc_streams import INFER as RPC
from .grpc_streams import STREAM
from .openai_answers import CHAT, JSON, chat, streamed
from .raw_grpc import framed, raw_call
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
