"""One HTTP request on its way: from its authorised head to its last byte, as callbacks, without a task of its own.

    COLLECT   the body is coming in, on the pool's byte budget; a slow sender holds memory, never a permit
    QUEUED    the request is here and waits for a permit
    JOINED    an equal call is being made, whose answer will be this one's as well (`single_flight`)
    SENDING   has a permit and an endpoint; a connection is being made, or the answer is awaited
    ANSWERING the upstream's head went to the client
    DONE

Exactly one of `response(..., complete=True)`, `failed`, `expired`, `displaced`, `client_left` ends a call, through
`_end`, which gives back whatever the call holds: its place in the queue, its permit, its connection, its slot among
the deadlines. The permit is given back at the upstream's last byte; what the client has not read by then is buffered
in its transport, whose high-water mark pauses the upstream before that.
"""

from time import monotonic
from typing import TYPE_CHECKING, Final

from oriel_gateway.answers import STATUS
from oriel_gateway.attempts import note_answer
from oriel_gateway.call_state import ANSWERING, COLLECT, DONE, JOINED, LEAST_S, QUEUED, SENDING, YOUNG
from oriel_gateway.cors import dressed
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.events import cut, events_of
from oriel_gateway.heads import answer_start, head_lines, with_retry
from oriel_gateway.hedge import Hedge
from oriel_gateway.loan import Loan
from oriel_gateway.recovery import Recovery
from oriel_wire.chunked import LAST_CHUNK, chunk
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.h1_response import ResponseHead
from oriel_wire.orca import LOAD_FORMAT, LOAD_METRICS

if TYPE_CHECKING:
    from oriel_gateway.limits import Grant

__all__ = ["Call"]

_STAGES: Final = (
    "receiving the request",
    "waiting for a permit",
    "waiting for the answer to an equal request",
    "waiting for the upstream",
    "receiving the answer",
    "",
)
ASK_REPORT: Final = f"{LOAD_FORMAT}: text\r\n"
_SMALL: Final = 64 * 1024
_PIECE: Final = 2 * 1024
_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time
_LEFT: Final = Outcome.CLIENT_LEFT


