"""Comments that keep a stream of events open until its first event comes.

Balancers end connections that are silent for a minute, and a call may wait for longer: for the first server of its
pool, for its turn, or for the first token. A client that asked for a stream of events and has waited for KEEP_ALIVE_S
gets the head of its answer with a comment, and a further comment each time. Its status has been sent then: an error
is the last event of the stream.
"""

import asyncio
from collections.abc import Iterable
from itertools import islice
from time import monotonic
from typing import Any, Final, Protocol

import msgspec

from oriel_gateway.call.contracts import LIMITED, QUEUED, SENDING, Call
from oriel_gateway.call.stream import AnswerStream, Events, events_of
from oriel_wire.h1.response import UNBUFFERED, ResponseHead

__all__ = ["KEEP_ALIVE_S", "KeepAlive", "rest_of", "wants_events"]

KEEP_ALIVE_S = 15.0
MAX_READ_BYTES: Final = 64 * 1024  # largest body that is searched for a request to stream
_AT_ONCE: Final = 100  # calls that are looked at in one turn of the loop
_COMMENT: Final = b": waiting\n\n"
_WAITING: Final = frozenset({LIMITED, QUEUED, SENDING})
_decode = msgspec.json.Decoder(msgspec.defstruct("Asked", [("stream", Any, None)])).decode


class EventClient(Protocol):
    """A client of HTTP, which may wait for an answer of events."""

    cors: bytes

    @property
    def must_close(self) -> bool:
        """Return whether the answer ends its connection."""

    def write_comment(self, call: Call, start: list[bytes], comment: bytes) -> None:
        """Write a comment. start: the first lines of the answer, none if they are written."""


class KeepAlive:
    """Looks at all waiting calls of a gateway each KEEP_ALIVE_S.

    watched: the objects that have a deadline, calls among them. rounds: the times that it has begun to look.
    """

    def __init__(self, watched: Iterable[object]) -> None:
        self.rounds = 0
        self._watched = watched
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._poll)

    def stop(self) -> None:
        """Send no more comments."""
        self._timer.cancel()

    def _poll(self) -> None:
        self.rounds += 1
        since_s = monotonic() - KEEP_ALIVE_S
        calls = (each for each in (*self._watched,) if isinstance(each, Call) and each.received_s <= since_s)
        self._go_through(iter(calls))

    def _go_through(self, calls: Any) -> None:
        some = [*islice(calls, _AT_ONCE)]
        for call in some:
            if call.state in _WAITING and (call.stream is not None or wants_events(call)):
                _comment(call)
        if len(some) == _AT_ONCE:
            self._timer = self._loop.call_later(0.0, self._go_through, calls)
        else:
            self._timer = self._loop.call_later(KEEP_ALIVE_S, self._poll)


def wants_events(call: Call) -> bool:
    """Return whether a waiting call asks for a stream of events, which it alone gets."""
    target, head = call.target, call.head
    if (
        call.side.protocol != "http"
        or call.client is None
        or call.receiver is not None
        or target.keepable
        or target.head_only
    ):
        return False
    if call.client.http_version == "1.1" and not head.line.minor:
        return False
    if head.line.path.endswith("/generate_stream") or "text/event-stream" in (head.get("accept") or ""):
        return True
    if target.kind != "service" or call.bytes_in > MAX_READ_BYTES or b'"stream"' not in (body := call.body()):
        return False
    try:
        decoded: Any = _decode(body)
        return decoded.stream is True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _comment(call: Call) -> None:
    """Send a comment, with the head of the answer before the first."""
    client: Any = call.client
    waiting: EventClient = client
    start: list[bytes] = []
    if call.stream is None:
        stream = call.stream = AnswerStream(call.received_s)
        call.status = 200
        stream.events, stream.rechunk, stream.close = Events(), client.http_version != "2", waiting.must_close
        start = [
            b"HTTP/1.1 200 OK",
            b"content-type: text/event-stream; charset=utf-8",
            *[f"{name}: {value}".encode() for name, value in UNBUFFERED],
            f"x-request-id: {call.mark.request_id}".encode("latin-1"),
            f"traceresponse: {call.mark.traceresponse()}".encode(),
            *([waiting.cors] if waiting.cors else []),
        ]
    waiting.write_comment(call, start, _COMMENT)


def rest_of(
    call: Call, stream: AnswerStream, head: ResponseHead, data: bytes, complete: bool, now: float
) -> bytes | None:
    """Return the rest of a stream that was kept open: the answer's events, or a whole answer of another kind as
    one event.

    None: it is no stream of events and not whole either, so the client was cut off.
    """
    if call.extras is not None:
        head = head.copy()
        data = call.extras.response(call, head, data, complete)
    if events_of(head, b"") is None:
        if not complete:
            assert call.client is not None
            call.client.abort()
            asyncio.get_running_loop().call_soon(call.client_left)
            return None
        data = b"".join([b"data: %b\n" % line for line in data.splitlines()]) + b"\n"
    if not complete:
        stream.unbounded, stream.data_s = True, now
        call.watch_until(stream.ends_s(call.tenant.tier, now))
    return data
