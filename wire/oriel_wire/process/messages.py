"""Messages between two processes over a stream socket, many in both directions at a time.

A frame consists of a header (mark, length of the head, length of the body), a head and a body, whose meaning the users
define. The head is padded to ALIGN bytes, so that arrays can be views of the received bytes, which belong to their
frame alone and are writable. Lengths are checked before memory is allocated.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import cast

from oriel_wire.memory import unwritten

ALIGN = 16
MAX_HEAD_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 30
SCRATCH_BYTES = 64 * 1024
MAX_PIECES = 512  # pieces in one system call
_MARK = b"oPY1"
_HEADER = struct.Struct("<4sIQ")
_PADDING = bytes(ALIGN)

Buffer = bytes | bytearray | memoryview
Frame = tuple[memoryview, memoryview]  # head and body


class FrameError(Exception):
    """The other side sent bytes that are not a frame, or more than a frame may hold."""


def frame(head: bytes, body: Sequence[Buffer] = (), *, max_body_bytes: int = MAX_BODY_BYTES) -> list[Buffer]:
    """Return a frame in pieces. Raises FrameError if it is too large."""
    size = sum(map(len, body))
    if len(head) > MAX_HEAD_BYTES or size > max_body_bytes:
        raise FrameError(f"{max(size, len(head))} bytes are more than fit into one message ({max_body_bytes})")
    return [_HEADER.pack(_MARK, len(head), size) + head + _PADDING[: -len(head) % ALIGN], *body]


def padded(data: Buffer, into: list[Buffer]) -> int:
    """Append data to the pieces of a body, with what fills it up to ALIGN bytes; return its own size."""
    size = len(data)
    into.append(data)
    if size % ALIGN:
        into.append(_PADDING[size % ALIGN :])
    return size


class Assembler:
    """Cuts a stream into frames: read into `buffer()`, then report the number of bytes with `received`.

    Large bodies are received into their final place.

    memory: makes a writable view of as many bytes as it is given, for a frame larger than the scratch buffer.
    """

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES, memory: Callable[[int], memoryview] = unwritten) -> None:
        self._max_body_bytes = max_body_bytes
        self._memory = memory
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._filled = 0
        self._large: memoryview | None = None  # a whole frame that does not fit the scratch buffer
        self._large_filled = 0
        self._head = 0

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view[self._filled :]

    def received(self, count: int) -> list[Frame]:
        """Handle `count` bytes written into the buffer; return the frames that are complete. Raises FrameError."""
        if self._large is not None:
            self._large_filled += count
            if self._large_filled < len(self._large):
                return []
            large, self._large = self._large, None
            return [_split(large[_HEADER.size :], self._head)]
        self._filled += count
        frames, at = [], 0
        while self._filled - at >= _HEADER.size:
            mark, head, body = _HEADER.unpack_from(self._scratch, at)
            if mark != _MARK or head > MAX_HEAD_BYTES or body > self._max_body_bytes:
                raise FrameError("a message is malformed or too large")
            total = _HEADER.size + head + -head % ALIGN + body
            if self._filled - at >= total:
                frames.append(_split(memoryview(self._scratch[at + _HEADER.size : at + total]), head))
                at += total
                continue
            if total > SCRATCH_BYTES:
                self._large = self._memory(total)
                self._large_filled, self._head = self._filled - at, head
                self._large[: self._large_filled] = self._view[at : self._filled]
                at = self._filled
            break
        rest = self._filled - at
        if at and rest:
            self._scratch[:rest] = self._scratch[at : self._filled]
        self._filled = rest
        return frames


def _split(data: memoryview, head: int) -> Frame:
    return data[:head], data[head + -head % ALIGN :]


class MessageStream(asyncio.BufferedProtocol):
    """A socket's end on an event loop.

    on_frame: called with the head and the body of each frame; may raise FrameError.
    on_lost: called once when the connection has ended, with the error of a frame that cannot be read, otherwise "".
    """

    def __init__(
        self,
        *,
        max_body_bytes: int,
        on_frame: Callable[[memoryview, memoryview], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._assembler = Assembler(max_body_bytes)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._problem = ""
        self._transport: asyncio.Transport | None = None
        self._opened = False
        self._closed = False

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket. Raises OSError."""
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        self._opened = True
        if self._closed:
            transport.abort()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._closed and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send a frame, whose memory must not change until it has arrived; a stream that has ended sends nothing."""
        if self._transport is not None and self.is_open:
            self._transport.writelines(pieces)

    def close(self) -> None:
        """End the connection at once: no frame follows, and `on_lost` is called a little later. May be called again."""
        self._closed = True
        if self._transport is not None and self._opened:  # otherwise `open` does it
            self._transport.abort()

    # The callbacks of asyncio ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._assembler.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for head, body in self._assembler.received(nbytes):
                if self._closed:
                    return
                self._on_frame(head, body)
        except FrameError as error:
            self._problem = str(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._on_lost(self._problem)


def receive(sock: socket.socket, assembler: Assembler) -> list[Frame]:
    """Read once from a blocking socket; return the frames that are complete, perhaps none.

    Raises OSError at the end, and FrameError.
    """
    count = sock.recv_into(assembler.buffer())
    if not count:
        raise ConnectionResetError("the other process is gone")
    return assembler.received(count)


def send(sock: socket.socket, pieces: Sequence[Buffer]) -> None:
    """Send a frame over a blocking socket. Raises OSError at the end."""
    for at in range(0, len(pieces), MAX_PIECES):
        group = pieces[at : at + MAX_PIECES]
        sent = sock.sendmsg(group)
        for piece in group:
            if sent < len(piece):
                sock.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))
