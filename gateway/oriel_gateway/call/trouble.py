"""State and actions of a call in trouble: it waits for an endpoint, asks for its model, tries again, sends a copy.

A `Trouble` is made when a call's endpoint fails, when no endpoint can be asked, or when its route wants second copies.
It carries out what `attempts` decides.
"""

import asyncio
from time import monotonic
from typing import Any, Final, cast

from oriel_gateway.call.attempts import (
    Attempts,
    Because,
    Decision,
    GiveUp,
    Send,
    Wait,
    decided_by_itself,
    mark_spent,
    note_answer,
    note_failure,
    why_failed,
)
from oriel_gateway.call.contracts import Call
from oriel_gateway.call.fallback import spill
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.observe.decisions import MAX_TRIED
from oriel_gateway.observe.tracing import new_span
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.sequences import lost
from oriel_gateway.pools.upstream_answers import NO_ROOM, AnswerKind
from oriel_policies.upstreams.budget import MAX_ATTEMPTS
from oriel_wire.engine.upstream import ResponseSink
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread

__all__ = ["Trouble"]

_LEFT_HERE: Final = (Because.NOBODY_ELSE, Because.ATTEMPTS)
_UNREACHABLE: Final = Outcome.UPSTREAM_UNREACHABLE.value


class _Withheld:
    """An answer that says that `endpoint` lacks the model; it is kept while all endpoints are asked for the model."""

    __slots__ = ("data", "endpoint", "head", "kind")

    def __init__(self, endpoint: HttpEndpoint, head: Any, data: bytes, kind: AnswerKind) -> None:
        self.endpoint, self.head, self.data, self.kind = endpoint, head, data, kind


