"""What a call does when its upstream does not answer, or another one has to: wait, try again, send a second copy.

`Recovery` is the part of `call.Call` that a call in no trouble never enters. What may be sent again is decided in
`attempts`, second copies are sent by `hedge`.
"""

from time import monotonic
from typing import cast

from oriel_gateway.attempts import Tries, note_failure
from oriel_gateway.call_state import LEAST_S, QUEUED, SENDING, CallState
from oriel_gateway.decisions import TOLD
from oriel_gateway.endpoints import HttpEndpoint
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.hedge import Hedge
from oriel_gateway.refusals import Said, what_it_says
from oriel_policies.budget import MAX_ATTEMPTS
from oriel_wire.engine.upstream import ResponseSink
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h1_response import ResponseHead

__all__ = ["Recovery"]


class _Asker:
    """A call whose answer says that the model is not there, while everybody is asked who has it."""

    __slots__ = ("_call", "data", "endpoint", "head", "said")

    def __init__(self, call: "Recovery", endpoint: HttpEndpoint, head: ResponseHead, data: bytes, said: Said) -> None:
        self._call = call
        self.endpoint, self.head, self.data, self.said = endpoint, head, data, said

    def looked(self) -> None:
        """See `places.Looker`."""
        self._call.asked(self)


class Recovery(CallState):
    """See the module's head."""

    __slots__ = ()

    def enter(self, now: float = 0.0) -> None:
        raise NotImplementedError

    def _send(self, now: float) -> None:
        raise NotImplementedError

    def refuse(self, refused: Refused) -> None:
        raise NotImplementedError

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        raise NotImplementedError

    def displaced(self) -> None:
        raise NotImplementedError

    def _end(self, outcome: Outcome, error: str = "") -> None:
        raise NotImplementedError

    # A permit --------------------------------------------------------------------------------------------------

    def admitted(self) -> None:
        """There is a permit: find an endpoint and send, unless the client has left where nobody could see it."""
        client = self.client
        if client is not None and client.departed:
            ticket, self._ticket = self._ticket, None
            self._gate.decline(ticket)
            self._end(Outcome.CLIENT_LEFT)
            client.transport.abort()
            return
        now = monotonic()
        if now >= self.deadline - LEAST_S:  # the permit came first: both have waited for the loop
            ticket, self._ticket = self._ticket, None
            self._gate.decline(ticket)
            self.expired()
            return
        self.permit_s = now
        self.state = SENDING
        self._send(now)

    # Nobody can be asked ---------------------------------------------------------------------------------------

    def _park(self) -> None:
        """Nobody can be asked: wait without a permit until somebody can, or until the deadline."""
        if self._gateway.refusing:
            self.refuse(stopping())
            return
        self.state = QUEUED
        gate = self._gate
        size = self._pending_bytes - self._held_bytes
        if size > 0 and not gate.hold(size, urgent=self.tenant.tier.band == self._gateway.top_band):
            self.refuse(Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=1))
            return
        self._held_bytes += max(0, size)
        self._parked = True
        try:
            gate.endpoints.park(self)
        except Refused as refused:
            self.refuse(refused)

    def stopping(self) -> None:
        """The gateway is about to end."""
        if self.state == QUEUED or (self.state == SENDING and not self.sent_s):
            self.refuse(stopping())

    def unparked(self) -> None:
        """Somebody can be asked: to the queue, with the time waited so far."""
        self._parked = False
        client = self.client
        if client is not None and client.departed:
            self._end(Outcome.CLIENT_LEFT)
            client.transport.abort()
            return
        queued_s = self.queued_s
        self.enter()
        self.queued_s = queued_s

    def _nobody(self) -> None:
        gate = self._gate
        if gate.endpoints.usable:
            places, model, now = gate.endpoints.places, self.target.sought, monotonic()
            if places.unknown(model, now):
                if not places.look(model, self, now):
                    self.looked()
                return
            self.refuse(Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1))
            return
        ticket, self._ticket = self._ticket, None
        self._tries = None
        self.permit_s = 0.0
        gate.give_back(ticket)
        self._park()

    def looked(self) -> None:
        """Everybody was asked for the model."""
        if self.state == SENDING:
            self._tries = self._tries or Tries(self._gate, self.target.sought)
            self._send(monotonic())

    def _sticky(self, now: float) -> HttpEndpoint | None:
        """The endpoint that the call's key chooses among those that can be asked."""
        gate, tries = self._gate, self._tries
        places, model = gate.endpoints.places, self.target.sought
        if places.unknown(model, now):
            return None
        tried = (*(tries.tried if tries is not None else ()), *places.lacking(model, now))
        endpoint = gate.sticky.pick(gate.endpoints.usable, self.stick, tried)
        if endpoint is not None and not endpoint.outstanding:
            endpoint.record.heard_s = now
        return endpoint

    @property
    def _kept(self) -> bool:
        """Whether the body is here to be sent (again)."""
        return self._pending is not None or not self._pending_bytes

    # It did not answer, or not the call ------------------------------------------------------------------------

    def failed(self, error: UpstreamError) -> None:
        """The upstream did not answer, or stopped in its answer; `attempts` says what may be sent again."""
        self._connection = None
        endpoint, self._endpoint = self._endpoint, None
        now = monotonic()
        if self.state == SENDING and endpoint is not None:
            tries = self._tries or Tries(self._gate, self.target.sought)
            hedge = self._hedge
            if hedge is not None and hedge.flying:
                note_failure(self._gate.endpoints, endpoint, error, now)
                self._in_vain(endpoint)
                return  # the second copy is the call's now
            twice = self._kept and (self.target.plan.idempotent or self._only_reads)
            # What was written and not kept can only be sent again if nothing was written.
            if (self._kept or not self.sent_s) and tries.after_failure(endpoint, error, now, twice=twice):
                if not isinstance(error, UpstreamUnread):
                    self._in_vain(endpoint)
                self._tries = tries
                self.sent_s = 0.0
                self._send(now)
                return
        elif endpoint is not None:
            self._gate.endpoints.broke(endpoint, now)
        if isinstance(error, UpstreamUnreachable):
            self.refuse(Refused(Outcome.UPSTREAM_UNREACHABLE, str(error), retry_after_s=1))
        else:
            self.refuse(Refused(Outcome.UPSTREAM_BROKEN, str(error), retry_after_s=1))

    @property
    def _only_reads(self) -> bool:
        return not self._pending_bytes and self.head.method in ("GET", "HEAD")

    def _elsewhere(self, endpoint: HttpEndpoint, head: ResponseHead, data: bytes, now: float) -> bool:
        """This endpoint surely did not execute the call and another one may, or has it already: that answer counts."""
        said = what_it_says(head, data, model=bool(self.target.sought))
        places, model = self._gate.endpoints.places, self.target.sought
        if said is Said.ABSENT:
            places.told(endpoint, model, now)
        hedge = self._hedge
        if hedge is not None and hedge.flying:
            if head.status < 500 and said is Said.ANSWER:
                return False
            self._in_vain(endpoint)
            self._connection = self._endpoint = None
            self.response_s = 0.0
            return True
        if said is Said.ANSWER and head.status != 503:
            return False
        self._tries = tries = self._tries or Tries(self._gate, model)
        if not self._kept:
            tries.attempts = MAX_ATTEMPTS
        if said in (Said.ABSENT, Said.PERHAPS_ABSENT) and places.may_look(model, now):
            # A body that is gone cannot be sent again, but the next call has to know.
            asker = _Asker(self, endpoint, head, data, said) if tries.attempts < MAX_ATTEMPTS else None
            if places.look(model, asker, now) and asker is not None:
                self._connection = self._endpoint = None
                return True
        return self._once_more(endpoint, head, said, now)

    def _once_more(self, endpoint: HttpEndpoint, head: ResponseHead, said: Said, now: float) -> bool:
        tries, places = self._tries, self._gate.endpoints.places
        assert tries is not None
        if said is Said.PERHAPS_ABSENT:
            if not places.lacks(endpoint, self.target.sought, now):
                return False  # it has the model, so these are the model's words
            said = Said.ABSENT
        if not tries.after_answer(endpoint, head, said, now, sticks=bool(self.stick)):
            return False
        self._in_vain(endpoint)
        self._connection = self._endpoint = None
        self.sent_s = self.response_s = 0.0
        self._send(now)
        return True

    def asked(self, asker: "_Asker") -> None:
        """Everybody was asked for the model that `asker.endpoint` said it has not: elsewhere, or that is the answer."""
        if self.state != SENDING or self._once_more(asker.endpoint, asker.head, asker.said, monotonic()):
            return
        assert self._tries is not None
        self._tries.attempts = MAX_ATTEMPTS
        self._endpoint = asker.endpoint
        self.response(asker.head, asker.data, True)

    def _in_vain(self, endpoint: HttpEndpoint) -> None:
        self.endpoint = None
        self.tried = (*self.tried[1 - TOLD :], endpoint)

    def inherit(self, work: "Recovery") -> None:
        """Another call was made for this one: what that went through is told of this."""
        self.ahead, self.endpoint, self.tried = work.ahead, work.endpoint, work.tried

    # The second copy (see `hedge`) -----------------------------------------------------------------------------

    @property
    def first_flying(self) -> bool:
        """Whether the first copy may still be answered."""
        return self._endpoint is not None

    def second_endpoint(self, now: float) -> HttpEndpoint | None:
        """Where a second copy may go now, paid from the retry budget; None: nowhere."""
        first = self._endpoint
        if self.state != SENDING or first is None or self._tries is not None or not self._kept or self.stick:
            return None
        second = self._gate.endpoints.pick(now, (first,), self.target.sought)
        return second if second is not None and self._gate.retries.spend(now) else None

    def take(self, hedge: Hedge, head: ResponseHead, data: bytes, complete: bool) -> None:
        """The second copy was answered first: it is the call's from here on."""
        if self._endpoint is not None:
            self._in_vain(self._endpoint)
        self._drop_first(monotonic())
        self._endpoint = self.endpoint = hedge.endpoint
        self.sent_s = hedge.sent_s
        self._connection = hedge.connection
        if not complete and hedge.connection is not None:
            hedge.connection.sink = cast(ResponseSink, self)
        self._hedge = None
        self._tries = Tries(self._gate, self.target.sought)
        self._tries.attempts = MAX_ATTEMPTS
        self.response(head, data, complete)

    def _drop_first(self, now: float) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None
            assert endpoint is not None
            if not self.response_s:
                endpoint.cost.observed(now - self.sent_s, now)  # at least that
        elif endpoint is not None and not self.sent_s:
            endpoint.forget(cast(ResponseSink, self))
        elif self.target.sought:
            self._gate.endpoints.places.leave(self.target.sought, self)

    def _settle(self, hedge: Hedge) -> None:
        """The answer is here: no other copy is needed."""
        hedge.cancel()
        self._hedge = None
