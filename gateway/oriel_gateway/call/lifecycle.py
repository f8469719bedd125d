"""The states of a call, what it holds in each, and what ends it.

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

| what ends it | outcome |
|---|---|
| `response` or `response_data` with the last byte | answered, whatever the status |
| `client_left` | client_left |
| `expired`: the deadline passed, or a stream was silent or lasted too long | deadline_exceeded, upstream_unreachable |
| `displaced`: another call took its place in the full queue, or its bytes | displaced |
| `failed`: no answer, or no more of it, and nothing left to try (`call.attempts`) | upstream_* |
| `stopping`: the gateway ends and the call has been sent to nobody | server_stopping |
| `refuse` by its pool, its limits or its route | as they report it |

Exactly one of these ends a call, through `Lifecycle.finish`, which gives everything back. The permit is given back at
the upstream's last byte, or for a slot at the first byte of a stream (`pools.stream_slots`). Bytes that the client has
not read are buffered in its transport, whose high-water mark pauses the upstream.
"""

from time import monotonic
from typing import Final, cast

from oriel_gateway.call.contracts import ANSWERING, COLLECT, DONE, JOINED, QUEUED, SENDING, Call
from oriel_gateway.call.late import deadline_passed
from oriel_gateway.call.stream import Pace
from oriel_gateway.call.trouble import Trouble
from oriel_gateway.clock import YOUNG
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.spans import SpanFacts
from oriel_policies.waiting.flows import Ticket
from oriel_wire.context import parse_cost, parse_tokens
from oriel_wire.engine.upstream import ResponseSink
from oriel_wire.h2.grpc import DEADLINE_EXCEEDED
from oriel_wire.observe.semantics import NOWHERE

LEAST_S: Final = 0.001  # with less left a call is not sent: the next hop gets the rest in whole milliseconds
_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time
_LEFT: Final = Outcome.CALLER_LEFT
_NO_CAPACITY: Final = (Outcome.QUEUE_FULL, Outcome.DISPLACED, Outcome.INFEASIBLE)


