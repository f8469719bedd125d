"""HTTP/1.1 ingress: a client connection judges each head, makes a `Call` of it, or answers that it does not."""

import asyncio
import socket
import ssl
from time import monotonic
from typing import Final, cast

from oriel_gateway.call.answers import refusal_body, refusal_bytes
from oriel_gateway.call.call import GatewayCall
from oriel_gateway.call.contracts import Call
from oriel_gateway.call.cors import cors_lines, dressed
from oriel_gateway.call.heads import Known, answer_lines, answer_start, head_lines
from oriel_gateway.call.kept_open import rest_of
from oriel_gateway.call.stream import begin_stream
from oriel_gateway.call.unread import NOTED_BYTES
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.ingress.grpc import GrpcClient
from oriel_gateway.ingress.grpc_web import GrpcWebOverH1
from oriel_gateway.ingress.h2 import Http2Connection
from oriel_gateway.ingress.http_view import HttpView
from oriel_gateway.ingress.judging import judge, turn_away
from oriel_gateway.ingress.own_answers import NOT_QUEUED
from oriel_gateway.ingress.tls_pieces import InPieces
from oriel_gateway.observe.record import refused_record
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import ApiKey, Tenant
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import ServerConnection
from oriel_wire.h1.chunked import LAST_CHUNK, chunk
from oriel_wire.h1.request import RequestHead
from oriel_wire.h1.response import ResponseHead
from oriel_wire.h2.grpc_web import is_grpc_web
from oriel_wire.process.process import connection_limit

__all__ = ["ClientConnection", "public_limits", "serve_public"]

_SMALL: Final = 64 * 1024
_BEGINNING: Final = 32  # bytes of a request line, in which its path begins
_MAX_STRIKES = 8  # refused credentials in a row on one connection, which is then closed
_FRAMING = {400: Outcome.INVALID_REQUEST, 408: Outcome.DEADLINE_EXCEEDED}


class _Http1View(HttpView):
    """The requests of one connection of HTTP/1.1, one after the other. None of them is kept once it was judged."""

    __slots__ = ("_connection",)

    def __init__(self, connection: "ClientConnection") -> None:
        super().__init__(connection.gateway, connection, 0.0)
        self._connection: ClientConnection | None = connection

    def lost(self) -> None:
        """Let go of the connection, which is lost: they refer to each other."""
        self._connection = self.client = None

    @property
    def connection(self) -> "ClientConnection":
        """The connection, while it is open."""
        assert self._connection is not None
        return self._connection

    @property
    def server(self) -> HttpServer:
        return self.connection.server

    @property
    def must_close(self) -> bool:
        return self.connection.must_close

    @property
    def peer(self) -> str:
        return self.connection.peer

    def note_front(self, cors: bytes, forwarded: str) -> None:
        self.connection.cors, self.connection.forwarded = cors, forwarded

    def count_unpaid(self, size: int) -> None:
        assert self.head is not None
        self.connection.unwanted(self.head, size)

    def count_unknown(self, *, at_fault: bool) -> None:
        assert self.head is not None
        self.connection.strike(self.head, at_fault)

    def write_own(self, answer: bytes) -> None:
        self.connection.write_own(answer)
        self.connection.answered(close=False)

    def answers_itself(self) -> bool:
        if super().answers_itself():
            return True
        head = self.head
        assert head is not None
        return head.line.path[:2] != "/v" and head.line.method == "POST" and self.connection.begin_web(head)

    def find(self, key: ApiKey) -> Target | None:
        target = super().find(key)
        head, gateway = self.head, self.gateway
        assert target is not None and head is not None
        self.server.heads.authenticated(head)
        http, varying, tenant_lines = gateway.snapshot.http, head.varying, gateway.targets.tenant_lines(target.tenant)
        self.known = Known(
            snapshot=gateway.snapshot,
            key=key,
            target=target,
            lines=head_lines(head, tenant_lines, target.left_out, varying),
            varies=bool(varying),
            fronted=bool(http.cors_origins or http.trusted_proxies),
        )
        self.server.heads.decide(head, self.known, gateway.callers.most_known)
        return target

    def crowds(self, tenant: Tenant) -> bool:
        return self.connection.crowds(tenant)

    def answer_refusal(self, refused: Refused, mark: Mark, status: int) -> None:
        connection = self.connection
        if self.tenant is not None:
            connection.forgive()
        connection.write_refusal(refused, mark, v2=self.v2, queued_s=0.0)
        connection.answered(close=False)


