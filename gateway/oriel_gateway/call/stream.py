"""The part of an answer that goes on after its head: its framing and its silence.

An answer of server-sent events (`text/event-stream`) that cannot go on reports why in one more event. This is done only
between two events, that is after a blank line or before the first: within one, whatever is written would become a part
of it. And only where the end of the answer can be told as well, which takes chunks. Every other answer is cut, which a
client cannot take for a whole one. Line ends are those of the HTML standard, 9.2.5: LF, CR, CRLF.
"""

import asyncio
from time import monotonic
from typing import Final

from oriel_gateway.call.heads import answer_lines
from oriel_policies.documents import Tier
from oriel_wire.h1.chunked import LAST_CHUNK, chunk
from oriel_wire.h1.response import ResponseHead

__all__ = ["AnswerStream", "Events", "Pace", "begin_stream", "events_of"]

_COPIED: Final = 64 * 1024  # larger pieces are not copied into a chunk
_ENDS = 4  # bytes: two line ends
_EVENT: Final = b"\ndata:"
_DONE: Final = b"\ndata: [DONE]"  # the last event of streams of the OpenAI API, which has no token


class Events:
    """Tracks whether an answer is between two events."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\n\n"  # nothing yet is between two events

    def sent(self, data: bytes) -> None:
        """Take more of the answer, without the framing of its chunks."""
        self._tail = data[-_ENDS:] if len(data) >= _ENDS else (self._tail + data)[-_ENDS:]

    @property
    def between(self) -> bool:
        """Return whether an event may begin here."""
        return self._tail.replace(b"\r\n", b"\n").replace(b"\r", b"\n").endswith(b"\n\n")


class Pace:
    """Measures how fast the events of a stream come, where its tier has a time per token.

    first_s, last_s: monotonic seconds of the first and of the latest event; 0.0 before the first.
    """

    __slots__ = ("_edge", "_events", "first_s", "last_s")

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self._events = 0
        self._edge = b"\n"

    def sent(self, data: bytes) -> None:
        """Take more of the answer, without the framing of its chunks."""
        joined = self._edge + data
        events = joined.count(_EVENT) - joined.count(_DONE)
        self._edge = joined[1 - len(_EVENT) :]
        if events > 0:
            self._events += events
            self.last_s = monotonic()
            self.first_s = self.first_s or self.last_s

    def token_s(self, tokens: int) -> float:
        """Return the mean seconds from one token to the next; 0.0 of fewer than two.

        tokens: the tokens of the answer; 0 if they are not known, and each event counts as one.
        """
        steps = (tokens or self._events) - 1
        return (self.last_s - self.first_s) / steps if steps > 0 else 0.0


def events_of(head: ResponseHead, data: bytes) -> Events | None:
    """Return the tracker of a chunked answer that begins with `data`, None unless it is one of plain events."""
    if not head.events or head.status != 200 or (head.get("content-encoding") or "identity").lower() != "identity":
        return None
    events = Events()
    events.sent(data)
    return events


class AnswerStream:
    """State of one answer; its writer is its call. Times are monotonic seconds.

    unbounded: no length was announced, so the stream has its tier's bounds on silence and duration instead of the
    call's deadline. rechunk: it is written in chunks. close: its end is the connection's. data_s: the time when its
    latest bytes came. events: how far an answer of events has come, None for any other. pace: how fast it comes, None
    where nobody needs it.
    """

    __slots__ = ("close", "data_s", "events", "pace", "rechunk", "unbounded")

    def __init__(self, data_s: float = 0.0, *, unbounded: bool = False) -> None:
        self.unbounded = unbounded
        self.data_s = data_s
        self.rechunk = False
        self.close = False
        self.events: Events | None = None
        self.pace: Pace | None = None

    def ends_s(self, tier: Tier, response_s: float) -> float:
        """Return when an unbounded stream has been silent, or gone on, for too long."""
        return min(self.data_s + tier.stream_idle_s, response_s + tier.stream_max_s)

    def write(self, transport: asyncio.Transport, data: bytes, complete: bool) -> None:
        """Write more of an unbounded answer."""
        self.data_s = monotonic()
        if self.events is not None:
            self.events.sent(data)
        if not self.rechunk:
            if data:
                transport.write(data)
            return
        if len(data) > _COPIED:
            transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
        elif data:
            transport.write(chunk(data))
        if complete:
            transport.write(LAST_CHUNK)


def begin_stream(
    head: ResponseHead, data: bytes, cors: bytes, minor: int, now: float, *, close: bool
) -> tuple[AnswerStream | None, bytes]:
    """Begin an answer of which `data` came with the head, and more will come: its state, and its first lines.

    minor: the minor number of the client's HTTP version; 1.0 has no chunks, so there the end of the answer is that of
    the connection. None: a length was announced, and there is nothing to remember.
    """
    length = None if head.status == 204 else head.content_length
    if length is not None:
        stream = None
        if close:
            stream = AnswerStream()
            stream.close = True
        return stream, answer_lines(head, cors, length, close=close)
    stream = AnswerStream(now, unbounded=True)
    stream.rechunk = minor > 0
    stream.close = close or not minor
    if minor:
        stream.events = events_of(head, data)
    return stream, answer_lines(head, cors, None, close=stream.close, chunked=stream.rechunk)