class Trouble:
    """The trouble of one call, from its begin to the call's end (`cancel_copy`).

    held: the call waited for a first server, for as long as the documents say (`hold_ms`). phase: the pool's phase when
    the call began to wait for an endpoint, "" if it has not; only of pools that scale.

    counted: the call is among the requests of which second tries are a share. parked: it waits, without a permit, for
    an endpoint that can be asked. unsure: a server may have executed the call.
    """

    __slots__ = (
        "_attempts",
        "_call",
        "_hedge",
        "_parked_sum_s",
        "_parked_s",
        "_withheld",
        "counted",
        "deadline",
        "due_s",
        "endpoints",
        "gate",
        "held",
        "parked",
        "phase",
        "target",
        "tenant",
        "unsure",
    )

    def __init__(self, call: Call, *, counted: bool) -> None:
        self._call = call
        self.gate = call.gate
        self.endpoints = call.endpoints
        self.target = call.target
        self.tenant = call.tenant
        self.counted = counted
        self.deadline = self.due_s = self._parked_s = self._parked_sum_s = 0.0
        self.phase = ""
        self.held = self.parked = self.unsure = False
        self._attempts: Attempts | None = None
        self._hedge: Hedge | None = None
        self._withheld: _Withheld | None = None

    def handed_to(self, call: Call) -> "Trouble":
        """Become the trouble of another call, which goes on with what this one has sent."""
        self._call = call
        return self

    def cancel_copy(self) -> None:
        """Cancel the second copy, because the call is over or answered."""
        hedge, self._hedge = self._hedge, None  # breaks the cycle of references between the two
        if hedge is not None:
            hedge.cancel()

    @property
    def attempts(self) -> Attempts:
        """The attempts of the call so far."""
        attempts = self._attempts
        if attempts is None:
            attempts = self._attempts = Attempts(
                self.endpoints, self.gate.retries, self.target.sought, self._call.stick
            )
        return attempts

    @property
    def settled(self) -> bool:
        """Return whether nothing more can be found out about the answer: it is noted and can go to the client."""
        return self._withheld is not None

    def in_vain(self, endpoint: HttpEndpoint, error: str = _UNREACHABLE) -> None:
        """Record an endpoint that was asked in vain. error: see `tracing.Attempt`."""
        call = self._call
        self._attempted(endpoint, error)
        call.endpoint = None
        call.tried = (*call.tried[1 - MAX_TRIED :], endpoint)  # `attempts` has those not to ask again

    def _attempted(self, endpoint: HttpEndpoint, error: str) -> None:
        call, now = self._call, monotonic()
        call.mark.attempted(endpoint, call.sent_s or call.permit_s or now, now, error)

    # No endpoint to pick ---------------------------------------------------------------------------------------

    def nobody(self, now: float) -> None:
        """Decide what to do when there was no endpoint to pick."""
        self._act(self.attempts.nobody(now), now)

    def park(self) -> None:
        """Wait until somebody can be asked. Raises Refused QUEUE_FULL."""
        call, cold = self._call, self.gate.cold_start
        self.parked = True
        self.deadline = call.deadline
        self.due_s = min(call.queued_s + self.tenant.tier.target_s, call.deadline)
        self._parked_s = monotonic()
        if cold is not None:
            self.phase = self.phase or cold.described(self.endpoints)
            if cold.holds:  # its target time cannot be met any more: what counts is that the call is answered at all
                self.due_s = call.deadline
        self.endpoints.park(self)

    def parked_for_s(self) -> float:
        """Return the seconds that the call has waited for an endpoint."""
        return self._parked_sum_s + (monotonic() - self._parked_s if self.parked else 0.0)

    def unpark(self) -> None:
        """The call leaves by itself."""
        self.endpoints.unpark(self)

    def unparked(self) -> None:
        """Join the queue, with the time waited so far, because an endpoint is usable again."""
        self._parked_sum_s = self.parked_for_s()
        self.parked = False
        call = self._call
        if not call.departed():
            self.held = call.end_hold(monotonic())
            queued_s = call.queued_s
            call.acquire_permit()
            call.queued_s = queued_s

    def displaced(self) -> None:
        """Someone more urgent took the place among the parked."""
        self._call.displaced()

    def probe_finished(self) -> None:
        """All endpoints were asked for the model."""
        call, withheld = self._call, self._withheld
        if not call.sending:
            return
        now = monotonic()
        if withheld is None:
            self._act(self.attempts.another(now, Because.FOUND), now)
            return
        head = withheld.head
        decision = self.attempts.after_answer(
            withheld.endpoint, head, withheld.kind, now, kept=call.kept, searched=True
        )
        if isinstance(decision, Send):
            self._withheld = None
            self._resend(withheld.endpoint, decision, now)
        else:
            mark_spent(head)
            call.response(head, withheld.data, True)

    def stop_waiting(self) -> None:
        """The call does not wait for the search any more."""
        self.endpoints.model_locations.stop_waiting(self.target.sought, self.probe_finished)

    def _act(self, decision: Decision, now: float) -> None:
        """Carry out what was decided while no endpoint is the call's."""
        call = self._call
        if isinstance(decision, Send):
            call.send(now, decision.endpoint, decision.fresh)
        elif isinstance(decision, GiveUp):
            down = Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1)
            call.refuse(lost() if decision.because is Because.LOST else down)
        elif decision.because is Because.MODEL:
            if not self.endpoints.model_locations.probe(self.target.sought, self.probe_finished, now):
                self.probe_finished()
        else:
            self._attempts = None
            call.park()

    # Failed attempts and refusals ------------------------------------------------------------------------------

    def after_failure(self, endpoint: HttpEndpoint, error: UpstreamError, now: float) -> bool:
        """Go on after no answer came from `endpoint`; False: the failure is the call's."""
        call = self._call
        note_failure(self.endpoints, endpoint, error, now, call.target.sought)
        if call.sent_s and not isinstance(error, (UpstreamUnreachable, UpstreamUnread)):
            self.unsure = True
        if self._copy_flying:
            self.in_vain(endpoint, why_failed(error))
            return True
        kept, sent = call.kept, call.sent_s > 0.0
        decision = self.attempts.after_failure(endpoint, error, now, kept=kept, sent=sent, twice=call.may_run_twice)
        if isinstance(decision, GiveUp) and decision.because not in (Because.NOBODY_ELSE, Because.LOST):
            return False
        if isinstance(error, UpstreamUnread):
            self._attempted(endpoint, why_failed(error))
        else:
            self.in_vain(endpoint, why_failed(error))
        call.sent_s = 0.0
        self._act(decision, now)
        return True

    def after_answer(self, endpoint: HttpEndpoint, head: Any, data: bytes, kind: AnswerKind, now: float) -> bool:
        """Go on after a whole error answer, or wait for the copy or a search; False: the answer is the call's."""
        call, locations, model = self._call, self.endpoints.model_locations, self.target.sought
        decision = decided_by_itself(kind, head.status, copy=self._copy_flying)
        if decision is None:
            decision = self.attempts.after_answer(endpoint, head, kind, now, kept=call.kept)
            if isinstance(decision, Wait):
                if locations.probe(model, self.probe_finished, now):
                    self._withheld = _Withheld(endpoint, head, data, kind)
                    call.connection = None
                    return True
                decision = self.attempts.after_answer(endpoint, head, kind, now, kept=call.kept, searched=True)
            elif isinstance(decision, GiveUp) and decision.search:
                locations.probe(model, None, now)
        if isinstance(decision, GiveUp):
            if decision.because in _LEFT_HERE and kind in NO_ROOM and self.target.fallbacks:
                if spill(call, Outcome.QUEUE_FULL, now, sent=True):
                    return True
            mark_spent(head)
            return False
        call.connection = None
        if isinstance(decision, Send):
            self._resend(endpoint, decision, now, str(head.status))
        else:
            self.in_vain(endpoint, str(head.status))
            call.response_s = 0.0
        return True

    def _resend(self, endpoint: HttpEndpoint, decision: Send, now: float, error: str = _UNREACHABLE) -> None:
        self.in_vain(endpoint, error)
        self._call.sent_s = self._call.response_s = 0.0
        self._call.send(now, decision.endpoint, decision.fresh)

    # The second copy (see `Hedge`) -----------------------------------------------------------------------------

    def hedge(self, after_s: float) -> None:
        """Send a second copy when the first has not been answered in time; only once."""
        if self._hedge is None:
            self._hedge = Hedge(self, after_s)

    @property
    def _copy_flying(self) -> bool:
        return self._hedge is not None and self._hedge.flying

    @property
    def first_flying(self) -> bool:
        """Return whether the first copy may still be answered."""
        return self._call.endpoint is not None

    def second_endpoint(self, now: float) -> HttpEndpoint | None:
        """Pick where a second copy may go now, paid from the retry budget; None: nowhere."""
        call, first = self._call, self._call.endpoint
        if not call.sending or first is None or self._attempts is not None or not call.kept or call.stick is not None:
            return None
        second: HttpEndpoint | None = self.endpoints.pick(now, (first,), self.target.sought)
        if second is None or not self.gate.retries.spend(now):
            return None
        self.unsure = True
        return second

    def put_copy(self, connection: Any, now: float, span: str) -> None:
        """Write the second copy. The tenant is charged for the first one."""
        call = self._call
        mark, tenant = call.mark, call.tenant
        lines, first, mark.onward = call.lines, mark.onward, span
        call.tenant, call.lines = call.gateway.targets.repeating(tenant), None
        call.side.write(call, connection, now)
        call.tenant, call.lines = tenant, lines
        mark.onward = first

    def copy_ended(self, hedge: "Hedge", endpoint: HttpEndpoint, error: str) -> None:
        """Record the second copy, which is not the call's."""
        now = monotonic()
        self._call.mark.add_attempt(hedge.span, endpoint, hedge.sent_s or now, now, error)

    def classify(self, head: Any, data: bytes) -> AnswerKind:
        """Return what the second copy's error answer means."""
        return self._call.side.classify(self._call, head, data)

    def take_copy(self, hedge: "Hedge", head: Any, data: bytes, complete: bool) -> None:
        """The second copy was answered first: it is the call's from here on."""
        call, first = self._call, self._call.endpoint
        call.drop(monotonic())
        if first is not None:
            self.in_vain(first, "")
        call.mark.onward = hedge.span
        call.endpoint, call.sent_s, call.connection = hedge.endpoint, hedge.sent_s, hedge.connection
        if not complete and hedge.connection is not None:
            hedge.connection.sink = cast(ResponseSink, call)
        self._hedge = None
        self.attempts.count = MAX_ATTEMPTS
        call.response(head, data, complete)

    def failed(self, error: UpstreamError) -> None:
        """Neither copy will be answered."""
        self._call.failed(error)


