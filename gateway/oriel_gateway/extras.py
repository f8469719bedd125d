"""What one HTTP call of a special route needs beyond its pool: see `single_flight`, `shadow`, `sticky`, `choices`.

A plain call has none. `Call` calls the hooks below and nothing else; they may end the call.
"""

from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from oriel_gateway.call_state import DONE
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.named_models import judge_body
from oriel_gateway.routing_state import REPLAY_BYTES
from oriel_gateway.shadow import Fingerprint, send_copy
from oriel_gateway.single_flight import FlightCall, answer_from, answer_key, join
from oriel_policies.assignment import unit
from oriel_policies.flights import Flight
from oriel_wire.h1_response import ResponseHead

if TYPE_CHECKING:
    from oriel_gateway.call import Call
    from oriel_gateway.targets import Target

__all__ = ["FLEX_BYTES", "Extras", "attach"]

FLEX_BYTES: Final = 4 * 1024 * 1024  # of a body that is read for its `service_tier`
_SERVICE_TIER: Final = b'"service_tier"'
# Not a class statement: this module is compiled, and a Struct makes its classes by itself.
_asked = msgspec.json.Decoder(msgspec.defstruct("Asked", [("service_tier", Any, None)])).decode


def attach(call: "Call") -> None:
    """Give a call of a special target its extras."""
    call.extras = Extras()
    sticky = call.target.plan.sticky
    if sticky not in ("", "stream"):
        call.stick = call.head.get(sticky) or ""


def asks_for_flex(call: "Call") -> bool:
    """Whether a body of the OpenAI API names the tier `flex`; what is larger or no JSON is not judged here."""
    if call.body_bytes > FLEX_BYTES or _SERVICE_TIER not in (body := call.body()):
        return False
    try:
        asked: Any = _asked(body)
        return bool(asked.service_tier == "flex")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def lowered(call: "Call", target: "Target") -> bool:
    """Let the call go on by the lower tier of `target`; True: other limits count it now. Raises Refused."""
    gateway, grant, now = call.gateway, call.grant, monotonic()
    same = call.target.allowances == target.allowances
    call.target, call.tenant, call.lines = target, target.tenant, None
    call.deadline = gateway.deadline(call.tenant, call.received_s, call.head.timeout)
    call.watch_until(call.deadline)
    if same:
        return False
    call.grant = None
    if grant is not None:
        if call.head.chunked:
            grant.move(-call.body_bytes, now)
        grant.undo(now)
    if target.allowances:
        grant = gateway.limiter.take(call.tenant, target, call.head.content_length or 0, now)
        if grant is not None:
            call.limited(grant)
    return True


class Extras:
    """Of one call; single writer: that call."""

    __slots__ = ("_copied", "_flight", "_seen", "_work")

    def __init__(self) -> None:
        self._flight: Flight[Call] | None = None
        self._work: FlightCall | None = None  # that is made for the flight
        self._copied: bytes | None = None  # the body, for a shadow
        self._seen: Fingerprint | None = None

    def before_queue(self, call: "Call") -> bool:
        """The request is here as a whole. False: the call is answered, waits for an equal one or for its limits."""
        lower = call.target.flex
        if lower is not None and asks_for_flex(call):
            try:
                if lowered(call, lower):
                    call.end()  # again, with the limits of that tier
                    return False
            except Refused as refused:
                call.refuse(refused)
                return False
        target, routing = call.target, call.gateway.routing
        if target.names in ("json", "form"):
            try:
                judge_body(call.head, target.names, call.body(), call.tenant)
            except Refused as refused:
                call.refuse(refused)
                return False
        plan, size = target.plan, call.body_bytes
        if size > REPLAY_BYTES or not (target.keepable or (plan.shadow_pool and target.executes)):
            return True
        body = call.body()
        if plan.shadow_pool and target.executes and unit(call.mark.request_id) < plan.shadow_share:
            self._copied = body  # the call's own, on the budget as that is: a copy takes no room from other calls
        if not target.keepable or (key := answer_key(call, body)) is None:
            return True
        found = routing.cache.get(key, monotonic()) if plan.cache_s else None
        if found is not None:
            routing.answered_from(plan.name, "hit")
            answer_from(call, found[0], "hit", found[1])
            return False
        if not call.hold_body():
            return True  # no bytes to wait with: the queue decides
        self.fly(call, key, body)
        return False

    def fly(self, call: "Call", key: bytes, body: bytes, *, again: bool = False) -> None:
        """Wait with all equal calls for one answer; again: after a flight that failed."""
        self._flight = join(call, key, body, again=again)
        self._work = call.gateway.routing.flight_calls.get(self._flight.key)

    def response(self, call: "Call", head: ResponseHead, data: bytes) -> None:
        """The upstream's head is about to be passed on."""
        head.forward += self.operator_lines(call)
        if self._copied is not None:
            self._seen = Fingerprint()
            self._seen.status = head.status
            self._seen.add(data)

    def data(self, data: bytes) -> None:
        """More of the answer."""
        if self._seen is not None:
            self._seen.add(data)

    def abandoned(self, call: "Call", now: float) -> tuple[bool, float]:
        """Of a call that ends before its flight does: whether it was executed, and what it has to pay of that, in s.

        Who leaves last pays for the work, and the founder for work that failed; else leaving would make it free.
        """
        work, flight = self._work, self._flight
        if work is None or not work.sent_s:
            return False, 0.0
        pays = work.founder is call if work.state == DONE else flight is not None and len(flight.members) == 1
        return True, (now - work.permit_s) / max(1, call.gate.admission.inflight) if pays else 0.0

    def ended(self, call: "Call") -> None:
        """The call is over, however it ended."""
        routing, target = call.gateway.routing, call.target
        if target.side:
            routing.took_side(target.plan.name, target.side)
        if self._flight is not None and routing.flights.leave(self._flight, call):
            routing.flight_calls[self._flight.key].client_left()
        self._flight = self._work = None
        if self._copied is not None and self._seen is not None and call.outcome is Outcome.ANSWERED:
            send_copy(call, self._copied, self._seen)
        self._copied = None

    def operator_lines(self, call: "Call") -> list[bytes]:
        """Which route and side it was, for those who may know how the house is built."""
        target = call.target
        if not target.side or "operator" not in call.tenant.scopes:
            return []
        return [f"x-oriel-route: {target.plan.name}; side={target.side}".encode("ascii", "replace")]
