"""HTTP/1.1 ingress: a client connection judges each head, makes a `Call` of it, or answers that it does not."""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from time import monotonic
from typing import Final, cast

from oriel_gateway.call.answers import refusal_body, refusal_bytes
from oriel_gateway.call.cors import cors_lines, dressed, is_preflight
from oriel_gateway.call.heads import answer_lines, answer_start, head_lines
from oriel_gateway.call.http import Call
from oriel_gateway.call.kept_open import rest_of
from oriel_gateway.call.stream import begin_stream
from oriel_gateway.call.unread import NOTED_BYTES
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.identity.keys import still_valid
from oriel_gateway.ingress.forwarded import forwarded_for
from oriel_gateway.ingress.grpc import GrpcClient
from oriel_gateway.ingress.grpc_web import GrpcWebOverH1
from oriel_gateway.ingress.h2 import Http2Connection
from oriel_gateway.ingress.judging import open_call, overloaded
from oriel_gateway.ingress.own_answers import NOT_QUEUED, is_own, own_page, page_answer, preflight_answer, unpaid_bytes
from oriel_gateway.ingress.tls_pieces import InPieces
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target, chosen
from oriel_policies.documents import ApiKey, Snapshot, Tenant
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


@dataclass(frozen=True, slots=True)
class _Judged:
    """The sender and the target of all heads of one shape with the same credentials, by one snapshot of the documents.

    lines: what an upstream gets of the head and the tenant, whenever it is sent; if it `varies`, without the lines that
    differ. plain: when a head like this comes again, nothing has to be judged but its ids, its size, how long its calls
    take, and if `limited` its limits.
    """

    snapshot: Snapshot
    key: ApiKey
    tenant: Tenant
    target: Target
    lines: bytes
    varies: bool
    gate: PoolGate
    plain: bool
    limited: bool
    give_up_s: float
    max_body_bytes: int

    def lines_of(self, head: RequestHead) -> bytes:
        """Return the header lines that an upstream gets for a head like the one that was judged."""
        return b"\r\n".join((self.lines, *head.varying)) if self.varies else self.lines


