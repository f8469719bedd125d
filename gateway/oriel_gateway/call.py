"""One HTTP request on its way: from its authorised head to its last byte, as callbacks, without a task of its own.

    COLLECT   the body is coming in, on the pool's byte budget; a slow sender holds memory, never a permit
    QUEUED    the request is here and waits for a permit
    SENDING   has a permit and an endpoint; a connection is being made, or the answer is awaited
    ANSWERING the upstream's head went to the client
    DONE

Exactly one of `response(..., complete=True)`, `failed`, `expired`, `displaced`, `client_left` ends a call, through
`_end`, which gives back whatever the call holds: its place in the queue, its permit, its connection, its slot among
the deadlines. The permit is given back at the upstream's last byte; what the client has not read by then is buffered
in its transport, whose high-water mark pauses the upstream before that.
"""

from time import monotonic
from typing import TYPE_CHECKING

from oriel_gateway.answers import STATUS
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import Grant
from oriel_gateway.targets import Target
from oriel_gateway.tracing import Mark
from oriel_policies.documents import Tenant
from oriel_policies.queue import Ticket
from oriel_wire.chunked import LAST_CHUNK, chunk
from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import UpstreamError, UpstreamHungUp, UpstreamUnreachable
from oriel_wire.h1 import RequestHead, ResponseHead

if TYPE_CHECKING:
    from oriel_gateway.ingress_http import ClientConnection

__all__ = ["Call"]

