"""The common part of HTTP/2 connections of servers and upstreams: writing what the codec has queued to a transport."""

import asyncio
from typing import Final

from mypy_extensions import mypyc_attr

from oriel_wire.h2.connection import H2Connection
from oriel_wire.h2.known_fields import FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import ENDED, Stream

# Pieces are joined before they are written if they are less than this in all, or less than the other on average.
_JOINED: Final = 64 * 1024
_SMALL: Final = 1024


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
        out, self.out = self.out, []
        if self.transport.is_closing():
            return
        size = sum(map(len, out))
        if len(out) == 1:
            self.transport.write(out[0])
        elif size <= _JOINED or size < _SMALL * len(out):
            self.transport.write(b"".join(out))
        else:
            self.transport.writelines(out)
