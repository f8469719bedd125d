"""Our client for gRPC calls with any number of answers, against servers made of the `h2` library."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from oriel_wire.engine.grpc_client import LIMITS, GrpcCall, GrpcClient
from oriel_wire.errors import BadMessage, TooLarge, UpstreamBroken, UpstreamUnread
from oriel_wire.h2.frames import CANCEL, REFUSED_STREAM
from oriel_wire.h2.grpc import UNAVAILABLE, UNIMPLEMENTED, encode_text, prefix
from oriel_wire.h2.hpack import Field

from ..waiting import until
from .h2.recorders import TRAILERS
from .h2_peers import Library, LibraryServer

MAX_BYTES = 1 << 20
WINDOW = LIMITS.stream_window_bytes


@pytest.fixture
async def library() -> AsyncIterator[LibraryServer]:
    async with LibraryServer(max_streams=1000) as server:
        yield server


@pytest.fixture
async def client(library: LibraryServer) -> AsyncIterator[GrpcClient]:
    made = GrpcClient(host="127.0.0.1", port=library.port, max_message_bytes=MAX_BYTES)
    yield made
    await made.close()


def call(client: GrpcClient, message: bytes = b"question", metadata: tuple[tuple[str, str], ...] = ()) -> GrpcCall:
    return client.call(b"/a.B/Hold", metadata, [message[:1], memoryview(message[1:])], 1.5)


async def begun(library: LibraryServer, count: int = 1) -> Library:
    """The first connection of the server, once so many whole requests have come on it."""
    await until(lambda: library.connections and len(library.connections[0].ended) == count)
    return library.connections[0]


def framed(*messages: bytes) -> bytes:
    return b"".join(prefix(len(each)) + each for each in messages)


async def test_a_call_carries_its_message_time_and_metadata(library: LibraryServer, client: GrpcClient) -> None:
    made = call(client, metadata=(("x-oriel-tier", "gold"), ("tracestate", "a=" + "b" * 200)))
    server = await begun(library)
    assert server.bodies[1] == framed(b"question")
    fields = dict(server.fields[1])
    assert fields[b":authority"] == b"127.0.0.1:%d" % library.port
    assert [fields[b":" + name] for name in (b"method", b"scheme", b"path")] == [b"POST", b"http", b"/a.B/Hold"]
    assert [fields[name] for name in (b"te", b"content-type")] == [b"trailers", b"application/grpc"]
    assert [fields[name] for name in (b"grpc-timeout", b"x-oriel-tier")] == [b"1500m", b"gold"]
    assert fields[b"tracestate"] == b"a=" + b"b" * 200
    made.cancel()


async def test_messages_come_in_their_order_and_then_the_status(library: LibraryServer, client: GrpcClient) -> None:
    made = call(client)
    server = await begun(library)
    server.send(1, framed(b"one", b"", b"three") + framed(b"four")[:7], None)
    assert [await made.read() for _ in range(3)] == [b"one", b"", b"three"]
    reading = asyncio.ensure_future(made.read())
    server.send(1, framed(b"four")[7:], TRAILERS)
    assert [await reading, await made.read(), await made.read()] == [b"four", None, None]
    assert (made.code, made.text, made.trailers) == (0, "", TRAILERS)
    made.cancel()
    assert not server.resets


async def test_a_tap_gets_what_comes_while_a_reader_waits(library: LibraryServer, client: GrpcClient) -> None:
    made = call(client)
    offered: list[bytes] = []

    def tap(message: bytes) -> bool:
        offered.append(message)
        return message != b"mine"

    made.tap = tap
    server = await begun(library)
    server.send(1, framed(b"early"), None)
    await until(lambda: made._messages)
    assert await made.read() == b"early" and not offered
    reading = asyncio.ensure_future(made.read())
    await asyncio.sleep(0)
    server.send(1, framed(b"one", b"two", b"mine", b"three"), TRAILERS)
    assert [await reading, await made.read(), await made.read()] == [b"mine", b"three", None]
    assert offered == [b"one", b"two", b"mine"], "behind one that waits to be read, nothing is offered"


async def test_an_answer_may_be_a_status_alone(library: LibraryServer, client: GrpcClient) -> None:
    made = call(client)
    server = await begun(library)
    status: list[Field] = [(b":status", b"200"), (b"grpc-status", b"12"), (b"grpc-message", encode_text("nö: 5 %"))]
    server.codec.send_headers(1, status, end_stream=True)
    server.flush()
    assert await made.read() is None
    assert (made.code, made.text, dict(made.trailers)[b"grpc-status"]) == (UNIMPLEMENTED, "nö: 5 %", b"12")


async def test_a_page_of_a_proxy_is_a_status(library: LibraryServer, client: GrpcClient) -> None:
    made = call(client)
    server = await begun(library)
    server.codec.send_headers(1, [(b":status", b"503"), (b"content-type", b"text/html")])
    server.codec.send_data(1, b"<html>")
    server.flush()
    assert await made.read() is None
    assert made.code == UNAVAILABLE and "HTTP status 503" in made.text


# Reading slowly ------------------------------------------------------------------------------------------------------


async def test_a_call_that_is_not_read_holds_a_window_and_no_more(library: LibraryServer, client: GrpcClient) -> None:
    messages = [b"%d" % number * 30_000 for number in range(40)]
    made = call(client)
    server = await begun(library)
    server.send(1, framed(*messages), TRAILERS)
    await until(lambda: server.codec.local_flow_control_window(1) == 0)
    other = call(client)
    await begun(library, 2)
    server.send(3, framed(b"more"), TRAILERS)
    assert await other.read() == b"more"  # the connection goes on
    assert server.codec.local_flow_control_window(1) == 0 and 1 in server._to_send
    assert [await made.read() for _ in messages] == messages and await made.read() is None


async def test_calls_that_are_not_read_do_not_hold_up_others(library: LibraryServer, client: GrpcClient) -> None:
    calls = [call(client) for _ in range(24)]
    server = await begun(library, len(calls))
    for number in range(len(calls)):
        server.send(1 + 2 * number, framed(bytes(2 * WINDOW)), None)
        server.send(1 + 2 * number, framed(bytes(2 * WINDOW)), TRAILERS)
    await until(lambda: all(each._messages for each in calls))
    await until(lambda: len(server._to_send) == len(calls) and server.codec.local_flow_control_window(47) == 0)
    last = call(client)
    await begun(library, len(calls) + 1)
    server.send(49, framed(bytes(2 * WINDOW)), TRAILERS)
    assert len(await last.read() or b"") == 2 * WINDOW
    for each in calls:
        each.cancel()
    assert len(library.connections) == 1


# Calls that fail -----------------------------------------------------------------------------------------------------


async def test_a_refused_call_is_begun_once_more(library: LibraryServer, client: GrpcClient) -> None:
    made, other = call(client), call(client)
    server = await begun(library, 2)
    for stream_id in (1, 3):
        server.codec.reset_stream(stream_id, REFUSED_STREAM)
    server.flush()
    await begun(library, 4)
    server.send(5, framed(b"answer"), TRAILERS)
    assert [await made.read(), await made.read()] == [b"answer", None]
    server.codec.reset_stream(7, REFUSED_STREAM)
    server.flush()
    with pytest.raises(UpstreamUnread):
        await other.read()
    assert len(server.ended) == 4


async def test_what_came_before_the_connection_was_lost_is_read_first(
    library: LibraryServer, client: GrpcClient
) -> None:
    made = call(client)
    server = await begun(library)
    server.send(1, framed(b"one", b"two") + b"\0", None)
    await until(lambda: made._messages)
    server.transport.abort()
    assert [await made.read(), await made.read()] == [b"one", b"two"]
    with pytest.raises(UpstreamBroken):
        await made.read()


@pytest.mark.parametrize(
    ("body", "trailers", "error"),
    [
        (b"\1\0\0\0\1x", None, BadMessage),
        (prefix(MAX_BYTES + 1), None, TooLarge),
        (b"\0\0\0\0\2x", TRAILERS, UpstreamBroken),
        (b"\0\0", TRAILERS, UpstreamBroken),
    ],
    ids=["compressed", "too large", "ends within a message", "ends within a prefix"],
)
async def test_an_answer_that_cannot_be_read_fails(
    library: LibraryServer, client: GrpcClient, body: bytes, trailers: list[Field] | None, error: type[Exception]
) -> None:
    made = call(client)
    server = await begun(library)
    server.send(1, body, trailers)
    with pytest.raises(error) as caught:
        await made.read()
    assert type(caught.value) is error
    await until(lambda: trailers or server.resets == {1: CANCEL})


# Callers that leave --------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_is_reset(library: LibraryServer, client: GrpcClient) -> None:
    made = call(client)
    server = await begun(library)
    reading = asyncio.ensure_future(made.read())
    await asyncio.sleep(0)
    made.cancel()
    with pytest.raises(UpstreamBroken, match="cancelled"):
        await reading
    await until(lambda: server.resets == {1: CANCEL})


async def test_a_call_cancelled_while_it_connects_is_never_sent(library: LibraryServer, client: GrpcClient) -> None:
    first = call(client, b"left")
    first.cancel()
    second = call(client, b"stayed")
    server = await begun(library)
    assert server.bodies == {1: framed(b"stayed")}
    second.cancel()
