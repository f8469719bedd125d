"""A call on its way: from its authorised head to its last byte, as callbacks, without a task of its own.

`lifecycle` has the states of a call and what ends it. A call that meets no trouble is this object with its side and its
lifecycle. Its next step when its endpoint fails or nobody can be asked is decided in `attempts`, and what only such a
call has to remember is in a `Trouble`; what only an answer in parts needs is in an `AnswerStream`.
"""

from math import inf
from time import monotonic
from typing import Any, Final

from oriel_gateway.call.attempts import decided_by_itself, note_answer, sticky_endpoint
from oriel_gateway.call.contracts import (
    ANSWERING,
    COLLECT,
    LIMITED,
    QUEUED,
    SENDING,
    SMALL_BYTES,
    Call,
    Client,
    Side,
)
from oriel_gateway.call.fallback import SPILLING, spill
from oriel_gateway.call.host import Host
from oriel_gateway.call.late import explained, prolong, wait_for_models
from oriel_gateway.call.lifecycle import LEAST_S, Lifecycle
from oriel_gateway.call.stream import Pace
from oriel_gateway.call.trouble import Trouble
from oriel_gateway.clock import YOUNG
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.cold_start import timing
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.grpc_answers import GrpcAnswer
from oriel_gateway.pools.pool import PoolGate, holding_of
from oriel_gateway.pools.upstream_answers import DENIED
from oriel_gateway.routing.targets import Target
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread

__all__ = ["GatewayCall", "Request"]

_PIECE: Final = 2 * 1024
_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time


class Request:
    """A request that may become a call. received_s: the time its head came, in monotonic seconds.

    client: the client that waits for the answer; None for a call that is made for others.
    head: the head of the request, as its client sent it.
    """

    __slots__ = ("client", "head", "mark", "received_s")

    def __init__(self, client: Client | None, head: Any, mark: Mark, received_s: float) -> None:
        self.client = client
        self.head = head
        self.mark = mark
        self.received_s = received_s


