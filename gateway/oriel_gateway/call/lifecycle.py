"""The states of an HTTP call, what it holds in each, and what ends it.

| state | the call | it holds |
|---|---|---|
| COLLECT | receives its body; a slow sender holds memory, never a permit | its body's bytes of the pool's budget |
| LIMITED | is complete, and the ledger of its limits has not answered | the same |
| QUEUED | waits for a permit, or is parked because no endpoint can be asked | and its place there |
| JOINED | waits for the answer to an equal call (`shared.single_flight`) | and its place in the flight |
| SENDING | has a permit: a connection is made, or the answer is awaited | a permit, an endpoint, a connection |
| ANSWERING | passes the answer on, whose head is written | the same; of a stream a slot in place of the permit |
| DONE | is over | nothing |

In every state it also holds what its limits granted, and is watched by the deadline clock.

`oriel_gateway.call` lists what ends a call.
"""

from time import monotonic
from typing import Any, Final, cast

from oriel_gateway.call.late import deadline_passed
from oriel_gateway.call.stream import AnswerStream
from oriel_gateway.call.trouble import Trouble
from oriel_gateway.clock import YOUNG
from oriel_gateway.contracts import Client, Host, Receiver, RouteHooks
from oriel_gateway.errors import Outcome, Refused, displaced, stopping
from oriel_gateway.http_status import STATUS
from oriel_gateway.limits import Grant
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.spans import SpanFacts
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.cold_start import timing
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.holding import held_by
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.stream_slots import StreamSlot
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.shares import Holding
from oriel_wire.engine.upstream import ResponseSink

COLLECT: Final = 0
LIMITED: Final = 1
QUEUED: Final = 2
JOINED: Final = 3
SENDING: Final = 4
ANSWERING: Final = 5
DONE: Final = 6
LEAST_S: Final = 0.001  # with less left a call is not sent: the next hop gets the rest in whole milliseconds
_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time
_LEFT: Final = Outcome.CALLER_LEFT
_NO_CAPACITY: Final = (Outcome.QUEUE_FULL, Outcome.DISPLACED, Outcome.INFEASIBLE)


