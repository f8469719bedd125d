"""One HTTP request on a stream of HTTP/2."""

from functools import partial
from time import monotonic
from typing import Final

from oriel_gateway.call.answers import refusal_body, refusal_bytes
from oriel_gateway.call.call import GatewayCall
from oriel_gateway.call.contracts import Call
from oriel_gateway.call.cors import dressed
from oriel_gateway.call.heads import answer_lines
from oriel_gateway.call.kept_open import rest_of
from oriel_gateway.call.stream import AnswerStream, events_of
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_gateway.ingress.http_view import HttpView
from oriel_gateway.ingress.judging import judge, turn_away
from oriel_gateway.ingress.own_answers import NOT_QUEUED
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import ApiKey, Tenant
from oriel_wire.engine.listener import HttpServer
from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import RequestHead, parse_request_head
from oriel_wire.h1.response import ResponseHead
from oriel_wire.h2.frames import CANCEL, INTERNAL_ERROR
from oriel_wire.h2.hpack import list_bytes, literal
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.h2.streams import ENDED, Stream

__all__ = ["Http2Client"]

_OF_A_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection"}
)
_GONE: Final = Stream()
_GONE.receiving = _GONE.sending = ENDED


class Http2Client(HttpView):
    """One request, and the `contracts.Client` of its call.

    A request becomes the head that HTTP/1.1 would have had, and its answer's lines become header fields: what the
    gateway decides is the same, and its upstreams for HTTP speak HTTP/1.1.
    """

    http_version = "2"
    __slots__ = ("_noted", "_unknown", "call", "connection", "cors", "forwarded", "stream")

    def __init__(self, connection: PublicConnection, stream: Stream) -> None:
        super().__init__(connection.gateway, None, connection.arrived_s)
        self.connection = connection
        self.stream = stream
        self.call: GatewayCall | None = None
        self.cors = b""
        self.forwarded = ""
        self._noted = False
        self._unknown = False  # the request was refused and its sender is not known

    # Callbacks of the client -----------------------------------------------------------------------------------

    def began(self, fields: list[HeaderField], end: bool) -> None:
        """The request's head is here."""
        connection = self.connection
        server = connection.server
        try:
            head = _request_head(fields, end, server)
            self.note_head(head, connection.arrived_s, connection.arrived_s + connection.late_s)
            if len(head.line.line) - len(head.line.method) - len("  HTTP/1.1") > server.limits.max_target_bytes:
                message = f"the target is longer than {server.limits.max_target_bytes} bytes"
                self._refuse(Refused(Outcome.TOO_LARGE, message), fields, 414)
                return
            http = self.gateway.snapshot.http
            if (http.cors_origins or http.trusted_proxies) and self.fronted():
                connection.unwanted(list_bytes(fields))
                return
            self.client = self
            call = self.call = judge(self)
        except BadMessage as error:
            self._refuse(Refused(Outcome.INVALID_REQUEST, error.message), fields)
            return
        except Refused as refused:
            if self.later:
                connection.refuse_later(self.stream, partial(turn_away, self, refused))
            else:
                self._refuse(refused, fields)
            return
        finally:
            self.client = None  # it would refer to itself, and wait for the garbage collector
        if call is None:  # answered: once the connection drains, a request counts after its answer only
            connection.unwanted(list_bytes(fields))
            return
        if end:
            call.request_complete()
        elif head.expect_continue:
            connection.send_headers(self.stream, literal(b":status", b"100"), False)

    def _refuse(self, refused: Refused, fields: list[HeaderField], status: int = 0) -> None:
        turn_away(self, refused, status)
        if self._unknown:
            self.connection.unwanted(list_bytes(fields))

    def came(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of the body came."""
        self.connection.consumed(self.stream, len(data))
        call = self.call
        if call is None:
            if self._unknown:
                self.connection.unwanted(len(data))
            self._let_go()
            return
        if data:
            call.data(data)
        if end and self.call is call:
            call.request_complete()

    def _let_go(self) -> None:
        """Forget a stream that has ended: as each refers to the other, both would wait for the garbage collector."""
        if self.stream.closed:
            self.stream = _GONE

    def client_left(self) -> None:
        """The client reset the stream, or its connection is lost."""
        call = self.call
        self._read()
        if call is not None:
            call.client_left()
        self._let_go()

    # The view of the request -----------------------------------------------------------------------------------

    @property
    def server(self) -> HttpServer:
        return self.connection.server

    @property
    def peer(self) -> str:
        return self.connection.peer

    def note_front(self, cors: bytes, forwarded: str) -> None:
        self.cors, self.forwarded = cors, forwarded

    def find(self, key: ApiKey) -> Target | None:
        target = super().find(key)
        server, head = self.connection.server, self.head
        assert head is not None
        server.memo.keep(head.fresh)
        server.fields.keep(self.connection.decoder.fresh)
        return target

    def crowds(self, tenant: Tenant) -> bool:
        self.later = self.connection.refuses(tenant)
        return self.later

    def count_unpaid(self, size: int) -> None:
        self.connection.unwanted(size)

    def count_unknown(self, *, at_fault: bool) -> None:
        """Count its head, and from now on its body."""
        self._unknown = self._unknown or at_fault

    def write_own(self, answer: bytes) -> None:
        self._write(answer)
        self.answered(close=False)

    def answer_refusal(self, refused: Refused, mark: Mark, status: int) -> None:
        self._write_refusal(refused, status, mark, v2=self.v2, queued_s=0.0)
        self.answered(close=False)

    # Answering the client --------------------------------------------------------------------------------------

    @property
    def departed(self) -> bool:
        """See `contracts.Client`."""
        return self.connection.departed

    @property
    def keeps_up(self) -> bool:
        """See `contracts.Client`."""
        return self.stream.pending is None

    @property
    def must_close(self) -> bool:
        """See `contracts.Client`: an answer never ends a connection that other requests use."""
        return False

    def answered(self, *, close: bool, now: float = 0.0) -> None:
        """See `contracts.Client`."""
        self.call = None
        stream = self.stream
        if stream.receiving != ENDED:
            self.connection.linger(stream)
        if stream.pending is None:
            self._read()
        self._let_go()

    def abort(self) -> None:
        """See `contracts.Client`."""
        self._read()
        self.connection.send_reset(self.stream, CANCEL)

    def on_writable(self, writable: bool) -> None:
        """See `contracts.Client`."""
        if writable:
            self._read()
        else:
            self._noted = True
            if not self.connection.gateway.unread.note(self, sum(map(len, self.stream.pending or ()))):
                return
        if self.call is not None:
            self.call.client_writable(writable)
        else:
            self._let_go()

    def _read(self) -> None:
        if self._noted:
            self._noted = False
            self.connection.gateway.unread.read(self)

    def call_finished(self) -> None:
        """See `contracts.Client`."""
        self.call = None

    def write_answer(self, call: Call, head: ResponseHead, data: bytes, complete: bool, now: float) -> bool:
        """See `contracts.Client`."""
        if call.stream is not None:
            rest = rest_of(call, call.stream, head, data, complete, now)
            if rest is not None and call.stream.events is not None:
                call.stream.events.sent(rest)
            if rest is not None and (rest or complete):
                self.connection.send_data(self.stream, rest, complete)
            return False
        if call.extras is not None:
            head = head.copy()
            data = call.extras.response(call, head, data, complete)
        length = head.content_length
        if complete:
            if length is None and head.status not in (204, 304) and not call.target.head_only:
                length = len(data)
        elif length is None:
            stream = call.stream = AnswerStream(now, unbounded=True)
            stream.events = events_of(head, data)
            call.watch_until(stream.ends_s(call.tenant.tier, now))
        start = answer_lines(head, self.cors, None if head.status == 204 else length, close=False)
        if not head.dated:
            start += self.connection.server.date_line
        mark = call.mark
        queued_s = call.permit_s - call.queued_s
        timing = f", {head.server_timing}" if head.server_timing else ""
        if queued_s and (held := call.hold_timing()):
            timing += f", {held}"
        tail = (
            f"{'' if call.grant is None else call.grant.lines(now)}x-request-id: {mark.request_id}\r\n"
            f"traceresponse: {mark.traceresponse()}\r\nserver-timing: gateway-queue;dur={queued_s * 1e3:.3f}, "
            f"gateway-upstream;dur={(now - call.sent_s) * 1e3:.3f}{timing}"
        )
        self.send(start + tail.encode("latin-1"), data, complete)
        return False

    def write_more(self, call: Call, data: bytes, complete: bool) -> None:
        """See `contracts.Client`."""
        stream = call.stream
        if stream is not None and stream.unbounded:
            stream.data_s = monotonic()
            if stream.events is not None:
                stream.events.sent(data)
        if data or complete:
            self.connection.send_data(self.stream, data, complete)

    def write_comment(self, call: Call, start: list[bytes], comment: bytes) -> None:
        """See `kept_open.EventClient`."""
        if start:
            self.send(b"\r\n".join(start), comment, False)
        else:
            self.connection.send_data(self.stream, comment, False)

    def write_kept(self, lines: list[bytes], body: bytes) -> bool:
        """See `contracts.Client`."""
        lines.append(b"content-length: %d" % len(body))
        if self.cors:
            lines = dressed(lines, self.cors)
        if not any(line[:5].lower() == b"date:" for line in lines):
            lines.append(self.connection.server.date)
        self.send(b"\r\n".join(lines), body, True)
        return False

    def write_refusal(self, refused: Refused, mark: Mark, *, v2: bool, queued_s: float) -> None:
        """See `contracts.Client`."""
        self._write_refusal(refused, STATUS[refused.outcome], mark, v2=v2, queued_s=queued_s)

    def _write_refusal(self, refused: Refused, status: int, mark: Mark, *, v2: bool, queued_s: float) -> None:
        head = self.head
        self._write(
            refusal_bytes(
                refused,
                status=status,
                v2=v2,
                mark=mark,
                timing=f"gateway-queue;dur={queued_s * 1e3:.3f}" if queued_s else NOT_QUEUED,
                date_line=self.connection.server.date_line,
                close=False,
                head_only=head is not None and head.line.method == "HEAD",
            )
        )

    def cut_answer(self, call: Call, refused: Refused, *, v2: bool) -> None:
        """See `contracts.Client`."""
        events = None if call.stream is None else call.stream.events
        if events is None or not events.between:
            self._read()
            self.connection.send_reset(self.stream, INTERNAL_ERROR)
            return
        event = b"data: " + refusal_body(refused, call.mark.request_id, v2=v2) + b"\n\n"
        self.connection.send_data(self.stream, event, True)
        self.answered(close=False)

    def _write(self, answer: bytes) -> None:
        """Write an answer of our own, made for HTTP/1.1, with the lines for browsers."""
        head, _, body = answer.partition(b"\r\n\r\n")
        if self.cors:
            status, _, rest = head.partition(b"\r\n")
            head = b"\r\n".join((status, self.cors, rest))
        self.send(head, body, True)

    def send(self, head: bytes, body: bytes, complete: bool) -> None:
        """Send the head of an answer, which is that of HTTP/1.1, and the body that is here."""
        lines = head.split(b"\r\n")
        parts = [literal(b":status", lines[0][9:12])]
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            name = name.lower()
            if colon and name not in _OF_A_CONNECTION:
                parts.append(literal(name, value.strip()))
        connection, stream = self.connection, self.stream
        connection.send_headers(stream, b"".join(parts), complete and not body)
        if body:
            connection.send_data(stream, body, complete)


def _request_head(fields: list[HeaderField], end: bool, server: HttpServer) -> RequestHead:
    """Return the head that this request would have over HTTP/1.1. Raises BadMessage."""
    known: dict[bytes, bytes] = {}
    lines: list[bytes] = []
    cookies: list[bytes] = []
    host = b""
    for name, value in fields:
        if name[:1] == b":":
            known[name] = value
        elif name == b"cookie":
            cookies.append(value)
        elif name == b"host":
            host = value
        else:
            lines.append(b"%b: %b" % (name, value))
    if cookies:
        lines.append(b"cookie: " + b"; ".join(cookies))  # RFC 9113, 8.2.3
    first = b"%b %b HTTP/1.1" % (known[b":method"], known[b":path"])
    lines = [first, b"host: " + known.get(b":authority", host), *lines]
    head = parse_request_head(b"\r\n".join(lines), server.memo, max_fields=server.limits.max_fields)
    head.close = False
    if not end and head.content_length is None:
        head.chunked = True  # its length is known at its end
    return head
