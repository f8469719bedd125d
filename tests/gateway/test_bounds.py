"""Bounds that no other test module reaches."""

import asyncio
from pathlib import Path
from time import monotonic

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.errors import Refused
from oriel_gateway.identity.keys import identify
from oriel_gateway.ingress import h2
from oriel_gateway.ingress.forwarded import MAX_HOPS, forwarded_for
from oriel_gateway.ingress.grpc_rules import GrpcLimits
from oriel_gateway.ingress.http import public_limits
from oriel_gateway.pools.pool import MAX_WORKS, PoolGate
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.tls import Certificates
from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import BadMessage, StartFailed
from oriel_wire.h1.chunked import ChunkedDecoder
from oriel_wire.h1.request import LineMemo, parse_request_head

from ..waiting import until
from .certificates import certificate
from .endpoint_pools import IDEMPOTENT, first_route
from .fake_transport import HEAD, FakeTransport
from .grpc_stack import Backend, stack
from .stack import GOLD, Client, Seen, digest, documents, gateway, upstream


@pytest.mark.parametrize(
    ("fits", "too_long"),
    [
        (b"1;%b\r\na\r\n0\r\n\r\n" % (b"x" * 254), b"1;%b\r\na\r\n0\r\n\r\n" % (b"x" * 255)),
        (b"00000001\r\na\r\n0\r\n\r\n", b"000000001\r\na\r\n0\r\n\r\n"),
        (b"1\r\na\r\n0\r\n" + b"t: 1\r\n" * 682 + b"\r\n", b"1\r\na\r\n0\r\n" + b"t: 1\r\n" * 683 + b"\r\n"),
    ],
)
def test_what_frames_a_chunk_is_bounded(fits: bytes, too_long: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(fits) == [b"a"] and decoder.done
    with pytest.raises(BadMessage):
        ChunkedDecoder().feed(too_long)
    with pytest.raises(BadMessage):  # fed byte by byte, it is refused as well
        late = ChunkedDecoder()
        for number in range(len(too_long)):
            late.feed(too_long[number : number + 1])


def test_a_credential_is_bounded() -> None:
    longest, longer = "k" * 4096, "k" * 4097
    keys = f'keys = [{{ sha256 = "{digest(longest)}" }}, {{ sha256 = "{digest(longer)}" }}]'
    snapshot = compile_documents(documents([1], extra=f'[tenants.long]\ntier = "gold"\nmodels = ["*"]\n{keys}'))
    assert identify([("x-api-key", longest)], snapshot).tenant.name == "long"
    with pytest.raises(Refused):
        identify([("x-api-key", longer)], snapshot)


def test_only_the_nearest_addresses_are_read() -> None:
    (network,) = compile_documents(
        documents([1], extra='[http]\ntrusted_proxies = ["10.0.0.0/8"]')
    ).http.trusted_proxies
    for others, client in ((MAX_HOPS - 1, "1.2.3.4"), (MAX_HOPS, "10.0.0.1")):
        listed = ", ".join(["1.2.3.4", *["10.0.0.1"] * others])
        head = parse_request_head(f"GET / HTTP/1.1\r\nhost: x\r\nx-forwarded-for: {listed}".encode(), LineMemo())
        assert forwarded_for(head, "10.0.0.9", secure=False, networks=(network,))[0] == client


def test_kinds_of_calls_are_bounded() -> None:
    gate = PoolGate(compile_documents(documents([1])).pools["p"])
    for number in range(MAX_WORKS + 2):
        gate._time(f"kind {number}", 1, 0.1)
    assert len(gate._times) == MAX_WORKS and next(iter(gate._times)) == "kind 2"


async def test_an_idle_connection_that_is_too_old_is_not_used_again() -> None:
    endpoint = Endpoint("127.0.0.1", 1, max_idle_s=10.0)
    fresh, old = UpstreamConnection(endpoint), UpstreamConnection(endpoint)
    now = monotonic()
    for connection, since in ((old, now - 11.0), (fresh, now - 9.0)):
        connection.connection_made(FakeTransport())  # type: ignore[arg-type]
        connection.idle_since = since
        endpoint.idle.append(connection)
    sink: object = None
    assert endpoint.begin(sink, now) is fresh  # type: ignore[arg-type]
    assert endpoint.begin(sink, now) is None and "close" in old.transport.calls  # type: ignore[arg-type, attr-defined]
    await endpoint.close()


@pytest.mark.parametrize(("size", "status"), [(60_000, 200), (70_000, 502)])
async def test_only_a_body_that_was_kept_is_sent_again(size: int, status: int) -> None:
    async with upstream() as up:
        broken = 0

        async def once(seen: Seen) -> bytes:
            nonlocal broken
            broken += 1
            return b"" if broken == 1 else await up.ok(seen)

        up.answer = once
        async with gateway(first_route(documents([up.port]), IDEMPOTENT)) as (port, _), Client(port) as client:
            assert (await client.ask("/v2/models/digits/infer", bytes(size))).status == status


async def test_a_pool_may_take_larger_bodies_than_others() -> None:
    """A pool's `max_body_bytes` counts also when it is above the default of 64 MiB."""
    files = documents([1])
    files["all.toml"] = files["all.toml"].replace(b"max_body_bytes = 1000000", b"max_body_bytes = 90000000")
    async with gateway(files, limits=public_limits()) as (port, _):
        for length, answer in ((90_000_000, b"100 Continue"), (90_000_001, b"413 Content Too Large")):
            async with Client(port) as client:
                client.writer.write(
                    HEAD % GOLD.encode() + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % length
                )
                assert (await client.reader.readline()) == b"HTTP/1.1 %b\r\n" % answer


def test_a_certificate_without_end_is_not_read(tmp_path: Path) -> None:
    pair = certificate(tmp_path, "some")
    Certificates(*pair)
    with pytest.raises(StartFailed, match="larger than 100 bytes"):
        Certificates(*pair, max_file_bytes=100)


async def test_grpc_messages_metadata_and_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrpcLimits, "MAX_MESSAGE_BYTES", 1000)
    monkeypatch.setattr(GrpcLimits, "MAX_METADATA_BYTES", 2000)
    monkeypatch.setattr(h2, "MAX_REQUESTS", 1)
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:

        def ask(size: int = 0, **more: str) -> "aio.UnaryUnaryCall[bytes, bytes]":
            request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(size)])
            metadata = (("x-api-key", GOLD), *more.items())
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            return infer(request.SerializeToString(), metadata=metadata)

        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(size=1000).code() is exhausted
        assert await ask(long="x" * 2000).code() is exhausted
        first = ask()
        await until(lambda: backend.seen)
        (server,) = core.fronts
        await until(lambda: server.requests_open == 1)
        assert await ask().code() is grpc.StatusCode.UNAVAILABLE, "one at once"
        backend.hold.set()
        assert await first.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("size", [20_000, 30_000, 40_000, 60_000])