class GatewayCall(Call):
    """One call of a gateway. life: its trouble, its queue ticket and its part of the pool."""

    __slots__ = ("life",)

    def __init__(
        self, gateway: Host, request: Request, side: Side, gate: PoolGate, target: Target, deadline: float
    ) -> None:
        self.gateway = gateway
        self.client = request.client
        self.head = head = request.head
        self.mark = request.mark
        self.received_s = request.received_s
        self.method = head.line.method
        self.side = side
        self.gate = gate
        gate.calls += 1
        self.endpoints = gate.grpc if side.grpc else gate.endpoints
        self.target = target
        self.tenant = target.tenant
        self.deadline = deadline
        self.life = life = Lifecycle()
        life.ticket = life.trouble = None
        self.state = COLLECT
        self.status = self.bytes_in = self.bytes_out = 0
        self.cost_us = self.ahead = -1
        self.queued_s = self.permit_s = self.sent_s = self.response_s = self.limited_s = 0.0
        self.timing = self.used = ""
        self.tried = ()
        self.lines = self.receiver = self.grant = self.extras = self.endpoint = self.connection = self.holding = (
            self._body
        ) = None
        self.stick = self.stream = self.stream_slot = self.answer = self.early = self.record = None
        self.slot = YOUNG
        clock = gateway.clock
        if not clock.young:
            clock.start()
        clock.young[self] = None

    # The client's side -----------------------------------------------------------------------------------------

    def data(self, data: bytes | memoryview) -> None:
        """Take some bytes of the body."""
        size = len(data)
        pieces = self._body
        if pieces is None or isinstance(pieces, bytes):
            pieces = self._body = [pieces] if pieces else []
        if size >= _PIECE:
            pieces.append(data)
        elif pieces and isinstance(last := pieces[-1], bytearray) and len(last) < SMALL_BYTES:
            last += data  # joined, because an object for each small piece would take more memory than the piece
        else:
            pieces.append(bytearray(data))
        self.bytes_in += size
        bound = self.gate.pool.max_body_bytes
        if self.bytes_in > bound:
            self.refuse(Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes"))
        else:
            self._keep_body()

    def whole(self, data: bytes | list[bytes | memoryview], now: float = 0.0) -> None:
        """Take the whole body at once, in one piece or several. now: see `acquire_permit`."""
        self._body = data
        self.bytes_in = len(data) if isinstance(data, bytes) else sum(map(len, data))
        if self.extras is None and ((grant := self.grant) is None or grant.ready):
            self.acquire_permit(now)
        else:
            self._judge()

    def request_complete(self) -> None:
        if self.state == COLLECT:
            self._judge()

    def client_writable(self, writable: bool) -> None:
        """Pass backpressure from the client on to the server."""
        connection = self.connection
        if connection is None:
            return
        self.side.client_writable(self, writable)
        if writable:
            connection.resume()
        else:
            connection.pause()
        if self.state == ANSWERING:
            slot = self.as_stream()
            (slot.resume if writable else slot.pause)(monotonic())

    # Admission -------------------------------------------------------------------------------------------------

    def granted(self) -> None:
        if self.state == LIMITED:
            self.state = COLLECT
            self._judge()

    def _judge(self) -> None:
        """The request is complete: queue, unless its limits or its route say something else."""
        if (grant := self.grant) is not None:
            if not grant.ready:
                self.state = LIMITED
                self.limited_s = monotonic()
                return
            if self.head.chunked:
                grant.move(self.bytes_in, monotonic())
        if self.extras is None or self.extras.before_queue(self):
            self.acquire_permit()

    def acquire_permit(self, now: float = 0.0) -> None:
        gate, now = self.gate, now or monotonic()
        demand = gate.demand
        if demand is not None and not self.queued_s:
            demand.arrived(self.tenant.tier.name, now)
        self.queued_s = now
        if now >= self.deadline:
            self.expired()
            return
        if not self.endpoints.usable and (self.stick is None or self.stick.bound is None):
            self.park()
            return
        trouble = self.life.trouble
        held = trouble is not None and trouble.held
        if gate.cold_start is not None and not held:
            self.shorten_hold(now)
        if self.side.streams and not self.as_stream().reserve():
            self.refuse_full("the pool has no slot for a further stream")
            return
        if gate.admission.acquire(self.target.counted, now):
            self.permit_s = now
            self.state = SENDING
            self.send(now)
            return
        if self.gateway.refusing:
            self.refuse(stopping())
            return
        if now < gate.grows_until_s and gate.cold_start is not None:
            prolong(self, gate.cold_start.hold_s(self.tenant))
        self.state = QUEUED
        self.ahead = gate.admission.queue.rows_ahead(self.tenant.tier.band)
        try:
            self.life.ticket = gate.join_queue(
                self,
                self.tenant,
                self.target,
                received_s=inf if held else self.received_s,
                deadline=self.deadline,
                size_bytes=self.bytes_in,
            )
        except Refused as refused:
            self.refuse(refused)
            return
        # A body that came with its head is put on the budget only now; a call that was displaced has been taken off it.
        if self._keep_body():
            gate.pump()

    def _keep_body(self) -> bool:
        """Put the body on the pool's byte budget; False: there are not enough bytes, and the call is refused."""
        if self.reserve_bytes():
            return True
        self.refuse_full("too many bytes of requests are waiting for this pool")
        return False

    def admitted(self) -> None:
        """Use the permit to send to an endpoint; give it back if the client has left or the deadline has passed."""
        client = self.client
        gone = client is not None and client.departed
        now = monotonic()
        # the permit, the client's departure and the deadline may all have waited for the same turn of the loop
        if gone or now >= self.deadline - LEAST_S:
            self.gate.decline_permit(self.life.take_ticket(), self.target.counted)
            if not self.departed():
                self.expired()
            return
        self.permit_s = now
        self.state = SENDING
        self.send(now)

    # Waiting for a server (see `pools.cold_start`) -------------------------------------------------------------

    def park(self) -> None:
        if self.permit_s:
            self.permit_s = 0.0
            self.gate.release_unused_permit(self.life.take_ticket(), self.target.counted)
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

    def hold_timing(self) -> str:
        trouble = self.life.trouble
        return "" if trouble is None or not trouble.phase else timing(trouble.phase, trouble.parked_for_s())

    # Sending to the upstream -----------------------------------------------------------------------------------

    def send(self, now: float, endpoint: Any = None, fresh: bool = False) -> None:
        gate, target, trouble = self.gate, self.target, self.life.trouble
        if endpoint is None:
            if trouble is None:
                gate.retries.requested(now)
            elif not trouble.counted:
                trouble.counted = True
                gate.retries.requested(now)
            if self.stick is not None:
                endpoint = sticky_endpoint(self.endpoints, self.stick, target.sought, now)
            elif self.extras is not None:
                endpoint = self.extras.pick(self, now)
            else:
                endpoint = self.endpoints.pick(now, (), target.sought)
            if endpoint is None:
                self.in_trouble().nobody(now)
                return
        if target.kind == "service" and self.gateway.callers.tickets is not None and not gate.pool.engine:
            wait_for_models(self)
        self.endpoint = endpoint
        connection = endpoint.begin(self, now, target.head_only, fresh, self.bytes_in > SMALL_BYTES)
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
        self.sent_s, self.early = now, None
        if (holding := self.holding) is not None:
            self.gate.bytes.fix(holding)
        self.side.write(self, connection, now)
        if self.target.plan.hedge_s and self.kept:
            self.in_trouble().hedge(self.target.plan.hedge_s)

    def upstream_writable(self, writable: bool) -> None:
        """Do nothing: the request is written as a whole, and its bytes stay on the budget until it is answered."""

    def room(self) -> None:
        """The upstream of a gRPC stream takes more."""
        self.side.room()

    def drop(self, now: float) -> None:
        self.life.drop(self, now)

    # Trouble (see `trouble`) -----------------------------------------------------------------------------------

    def in_trouble(self, *, counted: bool = True) -> Trouble:
        """Return the call's trouble, made now if there was none. counted: see `Trouble`."""
        return self.life.in_trouble(self, counted=counted)

    def failed(self, error: UpstreamError) -> None:
        self.side.failed(self)
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

    def elsewhere(self, endpoint: HttpEndpoint, head: Any, data: bytes, now: float) -> bool:
        """Return whether a whole error answer is not the call's: it is sent again, or waits for a copy or a search."""
        trouble, model = self.life.trouble, self.target.sought
        if trouble is not None and trouble.settled:
            return False
        kind = self.side.classify(self, head, data)
        if kind in DENIED:
            self.endpoints.model_locations.note_denied(endpoint, model, now)
        if trouble is None and decided_by_itself(kind, head.status, copy=False) is not None:
            return False
        return self.in_trouble().after_answer(endpoint, head, data, kind, now)

    def no_copy(self) -> None:
        """The answer is here: no second copy is needed."""
        if self.life.trouble is not None:
            self.life.trouble.cancel_copy()

    # Moving to another pool (see `fallback`) -------------------------------------------------------------------

    @property
    def may_move(self) -> bool:
        trouble = self.life.trouble
        return self.kept and self.side.may_move and (trouble is None or not trouble.unsure)

    def move(self, target: Target, gate: PoolGate, now: float) -> bool:
        life = self.life
        before, after = self.holding, holding_of(self.tenant, self)
        if before is not None and not gate.reserve_bytes(after, before.units):
            return False
        if target.renames and not self.side.rename(self, target.renames):
            gate.bytes.release(after)
            return False
        old = self.gate
        life.leave_pool(self, now)
        if before is not None:
            old.bytes.release(before)
            self.holding = after
        gate.calls += 1
        self.gate, self.target, self.endpoints = gate, target, gate.endpoints_for(grpc=self.side.grpc)
        self.lines = None  # they say that it was sent on
        self.shorten_hold(now)
        return True

    # Joining equal calls (see `shared.single_flight`) ----------------------------------------------------------

    def take_over(self, work: Call) -> None:
        assert isinstance(work, GatewayCall)
        self.life.take_over(self, work, work.life)
        self._body = None

    # Callbacks of the upstream's answer ------------------------------------------------------------------------

    def response(self, head: Any, data: bytes, complete: bool) -> None:
        if self.side.grpc:
            if not self.side.reads(self, head, data, complete):
                return
        elif self.gate.pool.engine and head.events and head.status < 400 and not (data or complete):
            self.early = head  # the call still waits inside the engine: its deadline and its permit stay in force
            return
        receiver = self.receiver
        if receiver is not None:
            if complete:
                self.connection = None
            if receiver.response(self, head, data, complete):
                return
        self.response_s = now = monotonic()
        status, endpoint, trouble = head.status, self.endpoint, self.life.trouble
        assert endpoint is not None
        # The clock would notice at its next tick. A server's 504 is in time, and says where the call was.
        late = now >= self.deadline and self.stream is None and status != 504
        if status < 400:
            self.endpoints.note_answer(endpoint, now, now - self.sent_s, self.target.sought)
        else:
            if trouble is None or not trouble.settled:
                note_answer(self.endpoints, endpoint, head, now, now - self.sent_s, self.target.sought)
            if complete and not late and self.elsewhere(endpoint, head, data, now):
                return
        if late:  # its client gets none of it, but what it cost is charged
            self.cost_us, self.timing, self.used = head.cost_us, head.server_timing, head.used
            self.response_s, self.answer = 0.0, None
            if complete:
                self.connection = None
            self.expired()
            return
        if trouble is not None:
            trouble.cancel_copy()
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
        if self.grant is not None:
            self.grant.move(self.bytes_out, now)
        close = client.write_answer(self, head, data, complete, now)
        if complete:
            self.life.finish(self, _ANSWERED, "", now)
            client.answered(close=close, now=now)
            return
        if (stream := self.stream) is not None and stream.unbounded:
            if not self.gate.keeps_permits():
                self.as_stream().begin_answer(now)
            if self.tenant.tier.token_s and stream.events is not None:
                stream.pace = pace = Pace()
                pace.sent(data)
        if not client.keeps_up:
            client.on_writable(False)

    def response_data(self, data: bytes, complete: bool) -> None:
        if (early := self.early) is not None:
            self.early = None
            self.response(early, data, complete)
            return
        if complete:
            if self.connection is not None and self.connection.reported is not None:
                self.cost_us, self.used = self.connection.reported
            self.connection = None
        if self.receiver is not None and self.receiver.response_data(self, data, complete):
            return
        if self.extras is not None:
            data = self.extras.data(self, data, complete)
        client, stream = self.client, self.stream
        assert client is not None
        self.side.note_data(self, data, complete)
        if stream is not None and stream.pace is not None:
            stream.pace.sent(data)
        client.write_more(self, data, complete)
        if complete:
            self.finish(_ANSWERED)
            client.answered(close=stream is not None and stream.close)
        elif not client.keeps_up:
            client.on_writable(False)

    def trailers(self, answer: GrpcAnswer) -> None:
        """The status and the trailers came of a gRPC answer whose data was passed on before."""
        self.answer = answer
        self.status, self.cost_us = answer.status, answer.cost_us
        self.timing, self.used = answer.server_timing, answer.used
        if answer.status >= 500 and self.endpoint is not None:
            now = monotonic()
            self.endpoints.note_error(self.endpoint, answer.status, now, now - self.sent_s, model=self.target.sought)
        self.response_data(b"", True)

    # The end ---------------------------------------------------------------------------------------------------

    def expired(self) -> None:
        self.life.expired(self)

    def refuse(self, refused: Refused) -> None:
        if self.target.fallbacks and self.queued_s and self.state < ANSWERING and refused.outcome in SPILLING:
            if spill(self, refused.outcome, monotonic()):  # another pool of its route can serve it
                return
        self.life.refuse(self, refused)

    def finish(self, outcome: Outcome, error: str = "", now: float = 0.0) -> None:
        self.life.finish(self, outcome, error, now)
