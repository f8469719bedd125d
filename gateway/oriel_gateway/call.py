"""One HTTP request on its way: from its authorised head to its last byte, as callbacks, without a task of its own.

    COLLECT   the body is coming in; up to `REPLAY_BYTES` of it are awaited before a permit is asked for, so that a slow
              sender holds none
    QUEUED    waits for a permit
    SENDING   has a permit and an endpoint; a connection is being made, or the request is going out
    ANSWERING the upstream's head went to the client
    DONE

Exactly one of `response(..., complete=True)`, `failed`, `expired`, `displaced`, `client_left` ends a call, through
`_end`, which gives back whatever the call holds: its place in the queue, its permit, its connection, its slot among
the deadlines. The permit is given back at the upstream's last byte; what the client has not read by then is buffered
in its transport, whose high-water mark pauses the upstream before that.
"""

from time import monotonic
from typing import TYPE_CHECKING

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.targets import Target
from oriel_gateway.tracing import Mark, record_call
from oriel_policies.documents import Tenant
from oriel_policies.queue import Ticket
from oriel_wire.chunked import LAST_CHUNK, chunk
from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import UpstreamError, UpstreamUnreachable
from oriel_wire.h1 import RequestHead, ResponseHead

if TYPE_CHECKING:
    from oriel_gateway.ingress_http import ClientConnection

__all__ = ["Call"]

COLLECT, QUEUED, SENDING, ANSWERING, DONE = range(5)
_STAGES = ("receiving the request", "waiting for a permit", "waiting for the upstream", "receiving the answer", "")
REPLAY_BYTES = 64 * 1024
STREAM_MAX_S = 600.0
_SMALL = 64 * 1024