@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive"])
async def test_a_call_with_too_much_metadata_leaves_the_others_of_its_connection_alone(method: str, size: int) -> None:
    """Above 32 KiB it ended the connection with every call on it; calls that need no key had twice the limit."""
    async with stack(Backend()) as (address, _), aio.insecure_channel(address) as channel:
        open_stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
        stream = open_stream(metadata=(("x-api-key", GOLD),))
        message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        await stream.write(message)
        assert await stream.read()
        metadata = [("x-api-key", GOLD), *[(f"x-{number}", "x" * 10_000) for number in range(size // 10_000)]]
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(message, metadata=metadata)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, await call.details()
        await stream.write(message)
        assert await stream.read(), "the stream goes on"
        stream.cancel()


async def test_a_grpc_connection_that_does_not_begin_is_closed() -> None:
    """A connection that never sends HTTP/2's preface is closed within the time of a head, not after two minutes."""
    async with stack(Backend(), limits=HttpLimits(head_timeout_s=0.2)) as (address, _), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(b"PRI * HTTP/2.0\r\n")
        while await reader.read(1000):
            pass
        writer.close()


async def test_grpc_connections_are_bounded_and_do_not_idle_for_ever() -> None:
    """Idle connections are closed to make room for new ones, or they could take every file of the process."""
    settings = b"\0\0\0\4\0\0\0\0\0"
    begun = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + b"\0\0\0\4\1\0\0\0\0"
    limits = HttpLimits(max_connections=2, idle_timeout_s=1.0)
    async with stack(Backend(), limits=limits) as (address, core), asyncio.timeout(60):
        opened = []
        for number in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(begun)
            opened.append((reader, writer))
            assert await reader.read(9), "a new connection is served"
            await until(lambda: sum(len(server.connections) for server in core.fronts) <= 2)
            if number > 1:
                left, _ = opened[number - 2]
                await left.read()  # read until the gateway closes it
        for reader, writer in opened:
            await reader.read()
            writer.close()
