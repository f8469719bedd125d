"""Answers that clients do not read (R31): they are counted, bounded together, and read no further from the upstream."""

import asyncio
import socket
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.call.unread import READER_BYTES, Unread
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.tls_pieces import PIECE_BYTES, InPieces
from oriel_wire.engine.limits import HttpLimits

from ..waiting import until
from .fake_transport import ASKED, HEAD, FakeTransport, core_connections, wired
from .gate import INFER, Gate, idle
from .stack import GOLD, Client, Seen, Upstream, documents, gateway, upstream

NOTES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=60)


class Reader:
    """A client that notes whether it was cut."""

    def __init__(self) -> None:
        self.transport: Any = FakeTransport()

    def abort(self) -> None:
        self.transport.abort()

    @property
    def cut(self) -> bool:
        return "abort" in self.transport.calls


@given(notes=NOTES)
def test_the_bound_holds_and_the_longest_silent_go_first(notes: list[tuple[int, int]]) -> None:
    """A size of 0 stands for a client that reads again."""
    unread, readers = Unread(100), [Reader() for _ in range(6)]
    waiting: dict[int, int] = {}
    for number, size in notes:
        if readers[number].cut:
            continue
        if size:
            waiting[number] = size
            unread.note(readers[number], size)
        else:
            waiting.pop(number, None)
            unread.read(readers[number])
        while sum(waiting.values()) > 100:
            del waiting[next(iter(waiting))]
        assert unread.bytes == sum(waiting.values()) <= 100
        assert not any(readers[each].cut for each in waiting)
    assert unread.cut == sum(reader.cut for reader in readers)


def test_less_is_taken_for_each_when_half_is_used() -> None:
    unread, first, second = Unread(4 * READER_BYTES), Reader(), Reader()
    assert not unread.note(first, READER_BYTES) and unread.note(first, READER_BYTES + 1)
    assert unread.note(second, READER_BYTES) and not unread.note(second, READER_BYTES // 4)


async def test_an_answer_that_begins_while_its_client_does_not_read_is_not_taken() -> None:
    """The answer before it, or an interim answer, may have filled the transport before there was a connection to
    pause.
    """
    async with wired() as (client, towards, up, towards_up):
        client.data_received(HEAD % GOLD.encode() + b"expect: 100-continue\r\ncontent-length: 1\r\n\r\n")
        client.pause_writing()
        client.data_received(b"x")
        towards.unsent = READER_BYTES + 1
        up.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\nx")
        assert "pause_reading" in towards_up.calls
        client.resume_writing()
        assert towards_up.calls[-1] == "resume_reading" and client.gateway.unread.bytes == 0
        client.connection_lost(None)


async def test_a_little_more_is_taken_for_a_client_that_does_not_read() -> None:
    """Then the answer may be complete, and the call's permit free."""
    async with wired() as (client, towards, up, towards_up):
        client.data_received(ASKED)
        towards.full, towards.unsent = True, 20_000
        up.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n" + bytes(20_000))
        assert client.gateway.unread.bytes == 20_000 and "pause_reading" not in towards_up.calls
        towards.unsent = 300_000
        up.data_received(bytes(270_000))
        assert client.gateway.unread.bytes == 300_000 and "pause_reading" in towards_up.calls
        client.connection_lost(None)
        assert client.gateway.unread.bytes == 0 and client.gateway.pools["p"].admission.inflight == 0


@given(lines=st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=5))
def test_over_tls_nothing_is_written_in_large_pieces_and_everything_in_order(lines: list[int]) -> None:
    """Memory for a write that is encrypted stays allocated: one write of 256 KiB would leave the connection at 380
    KiB.
    """
    written: list[bytes] = []
    transport = FakeTransport()
    transport.write = lambda data: written.append(bytes(data))  # type: ignore[method-assign]
    pieces = InPieces(transport)  # type: ignore[arg-type]
    texts = [bytes([number]) * size for number, size in enumerate(lines)]
    pieces.writelines(texts)
    assert b"".join(written) == b"".join(texts) and max(map(len, written), default=0) <= PIECE_BYTES
    pieces.abort()
    assert transport.calls == ["abort"]


async def test_readers_without_number_share_a_bound_and_everything_comes_back() -> None:
    size = 6_000_000

    async def large(seen: Seen) -> bytes:
        if seen.get("x-large") is None:
            return await up.ok(seen)
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)

    async with upstream() as up, gateway(documents([up.port], max_inflight=64)) as (port, core):
        up.answer = large
        core.unread.max_bytes = 1 << 20
        readers = []
        for _ in range(16):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            sock.sendall(HEAD % GOLD.encode() + b"x-large: 1\r\ncontent-length: 0\r\n\r\n")
            readers.append(sock)

        def cut() -> int:
            assert core.unread.bytes <= 1 << 20
            return core.unread.cut

        await until(cut)
        async with Client(port) as canary:
            assert (await canary.ask(INFER)).status == 200
        assert sum(each.transport.get_write_buffer_size() for each in next(iter(core.fronts)).connections) < 2 << 20
        for sock in readers:
            sock.close()
        await until(lambda: idle(core) and not core.unread.bytes, 60)


