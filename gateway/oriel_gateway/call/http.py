"""One HTTP request on its way: from its authorised head to its last byte, as callbacks, without a task of its own.

`lifecycle` has the states of a call and what ends it. A call that meets no trouble is this one object. What it does
when its endpoint fails or nobody can be asked is decided in `attempts`, and what only such a call has to remember is in
a `Trouble`; what only an answer in parts needs is in an `AnswerStream`. `contracts` has hooks and receivers of answers.
"""

from math import inf
from time import monotonic
from typing import Any, Final

from oriel_gateway.call.attempts import decided_by_itself, note_answer, sticky_endpoint
from oriel_gateway.call.fallback import SENT_ON, SPILLING, spill
from oriel_gateway.call.heads import head_lines
from oriel_gateway.call.late import explained
from oriel_gateway.call.lifecycle import (
    ANSWERING,
    COLLECT,
    DONE,
    LEAST_S,
    LIMITED,
    QUEUED,
    SENDING,
    Lifecycle,
)
from oriel_gateway.call.trouble import Trouble
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.identity.named_models import naming_another
from oriel_gateway.limits import Grant
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.holding import held_by
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.upstream_answers import DENIED, AnswerKind, classify_answer
from oriel_gateway.routing.targets import Target
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread
from oriel_wire.observe.orca import LOAD_FORMAT, LOAD_METRICS

__all__ = ["Call"]

ASK_REPORT: Final = f"{LOAD_FORMAT}: text\r\n"
_SMALL: Final = 64 * 1024
_PIECE: Final = 2 * 1024
_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time
_LEFT: Final = Outcome.CALLER_LEFT