class ClientConnection(ServerConnection):
    """One public connection; at most one `call` at a time.

    view: the request under way while it is judged. cors, forwarded: header lines for its answer and for the next hop.
    web: the request under way is a call of gRPC-Web, and `call` is None.
    """

    http_version = "1.1"
    __slots__ = ("_rank", "_strikes", "view", "call", "cors", "forwarded", "gateway", "web")

    def __init__(self, server: HttpServer, gateway: Gateway) -> None:
        super().__init__(server)
        self.gateway = gateway
        self.view = _Http1View(self)
        self.call: GatewayCall | None = None
        self.web: GrpcWebOverH1 | None = None
        gateway.fronts.add(server)
        self.cors = b""
        self.forwarded = ""
        self._strikes = 0
        self._rank = 0  # rank of its latest request while the loop was behind (`gateway.overload`)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=NOTED_BYTES, low=NOTED_BYTES)
        if self.server.secure:
            self.transport = cast(asyncio.Transport, InPieces(self.transport))

    def on_http2(self, data: bytes) -> bool:
        """The client begins with HTTP/2's preface: hand the connection over."""
        Http2Connection(self.server, self.gateway).take_over(self.transport, self.peer, self.peer_name, data)
        self.view.lost()
        return True

    def on_head(self, head: RequestHead) -> None:
        view, arrived_s = self.view, self.arrived_s
        view.note_head(head, arrived_s, arrived_s + self.late_s)
        known = view.known
        try:
            if (known is None or known.fronted or self.cors or self.forwarded) and view.fronted():
                return
            self.call = judge(view)
        except Refused as refused:
            turn_away(view, refused)
            return
        finally:  # the connection may be idle for long, and what is known of a sender has all documents
            view.head = view.known = view.tenant = view.target = None
        if head.expect_continue and self.call is not None:
            self.continue_body()

    def begin_web(self, head: RequestHead) -> bool:
        """Begin a call of gRPC-Web; False: the request is none."""
        if not is_grpc_web((head.get("content-type") or "").encode("latin-1")):
            return False
        self.web = web = GrpcWebOverH1(self, self.gateway, head, self.crowds, self.strike, self._web_over)
        web.call = call = GrpcClient(web)
        call.began(web.metadata, False, head.credentials)
        return True

    def _web_over(self) -> None:
        self.web = None

    def listen(self) -> None:
        gate = self.server.gate
        if gate is None or not self._rank or self.transport.is_closing():
            super().listen()
            return
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()
        gate(self._rank, self._go_on)

    def _go_on(self) -> None:
        if self.waits_for_head:
            super().listen()

    def on_request(self, head: RequestHead, data: bytes) -> None:
        if head.expect_continue:
            super().on_request(head, data)
            return
        self.on_head(head)
        call = self.call
        if call is None:
            if self.web is not None:
                self.web.came(data, True)
            return
        now = 0.0 if self.late_s else call.received_s
        if data:
            call.whole(data, now)
        elif call.grant is None and call.extras is None:
            call.acquire_permit(now)
        else:
            call.request_complete()

    def crowds(self, tenant: Tenant) -> bool:
        """Return whether the loop has no time for a request of this tenant."""
        if self.server.gate is None:
            return False
        self._rank = self.gateway.rank(tenant)
        return self.gateway.overload.refuses(self._rank)

    def strike(self, head: RequestHead, counts: bool) -> None:
        """Count a request whose sender is not known, and end the connection with the last of a few."""
        self._strikes += counts
        self.unwanted(head)
        if self._strikes >= _MAX_STRIKES:
            head.close = True

    def forgive(self) -> None:
        """Begin to count anew: the sender of a request is known."""
        self._strikes = 0

    def call_finished(self) -> None:
        """See `contracts.Client`."""
        self.call = None

    def write_answer(self, call: Call, head: ResponseHead, data: bytes, complete: bool, now: float) -> bool:
        """Write the head of an upstream's answer, and the bytes of its body that are here. See `contracts.Client`."""
        if call.stream is not None:
            rest = rest_of(call, call.stream, head, data, complete, now)
            if rest is not None:
                call.stream.write(self.transport, rest, complete)
            return rest is not None and call.stream.close
        start: bytes | None = None
        close = False
        if complete:
            # As `must_close` would say: the request is here as a whole.
            close = call.head.close or self.server.draining
            if call.extras is None and not (close or self.cors):
                start = head.start or answer_start(head)
        if start is None:
            if call.extras is not None:
                head = head.copy()
                data = call.extras.response(call, head, data, complete)
            close = self.must_close
            if complete:
                length = head.content_length
                if length is None and head.status != 304 and not call.target.head_only:
                    length = len(data)
                start = answer_lines(head, self.cors, None if head.status == 204 else length, close=close)
            else:
                stream, start = begin_stream(head, data, self.cors, call.head.line.minor, now, close=close)
                call.stream = stream
                if stream is not None and stream.unbounded:
                    call.watch_until(stream.ends_s(call.tenant.tier, now))
                    if stream.rechunk and data:
                        data = chunk(data)
        if not head.dated:
            start += self.server.date_line
        own = "" if call.grant is None else call.grant.lines(now)
        if call.tenant.caller and call.cost_us >= 0:
            # a model call of a service: its cost is part of what the service's own call is charged
            used = f"x-oriel-cost: {call.used}\r\n" if call.used else ""
            own = f"x-oriel-cost-us: {call.cost_us}\r\n{used}"
        mark = call.mark
        queued = "0.000"
        if call.permit_s != call.queued_s:
            held = call.hold_timing()
            queued = f"{(call.permit_s - call.queued_s) * 1e3:.3f}{f', {held}' if held else ''}"
        timing = f", {head.server_timing}" if head.server_timing else ""
        tail = (
            f"{own}x-request-id: {mark.request_id}\r\ntraceresponse: 00-{mark.trace}-{mark.own}-"
            f"{mark.flags}\r\nserver-timing: gateway-queue;dur={queued}, "
            f"gateway-upstream;dur={'%.3f' % ((now - call.sent_s) * 1e3)}{timing}\r\n\r\n"
        ).encode("latin-1")
        if len(data) <= _SMALL:
            self.transport.write(b"".join((start, tail, data)))
        else:
            self.transport.writelines((start + tail, data))
        return close

    def write_more(self, call: Call, data: bytes, complete: bool) -> None:
        """Write more of an answer whose head is written. See `contracts.Client`."""
        stream = call.stream
        if stream is not None and stream.unbounded:
            stream.write(self.transport, data, complete)
        elif data:
            self.transport.write(data)

    def write_comment(self, call: Call, start: list[bytes], comment: bytes) -> None:
        """See `kept_open.EventClient`."""
        head = b""
        if start:
            close = [b"connection: close"] if call.stream is not None and call.stream.close else []
            head = b"\r\n".join((*start, b"transfer-encoding: chunked", *close, self.server.date, b"\r\n"))
        self.transport.write(head + chunk(comment))

    def write_kept(self, lines: list[bytes], body: bytes) -> bool:
        """Write a whole answer that no upstream gave to this call. See `contracts.Client`."""
        close = self.must_close
        lines.append(b"content-length: %d" % len(body))
        if self.cors:
            lines = dressed(lines, self.cors)
        if close:
            lines.append(b"connection: close")
        if not any(line[:5].lower() == b"date:" for line in lines):
            lines.append(self.server.date)
        head = b"\r\n".join((*lines, b"\r\n"))
        if len(body) <= _SMALL:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))  # not copied, because many answers may share the body
        return close

    def cut_answer(self, call: Call, refused: Refused, *, v2: bool) -> None:
        """End an answer that has begun, and the connection. See `contracts.Client`."""
        events = None if call.stream is None else call.stream.events
        if events is None or not events.between:
            self.transport.abort()
            return
        event = b"data: " + refusal_body(refused, call.mark.request_id, v2=v2) + b"\n\n"
        self.transport.write(chunk(event) + LAST_CHUNK)
        self.answered(close=True)

    def abort(self) -> None:
        """Drop the connection: nobody reads it any more."""
        self.transport.abort()

    def write_own(self, answer: bytes) -> None:
        """Write an answer of our own, with the lines for browsers."""
        if self.cors:
            status, _, rest = answer.partition(b"\r\n")
            answer = b"\r\n".join((status, self.cors, rest))
        self.transport.write(answer)

    def on_data(self, data: bytes | memoryview) -> None:
        if self.call is not None:
            self.call.data(data)
        elif self.web is not None:
            self.web.more(data)

    def on_end(self) -> None:
        if self.call is not None:
            self.call.request_complete()
        elif self.web is not None:
            self.web.came(b"", True)

    def on_body(self, data: bytes) -> None:
        if self.call is not None:
            self.call.whole(data)
        elif self.web is not None:
            self.web.came(data, True)

    def on_lost(self) -> None:
        if self.call is not None:
            self.call.client_left()
        elif self.web is not None:
            self.web.client_left()

    def connection_lost(self, exc: Exception | None) -> None:
        # the unread bytes of this connection are not needed any more
        self.gateway.bodies.freed(self.gateway.unread.read(self))
        self.view.lost()
        super().connection_lost(exc)

    def on_writable(self, writable: bool) -> None:
        if self.web is not None:
            self.web.on_writable(writable)
            return
        unread = self.gateway.unread
        if writable:
            unread.read(self)
        elif not unread.note(self, self.transport.get_write_buffer_size()):
            return
        if self.call is not None:
            self.call.client_writable(writable)

    def on_refused(self, status: int, message: str) -> None:
        outcome = _FRAMING.get(status, Outcome.TOO_LARGE)
        head, call = self.head, self.call
        mark = call.mark if call is not None else self.gateway.marks.of(head.request_id if head else None, None, None)
        # A head that cannot be parsed is judged by its beginning; v2 clients are the ones that cannot read an object.
        v2 = b" /v1/" not in self._buffer[:_BEGINNING] if head is None else head.line.path.startswith("/v2")
        refused = Refused(outcome, message)
        method = head.line.method if head is not None else ""
        if self.web is not None:
            self.web.client_left()
        if call is not None:
            call.end_unsent(status, outcome, message)
        else:
            record = refused_record(mark, method, monotonic(), None, None, outcome)
            self.gateway.records.turned_away(refused, record, status)
        http = self.gateway.snapshot.http
        self.cors = cors_lines(head.get("origin"), http.cors_origins) if head is not None and http.cors_origins else b""
        self._write_refusal(refused, status, mark, v2, NOT_QUEUED, close=True)

    def write_refusal(self, refused: Refused, mark: Mark, *, v2: bool, queued_s: float) -> None:
        """Write a whole error answer. The caller calls `answered` afterwards."""
        timing = f"gateway-queue;dur={queued_s * 1e3:.3f}"
        self._write_refusal(refused, STATUS[refused.outcome], mark, v2, timing, close=self.must_close)

    def _write_refusal(self, refused: Refused, status: int, mark: Mark, v2: bool, timing: str, *, close: bool) -> None:
        head = self.head
        self.write_own(
            refusal_bytes(
                refused,
                status=status,
                v2=v2,
                mark=mark,
                timing=timing,
                date_line=self.server.date_line,
                close=close,
                head_only=head is not None and head.line.method == "HEAD",
            )
        )


def public_limits() -> HttpLimits:
    """Return the limits of a public port. A body's size is limited by its pool, once its sender is known."""
    return HttpLimits(max_connections=connection_limit(HttpLimits().max_connections), max_body_bytes=1 << 40)


async def serve_public(
    gateway: Gateway, sock: socket.socket, *, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None
) -> HttpServer:
    """Serve clients on `sock`, which the server owns from here on: HTTP/1.1, HTTP/2 and gRPC on one port.

    With `tls`, ALPN offers both versions; without it, HTTP/2 begins with prior knowledge.
    """
    server = HttpServer(limits or public_limits())
    if not gateway.fronts:  # all ports share one loop, so only one of them measures it
        server.pulse.on_beat = gateway.overload.beat
    gateway.fronts.add(server)
    await server.open(lambda: ClientConnection(server, gateway), sock, tls=tls)
    return server