class Hedge:
    """Second copy of a call whose first one is late, where its route asks for that.

    "Hedged requests" of Dean and Barroso, The Tail at Scale, 2013. The copy goes to another endpoint, within the retry
    budget, and only while its body is still here. The first answer wins; the other copy is dropped, which its server
    sees as a departure. Should the first copy break meanwhile, the second one is the call's. In a trace each copy is a
    span of its own, and the parent of what its server did.

    It ends by `cancel`, by `failed`, or by an answer (`Trouble.take_copy`). span: the id of its hop's span, in
    lower-case hex.
    """

    __slots__ = ("_trouble", "_timer", "connection", "endpoint", "sent_s", "span")

    def __init__(self, trouble: Trouble, after_s: float) -> None:
        self._trouble = trouble
        self._timer = asyncio.get_running_loop().call_later(after_s, self._fire)
        self.endpoint: HttpEndpoint | None = None
        self.connection: Any = None
        self.sent_s = 0.0
        self.span = ""

    @property
    def flying(self) -> bool:
        """Return whether an answer may still come."""
        return self.endpoint is not None

    def _fire(self) -> None:
        now = monotonic()
        endpoint: Any = self._trouble.second_endpoint(now)  # an endpoint of either protocol
        if endpoint is None:
            return
        self.endpoint = endpoint
        self.span = new_span()
        connection = endpoint.begin(self, now, head_only=self._trouble.target.head_only)
        if connection is not None:
            self.connected(connection)

    def cancel(self, error: str = "") -> None:
        """The call needs no second answer any more. error: why the one that came is not used, "" if none came."""
        self._timer.cancel()
        endpoint, self.endpoint = self.endpoint, None
        if self.connection is not None:
            self.connection.abandon()
            self.connection = None
            if endpoint is not None:
                self._trouble.copy_ended(self, endpoint, error)
        elif endpoint is not None:
            endpoint.borrower_left(self)

    def connected(self, connection: Any) -> None:
        self.connection = connection
        self.sent_s = now = monotonic()
        self._trouble.put_copy(connection, now, self.span)

    def response(self, head: Any, data: bytes, complete: bool) -> None:
        trouble, endpoint = self._trouble, self.endpoint
        assert endpoint is not None
        refused = head.status >= 500 or (head.status >= 400 and trouble.classify(head, data) is not AnswerKind.ANSWER)
        if refused and trouble.first_flying:
            now = monotonic()
            note_answer(trouble.endpoints, endpoint, head, now, now - self.sent_s, trouble.target.sought)
            if complete:
                self.connection = None
                self.endpoint = None
                trouble.copy_ended(self, endpoint, str(head.status))
            else:
                self.cancel(str(head.status))
            return
        trouble.take_copy(self, head, data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        """Do nothing. It is never called: the answer's connection is the call's from its head on."""

    def failed(self, error: UpstreamError) -> None:
        trouble, endpoint = self._trouble, self.endpoint
        self.connection = None
        self.endpoint = None
        if endpoint is not None:
            note_failure(trouble.endpoints, endpoint, error, monotonic(), trouble.target.sought)
            trouble.copy_ended(self, endpoint, why_failed(error))
        if not trouble.first_flying:
            trouble.failed(error)

    def upstream_writable(self, writable: bool) -> None:
        """The request was written as a whole."""