class Lifecycle:
    """The permit, places and bytes that one call holds, and its end. Its single writer is that call, which each method
    gets.

    ticket: the call's ticket of the queue, also while it has the permit that it queued for.
    trouble: the next steps of a call whose endpoint failed, or that waits for one.
    """

    __slots__ = ("ticket", "trouble")
    ticket: Ticket | None
    trouble: Trouble | None

    # Trouble, queue ticket and pool ----------------------------------------------------------------------------

    def in_trouble(self, call: Call, *, counted: bool = True) -> Trouble:
        """Return the call's trouble, made now if there was none. counted: see `Trouble`."""
        trouble = self.trouble
        if trouble is None:
            trouble = self.trouble = Trouble(call, counted=counted)
        return trouble

    def take_ticket(self) -> Ticket | None:
        """Return the ticket with which the call has queued, which is the caller's from now on."""
        ticket, self.ticket = self.ticket, None
        return ticket

    def leave_pool(self, call: Call, now: float) -> None:
        """Give back all that the call holds of its pool but its bytes.

        It is in state COLLECT afterwards, as if it had not come to a pool yet.
        """
        gate, trouble, sent = call.gate, self.trouble, call.sent_s > 0.0
        state, permit_s, endpoint = call.state, call.permit_s, call.endpoint
        ticket = self.take_ticket()
        if state == SENDING and not sent:
            self.drop(call, now)
        if trouble is not None:
            if trouble.parked:
                trouble.unpark()
            if sent and endpoint is not None:
                trouble.in_vain(endpoint)
            trouble.cancel_copy()
            self.trouble = None
        demand = gate.demand
        if demand is not None:
            if not call.queued_s:
                demand.arrived(call.tenant.tier.name, now)
            demand.refused(call.tenant.tier.name)
        gate.calls -= 1
        call.state = COLLECT
        call.endpoint = call.connection = None
        call.ahead = -1
        call.queued_s = call.permit_s = call.sent_s = call.response_s = 0.0
        if (slot := call.stream_slot) is not None:
            slot.release(now)
            call.stream_slot = None
        if state == SENDING and sent:
            took_s = now - permit_s
            share_s = took_s / gate.streams.at_servers
            charge_s = gate.charge(call.target, call.tenant, took_s, share_s, share_s)
            if ticket is not None:
                gate.settle(ticket, charge_s)
            gate.release_permit(call.target.counted, took_s, False)
        elif state == SENDING:
            gate.decline_permit(ticket, call.target.counted)
            gate.pump()
        elif ticket is not None:
            gate.leave_queue(ticket)
        if ticket is not None:
            ticket.payload = None

    def drop(self, call: Call, now: float) -> None:
        """Take back what was sent, or stop waiting for a connection or for a search."""
        endpoint = call.endpoint
        if call.connection is not None:
            call.connection.abandon()
            call.connection = None
            assert endpoint is not None
            if not call.response_s:
                endpoint.cost.observed(now - call.sent_s, now)  # the call took at least this long
        elif endpoint is not None and not call.sent_s:
            endpoint.borrower_left(cast(ResponseSink, call))
        elif self.trouble is not None:
            self.trouble.stop_waiting()

    def take_over(self, call: Call, work: Call, of_work: "Lifecycle") -> None:
        """Let `call` go on as `work`, which is over: with all that it holds but its bytes, which leave the budget.

        of_work: the lifecycle of `work`.
        """
        work.unwatch()
        work.state = DONE
        work.receiver = None
        work.gate.calls -= 1
        call.state = SENDING
        call.queued_s, call.permit_s, call.sent_s = work.queued_s, work.permit_s, work.sent_s
        call.ahead, call.endpoint, call.tried, call.early = work.ahead, work.endpoint, work.tried, work.early
        holding, work.holding = work.holding, None
        if holding is not None:  # it had to queue
            work.gate.bytes.release(holding)
        trouble, of_work.trouble = of_work.trouble, None
        self.trouble = None if trouble is None else trouble.handed_to(call)
        self.ticket = of_work.take_ticket()
        call.connection, work.connection = work.connection, None
        if call.connection is not None:
            call.connection.sink = call

    # The end ---------------------------------------------------------------------------------------------------

    def expired(self, call: Call) -> None:
        """End the call, because its deadline passed, or because its stream was silent or went on for too long."""
        stream = call.stream
        if stream is not None and stream.unbounded:
            ends_s = stream.ends_s(call.tenant.tier, call.response_s)
            if monotonic() < ends_s:
                call.watch_until(ends_s)
                return
            if call.side.streams:
                message = "the stream was silent, or went on, for longer than its tier may"
                call.refuse(Refused(Outcome.DEADLINE_EXCEEDED, message))
                return
        parked = self.trouble is not None and self.trouble.parked
        waited = parked or (call.state == QUEUED and not call.endpoints.usable)
        lacking = call.endpoints.lacking(call.target.sought) if waited else ""
        call.refuse(deadline_passed(call, call.state, lacking=lacking, retry_after_s=call.endpoints.retry_after_s()))

    def refuse(self, call: Call, refused: Refused) -> None:
        """End the call with an error; once the answer has begun, all that is left is to cut it."""
        if call.state == DONE or (call.receiver is not None and call.receiver.refused(call, refused)):
            return
        begun = call.state == ANSWERING or call.stream is not None
        demand = call.gate.demand
        if demand is not None and (refused.outcome in _NO_CAPACITY or call.state == QUEUED):
            if not call.queued_s:
                demand.arrived(call.tenant.tier.name, monotonic())
            demand.refused(call.tenant.tier.name)
        client = call.client
        assert client is not None
        refused.timing = refused.timing or call.hold_timing()
        queued_s = (call.permit_s or monotonic()) - call.queued_s if call.queued_s else 0.0
        if not begun:
            call.status = STATUS[refused.outcome]
        call.finish(refused.outcome, str(refused))
        v2 = call.target.kind != "service"
        if begun:
            client.cut_answer(call, refused, v2=v2)
        else:
            client.write_refusal(refused, call.mark, v2=v2, queued_s=queued_s)
            client.answered(close=client.must_close)

    def finish(self, call: Call, outcome: Outcome, error: str, now: float) -> None:
        """Record the end of the call, once, and give back everything that it holds."""
        state, answer = call.state, call.answer
        if state == DONE:
            return
        if answer is not None and answer.code and outcome is _ANSWERED:
            error = answer.passed_on()[0]
            if answer.code == DEADLINE_EXCEEDED:
                outcome = Outcome.DEADLINE_EXCEEDED
        if call.side.streams:
            call.side.finishing(call)
        call.state = DONE
        gateway, gate = call.gateway, call.gate
        stream, trouble = call.stream, self.trouble
        if call.slot == YOUNG:
            del gateway.clock.young[call]
            call.slot = 0
        else:
            gateway.clock.unwatch(call, call.slot)
        now = now or monotonic()
        unbounded = stream is not None and stream.unbounded
        beside = (gate.admission.inflight + gate.streams.working) or 1
        if call.extras is not None and outcome is not _ANSWERED:
            call.extras.cut_off(call)
        if trouble is not None:
            trouble.cancel_copy()  # so that the record has the copy that is dropped
        if (client := call.client) is not None:
            client.call_finished()
            call.record = record = _record_of(call, outcome, now)
            record.error, record.beside = error, beside
            record.answered_s = call.response_s if unbounded else now
            if unbounded and stream is not None and stream.pace is not None:
                _note_pace(record, stream.pace)
            record.held_s = 0.0 if trouble is None else trouble.parked_for_s()
            if gateway.records.finished(record, call.tenant, call.target.route):
                gateway.records.trace(record, self._span_facts(call))
        if call.receiver is not None:
            receiver, call.receiver = call.receiver, None
            receiver.finished(call)
        gate.calls -= 1
        if (holding := call.holding) is not None:
            gate.bytes.release(holding)
            holding.payload = None
            gateway.bodies.freed(holding.units)
        ticket = self.ticket
        cost_s = 0.0
        if state >= SENDING:
            if call.connection is not None or not call.sent_s:
                self.drop(call, now)
            late = outcome is not _ANSWERED and now >= call.deadline and not unbounded
            left = outcome is _LEFT and not late
            good = None if left else outcome is _ANSWERED and call.status < 500
            cost_s = self._release_permit(call, now, beside, good, late)
        elif ticket is not None:
            gate.leave_queue(ticket)
        elif trouble is not None and trouble.parked:
            trouble.unpark()
        if (slot := call.stream_slot) is not None:
            if state < SENDING:
                slot.release(now)
            call.stream_slot = None  # breaks the cycle of references between the two
        self.trouble = None  # breaks the cycle of references between the two
        if call.grant is not None or call.side.streams:
            executed = call.sent_s > 0.0 or outcome is _ANSWERED
            if state == JOINED and not executed and call.extras is not None:
                executed, cost_s = call.extras.abandoned(call, now)
            call.side.settle(call, cost_s, executed, now)
        if ticket is not None:
            ticket.payload = None  # the queue may keep a dead ticket for a while, but not the body
        if call.extras is not None:
            call.extras.finished(call)
        call.client = call.grant = call.extras = call.connection = None  # they may refer to the call

    def _release_permit(self, call: Call, now: float, beside: int, good: bool | None, late: bool) -> float:
        """Release the permit or the slot. Returns what the call is charged, in seconds. See `PoolGate`.

        beside: the calls that its pool has in flight, itself included.
        """
        gate, slot, stream = call.gate, call.stream_slot, call.stream
        if slot is None:
            worked_s = now - call.permit_s
            share_s, messages = worked_s / beside, 1
        else:
            slot.release(now)
            worked_s, share_s, messages = slot.worked_s, slot.share_s, call.side.messages
        cost_s = call.cost_us * 1e-6 if call.cost_us >= 0 else share_s
        charge_s = gate.charge(call.target, call.tenant, worked_s, share_s, cost_s, messages)
        if self.ticket is not None:
            gate.settle(self.ticket, charge_s)
        if good:
            if gate.demand is not None:
                gate.note_answered(worked_s, share_s, call.cost_us)
            if call.status < 300 and (stream is None or not stream.unbounded):
                gate.note_time(call.target, call.bytes_in, worked_s)
        if slot is None or not slot.has_slot:
            gate.release_permit(call.target.counted, now - call.permit_s, good, late)
        return cost_s

    def _span_facts(self, call: Call) -> SpanFacts:
        """Return the facts about the call that only its spans tell."""
        client, extras, trouble = call.client, call.extras, self.trouble
        return SpanFacts(
            version="" if client is None else client.http_version,
            served_at=call.head.served_at if call.side.grpc else NOWHERE,
            code=-1 if call.answer is None else call.answer.code,
            held=None if trouble is None or not trouble.phase else (trouble.phase, trouble.parked_for_s()),
            model=call.target.renames or ("" if extras is None else extras.model),
        )