class ClientConnection(ServerConnection):
    """One public connection; at most one `call` at a time.

    address: the client's, as trusted proxies tell it; cors, forwarded: header lines of the request under way, for its
    answer and for the next hop. web: the request under way is a call of gRPC-Web, and `call` is None.
    """

    http_version = "1.1"
    __slots__ = ("_rank", "_strikes", "address", "call", "cors", "forwarded", "gateway", "web")

    def __init__(self, server: HttpServer, gateway: Gateway) -> None:
        super().__init__(server)
        self.gateway = gateway
        self.call: Call | None = None
        self.web: GrpcWebOverH1 | None = None
        gateway.fronts.add(server)
        self.address = ""
        self.cors = b""
        self.forwarded = ""
        self._strikes = 0
        self._rank = 0  # of its latest request while the loop was behind (`gateway.overload`)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=NOTED_BYTES, low=NOTED_BYTES)
        if self.server.secure:
            self.transport = cast(asyncio.Transport, InPieces(self.transport))
        self.address = self.peer

    def on_http2(self, data: bytes) -> bool:
        """The client begins with HTTP/2's preface: hand the connection over."""
        Http2Connection(self.server, self.gateway).take_over(self.transport, self.peer, self.peer_name, data)
        return True

    def on_head(self, head: RequestHead) -> None:
        if self._again(head):
            return
        gateway = self.gateway
        received_s = self.arrived_s
        lines: bytes | None = None
        mark: Mark | None = None
        tenant: Tenant | None = None
        target: Target | None = None
        http = gateway.snapshot.http
        if (http.cors_origins or http.trusted_proxies or self.cors or self.forwarded) and self._fronted(head):
            return
        try:
            judged: _Judged | None = head.decision
            if judged is not None and judged.snapshot is gateway.snapshot:
                if judged.key.expires_at is not None:
                    still_valid(judged.key)
                tenant, target = judged.tenant, judged.target
            else:
                line = head.line
                if is_own(line.method, line.path):
                    page = own_page(head, gateway, self.memo)
                    self.unwanted(head, unpaid_bytes(head, page))
                    mark = gateway.mark(head.request_id, None, None)
                    self._write(page_answer(page, head, mark, self.server.date_line, close=self.must_close))
                    self.answered(close=False)
                    return
                if line.path[:2] != "/v" and line.method == "POST" and self._begin_web(head):
                    return
                key = gateway.identify_fields(head.credentials, self.memo)
                tenant = key.tenant
                target = gateway.targets.of_line(tenant, line.line, line.method, line.path, line.query, head.tier)
                tenant = target.tenant
                self.authenticated(head)
                judged = self._judgement(head, key, target)
                self.server.heads.decide(head, judged)
            lines = None if judged.target.tokens else judged.lines_of(head)
            mark = gateway.mark(head.request_id, head.traceparent, head.tracestate, judged.key)
            if target.choices is not None:
                target = chosen(target, head.get, mark.own)
                if target.tenant is not tenant:
                    tenant, lines = target.tenant, None  # the cached lines name another tier, so they are written anew
            if self.server.gate is not None:
                self._rank = gateway.rank(tenant)
                if gateway.overload.refuses(self._rank):
                    raise overloaded(gateway, tenant, target, received_s)
            self.call = open_call(gateway, self, head, tenant, target, mark, received_s, self.late_s, lines)
        except Refused as refused:
            self._turn_away(refused, head, mark, tenant, target, received_s)
            return
        if head.expect_continue:
            self.continue_body()

    def _begin_web(self, head: RequestHead) -> bool:
        """Begin a call of gRPC-Web; False: the request is none."""
        if not is_grpc_web((head.get("content-type") or "").encode("latin-1")):
            return False
        self.web = web = GrpcWebOverH1(self, head)
        web.call = call = GrpcClient(web)
        call.began(web.metadata, False, head.credentials)
        return True

    def listen(self) -> None:
        gate = self.server.gate
        if gate is None or not self._rank or self.transport.is_closing():
            super().listen()
            return
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()
        gate.join(self._rank, self._go_on)

    def _go_on(self) -> None:
        if self.waits_for_head:
            super().listen()

    def _judgement(self, head: RequestHead, key: ApiKey, target: Target) -> _Judged:
        gateway, tenant = self.gateway, target.tenant
        http, gate = gateway.snapshot.http, gateway.pools[target.pool]
        odd = target.special or target.choices is not None or head.timeout is not None or head.expect_continue
        watched = bool(http.cors_origins or http.trusted_proxies) or key.expires_at is not None
        varying = head.varying
        return _Judged(
            snapshot=gateway.snapshot,
            key=key,
            tenant=tenant,
            target=target,
            lines=head_lines(head, gateway.targets.tenant_lines(tenant), varying=varying),
            varies=bool(varying),
            gate=gate,
            plain=not odd and not watched,
            limited=bool(target.allowances),
            max_body_bytes=gate.pool.max_body_bytes,
            give_up_s=tenant.tier.give_up_s,
        )

    def on_request(self, head: RequestHead, data: bytes) -> None:
        if not self._again(head):
            super().on_request(head, data)
        elif (call := self.call) is None:
            pass  # the call was refused because of its tenant's limits
        elif data:
            call.whole(data, call.received_s)
        elif call.grant is None:
            call.enter(call.received_s)
        else:
            call.end()

    def _again(self, head: RequestHead) -> bool:
        """Make a call, or refuse it, for a head of a kind that was judged before. False: the head has to be judged in
        full.
        """
        judged: _Judged | None = head.decision
        gateway = self.gateway
        if (
            judged is None
            or not judged.plain
            or (head.content_length or 0) > judged.max_body_bytes
            or judged.snapshot is not gateway.snapshot
            or judged.give_up_s < judged.gate.slow_s
            or self.late_s
        ):
            return False
        if self.server.gate is not None:
            return False
        now, tenant, target, lines = self.arrived_s, judged.tenant, judged.target, judged.lines_of(head)
        if head.request_id is None and head.traceparent is None:
            mark = gateway.fresh_mark()
        else:
            mark = gateway.mark(head.request_id, head.traceparent, head.tracestate, judged.key)
        gate, until = judged.gate, now + judged.give_up_s
        if judged.limited:
            try:
                grant = gateway.limiter.acquire(tenant, target, head.content_length or 0, now)
            except Refused as refused:
                self._turn_away(refused, head, mark, tenant, target, now)
                return True
            self.call = call = Call(gateway, self, gate, head, tenant, target, mark, now, until, lines)
            if grant is not None:
                call.limited(grant)
        else:
            self.call = Call(gateway, self, gate, head, tenant, target, mark, now, until, lines)
        return True

    def _turn_away(
        self,
        refused: Refused,
        head: RequestHead,
        mark: Mark | None,
        tenant: Tenant | None,
        target: Target | None,
        received_s: float,
    ) -> None:
        """Answer a request that does not become a call. mark, tenant, target: None if they are not known yet."""
        gateway = self.gateway
        mark = mark or gateway.mark(head.request_id, head.traceparent, head.tracestate)
        status = STATUS[refused.outcome]
        record = Record(mark, head.line.method, received_s, tenant, target, refused.outcome)
        gateway.records.turned_away(refused, record)
        if tenant is None:
            self.strike(head, counts=status < 500)  # else it is not the client's fault
        else:
            self._strikes = 0
        self.write_refusal(refused, mark, v2=head.line.path.startswith("/v2"), queued_s=0.0)
        self.answered(close=False)

    def strike(self, head: RequestHead, *, counts: bool) -> None:
        """Count a request whose sender is not known, and end the connection with the last of a few."""
        self._strikes += counts
        self.unwanted(head)
        if self._strikes >= _MAX_STRIKES:
            head.close = True

    def _fronted(self, head: RequestHead) -> bool:
        """Read what browsers and proxies report about the client; True: it was a preflight and is answered."""
        snapshot = self.gateway.snapshot
        http = snapshot.http
        self.address, self.forwarded = self.peer, ""
        if http.trusted_proxies:
            self.address, self.forwarded = forwarded_for(
                head, self.peer, secure=self.server.secure, networks=http.trusted_proxies
            )
        self.cors = cors_lines(head.get("origin"), http.cors_origins) if http.cors_origins else b""
        if not http.cors_origins or not is_preflight(head):
            return False
        self.unwanted(head)
        mark = self.gateway.mark(head.request_id, None, None)
        self._write(preflight_answer(self.cors, snapshot, head, mark, self.server.date_line, close=self.must_close))
        self.answered(close=False)
        return True

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
            if call.extras is None and not (close or call.asks_report or self.cors):
                start = head.start or answer_start(head)
        if start is None:
            if call.extras is not None:
                head = head.copy()
                call.extras.response(call, head, data, complete)
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
            held = call.held_timing()
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

    def _write(self, answer: bytes) -> None:
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
            self.call.end()
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
            self.web.left()

    def connection_lost(self, exc: Exception | None) -> None:
        # the unread bytes of this connection are not needed any more
        self.gateway.bodies.ended(self.gateway.unread.read(self))
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
        mark = call.mark if call is not None else self.gateway.mark(head.request_id if head else None, None, None)
        # Of a head that cannot be read its beginning has to do; v2 clients are the ones that cannot read an object.
        v2 = b" /v1/" not in self._buffer[:_BEGINNING] if head is None else head.line.path.startswith("/v2")
        refused = Refused(outcome, message)
        method = head.line.method if head is not None else ""
        if self.web is not None:
            self.web.left()
        if call is not None:
            call.end_unsent(status, outcome, message)
        else:
            self.gateway.records.turned_away(refused, Record(mark, method, monotonic(), None, None, outcome), status)
        http = self.gateway.snapshot.http
        self.cors = cors_lines(head.get("origin"), http.cors_origins) if head is not None and http.cors_origins else b""
        self._write_refusal(refused, status, mark, v2, NOT_QUEUED, close=True)

    def write_refusal(self, refused: Refused, mark: Mark, *, v2: bool, queued_s: float) -> None:
        """Write a whole error answer. The caller calls `answered` afterwards."""
        timing = f"gateway-queue;dur={queued_s * 1e3:.3f}"
        self._write_refusal(refused, STATUS[refused.outcome], mark, v2, timing, close=self.must_close)

    def _write_refusal(self, refused: Refused, status: int, mark: Mark, v2: bool, timing: str, *, close: bool) -> None:
        head = self.head
        self._write(
            refusal_bytes(
                refused,
                status=status,
                v2=v2,
                request_id=mark.request_id,
                trace=mark.traceresponse(),
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