COLLECT, QUEUED, SENDING, ANSWERING, DONE = range(5)
_STAGES = ("receiving the request", "waiting for a permit", "waiting for the upstream", "receiving the answer", "")
STREAM_IDLE_S = 60.0
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
    protocol = "http"
    ahead = -1
    bytes_out = 0
    endpoint: Endpoint | None = None
    tried: tuple[Endpoint, ...] = ()
    _pending: list[bytes] | None = None
    _pending_bytes = 0
    _held_bytes = 0  # of the pool's byte budget
    _close = False  # the answer that has begun ends its connection
    _rechunk = False
    _streaming = False
    _data_s = 0.0
    _ticket: Ticket | None = None
    _connection: UpstreamConnection | None = None
    _endpoint: Endpoint | None = None
    _retried = False
    grant: Grant | None = None
    _collected = False  # the body is here, the limiter's answer is not

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

    # The client's side -----------------------------------------------------------------------------------------

    def data(self, data: bytes) -> None:
        """Some bytes of the body."""
        size = len(data)
        gate = self._gate
        if self._pending is None:
            self._pending = []
        self._pending.append(data)
        self._pending_bytes += size
        if self._pending_bytes > gate.pool.max_body_bytes:
            bound = gate.pool.max_body_bytes
            self.refuse(Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes"))
        elif not gate.hold(size, urgent=self.tenant.tier.band == self._gateway.top_band):
            retry_after_s = gate.admission.retry_after_s()
            self.refuse(Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=retry_after_s))
        else:
            self._held_bytes += size

    def whole(self, data: bytes) -> None:
        """The whole body at once."""
        self._pending = [data]
        self._pending_bytes = len(data)
        self._ask()

    def end(self) -> None:
        """The body is complete."""
        if self.state == COLLECT:
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

    def granted(self) -> None:
        """The limiter's ledger let the call through."""
        if self._collected:
            self._ask()

    def _ask(self) -> None:
        if (grant := self.grant) is not None:
            if not grant.ready:
                self._collected = True
                return
            if self.head.chunked:
                grant.move(self._pending_bytes, monotonic())
        gate = self._gate
        self.queued_s = now = monotonic()
        if gate.admission.enter():
            self.permit_s = now
            self.state = SENDING
            self._send(now)
            return
        self.state = QUEUED
        self.ahead = gate.admission.queue.rows_ahead(self.tenant.tier.band)
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
        """The deadline passed; for a stream, it was silent for too long."""
        if self._streaming and monotonic() < self._data_s + STREAM_IDLE_S:
            self._extend()
            return
        stage = _STAGES[self.state]
        self.refuse(Refused(Outcome.DEADLINE_EXCEEDED, f"the deadline passed while {stage}"))

    # The upstream's side ---------------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        endpoint = self._gate.pick(self.tried)
        if endpoint is None:
            self.refuse(Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1))
            return
        self._endpoint = self.endpoint = endpoint
        connection = endpoint.begin(self, now, head_only=self.target.head_only)
        if connection is not None:
            self._write(connection, now)

    def connected(self, connection: UpstreamConnection) -> None:
        """A connection was made for this call."""
        self._write(connection, monotonic())

    def _write(self, connection: UpstreamConnection, now: float) -> None:
        """Write the whole request."""
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
        if head.chunked:  # it is all here now: its length is known
            tail += f"content-length: {self._pending_bytes}\r\n"
        parts = [
            self.target.line,
            connection.endpoint.host_line,
            *head.forward,
            self._gateway.tenant_lines(self.tenant),
            tail.encode("ascii"),
        ]
        pending = self._pending
        if pending is None:
            parts.append(b"")
            connection.transport.write(b"\r\n".join(parts))
        elif self._pending_bytes <= _SMALL:
            parts.append(pending[0] if len(pending) == 1 else b"".join(pending))
            connection.transport.write(b"\r\n".join(parts))
        else:
            parts.append(b"")
            connection.transport.writelines((b"\r\n".join(parts), *pending))
        self._pending = None
        connection.request_done = True

    def upstream_writable(self, writable: bool) -> None:
        """The request is in the upstream's transport as a whole; its bytes stay on the budget until it answers."""

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        """The upstream's head, and the body bytes that came with it."""
        self.response_s = now = monotonic()
        self.state = ANSWERING
        self.status = head.status
        self.cost_us = head.cost_us
        self.bytes_out = len(data)
        client = self.client
        lines = head.forward
        if (grant := self.grant) is not None:
            grant.move(len(data), now)
            lines.append(grant.lines(now))
        close = client.must_close
        length = head.content_length
        if head.status == 204:
            length = None
        elif length is None and complete and head.status != 304 and not self.target.head_only:
            length = len(data)
        if complete:
            self._connection = None  # it is the pool's again: what this client does not read must not pause it
        if length is not None:
            lines.append(b"content-length: %d" % length)
        elif not complete:
            if self.head.line.minor:
                lines.append(b"transfer-encoding: chunked")
                self._rechunk = True
                data = chunk(data) if data else b""
            else:
                close = True
            self._streaming = True
            self._data_s = now
            self._extend()
        self._close = close
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
            self._end(Outcome.ANSWERED)
            client.answered(close=close)

    def _extend(self) -> None:
        """An answer without a known length is a stream: its deadline was its first byte; now it may not fall silent."""
        gateway = self._gateway
        gateway.unwatch(self, self._slot)
        self._slot = gateway.watch(self, self._data_s + STREAM_IDLE_S, self._data_s)

    def response_data(self, data: bytes, complete: bool) -> None:
        """More of the answer."""
        client = self.client
        if complete:
            self._connection = None
        self.bytes_out += len(data)
        if self._streaming:
            self._data_s = monotonic()
        if self.grant is not None:
            self.grant.move(len(data), monotonic())
        if self._rechunk:
            if data:
                client.transport.write(chunk(data))
            if complete:
                client.transport.write(LAST_CHUNK)
        elif data:
            client.transport.write(data)
        if complete:
            self._end(Outcome.ANSWERED)
            client.answered(close=self._close)

    def failed(self, error: UpstreamError) -> None:
        """The upstream did not answer: another endpoint may if nothing was sent, or the same may if it only hung up
        on a kept connection and the request may run twice (a read without a body, tried once more at most)."""
        self._connection = None
        if isinstance(error, UpstreamUnreachable):
            assert self._endpoint is not None
            self.tried = (*self.tried, self._endpoint)
            self._endpoint = self.endpoint = None
            self._send(monotonic())
            return
        self._endpoint = None
        if isinstance(error, UpstreamHungUp) and not self._retried and self._repeatable:
            self._retried = True
            self.sent_s = 0.0
            self._send(monotonic())
            return
        self.refuse(Refused(Outcome.UPSTREAM_BROKEN, str(error), retry_after_s=1))

    @property
    def _repeatable(self) -> bool:
        return not self._pending_bytes and self.head.method in ("GET", "HEAD") and self.state == SENDING

    # The end ---------------------------------------------------------------------------------------------------

    def refuse(self, refused: Refused) -> None:
        """End the call with an error; once the answer has begun, all that is left is to cut the connection."""
        if self.state == DONE:
            return
        begun = self.state == ANSWERING
        client = self.client
        queued_s = (self.permit_s or monotonic()) - self.queued_s if self.queued_s else 0.0
        if not begun:
            self.status = STATUS[refused.outcome]
        self._end(refused.outcome, str(refused))
        if begun:
            client.transport.abort()
        else:
            client.write_refusal(refused, self.mark, v2=self.target.kind != "service", queued_s=queued_s)
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
        gateway.ended(self, now, error, self.response_s if self._streaming else now, self._pending_bytes)
        if self._held_bytes:
            gate.release(self._held_bytes)
        ticket = self._ticket
        cost_s = 0.0
        if state >= SENDING:
            if self._connection is not None:
                self._connection.abandon()
                self._connection = None
            elif self._endpoint is not None and not self.sent_s:
                self._endpoint.forget(self)
            cost_s = gate.leave(self.target.route, tenant, ticket, now - self.permit_s, self.cost_us)
        elif ticket is not None:
            gate.forget(ticket)
        if self.grant is not None:
            executed = self.sent_s > 0.0 or outcome is Outcome.ANSWERED
            self.grant.settle(int(cost_s * 1e6), executed, now)
        if ticket is not None:
            ticket.payload = None  # the queue may keep a dead ticket for a while, but not the body