class Call(Lifecycle):
    """One request, from `Lifecycle`'s begin to its end."""

    __slots__ = ()

    # The client's side -----------------------------------------------------------------------------------------

    def data(self, data: bytes | memoryview) -> None:
        """Take some bytes of the body."""
        size = len(data)
        pieces = self._body
        if pieces is None or isinstance(pieces, bytes):
            pieces = self._body = [pieces] if pieces else []
        if size >= _PIECE:
            pieces.append(data)
        elif pieces and isinstance(last := pieces[-1], bytearray) and len(last) < _SMALL:
            last += data  # joined, because an object for each small piece would take more memory than the piece
        else:
            pieces.append(bytearray(data))
        self.body_bytes += size
        bound = self.gate.pool.max_body_bytes
        if self.body_bytes > bound:
            self.refuse(Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes"))
        else:
            self._keep_body()

    def whole(self, data: bytes | list[bytes | memoryview], now: float = 0.0) -> None:
        """Take the whole body at once, in one piece or several. now: see `enter`."""
        self._body = data
        self.body_bytes = len(data) if isinstance(data, bytes) else sum(map(len, data))
        if self.extras is None and ((grant := self.grant) is None or grant.ready):
            self.enter(now)
        else:
            self._judge()

    def end(self) -> None:
        """The body is complete."""
        if self.state == COLLECT:
            self._judge()

    def client_left(self) -> None:
        """The client closed its side: free everything at once."""
        self.finish(_LEFT)

    def client_writable(self, writable: bool) -> None:
        """Pass backpressure from the client on to the upstream."""
        connection = self.connection
        if connection is not None:
            if writable:
                connection.resume()
            else:
                connection.pause()
            if self.state == ANSWERING:
                slot = self.as_stream()
                (slot.resume if writable else slot.pause)(monotonic())

    # Admission -------------------------------------------------------------------------------------------------

    def limited(self, grant: Grant) -> None:
        """Keep what the limits granted; the call may have to wait until their ledger has answered."""
        self.grant = grant
        if not grant.ready:
            grant.waiter = self

    def granted(self) -> None:
        """The ledger of the limits let the call through."""
        if self.state == LIMITED:
            self.state = COLLECT
            self._judge()

    def _judge(self) -> None:
        """The request is complete: queue, unless its limits or its route say something else."""
        if (grant := self.grant) is not None:
            if not grant.ready:
                self.state = LIMITED
                grant.limited_s = monotonic()
                return
            if self.head.chunked:
                grant.move(self.body_bytes, monotonic())
        if self.extras is None or self.extras.before_queue(self):
            self.enter()

    def enter(self, now: float = 0.0) -> None:
        """Take a permit or queue for one. now: monotonic seconds, 0.0 if the caller has not read the clock."""
        gate, now = self.gate, now or monotonic()
        demand = gate.demand
        if demand is not None and not self.queued_s:
            demand.arrived(self.tenant.tier.name, now)
        self.queued_s = now
        if now >= self.deadline:
            self.expired()
            return
        if not self.endpoints.usable:
            self.park()
            return
        if gate.cold_start is not None:
            self.shorten_hold(now)
        if self.streams and not self.as_stream().reserve():
            self.refuse_full("the pool has no slot for a further stream")
            return
        if gate.admission.enter(self.target.counted, now):
            self.permit_s = now
            self.state = SENDING
            self.send(now)
            return
        if self.gateway.refusing:
            self.refuse(stopping())
            return
        self.state = QUEUED
        self.ahead = gate.admission.queue.rows_ahead(self.tenant.tier.band)
        try:
            self._ticket = gate.join_queue(
                self,
                self.tenant,
                self.target,
                # a held call has missed its target: only its deadline orders it, and it is never refused as late
                received_s=inf if self._trouble is not None and self._trouble.held else self.received_s,
                deadline=self.deadline,
                size_bytes=self.body_bytes,
            )
        except Refused as refused:
            self.refuse(refused)
            return
        # A body that came with its head is put on the budget only now; a call that was displaced has been taken off it.
        if self._keep_body():
            gate.pump()

    def _keep_body(self) -> bool:
        """Put the body on the pool's byte budget; False: there are not enough bytes, and the call is refused."""
        if self.hold_body():
            return True
        self.refuse_full("too many bytes wait for this pool")
        return False

    def admitted(self) -> None:
        """Use the permit to send to an endpoint; give it back if the client has left or the deadline has passed."""
        client = self.client
        gone = client is not None and client.departed
        now = monotonic()
        # the permit, the client's departure and the deadline may all have waited for the same turn of the loop
        if gone or now >= self.deadline - LEAST_S:
            self.decline_permit()
            if gone:
                self._left_unseen()
            else:
                self.expired()
            return
        self.permit_s = now
        self.state = SENDING
        self.send(now)

    def departed(self) -> bool:
        """Return whether the client has closed behind bytes that were not read; then the call is over."""
        if (client := self.client) is None or not client.departed:
            return False
        self._left_unseen()
        return True

    def _left_unseen(self) -> None:
        assert (client := self.client) is not None
        self.finish(_LEFT)
        client.abort()

    def park(self) -> None:
        """Wait without a permit until an endpoint is usable, or until the deadline."""
        if self.gateway.refusing:
            self.refuse(stopping())
            return
        self.state = QUEUED
        if self.target.fallbacks and spill(self, Outcome.UPSTREAM_UNREACHABLE, monotonic()):
            return
        try:
            self.hold()
            if self._keep_body():
                self.in_trouble(counted=False).park()
        except Refused as refused:
            self.refuse(refused)

    # To the upstream -------------------------------------------------------------------------------------------

    def send(self, now: float, endpoint: Any = None, fresh: bool = False) -> None:
        """Send to `endpoint`, or to the one that the pool picks."""
        gate, target, trouble = self.gate, self.target, self._trouble
        if endpoint is None:
            if trouble is None:
                gate.retries.requested(now)
            elif not trouble.counted:
                trouble.counted = True
                gate.retries.requested(now)
            if self.stick:
                endpoint = sticky_endpoint(self.endpoints, self.stick, target.sought, now)
            else:
                endpoint = self.endpoints.pick(now, (), target.sought)
            if endpoint is None:
                self.in_trouble().nobody(now)
                return
        self.endpoint = endpoint
        connection = endpoint.begin(self, now, target.head_only, fresh, self.body_bytes > _SMALL)
        if connection is not None:
            self.connection = connection
            self._begin(connection, now)

    def connected(self, connection: Any) -> None:
        """A connection was made for this call."""
        self.connection = connection
        now = monotonic()
        if now >= self.deadline - LEAST_S:
            self.expired()
            return
        self._begin(connection, now)

    def _begin(self, connection: Any, now: float) -> None:
        """Write the request to the connection that was made for it; it makes room for no other call from now on."""
        self.sent_s = now
        if self._holding is not None:
            self.gate.bytes.fix(self._holding)
        self.put(connection, now)
        if self.target.plan.hedge_s and self.kept:
            self.in_trouble().hedge(self.target.plan.hedge_s)

    def shared_lines(self, left_out: tuple[bytes, ...]) -> bytes | None:
        """Return the lines of a call that is made for several callers; see `heads.head_lines`."""
        return head_lines(self.head, self.gateway.targets.tenant_lines(self.tenant), left_out + self.target.left_out)

    def put(self, connection: Any, now: float) -> None:
        """Write the whole request to a connection. A body of up to 64 KiB is kept: it may have to be sent again."""
        mark, lines = self.mark, self.lines
        if lines is None:
            lines = head_lines(self.head, self.gateway.targets.tenant_lines(self.tenant), self.target.left_out)
            if self.target.spills:
                lines = b"%b\r\n%b: true" % (lines, SENT_ON.encode())
            self.lines = lines
        remaining_ms = int((self.deadline - now) * 1000.0)
        tail = (
            f"x-oriel-timeout-ms: {remaining_ms if remaining_ms > 0 else 1}\r\nx-request-id: {mark.request_id}\r\n"
            f"traceparent: 00-{mark.trace}-{mark.onward}-{mark.flags}\r\n"
        )
        if mark.state:
            tail += f"tracestate: {mark.state}\r\n"
        if self.target.kind == "service" and self.gateway.tickets is not None:
            tail += self.gateway.tickets.line(self.tenant, mark.request_id, self.deadline - now)
        if self.gate.wants_load_report:
            self.gate.wants_load_report, self.asks_report = False, True
            tail += ASK_REPORT
        if self.head.content_length is not None or self.head.chunked:  # it is complete now: its length is known
            tail += f"content-length: {self.body_bytes}\r\n"
        if (client := self.client) is not None and client.forwarded:
            tail += client.forwarded
        line, host, more = self.target.line, connection.endpoint.host_line, tail.encode("latin-1")
        body = self._body
        if body is None or self.body_bytes <= _SMALL:
            pieces = (body,) if isinstance(body, bytes) else body or (b"",)
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            request = b"\r\n".join((line, host, lines, more, whole))
            connection.request_bytes = len(request)
            connection.transport.write(request)
        else:
            connection.request_bytes = -1
            pieces = (body,) if isinstance(body, bytes) else body
            connection.transport.writelines((b"\r\n".join((line, host, lines, more, b"")), *pieces))
            self._body = None
        connection.request_done = True

    def upstream_writable(self, writable: bool) -> None:
        """Do nothing: the request is written as a whole."""

    # Trouble (see `trouble`) -----------------------------------------------------------------------------------

    def in_trouble(self, *, counted: bool = True) -> Trouble:
        """Return the call's trouble, made now if there was none. counted: see `Trouble`."""
        trouble = self._trouble
        if trouble is None:
            trouble = self._trouble = Trouble(self, counted=counted)
        return trouble

    def failed(self, error: UpstreamError) -> None:
        """The upstream did not answer, or stopped in its answer."""
        self.connection = None
        endpoint, now = self.endpoint, monotonic()
        if endpoint is not None:
            if self.state == SENDING:
                if self.in_trouble().after_failure(endpoint, error, now):
                    return
            else:
                self.endpoints.note_broken(endpoint, now, self.target.sought)
        outcome = Outcome.UPSTREAM_UNREACHABLE if isinstance(error, UpstreamUnreachable) else Outcome.UPSTREAM_BROKEN
        if self.state == SENDING and isinstance(error, UpstreamUnread) and spill(self, outcome, now):
            return
        self.refuse(Refused(outcome, str(error), retry_after_s=1))

    # To another pool (see `fallback`) --------------------------------------------------------------------------

    def endpoints_of(self, gate: PoolGate) -> EndpointSet[Any]:
        """Return the endpoints of a pool that speak the call's protocol."""
        return gate.endpoints

    def rename(self, model: str) -> bool:
        """Let the body name another model; False if it does not name exactly one."""
        body = naming_another(self.body(), model)
        if body is None:
            return False
        self._body, self.body_bytes = body, len(body)
        return True

    def move(self, target: Target, gate: PoolGate, now: float) -> bool:
        """Leave the pool for `gate`; `enter` comes next. False: its bytes, or the other model, do not allow that."""
        before, after = self._holding, held_by(self.tenant, self)
        if before is not None and not gate.take_bytes(after, before.units):
            return False
        if target.renames and not self.rename(target.renames):
            gate.bytes.release(after)
            return False
        old = self.gate
        tried = self.leave_pool(now)
        if before is not None:
            old.bytes.release(before)
            self._holding = after
        gate.calls += 1
        self.gate, self.target, self.endpoints = gate, target, self.endpoints_of(gate)
        self.lines = None  # they say that it was sent on
        self.shorten_hold(now)
        if tried:
            self.in_trouble(counted=False).tried = tried
        return True

    def refuse(self, refused: Refused) -> None:
        """See `Lifecycle.refuse`; but a call that another pool of its route can serve goes on there."""
        if self.target.fallbacks and self.queued_s and self.state < ANSWERING and refused.outcome in SPILLING:
            if spill(self, refused.outcome, monotonic()):
                return
        super().refuse(refused)

    # From the upstream: errors ---------------------------------------------------------------------------------

    def classify(self, head: Any, data: bytes) -> AnswerKind:
        """Return what a whole error answer means for the call."""
        return classify_answer(head, data, model=bool(self.target.sought))

    def elsewhere(self, endpoint: HttpEndpoint, head: Any, data: bytes, now: float) -> bool:
        """Return whether a whole error answer is not the call's: it is sent again, or waits for a copy or a search."""
        trouble, model = self._trouble, self.target.sought
        if trouble is not None and trouble.settled:
            return False
        kind = self.classify(head, data)
        if kind in DENIED:
            self.endpoints.model_locations.note_denied(endpoint, model, now)
        if trouble is None and decided_by_itself(kind, head.status, copy=False) is not None:
            return False
        return self.in_trouble().after_answer(endpoint, head, data, kind, now)

    def no_copy(self) -> None:
        """The answer is here: no second copy is needed."""
        if self._trouble is not None:
            self._trouble.end()

    def inherit(self, work: "Call", tried: tuple[HttpEndpoint, ...]) -> None:
        """Record for this call what another call, which was made for it, went through in vain."""
        self.ahead, self.endpoint = work.ahead, work.endpoint
        if tried:
            self.in_trouble().tried = tried

    def take_over(self, work: "Call") -> None:
        """Go on as if this call had been sent itself: with the permit, the times and the connection of `work`.

        `work` is over; its answer goes to this call's `response`.
        """
        work.unwatch()
        work.state = DONE
        work.receiver = None
        work.gate.calls -= 1
        holding, work._holding = work._holding, None
        if holding is not None:  # it had to queue
            work.gate.bytes.release(holding)
        self.state = SENDING
        self.queued_s, self.permit_s, self.sent_s = work.queued_s, work.permit_s, work.sent_s
        self.ahead, self.endpoint = work.ahead, work.endpoint
        trouble, work._trouble = work._trouble, None
        self._trouble = None if trouble is None else trouble.handed_to(self)
        self._ticket, work._ticket = work._ticket, None
        self.connection, work.connection = work.connection, None
        if self.connection is not None:
            self.connection.sink = self
        self._body = None

    # From the upstream -----------------------------------------------------------------------------------------

    def response(self, head: Any, data: bytes, complete: bool) -> None:
        """The upstream's head came, and the body bytes that came with it."""
        receiver = self.receiver
        if receiver is not None:
            if complete:
                self.connection = None
            if receiver.response(self, head, data, complete):
                return
        self.response_s = now = monotonic()
        status = head.status
        endpoint = self.endpoint
        assert endpoint is not None
        if status < 400:
            self.endpoints.note_answer(endpoint, now, now - self.sent_s, self.target.sought)
        else:
            if self._trouble is None or not self._trouble.settled:
                note_answer(self.endpoints, endpoint, head, now, now - self.sent_s, self.target.sought)
            if complete and self.elsewhere(endpoint, head, data, now):
                return
        self.no_copy()
        self.state = ANSWERING
        self.status = status
        self._body = None
        self.cost_us, self.timing, self.used = head.cost_us, head.server_timing, head.used
        self.bytes_out = len(data)
        client = self.client
        assert client is not None
        if complete:
            # the connection goes back to the pool: a client that does not read its answer must not pause it
            self.connection = None
            if status == 504:
                head, data = explained(self, head, data)
        if self.asks_report:
            self.gate.note_load_report(head.get(LOAD_METRICS))
        if self.grant is not None:
            self.grant.move(self.bytes_out, now)
        close = client.write_answer(self, head, data, complete, now)
        if complete:
            self.finish(_ANSWERED, "", now)
            client.answered(close=close, now=now)
            return
        if (stream := self.stream) is not None and stream.unbounded:
            self.as_stream().begin_answer(now)
        if not client.keeps_up:
            client.on_writable(False)

    def response_data(self, data: bytes, complete: bool) -> None:
        """More of the answer came."""
        if complete:
            if self.connection is not None and self.connection.reported is not None:
                self.cost_us, self.used = self.connection.reported
            self.connection = None
        if self.receiver is not None and self.receiver.response_data(self, data, complete):
            return
        if self.extras is not None:
            self.extras.data(self, data, complete)
        client, stream = self.client, self.stream
        assert client is not None
        self.bytes_out += len(data)
        if self.grant is not None:
            self.grant.move(len(data), monotonic())
        client.write_more(self, data, complete)
        if complete:
            self.finish(_ANSWERED)
            client.answered(close=stream is not None and stream.close)
        elif not client.keeps_up:
            client.on_writable(False)