class Lifecycle:
    """The state of one call, and what it holds and gives back. Times are monotonic seconds, 0.0 = not reached.

    Everything that needs no transport is here; `http.Call` adds the bytes. Nothing here calls what is only there.

    client: None for a call that is made for others, which has a receiver. ahead: calls before it when it came to the
    queue, -1 if it did not queue. endpoint: asked last. stick: the key that chooses the endpoint, "" = the least busy.
    slot: among the deadlines. lines: the part of its head that is the same whenever it is sent, None until it is.
    extras: of a special route. body_bytes: so much of the body is here, or was when it was sent. stream: of an answer
    that comes in parts and is more than its bytes. stream_slot: of a streaming call, None for others. asks_report: the
    upstream was asked for a load report. timing: the upstream's `Server-Timing`.
    """

    protocol = "http"
    streams = False  # whether it is a gRPC stream, known as a streaming call before its answer
    # Slots and not defaults of the class: what a call reads and never set would cost more than to set it.
    __slots__ = (
        *("_body", "_holding", "_ticket", "_trouble", "ahead", "asks_report"),
        *("body_bytes", "bytes_out", "client", "connection", "cost_us", "deadline"),
        *("endpoint", "endpoints", "extras", "gate", "gateway", "grant"),
        *("head", "lines", "mark", "messages", "method", "outcome", "permit_s"),
        *("queued_s", "received_s", "receiver", "response_s", "sent_s", "slot"),
        *("state", "status", "stick", "stream", "stream_slot", "target"),
        *("tenant", "timing", "used"),
    )

    def __init__(
        self,
        gateway: Host,
        client: Client | None,
        gate: PoolGate,
        head: Any,
        tenant: Tenant,
        target: Target,
        mark: Mark,
        received_s: float,
        deadline: float,
        lines: bytes | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self.gateway = gateway
        self.gate = gate
        gate.calls += 1
        self.endpoints = gate.endpoints
        self.client = client
        self.head = head
        self.method: str = head.line.method
        self.tenant = tenant
        self.target = target
        self.mark = mark
        self.received_s = received_s
        self.deadline = deadline
        self.lines = lines
        self.receiver = receiver
        self.state = COLLECT
        self.status = 0
        self.cost_us = self.ahead = -1
        self.messages = 1  # that are charged
        self.outcome = _ANSWERED
        self.queued_s = self.permit_s = self.sent_s = self.response_s = 0.0
        self.bytes_out = 0
        self.stick = self.timing = self.used = ""
        self.grant: Grant | None = None
        self.extras: RouteHooks | None = None
        self.endpoint: HttpEndpoint | None = None
        self.connection: Any = None
        self._body: bytes | list[Any] | None = None  # whole, or in pieces
        self.body_bytes = 0  # so far
        self._holding: Holding | None = None  # their part of the pool's byte budget
        self._ticket: Ticket | None = None
        self._trouble: Trouble | None = None
        self.stream: AnswerStream | None = None
        self.stream_slot: StreamSlot | None = None
        self.asks_report = False
        self.slot = YOUNG
        clock = gateway.clock
        if not clock.young:
            clock.start()
        clock.young[self] = None

    def body(self) -> bytes:
        """Return the whole body; only before the call was sent."""
        body = self._body
        if body is None:
            return b""
        if not isinstance(body, bytes):
            body = self._body = b"".join(body)
        return body

    def hold_already(self, holding: Holding) -> None:
        """Take over what was put on the pool's byte budget before the call began."""
        self._holding, holding.payload = holding, self

    def hold_body(self) -> bool:
        """Put what has come of the body on the byte budget of its pool; False: there are not enough bytes."""
        if self.body_bytes and self._holding is None:
            self._holding = held_by(self.tenant, self)
        holding = self._holding
        return holding is None or self.gate.take_bytes(holding, max(0, self.body_bytes - holding.units))

    def release_unused_permit(self) -> None:
        """Release the permit for others, because nothing was sent with it."""
        ticket, self._ticket = self._ticket, None
        self.permit_s = 0.0
        self.gate.release_unused_permit(ticket, self.target.counted)

    def decline_permit(self) -> None:
        """Release at once a permit that `admitted` has offered."""
        ticket, self._ticket = self._ticket, None
        self.gate.decline_permit(ticket, self.target.counted)

    def watch_until(self, deadline: float) -> None:
        """Set another time at which `expired` is called."""
        self.unwatch()
        self.slot = self.gateway.clock.watch(self, deadline, monotonic())

    def unwatch(self) -> None:
        """Cancel the call of `expired`."""
        clock = self.gateway.clock
        if self.slot == YOUNG:
            del clock.young[self]
            self.slot = 0
        else:
            clock.unwatch(self, self.slot)

    def requested_until(self) -> float:
        """Return the deadline that the caller asked for; infinite if it asked for none."""
        return self.gateway.requested_until(self.received_s, self.head.timeout)

    def hold(self) -> None:
        """Wait for the first server of the pool for as long as the documents say. Raises Refused."""
        cold = self.gate.cold_start
        if cold is None or self.client is None:
            return
        until = cold.until(self.endpoints, self.tenant, self.received_s, self.requested_until(), monotonic())
        if until is not None and until != self.deadline:
            self.deadline = until
            self.watch_until(until)

    def end_hold(self, now: float) -> bool:
        """A server is there: from now on the call has the time of its tier. False: it was not held."""
        scaling = self.gate.pool.scaling
        if self.client is None or scaling is None or scaling.hold_for(self.tenant.tier.name) is None:
            return False
        self.deadline = min(now + self.tenant.tier.give_up_s, self.requested_until())
        self.watch_until(self.deadline)
        return True

    def shorten_hold(self, now: float) -> None:
        """A server is there: the call has the time of its tier from now on, if it was given more to wait for one."""
        until = now + self.tenant.tier.give_up_s
        if self.deadline > until:
            self.deadline = until
            self.watch_until(until)

    def held_timing(self) -> str:
        """Return the entry of `Server-Timing` about the call's wait for an endpoint; "" if it did not wait for one."""
        trouble = self._trouble
        return "" if trouble is None or not trouble.phase else timing(trouble.phase, trouble.held_for_s())

    def record(self, error: str, answered_s: float, now: float) -> Record:
        """Return the record of the call, which has ended. error, answered_s: see `Record`."""
        record = Record(self.mark, self.method, self.received_s, self.tenant, self.target, self.outcome)
        record.opened, record.protocol = True, self.protocol
        record.status = self.status
        record.error = error
        if self.grant is not None:
            record.limited_s = self.grant.limited_s
        if self._trouble is not None:
            record.held_s, record.tried = self._trouble.held_for_s(), self._trouble.tried
        record.queued_s = self.queued_s
        record.permit_s = self.permit_s
        record.sent_s = self.sent_s
        record.response_s = self.response_s
        record.answered_s = answered_s
        record.ended_s = now
        record.deadline = self.deadline
        record.ahead = self.ahead
        record.beside = self.gate.streams.at_servers
        record.bytes_in = self.body_bytes
        record.bytes_out = self.bytes_out
        record.endpoint = self.endpoint
        record.timing = self.timing
        record.used = self.used
        return record

    def _span_facts(self) -> SpanFacts:
        """Return the facts about the call that only its spans tell."""
        client, extras, trouble = self.client, self.extras, self._trouble
        return SpanFacts(
            version="" if client is None else client.http_version,
            model=self.target.renames or ("" if extras is None else extras.model),
            held=None if trouble is None or not trouble.phase else (trouble.phase, trouble.held_for_s()),
        )

    @property
    def sending(self) -> bool:
        """Return whether the call has a permit and no answer yet."""
        return self.state == SENDING

    @property
    def tried(self) -> tuple[HttpEndpoint, ...]:
        """Return the endpoints that were asked in vain, the latest of them; they are known until the call is over."""
        return () if self._trouble is None else self._trouble.tried

    @property
    def kept(self) -> bool:
        """Return whether the body is still here and can be sent (again)."""
        return self._body is not None or not self.body_bytes

    @property
    def may_run_twice(self) -> bool:
        """Return whether it does no harm if the call is executed twice."""
        return self.target.plan.idempotent or (not self.body_bytes and self.head.method in ("GET", "HEAD"))

    @property
    def may_move(self) -> bool:
        """Return whether the body is still here and no server can have executed the call."""
        trouble = self._trouble
        return self.kept and (trouble is None or not trouble.unsure)

    def leave_pool(self, now: float) -> tuple[HttpEndpoint, ...]:
        """Give back all that the call holds of its pool but its bytes. Returns the endpoints that were tried in vain.

        It is in state COLLECT afterwards, as if it had not come to a pool yet.
        """
        gate, ticket, trouble, sent = self.gate, self._ticket, self._trouble, self.sent_s > 0.0
        state, permit_s, endpoint = self.state, self.permit_s, self.endpoint
        if state == SENDING and not sent:
            self.drop(now)
        tried: tuple[HttpEndpoint, ...] = ()
        if trouble is not None:
            if trouble.parked:
                trouble.unpark()
            if sent and endpoint is not None:
                trouble.in_vain(endpoint)
            trouble.end()
            tried, self._trouble = trouble.tried, None
        demand = gate.demand
        if demand is not None:
            if not self.queued_s:
                demand.arrived(self.tenant.tier.name, now)
            demand.refused(self.tenant.tier.name)
        gate.calls -= 1
        self.state = COLLECT
        self._ticket = self.endpoint = self.connection = None
        self.ahead = -1
        self.queued_s = self.permit_s = self.sent_s = self.response_s = 0.0
        if (slot := self.stream_slot) is not None:
            slot.finish(now)
            self.stream_slot = None
        if state == SENDING and sent:
            held_s = now - permit_s
            gate.charge(self.target, self.tenant, ticket, held_s, held_s / gate.streams.at_servers, -1)
            gate.release_permit(self.target.counted, held_s, False)
        elif state == SENDING:
            gate.decline_permit(ticket, self.target.counted)
            gate.pump()
        elif ticket is not None:
            gate.leave_queue(ticket)
        if ticket is not None:
            ticket.payload = None
        return tried

    def drop(self, now: float) -> None:
        """Take back what was sent, or stop waiting for a connection or for a search."""
        endpoint = self.endpoint
        if self.connection is not None:
            self.connection.abandon()
            self.connection = None
            assert endpoint is not None
            if not self.response_s:
                endpoint.cost.observed(now - self.sent_s, now)  # the call took at least this long
        elif endpoint is not None and not self.sent_s:
            endpoint.forget(cast(ResponseSink, self))
        elif self._trouble is not None:
            self._trouble.stop_waiting()

    # The slot of a streaming call, see `pools.stream_slots` -----------------------------------------------------

    def as_stream(self) -> StreamSlot:
        """Return the call's stream slot, made now if it has none: it is a streaming call from now on."""
        slot = self.stream_slot
        if slot is None:
            slot = self.stream_slot = StreamSlot(self.gate.streams, self, held_by(self.tenant))
            if self.permit_s:
                slot.begin_work(self.permit_s)
        return slot

    def release_permit_for_slot(self, now: float) -> None:
        """The call has a slot now: release its permit."""
        self.gate.release_permit(self.target.counted, now - self.permit_s, True)

    def unread(self) -> None:
        """End the call: its client does not read, and no slot became free."""
        self.refuse_full("the client did not read its answer while the pool had no slot for a stream")

    # The end ---------------------------------------------------------------------------------------------------

    def displaced(self) -> None:
        """End the call: another one took its place, or its bytes, by the rule of `oriel_policies.waiting.shares`."""
        self.refuse(displaced(self.gate.retry_after_s()))

    def refuse_full(self, message: str) -> None:
        """End the call, because there is too little of something in its pool."""
        self.refuse(Refused(Outcome.QUEUE_FULL, message, retry_after_s=self.gate.retry_after_s()))

    @property
    def collecting(self) -> bool:
        """Return whether its client still sends the body."""
        return self.state == COLLECT

    def stopping(self) -> None:
        """Refuse the call, because the gateway is about to end, unless it was sent."""
        if self.state in (COLLECT, QUEUED) or (self.state == SENDING and not self.sent_s):
            self.refuse(stopping())

    def expired(self) -> None:
        """End the call, because its deadline passed, or because its stream was silent or went on for too long."""
        stream = self.stream
        if stream is not None and stream.unbounded:
            ends_s = stream.ends_s(self.tenant.tier, self.response_s)
            if monotonic() < ends_s:
                self.watch_until(ends_s)
                return
        parked = self._trouble is not None and self._trouble.parked
        waited = parked or (self.state == QUEUED and not self.endpoints.usable)
        lacking = self.endpoints.lacking(self.target.sought) if waited else ""
        self.refuse(deadline_passed(self, self.state, lacking=lacking, retry_after_s=self.endpoints.retry_after_s()))

    def refuse(self, refused: Refused) -> None:
        """End the call with an error; once the answer has begun, all that is left is to cut it."""
        if self.state == DONE or (self.receiver is not None and self.receiver.refused(self, refused)):
            return
        begun = self.state == ANSWERING or self.stream is not None
        demand = self.gate.demand
        if demand is not None and (refused.outcome in _NO_CAPACITY or self.state == QUEUED):
            if not self.queued_s:
                demand.arrived(self.tenant.tier.name, monotonic())
            demand.refused(self.tenant.tier.name)
        client = self.client
        assert client is not None
        refused.timing = refused.timing or self.held_timing()
        queued_s = (self.permit_s or monotonic()) - self.queued_s if self.queued_s else 0.0
        if not begun:
            self.status = STATUS[refused.outcome]
        self.finish(refused.outcome, str(refused))
        v2 = self.target.kind != "service"
        if begun:
            client.cut_answer(self, refused, v2=v2)
        else:
            client.write_refusal(refused, self.mark, v2=v2, queued_s=queued_s)
            client.answered(close=client.must_close)

    def end_unsent(self, status: int, outcome: Outcome = _ANSWERED, error: str = "") -> None:
        """End a call that was answered, or whose connection refused the rest of it, without being sent."""
        self.status = status
        self.finish(outcome, error)

    def finish(self, outcome: Outcome, error: str = "", now: float = 0.0) -> None:
        """End the call, once: record it and give back what it holds. now: 0.0 if the caller has not read the clock."""
        state = self.state
        if state == DONE:
            return
        self.state = DONE
        self.outcome = outcome
        gateway, gate, stream, trouble = self.gateway, self.gate, self.stream, self._trouble
        if self.slot == YOUNG:
            del gateway.clock.young[self]
            self.slot = 0
        else:
            gateway.clock.unwatch(self, self.slot)
        now = now or monotonic()
        unbounded = stream is not None and stream.unbounded
        if self.extras is not None and outcome is not _ANSWERED:
            self.extras.cut_off(self)
        if trouble is not None:
            trouble.end()  # so that the record has the copy that is dropped
        record: Record | None = None
        if (client := self.client) is not None:
            client.call = None
            record = self.record(error, self.response_s if unbounded else now, now)
            if gateway.records.ended(record, self.tenant, self.target.route):
                gateway.records.trace(record, self._span_facts())
        if self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            receiver.ended(self)
        gate.calls -= 1
        if (holding := self._holding) is not None:
            gate.bytes.release(holding)
            holding.payload = None
            gateway.bodies.ended(holding.units)
        ticket = self._ticket
        cost_s = 0.0
        if state >= SENDING:
            if self.connection is not None or not self.sent_s:
                self.drop(now)
            late = outcome is not _ANSWERED and now >= self.deadline and not unbounded
            left = outcome is _LEFT and not late
            good = None if left else outcome is _ANSWERED and self.status < 500
            cost_s = self.release_permit(now, good, late)
        elif ticket is not None:
            gate.leave_queue(ticket)
        elif trouble is not None and trouble.parked:
            trouble.unpark()
        if (slot := self.stream_slot) is not None:
            if state < SENDING:
                slot.finish(now)
            self.stream_slot = None  # breaks the cycle of references between the two
        if trouble is not None:
            self._trouble = None  # breaks the cycle of references between the two
        if self.grant is not None:
            executed = self.sent_s > 0.0 or outcome is _ANSWERED
            if state == JOINED and not executed and self.extras is not None:
                executed, cost_s = self.extras.abandoned(self, now)
            self.settle(cost_s, executed, now)
        if ticket is not None:
            ticket.payload = None  # the queue may keep a dead ticket for a while, but not the body
        if self.extras is not None:
            self.extras.ended(self, record)

    def release_permit(self, now: float, good: bool | None, late: bool) -> float:
        """Release the permit or the slot at the end. Returns what the call is charged, in seconds. See `PoolGate`."""
        gate, slot, stream = self.gate, self.stream_slot, self.stream
        if slot is None:
            worked_s = now - self.permit_s
            share_s = worked_s / gate.streams.at_servers
        else:
            slot.finish(now)
            worked_s, share_s = slot.worked_s, slot.share_s
        cost_s = gate.charge(self.target, self.tenant, self._ticket, worked_s, share_s, self.cost_us, self.messages)
        if good:
            if gate.demand is not None:
                gate.note_answered(worked_s, share_s, self.cost_us)
            if self.status < 300 and (stream is None or not stream.unbounded):
                gate.note_time(self.target, self.body_bytes, worked_s)
        if slot is None or not slot.has_slot:
            gate.release_permit(self.target.counted, now - self.permit_s, good, late)
        return cost_s

    def settle(self, cost_s: float, executed: bool, now: float) -> None:
        """Settle what the limits granted, once, at the end."""
        if self.grant is not None:
            self.grant.settle(round(cost_s * 1e6), executed, now)
