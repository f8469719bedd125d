"""What must hold for every byte string a client sends to an HTTP/1.1 port. `judge(data)` says which rule does not.

1. Requests and at most one refusal come out; nothing escapes. A refusal is a printable sentence of <= 500 characters.
2. Where the bytes are cut into segments, and whether answers are late, changes nothing.
3. What h11 accepts as well, it reads as the same method, target, fields and body.
4. What a proxy passes on of a head is framed as the body is, and names nothing that belongs to the hop, to the sender's
   credential or to us.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import h11

from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.server import CLOSED, DRAIN, ServerConnection
from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import LineMemo, RequestHead, parse_request_head
from oriel_wire.h1.similar import SimilarHeads

__all__ = ["LIMITS", "Request", "drive", "judge"]

LIMITS = HttpLimits(max_head_bytes=4096, max_fields=24, max_target_bytes=400, max_body_bytes=6000)
# Not the parser's own table, which may be what is wrong.
_NEVER_PASSED_ON = frozenset(
    (
        "connection keep-alive proxy-connection te trailer transfer-encoding transfer_encoding content_length upgrade "
        "http2-settings host expect authorization x-api-key proxy-authorization x-request-id x-request-timeout-ms "
        "traceparent tracestate forwarded x-real-ip x-forwarded-for x-forwarded-proto x-forwarded-host"
    ).split()
)


class Request:
    """One request as the server read it."""

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.body = b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.said() == other.said()

    def __repr__(self) -> str:
        return f"{self.head.method} {self.head.target[:80]} {len(self.body)} bytes"

    def said(self) -> tuple[Any, ...]:
        head = self.head
        return head.method, head.target, head.items(), head.forward, self.body, head.close, head.expect_continue


class _Turns:
    """An event loop whose callbacks run when the test says so."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def run(self) -> None:
        while self._due:
            self._due.popleft()()


class _Server:
    def __init__(self) -> None:
        self.limits = LIMITS
        self.memo = LineMemo()
        self.heads = SimilarHeads(self.memo)
        self.connections: set[Any] = set()
        self.draining = False
        self.secure = False
        self.gate = None
        self.kept_bytes = 0
        self.accepting = True
        self.loop = _Turns()
        self.pulse = SimpleNamespace(fresh_until=inf)


class _Transport:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    abort = close

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def get_write_buffer_size(self) -> int:
        return 0


class _Connection(ServerConnection):
    def __init__(self, server: Any, late: bool) -> None:
        super().__init__(server)
        self.requests: list[Request] = []
        self.refusal = ""
        self.ended = False
        self._now: Request | None = None
        self._late = late

    def on_head(self, head: RequestHead) -> None:
        self.server.heads.authenticated(head)
        self._now = Request(head)

    def on_data(self, data: bytes) -> None:
        assert data and self._now is not None
        self._now.body += data

    def on_end(self) -> None:
        assert self._now is not None
        self.requests.append(self._now)
        if self._late:
            self.server.loop.call_soon(lambda: self.answered(close=False))
        else:
            self.answered(close=False)

    def on_lost(self) -> None:
        self._now = None

    def on_refused(self, status: int, message: str) -> None:
        assert status in (400, 408, 413, 414, 431) and not self.refusal
        self.refusal = message


def drive(segments: Sequence[bytes], *, late: bool = False) -> tuple[list[Request], str]:
    """Feed the segments to a server; returns its complete requests in order, and its refusal ('' if there is none)."""
    server = _Server()
    transport = _Transport()
    connection = _Connection(server, late)
    connection.connection_made(transport)  # type: ignore[arg-type]
    for segment in segments:
        if transport.closed or connection.state in (DRAIN, CLOSED):
            break
        if segment:
            connection.data_received(segment)
        server.loop.run()
    return connection.requests, connection.refusal


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut the same bytes into several segments."""
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 2, 3, 8, 40))))
    return [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]


def judge(data: bytes) -> tuple[str, str]:
    """Return the refusal and the rule that is broken; each is "" if there is none."""
    requests, refusal = drive([data])
    if refusal and (len(refusal) > 500 or not refusal.isprintable()):
        return refusal, f"a refusal of {len(refusal)} characters: {refusal[:600]!r}"
    rng = random.Random(data)
    ways = [cut(data, rng), cut(data, rng)]
    if len(data) < 1500:
        ways.append([data[n : n + 1] for n in range(len(data))])
    for number, segments in enumerate(ways):
        again, refused = drive(segments, late=number == 1)
        if again != requests or bool(refused) != bool(refusal):
            return refusal, f"cut otherwise: {requests} {refusal!r} became {again} {refused!r}"
    for request, other in zip(requests, with_h11(data)[0], strict=False):
        target = other[1] if other[1].startswith("/") else request.head.target  # an absolute one is cut
        other = (other[0], target, _unframed(other[2]), other[3])
        if (request.head.method, request.head.target, _unframed(request.head.items()), request.body) != other:
            return refusal, f"h11 reads {other[:2]} and {len(other[3])} bytes, not {request}"
    for request in requests:
        if wrong := _passed_on(request):
            return refusal, wrong
    return refusal, ""


def _unframed(fields: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Remove the fields of the framing: h11 spells them in its own way, and the body shows what they say."""
    return [field for field in fields if field[0] not in ("content-length", "transfer-encoding")]


def _passed_on(request: Request) -> str:
    head = request.head
    try:
        again = parse_request_head(b"\r\n".join([b"POST / HTTP/1.1", b"host: x", *head.forward]), LineMemo())
    except BadMessage as error:
        return f"what is passed on is refused: {error.message}"
    if again.chunked or again.content_length != head.content_length:
        return "what is passed on is framed otherwise"
    if head.content_length is not None and head.content_length != len(request.body):
        return f"a body of {len(request.body)} bytes under a Content-Length of {head.content_length}"
    named = [name for name, _ in again.items()[1:] if name in _NEVER_PASSED_ON]
    named += [name for name, _ in again.items() if name.replace("_", "-").startswith("x-oriel-")]
    return f"passed on: {named}" if named else ""


def with_h11(data: bytes) -> tuple[list[tuple[str, str, list[tuple[str, str]], bytes]], int]:
    """Return h11's complete requests (method, target, fields, body), and the status with which it would refuse; 0 for
    none.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=LIMITS.max_head_bytes)
    found = []
    try:
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return found, 0
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
                found.append((head.method.decode(), head.target.decode("latin-1"), fields, body))
                connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return found, 0
                connection.start_next_cycle()
    except h11.RemoteProtocolError as error:
        return found, error.error_status_hint