def _note_pace(record: Record, pace: Pace) -> None:
    """Note how fast a stream of events came; its head, which may come before its first token, answers nobody."""
    cost = parse_cost(record.used)
    tokens = (parse_tokens(record.used) or (0, 0))[1] if cost is None else cost.tokens_out
    record.token_s = pace.token_s(tokens)
    record.response_s = record.answered_s = pace.first_s or record.ended_s


def _record_of(call: Call, outcome: Outcome, now: float) -> Record:
    """Return the record of a call that has ended, without what only its end tells."""
    record = Record()
    record.mark = call.mark
    record.method = call.method
    record.protocol = call.side.protocol
    record.tenant = call.tenant
    record.target = call.target
    record.opened = True
    record.outcome = outcome
    record.status = call.status
    record.received_s = call.received_s
    record.limited_s = call.limited_s
    record.queued_s = call.queued_s
    record.permit_s = call.permit_s
    record.sent_s = call.sent_s
    record.response_s = call.response_s
    record.ended_s = now
    record.deadline = call.deadline
    record.ahead = call.ahead
    record.bytes_in = call.bytes_in
    record.bytes_out = call.bytes_out
    record.endpoint = call.endpoint
    record.tried = call.tried
    record.timing = call.timing
    record.used = call.used
    record.judged = None
    record.token_s = -1.0
    return record