async def abort_unread(core: Gateway, clients: list[Client]) -> None:
    """Send more than the gateway reads of a further request, and abort the connections behind it."""

    def reads_no_more() -> bool:
        for client in clients:
            client.writer.write(b"x")
        return sum(connection._paused for connection in core_connections(core)) == len(clients)

    await until(reads_no_more)
    await until(lambda: not any(client.writer.transport.get_write_buffer_size() for client in clients))
    for client in clients:
        client.writer.transport.abort()
    for client in clients:
        with suppress(ConnectionError):
            await client.writer.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the state of a connection")
async def test_a_client_that_left_behind_bytes_nobody_read_is_not_served() -> None:
    """While a call runs, the gateway reads only a head's length of the next request, and must still notice the end."""
    hold = Gate()
    async with (
        upstream() as up,
        gateway(documents([up.port], max_inflight=1)) as (port, core),
        Client(port) as first,
    ):
        up.answer = hold
        first.send(INFER, b"first")
        await until(lambda: len(hold.order) == 1)
        leaving = [await Client(port).__aenter__() for _ in range(3)]
        for client in leaving:
            client.send(INFER, b"gone")
            client.writer.write(b"GET /v2 HTTP/1.1\r\nx: " + bytes(100_000))
        queue = core.pools["p"].admission.queue
        await until(lambda: len(queue) == 3)
        async with Client(port) as last:
            last.send(INFER, b"last")
            await until(lambda: len(queue) == 4)
            await abort_unread(core, leaving)
            for _ in range(2):
                hold.go.release()
            assert [(await client.reply()).status for client in (first, last)] == [200, 200]
        assert [seen.body for seen in up.seen] == [b"first", b"last"]
        assert [decided.outcome for decided in core.records.decisions.where()].count("client_left") == 3
        await until(lambda: idle(core))


async def test_what_is_read_ahead_of_its_turn_is_bounded() -> None:
    """Otherwise up to 256 KiB of further requests would stay with each connection, outside every budget."""
    one = HEAD % GOLD.encode() + b"content-length: 0\r\n\r\n"
    limits = HttpLimits(max_kept_bytes=300_000)
    hold = Gate()
    async with upstream() as up, gateway(documents([up.port], max_inflight=1), limits=limits) as (port, core):
        up.answer = hold
        clients = [await Client(port).__aenter__() for _ in range(8)]
        for client in clients:
            client.writer.write(one * 1500)
        await until(lambda: len(core.fronts) == 1)
        (front,) = core.fronts
        await until(lambda: len(core.pools["p"].admission.queue) == 7 and front.kept_bytes > 0)
        assert front.kept_bytes <= 300_000
        for _ in range(8):
            hold.go.release()
        said = [(await client.reply()).headers.get("connection") for client in clients]
        assert "close" in said and None in said, "some connections had to be closed, and the others go on"
        for client in clients:
            client.writer.transport.abort()
        await until(lambda: idle(core) and not front.kept_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the state of a connection")
async def test_nor_is_one_that_left_while_no_server_was_there() -> None:
    up, later = Upstream(), socket.socket()
    later.bind(("127.0.0.1", 0))  # connections are refused until it listens
    files = documents([later.getsockname()[1]])
    async with gateway(files) as (port, core), Client(port) as leaving, Client(port) as stays:
        for client in (leaving, stays):
            client.send(INFER, b"x")
        await until(lambda: core.pools["p"].endpoints.parked == 2)
        leaving.writer.write(b"GET /" + b"x" * 100_000)
        await abort_unread(core, [leaving])
        server = await asyncio.start_server(up.serve, sock=later)
        assert (await stays.reply()).status == 200
        assert len(up.seen) == 1
        await until(lambda: idle(core))
        server.close()


async def test_between_two_requests_nothing_is_left_out() -> None:
    """Otherwise the following bytes would be read as a request of their own."""
    async with wired() as (client, towards, _, _):
        client.limits = client.server.limits = HttpLimits(max_kept_bytes=1000, max_head_bytes=100)
        client.pause_writing()  # the client does not read its answers, so its next request is not read either
        client.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" + bytes(2000))
        assert "abort" in towards.calls and not client.server.kept_bytes
        client.connection_lost(None)