class Call(Recovery):
    """See the module's head. Times are monotonic seconds; 0.0 means not reached."""

    __slots__ = ()

    # The client's side -----------------------------------------------------------------------------------------

    def data(self, data: bytes | memoryview) -> None:
        """Some bytes of the body."""
        size = len(data)
        pending = self._pending
        if pending is None or isinstance(pending, bytes):
            pending = self._pending = [pending] if pending else []
        if size >= _PIECE:
            pending.append(data)
        elif pending and isinstance(last := pending[-1], bytearray) and len(last) < _SMALL:
            last += data  # an object per piece would weigh more than a small piece
        else:
            pending.append(bytearray(data))
        self._pending_bytes += size
        bound = self._gate.pool.max_body_bytes
        if self._pending_bytes > bound:
            self.refuse(Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes"))
        else:
            self._hold(size)

    def _hold(self, size: int) -> bool:
        """Take bytes from the pool's budget; False: there are none, and the call is refused."""
        gate = self._gate
        if gate.hold(size, urgent=self.tenant.tier.band == self._gateway.top_band):
            self._held_bytes = self._held_bytes + size if self._held_bytes else size
            return True
        retry_after_s = gate.admission.retry_after_s()
        self.refuse(Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=retry_after_s))
        return False

    def whole(self, data: bytes, now: float = 0.0) -> None:
        """The whole body at once. now: see `enter`."""
        self._pending = data
        self._pending_bytes = len(data)
        if self.extras is None and ((grant := self.grant) is None or grant.ready):
            self.enter(now)
        else:
            self._ask()

    def end(self) -> None:
        """The body is complete."""
        if self.state == COLLECT:
            self._ask()

    def client_left(self) -> None:
        """The client closed its side: free everything at once."""
        self._end(_LEFT)

    def client_writable(self, writable: bool) -> None:
        """Backpressure from the client to the upstream."""
        connection = self._connection
        if connection is not None:
            if writable:
                connection.transport.resume_reading()
            else:
                connection.transport.pause_reading()
            if self.state == ANSWERING:
                loan = self._loan = self._loan or Loan(self._gate, self.tenant)
                loan.busy() if writable else loan.idle()

    # Admission -------------------------------------------------------------------------------------------------

    def limited(self, grant: "Grant") -> None:
        """What its limits gave it; the call may have to wait until they have."""
        self.grant = grant
        if not grant.ready:
            grant.waiter = self

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
        if self.extras is None or self.extras.before_queue(self):
            self.enter()

    def body(self) -> bytes:
        """The whole body, while the call has not been sent."""
        body = self._pending
        if body is None:
            return b""
        if not isinstance(body, bytes):
            body = self._pending = b"".join(body)
        return body

    def hold_body(self) -> bool:
        """Put the body on the byte budget if it came with the head; False: there are not enough bytes."""
        size = self._pending_bytes - self._held_bytes
        if size and not self._gate.hold(size, urgent=False):
            return False
        self._held_bytes = self._pending_bytes
        return True

    def enter(self, now: float = 0.0) -> None:
        """Take a permit or queue for one. now: monotonic seconds, 0.0 if the caller has not looked."""
        gate = self._gate
        self.queued_s = now = now or monotonic()
        if now >= self.deadline:
            self.expired()
            return
        if not gate.endpoints.usable:
            self._park()
            return
        if gate.admission.enter():
            self.permit_s = now
            self.state = SENDING
            self._send(now)
            return
        if self._gateway.refusing:
            self.refuse(stopping())
            return
        self.state = QUEUED
        self.ahead = gate.admission.queue.rows_ahead(self.tenant.tier.band)
        try:
            self._ticket = gate.wait(
                self,
                self.tenant,
                self.target,
                received_s=self.received_s,
                deadline=self.deadline,
                size_bytes=self._pending_bytes,
            )
        except Refused as refused:
            self.refuse(refused)
            return
        # It came with its head: it is on the budget only now that it has to wait, and whoever it displaced is not.
        if self._pending_bytes > self._held_bytes and not self._hold(self._pending_bytes - self._held_bytes):
            return
        gate.pump()

    def displaced(self) -> None:
        """Someone more urgent took this call's place in the full queue."""
        retry_after_s = self._gate.admission.retry_after_s()
        message = "a more urgent call took the place in the queue"
        self.refuse(Refused(Outcome.DISPLACED, message, retry_after_s=retry_after_s))

    def expired(self) -> None:
        """The deadline passed; for a stream, it was silent or went on for too long."""
        if self._streaming and monotonic() < self._stream_ends_s():
            self.watch_until(self._stream_ends_s())
            return
        if self._parked or (self.state == QUEUED and not self._gate.endpoints.usable):
            message = "no server of this pool could be reached before the deadline"
            self.refuse(Refused(Outcome.UPSTREAM_UNREACHABLE, message, retry_after_s=1))
            return
        stage = _STAGES[self.state]
        self.refuse(Refused(Outcome.DEADLINE_EXCEEDED, f"the deadline passed while {stage}"))

    # The upstream's side ---------------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        tries = self._tries
        if tries is None and not self.tried:
            self._gate.retries.requested(now)
        if self.stick:
            endpoint = self._sticky(now)
        elif tries is None:
            endpoint = self._gate.endpoints.pick(now, (), self.target.sought)
        else:
            endpoint = tries.pick(now)
        if endpoint is None:
            self._nobody()
            return
        self._endpoint = self.endpoint = endpoint
        fresh = tries is not None and tries.fresh
        large = self._pending_bytes > _SMALL
        connection = endpoint.begin(self, now, self.target.head_only, fresh, large)
        if connection is not None:
            self._connection = connection
            self.sent_s = now
            self.put(connection, now)
            if self.target.plan.hedge_s:
                self._hedge_later()

    def connected(self, connection: UpstreamConnection) -> None:
        """A connection was made for this call."""
        self._connection = connection
        now = monotonic()
        if now >= self.deadline - LEAST_S:
            self.expired()
            return
        self.sent_s = now
        self.put(connection, now)
        if self.target.plan.hedge_s:
            self._hedge_later()

    def _hedge_later(self) -> None:
        if self._hedge is None and self._kept:
            self._hedge = Hedge(self, self.target.plan.hedge_s)

    def put(self, connection: UpstreamConnection, now: float) -> None:
        """Write the whole request to a connection. A body of up to 64 KiB is kept: it may have to be sent again."""
        mark = self.mark
        lines = self.lines
        if lines is None:
            lines = self.lines = head_lines(self.head, self._gateway.tenant_lines(self.tenant))
        remaining_ms = int((self.deadline - now) * 1000.0)
        tail = (
            f"x-oriel-timeout-ms: {remaining_ms if remaining_ms > 0 else 1}\r\nx-request-id: {mark.request_id}\r\n"
            f"traceparent: 00-{mark.trace}-{mark.onward}-{'01' if mark.sampled else '00'}\r\n"
        )
        if mark.state:
            tail += f"tracestate: {mark.state}\r\n"
        if self._gate.asks:
            self._gate.asks, self._asked = False, True
            tail += ASK_REPORT
        head = self.head
        if head.content_length is not None or head.chunked:  # it is all here now: its length is known
            tail += f"content-length: {self._pending_bytes}\r\n"
        client = self.client
        if client is not None and client.forwarded:
            tail += client.forwarded
        line, host, more = self.target.line, connection.endpoint.host_line, tail.encode("latin-1")
        body = self._pending
        if body is None or self._pending_bytes <= _SMALL:
            pieces = (body,) if isinstance(body, bytes) else body or (b"",)
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            request = b"\r\n".join((line, host, lines, more, whole))
            connection.request_bytes = len(request)
            connection.transport.write(request)
        else:
            connection.request_bytes = -1
            pieces = (body,) if isinstance(body, bytes) else body
            connection.transport.writelines((b"\r\n".join((line, host, lines, more, b"")), *pieces))
            self._pending = None
        connection.request_done = True

    def upstream_writable(self, writable: bool) -> None:
        """The request is in the upstream's transport as a whole; its bytes stay on the budget until it answers."""

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        """The upstream's head, and the body bytes that came with it."""
        self.response_s = now = monotonic()
        status = head.status
        endpoint = self._endpoint
        assert endpoint is not None
        if status < 400:
            endpoint.answered(now, now - self.sent_s)
        else:
            note_answer(self._gate.endpoints, endpoint, head, now, now - self.sent_s)
        if status >= 400 and complete and self._elsewhere(endpoint, head, data, now):
            return
        if self._hedge is not None:
            self._settle(self._hedge)
        self.state = ANSWERING
        self.status = status
        self._pending = None
        self.cost_us = head.cost_us
        self.bytes_out = len(data)
        client = self.client
        assert client is not None
        start: bytes | None = None
        if complete:
            self._connection = None  # it is the pool's again: what this client does not read must not pause it
            # As `must_close` would say: the request is here as a whole.
            close = self.head.close or client.server.draining
            if self.extras is None and not (close or self._asked or client.cors):
                start = head.start or answer_start(head)
        if start is None:
            if self.extras is not None:
                head = head.copy()
                self.extras.response(self, head, data)
            start = self._begin(head, data, complete, now)
            if self._rechunk and data:
                data = chunk(data)
        if not head.dated:
            start += client.server.date_line
        limits = ""
        if (grant := self.grant) is not None:
            grant.move(self.bytes_out, now)
            limits = grant.lines(now)
        mark = self.mark
        queued = f"{(self.permit_s - self.queued_s) * 1e3:.3f}" if self.permit_s != self.queued_s else "0.000"
        timing = f", {head.server_timing}" if head.server_timing else ""
        tail = (
            f"{limits}x-request-id: {mark.request_id}\r\ntraceresponse: 00-{mark.trace}-{mark.own}-"
            f"{'01' if mark.sampled else '00'}\r\nserver-timing: gateway-queue;dur={queued}, "
            f"gateway-upstream;dur={(now - self.sent_s) * 1e3:.3f}{timing}\r\n\r\n"
        ).encode("latin-1")
        if len(data) <= _SMALL:
            client.transport.write(b"".join((start, tail, data)))
        else:
            client.transport.writelines((start + tail, data))
        if complete:
            self._end(_ANSWERED, "", now)
            client.answered(close=self._close, now=now)
        elif not client.keeps_up:
            client.on_writable(False)

    def _begin(self, head: ResponseHead, data: bytes, complete: bool, now: float) -> bytes:
        """The first lines of an answer that is not like most; data: of the body, came with it."""
        client = self.client
        assert client is not None
        close = client.must_close
        lines = dressed(head.forward, client.cors) if client.cors else [*head.forward]
        if self._asked:
            self._gate.reported(head.get(LOAD_METRICS))
        length = head.content_length
        if head.status == 204:
            length = None
        elif length is None and complete and head.status != 304 and not self.target.head_only:
            length = len(data)
        if length is not None:
            lines.append(b"content-length: %d" % length)
        elif not complete:
            if self.head.line.minor:
                lines.append(b"transfer-encoding: chunked")
                self._rechunk = True
                self._events = events_of(head, data)
            else:
                close = True
            self._streaming = True
            self._data_s = now
            self.watch_until(self._stream_ends_s())
        self._close = close
        if close:
            lines.append(b"connection: close")
        lines = with_retry(head, lines)
        lines.append(b"")
        return b"\r\n".join(lines)

    def _stream_ends_s(self) -> float:
        tier = self.tenant.tier
        return min(self._data_s + tier.stream_idle_s, self.response_s + tier.stream_max_s)

    def response_data(self, data: bytes, complete: bool) -> None:
        """More of the answer."""
        if self.extras is not None:
            self.extras.data(data)
        client = self.client
        assert client is not None
        if complete:
            self._connection = None
        self.bytes_out += len(data)
        if self._streaming:
            self._data_s = monotonic()
            if self._events is not None:
                self._events.sent(data)
        if self.grant is not None:
            self.grant.move(len(data), monotonic())
        if self._rechunk:
            if len(data) > _SMALL:
                client.transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
            elif data:
                client.transport.write(chunk(data))
            if complete:
                client.transport.write(LAST_CHUNK)
        elif data:
            client.transport.write(data)
        if complete:
            self._end(_ANSWERED)
            client.answered(close=self._close)
        elif not client.keeps_up:
            client.on_writable(False)

    # The end ---------------------------------------------------------------------------------------------------

    def refuse(self, refused: Refused) -> None:
        """End the call with an error; once the answer has begun, all that is left is to cut it."""
        if self.state == DONE:
            return
        begun = self.state == ANSWERING
        client = self.client
        assert client is not None
        queued_s = (self.permit_s or monotonic()) - self.queued_s if self.queued_s else 0.0
        if not begun:
            self.status = STATUS[refused.outcome]
        self._end(refused.outcome, str(refused))
        v2 = self.target.kind != "service"
        if begun:
            cut(client, self._events, refused, self.mark.request_id, v2=v2)
        else:
            client.write_refusal(refused, self.mark, v2=v2, queued_s=queued_s)
            client.answered(close=client.must_close)

    def end_unsent(self, status: int, outcome: Outcome = _ANSWERED, error: str = "") -> None:
        """The call was answered, or its connection refused the rest of it, without being made."""
        self.status = status
        self._end(outcome, error)

    def _count(self, outcome: Outcome, now: float, error: str) -> None:
        """Tell everybody who counts or records calls."""
        self._gateway.ended(self, now, error, self.response_s if self._streaming else now, self._pending_bytes)

    def _end(self, outcome: Outcome, error: str = "", now: float = 0.0) -> None:
        state = self.state
        if state == DONE:
            return
        self.state = DONE
        self.outcome = outcome
        if self.client is not None:
            self.client.call = None
        gateway, gate, tenant = self._gateway, self._gate, self.tenant
        if self.slot == YOUNG:
            del gateway.young[self]
            self.slot = 0
        else:
            gateway.unwatch(self, self.slot)
        now = now or monotonic()
        self._count(outcome, now, error)
        gate.calls -= 1
        if self._held_bytes:
            gate.release(self._held_bytes)
            gateway.bodies.ended(self._held_bytes)
        ticket = self._ticket
        cost_s = 0.0
        if state >= SENDING:
            if self._connection is not None or not self.sent_s:
                self._drop_first(now)
            late = outcome is not _ANSWERED and now >= self.deadline and not self._streaming
            left = outcome is _LEFT and not late
            good = None if left else outcome is _ANSWERED and self.status < 500
            size_bytes = -1 if self._streaming or self.status >= 300 else self._pending_bytes
            held_s = now - self.permit_s
            if self._loan is not None:
                held_s -= self._loan.end()
            cost_s = gate.leave(self.target, tenant, ticket, held_s, self.cost_us, size_bytes, good, late)
        elif ticket is not None:
            gate.forget(ticket)
        elif self._parked:
            gate.endpoints.unpark(self)
        if self._hedge is not None:
            self._hedge.cancel()
            self._hedge = None  # or the two would hold one another
        if self.grant is not None:
            executed = self.sent_s > 0.0 or outcome is _ANSWERED
            if state == JOINED and not executed and self.extras is not None:
                executed, cost_s = self.extras.abandoned(self, now)
            self.grant.settle(round(cost_s * 1e6), executed, now)
        if ticket is not None:
            ticket.payload = None  # the queue may keep a dead ticket for a while, but not the body
        if self.extras is not None:
            self.extras.ended(self)