class Call:
    """See the module's head. Times are monotonic seconds; 0.0 means not reached."""

    # Class attributes are the defaults: a call that goes through at once never sets most of them.
    state = COLLECT
    status = 0
    cost_us = -1
    outcome = Outcome.ANSWERED
    queued_s = 0.0
    permit_s = 0.0
    sent_s = 0.0
    response_s = 0.0
    _pending: list[bytes] | None = None
    _pending_bytes = 0
    _body_done = False
    _rechunk = False
    _ticket: Ticket | None = None
    _connection: UpstreamConnection | None = None
    _endpoint: Endpoint | None = None
    _tried: tuple[Endpoint, ...] = ()

    def __init__(
        self,
        gateway: Gateway,
        client: "ClientConnection",
        head: RequestHead,
        tenant: Tenant,
        target: Target,
        mark: Mark,
        received_s: float,
        deadline: float,
    ) -> None:
        self._gateway = gateway
        self._gate = gateway.pools[target.pool]
        self.client = client
        self.head = head
        self.tenant = tenant
        self.target = target
        self.mark = mark
        self.received_s = received_s
        self.deadline = deadline
        self._slot = gateway.watch(self, deadline, received_s)

    @property
    def method(self) -> str:
        """The HTTP method."""
        return self.head.method

    @property
    def max_body_bytes(self) -> int:
        """The bound of the pool this call goes to."""
        return self._gate.pool.max_body_bytes

    # The client's side -----------------------------------------------------------------------------------------

    def data(self, data: bytes) -> None:
        """Some bytes of the body."""
        connection = self._connection
        if connection is not None:
            connection.transport.write(chunk(data) if self.head.chunked else data)
            return
        if self._pending is None:
            self._pending = []
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= REPLAY_BYTES:
            if self._pending_bytes > self.max_body_bytes:
                self.refuse(Refused(Outcome.TOO_LARGE, f"the body is larger than {self.max_body_bytes} bytes"))
                return
            if self.state != DONE and not self._body_done:
                self.client.pause_body()
            if self.state == COLLECT:
                self._ask()

    def whole(self, data: bytes) -> None:
        """The whole body at once."""
        self._pending = [data]
        self._pending_bytes = len(data)
        self._body_done = True
        self._ask()

    def end(self) -> None:
        """The body is complete."""
        self._body_done = True
        connection = self._connection
        if connection is not None:
            if self.head.chunked:
                connection.transport.write(LAST_CHUNK)
            connection.request_done = True
        elif self.state == COLLECT:
            self._ask()

    def client_left(self) -> None:
        """The client closed its side: free everything at once."""
        self._end(Outcome.CLIENT_LEFT)

    def client_writable(self, writable: bool) -> None:
        """Backpressure from the client to the upstream."""
        connection = self._connection
        if connection is not None:
            if writable:
                connection.transport.resume_reading()
            else:
                connection.transport.pause_reading()

    # Admission -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        gate = self._gate
        self.queued_s = now = monotonic()
        if gate.admission.enter():
            self.permit_s = now
            self.state = SENDING
            self._send(now)
            return
        self.state = QUEUED
        due = min(self.received_s + self.tenant.tier.target_s, self.deadline)
        try:
            self._ticket = gate.wait(self, self.tenant, self.target.route, due=due, size_bytes=self._pending_bytes)
        except Refused as refused:
            self.refuse(refused)
            return
        gate.pump()

    def admitted(self) -> None:
        """There is a permit: find an endpoint and send."""
        self.permit_s = now = monotonic()
        self.state = SENDING
        self._send(now)

    def displaced(self) -> None:
        """Someone more urgent took this call's place in the full queue."""
        retry_after_s = self._gate.admission.retry_after_s()
        self.refuse(
            Refused(Outcome.DISPLACED, "a more urgent call took the place in the queue", retry_after_s=retry_after_s)
        )

    def expired(self) -> None:
        """The deadline passed."""
        stage = _STAGES[self.state]
        self.refuse(Refused(Outcome.DEADLINE_EXCEEDED, f"the deadline passed while {stage}"))

    # The upstream's side ---------------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        endpoint = self._gate.pick(self._tried)
        if endpoint is None:
            self.refuse(Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1))
            return
        self._endpoint = endpoint
        connection = endpoint.begin(self, now, head_only=self.target.head_only)
        if connection is not None:
            self._write(connection, now)

    def connected(self, connection: UpstreamConnection) -> None:
        """A connection was made for this call."""
        self._write(connection, monotonic())

    def _write(self, connection: UpstreamConnection, now: float) -> None:
        """Write the head and what there is of the body."""
        self._connection = connection
        head = self.head
        mark = self.mark
        self.sent_s = now
        remaining_ms = max(1, int((self.deadline - now) * 1000.0))
        tail = (
            f"x-oriel-timeout-ms: {remaining_ms}\r\nx-request-id: {mark.request_id}\r\n"
            f"traceparent: {mark.traceparent()}\r\n"
        )
        if mark.state:
            tail += f"tracestate: {mark.state}\r\n"
        if head.chunked:
            tail += "transfer-encoding: chunked\r\n"
        parts = [
            self.target.line,
            connection.endpoint.host_line,
            *head.forward,
            self._gateway.tenant_lines(self.tenant),
            tail.encode("ascii"),
        ]
        pending = self._pending
        if not pending:
            parts.append(b"")
            connection.transport.write(b"\r\n".join(parts))
        else:
            if head.chunked:
                pending = [chunk(piece) for piece in pending]
            if self._pending_bytes <= _SMALL:
                parts.append(pending[0] if len(pending) == 1 else b"".join(pending))
                connection.transport.write(b"\r\n".join(parts))
            else:
                parts.append(b"")
                connection.transport.writelines((b"\r\n".join(parts), *pending))
            self._pending = None
        if self._body_done:
            if head.chunked:
                connection.transport.write(LAST_CHUNK)
            connection.request_done = True
        else:
            self.client.resume_body()

    def upstream_writable(self, writable: bool) -> None:
        """Backpressure from the upstream to the client."""
        if writable:
            self.client.resume_body()
        else:
            self.client.pause_body()

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        """The upstream's head, and the body bytes that came with it."""
        self.response_s = now = monotonic()
        self.state = ANSWERING
        self.status = head.status
        self.cost_us = head.cost_us
        client = self.client
        lines = head.forward
        close = client.must_close or (complete and not self._body_done)
        length = head.content_length
        if length is None and complete and head.status not in (204, 304) and not self.target.head_only:
            length = len(data)
        if length is not None:
            lines.append(b"content-length: %d" % length)
        elif not complete:
            if self.head.line.minor:
                lines.append(b"transfer-encoding: chunked")
                self._rechunk = True
                data = chunk(data) if data else b""
            else:
                close = True
            self._extend()
        if close:
            lines.append(b"connection: close")
        if head.status in (502, 503) and head.get("retry-after") is None:
            lines.append(b"retry-after: 1")
        mark = self.mark
        upstream_timing = f", {head.server_timing}" if head.server_timing else ""
        lines.append(
            f"x-request-id: {mark.request_id}\r\ntraceresponse: {mark.traceresponse()}\r\n"
            f"server-timing: gateway-queue;dur={(self.permit_s - self.queued_s) * 1e3:.3f}, "
            f"gateway-upstream;dur={(now - self.sent_s) * 1e3:.3f}{upstream_timing}\r\n\r\n".encode("latin-1")
        )
        if len(data) <= _SMALL:
            client.transport.write(b"\r\n".join(lines) + data)
        else:
            client.transport.writelines((b"\r\n".join(lines), data))
        if complete:
            self._connection = None
            self._end(Outcome.ANSWERED)
            client.answered(close=close)

    def _extend(self) -> None:
        """An answer without a known length is a stream: its deadline was its first byte."""
        gateway = self._gateway
        gateway.unwatch(self, self._slot)
        self._slot = gateway.watch(self, self.response_s + STREAM_MAX_S, self.response_s)

    def response_data(self, data: bytes, complete: bool) -> None:
        """More of the answer."""
        client = self.client
        if self._rechunk:
            if data:
                client.transport.write(chunk(data))
            if complete:
                client.transport.write(LAST_CHUNK)
        elif data:
            client.transport.write(data)
        if complete:
            self._connection = None
            close = not self._body_done or (not self._rechunk and self.head.line.minor == 0 and client.must_close)
            self._end(Outcome.ANSWERED)
            client.answered(close=close)

    def failed(self, error: UpstreamError) -> None:
        """The upstream did not answer; if nothing was sent, another endpoint may."""
        self._connection = None
        if isinstance(error, UpstreamUnreachable):
            assert self._endpoint is not None
            self._tried = (*self._tried, self._endpoint)
            self._endpoint = None
            self._send(monotonic())
            return
        self._endpoint = None
        self.refuse(Refused(Outcome.UPSTREAM_BROKEN, str(error), retry_after_s=1))

    # The end ---------------------------------------------------------------------------------------------------

    def refuse(self, refused: Refused) -> None:
        """End the call with an error; once the answer has begun, all that is left is to cut the connection."""
        if self.state == DONE:
            return
        begun = self.state == ANSWERING
        client = self.client
        self._end(refused.outcome, str(refused))
        if begun:
            client.transport.abort()
        else:
            self.status = client.write_refusal(refused, self.mark, v2=self.target.kind != "service")
            client.answered(close=client.must_close)

    def _end(self, outcome: Outcome, error: str = "") -> None:
        state = self.state
        if state == DONE:
            return
        self.state = DONE
        self.outcome = outcome
        self.client.call = None
        gateway, gate, tenant = self._gateway, self._gate, self.tenant
        gateway.unwatch(self, self._slot)
        now = monotonic()
        seconds = now - self.received_s
        on_time = outcome is Outcome.ANSWERED and self.status < 500 and seconds <= tenant.tier.target_s
        gateway.stats.ended(gate.name, tenant.tier.name, outcome, self.status, seconds, on_time)
        if self.mark.sampled and gateway.sink.enabled:
            record_call(self, gateway.sink, now, error)
        ticket = self._ticket
        if state >= SENDING:
            if self._connection is not None:
                self._connection.abandon()
                self._connection = None
            elif self._endpoint is not None and not self.sent_s:
                self._endpoint.forget(self)
            gate.leave(self.target.route, tenant, ticket, now - self.permit_s, self.cost_us)
        elif ticket is not None:
            gate.forget(ticket)
        if ticket is not None:
            ticket.payload = None  # the queue may keep a dead ticket for a while, but not the body
