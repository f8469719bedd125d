"""One HTTP request on a stream of HTTP/2."""

from functools import partial
from time import monotonic
from typing import Final

from oriel_gateway.call.answers import refusal_body, refusal_bytes
from oriel_gateway.call.cors import cors_lines, dressed, is_preflight
from oriel_gateway.call.events import events_of
from oriel_gateway.call.heads import answer_lines
from oriel_gateway.call.http import Call
from oriel_gateway.call.kept_open import rest_of
from oriel_gateway.call.stream import AnswerStream
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.ingress.forwarded import forwarded_for
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_gateway.ingress.judging import open_call, overloaded
from oriel_gateway.ingress.own_answers import NOT_QUEUED, is_own, own_page, page_answer, preflight_answer, unpaid_bytes
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.routing.targets import Target, chosen
from oriel_policies.documents import Tenant
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


class Http2Client:
    """The `contracts.Client` of one request's call.

    A request becomes the head that HTTP/1.1 would have had, and its answer's lines become header fields: what the
    gateway decides is the same, and its upstreams for HTTP speak HTTP/1.1.
    """

    http_version = "2"
    __slots__ = ("_head", "_noted", "_unknown", "call", "connection", "cors", "forwarded", "stream")

    def __init__(self, connection: PublicConnection, stream: Stream) -> None:
        self.connection = connection
        self.stream = stream
        self.call: Call | None = None
        self.cors = b""
        self.forwarded = ""
        self._head: RequestHead | None = None
        self._noted = False
        self._unknown = False  # the request was refused and its sender is not known

    # From the client -------------------------------------------------------------------------------------------

    def began(self, fields: list[HeaderField], end: bool) -> None:
        """The request's head is here."""
        connection = self.connection
        gateway, server = connection.gateway, connection.server
        received_s = connection.arrived_s
        mark: Mark | None = None
        tenant: Tenant | None = None
        target: Target | None = None
        try:
            head = self._head = _request_head(fields, end, server)
            if len(head.line.line) - len(head.line.method) - len("  HTTP/1.1") > server.limits.max_target_bytes:
                message = f"the target is longer than {server.limits.max_target_bytes} bytes"
                self._turn_away(Refused(Outcome.TOO_LARGE, message), mark, tenant, target, received_s, status=414)
                self._count_unknown(fields)
                return
            http = gateway.snapshot.http
            if (http.cors_origins or http.trusted_proxies) and self._fronted(head):
                return
            mark = gateway.mark(head.request_id, head.traceparent, head.tracestate)
            line = head.line
            if is_own(line.method, line.path):
                page = own_page(head, gateway, server.memo)
                connection.unwanted(unpaid_bytes(head, page))
                self._write(page_answer(page, head, mark, server.date_line, close=False))
                self.answered(close=False)
                return
            key = gateway.identify_fields(head.credentials, server.memo)
            tenant = key.tenant
            gateway.judge_sample(mark, key)
            server.memo.keep(head.fresh)
            server.fields.keep(connection.decoder.fresh)
            target = gateway.targets.of_line(tenant, line.line, line.method, line.path, line.query, head.tier)
            tenant = target.tenant
            if target.choices is not None:
                target = chosen(target, head.get, mark.own)
                tenant = target.tenant
            if server.gate is not None and connection.refuses(tenant):
                answer = overloaded(gateway, tenant, target, received_s)
                connection.refuse_later(self.stream, partial(self._turn_away, answer, mark, tenant, target, received_s))
                return
            self.call = open_call(gateway, self, head, tenant, target, mark, received_s, connection.late_s, None)
        except BadMessage as error:
            self._turn_away(Refused(Outcome.INVALID_REQUEST, error.message), mark, tenant, target, received_s)
            if tenant is None:
                self._count_unknown(fields)
            return
        except Refused as refused:
            self._turn_away(refused, mark, tenant, target, received_s)
            if tenant is None and STATUS[refused.outcome] < 500:  # else it is not the sender's fault
                self._count_unknown(fields)
            return
        if end:
            self.call.end()
        elif head.expect_continue:
            connection.send_headers(self.stream, literal(b":status", b"100"), False)

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
            call.end()

    def _let_go(self) -> None:
        """Forget a stream that has ended: as each refers to the other, both would wait for the garbage collector."""
        if self.stream.closed:
            self.stream = _GONE

    def left(self) -> None:
        """The client reset the stream, or its connection is lost."""
        call = self.call
        self._read()
        if call is not None:
            call.client_left()
        self._let_go()

    def _fronted(self, head: RequestHead) -> bool:
        """Read what browsers and proxies report about the client; True: it was a preflight and is answered."""
        connection = self.connection
        gateway, server = connection.gateway, connection.server
        http = gateway.snapshot.http
        if http.trusted_proxies:
            _, self.forwarded = forwarded_for(
                head, connection.peer, secure=server.secure, networks=http.trusted_proxies
            )
        self.cors = cors_lines(head.get("origin"), http.cors_origins) if http.cors_origins else b""
        if not http.cors_origins or not is_preflight(head):
            return False
        mark = gateway.mark(head.request_id, None, None)
        self._write(preflight_answer(self.cors, gateway.snapshot, head, mark, server.date_line, close=False))
        self.answered(close=False)
        return True

    def _count_unknown(self, fields: list[HeaderField]) -> None:
        """Count the head of a request whose sender is not known, and from now on its body."""
        self._unknown = True
        self.connection.unwanted(list_bytes(fields))

    def _turn_away(
        self,
        refused: Refused,
        mark: Mark | None,
        tenant: Tenant | None,
        target: Target | None,
        received_s: float,
        status: int = 0,
    ) -> None:
        """Answer a request that does not become a call. status: if it is not that of the refusal's outcome."""
        gateway, head = self.connection.gateway, self._head
        mark = mark or gateway.mark(None, None, None)
        method = head.line.method if head is not None else ""
        status = status or STATUS[refused.outcome]
        record = Record(mark, method, received_s, tenant, target, refused.outcome)
        gateway.records.turned_away(refused, record, status)
        v2 = head is None or head.line.path.startswith("/v2")
        self._write_refusal(refused, status, mark, v2=v2, queued_s=0.0)
        self.answered(close=False)

    # To the client ---------------------------------------------------------------------------------------------

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
            call.extras.response(call, head, data, complete)
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
        if queued_s and (held := call.held_timing()):
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
        head = self._head
        self._write(
            refusal_bytes(
                refused,
                status=status,
                v2=v2,
                request_id=mark.request_id,
                trace=mark.traceresponse(),
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
