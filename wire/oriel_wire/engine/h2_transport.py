"""The common part of HTTP/2 connections of servers and upstreams: writing what the codec has queued to a transport."""

import asyncio
from typing import Final

from mypy_extensions import mypyc_attr

from oriel_wire.h2.connection import H2Connection
from oriel_wire.h2.known_fields import FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import ENDED, Stream

_JOINED: Final = 64 * 1024  # pieces of less than this in all are joined before they are written
_PIECES: Final = 256


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Transport(H2Connection):
    """A connection that is also an asyncio protocol. Its bytes are written once in each turn of the loop."""

    __slots__ = ("_flushing", "_loop", "transport")
    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, *, client: bool, limits: H2Limits, memo: FieldMemo) -> None:
        super().__init__(client=client, limits=limits, memo=memo)
        self._loop = loop
        self._flushing = False

    def eof_received(self) -> bool:
        """Treat a half-closed peer as gone, because it cannot be distinguished from one that left."""
        return False

    def pause_writing(self) -> None:
        self.pause()

    def resume_writing(self) -> None:
        self.resume()
        if self.out:
            self._write()

    def wants_write(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self.out:
            self._write()

    def _end_streams(self) -> list[Stream]:
        """Forget all streams as the connection ends, and return them; what is sent on them is ignored."""
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.receiving = stream.sending = ENDED
            stream.pending = None
        return streams

    def _write(self) -> None:
        out = self.out
        self.out = []
        if not self.transport.is_closing():
            _write_pieces(self.transport, out)


def _write_pieces(transport: asyncio.Transport, out: list[bytes | memoryview]) -> None:
    if len(out) == 1:
        transport.write(out[0])
        return
    size = sum(map(len, out))
    if size <= _JOINED:
        transport.write(b"".join(out))
    elif len(out) < _PIECES:
        transport.writelines(out)
    else:
        # A frame head is nine bytes: joined to its neighbours it costs less than an entry of its own.
        small: list[bytes | memoryview] = []
        whole: list[bytes | memoryview] = []
        for piece in out:
            if len(piece) < 1024:
                small.append(piece)
                continue
            if small:
                whole.append(b"".join(small))
                small = []
            whole.append(piece)
        if small:
            whole.append(b"".join(small))
        transport.writelines(whole)
