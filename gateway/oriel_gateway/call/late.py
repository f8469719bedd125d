"""Errors of calls whose time ran out: where the call was, who bounded its time, and which tier gives more."""

from typing import Any, Final

import msgspec

from oriel_gateway.call.contracts import ANSWERING, COLLECT, Call
from oriel_gateway.errors import Outcome, Refused
from oriel_policies.promise.tiers import time_bound

__all__ = ["bound_of", "deadline_passed", "explained"]

_MOST_BYTES: Final = 16 * 1024  # largest error body that gets a further sentence
_STAGES: Final = (
    "receiving the request",
    "waiting for its limits",
    "waiting for a permit",
    "waiting for the answer to an equal request",
    "waiting for the upstream",
    "receiving the answer",
    "",
)


def bound_of(call: Call, state: int = ANSWERING) -> str:
    """Return a sentence on who bounded the call's time; more of it would not help a body that stops half way."""
    tier, had_s = call.tenant.tier, call.deadline - call.received_s
    if had_s > tier.give_up_s + 0.001 and call.receiver is None:  # one that several share may have that of another
        return f"it had {had_s:g} s, as servers were starting; tier {tier.name!r} gives {tier.give_up_s:g} s"
    requested_s = round(call.side.requested_until(call) - call.received_s, 6)
    tiers = None if state == COLLECT else call.gateway.snapshot.tiers
    return time_bound(tier, tiers, requested_s)


def deadline_passed(call: Call, state: int, *, lacking: str = "", retry_after_s: int = 1) -> Refused:
    """Return the error of a call whose deadline passed in `state`; lacking: why there was no endpoint, or ""."""
    if lacking:
        return Refused(Outcome.UPSTREAM_UNREACHABLE, f"{lacking} before the deadline", retry_after_s=retry_after_s)
    bound = "" if state == ANSWERING else f": {bound_of(call, state)}"
    return Refused(Outcome.DEADLINE_EXCEEDED, f"the deadline passed while {_STAGES[state]}{bound}")


def explained(call: Call, head: Any, data: bytes) -> tuple[Any, bytes]:
    """Return a server's whole 504 with who bounded the call's time, where its body has the form of ours."""
    try:
        found = msgspec.json.decode(data) if len(data) <= _MOST_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    where, name = (error, "message") if isinstance(error, dict) else (found, "error")
    if not isinstance(where, dict) or not isinstance(where.get(name), str):
        return head, data
    where[name] = f"{where[name]}; {bound_of(call)}"
    head, body = head.copy(), msgspec.json.encode(found)
    head.content_length = len(body)
    return head, body


def prolong(call: Call, hold_s: float) -> None:
    """Let the call have `hold_s` seconds from its arrival, if that is more than it has and its client allows it."""
    until = min(call.received_s + hold_s, call.side.requested_until(call))
    if until > call.deadline:
        call.deadline = until
        call.watch_until(until)


def wait_for_models(call: Call) -> None:
    """Let a service's request last as long as pools hold the model calls that it makes through a gateway.

    It keeps its permit meanwhile. All but the most urgent tier leave a quarter of the permits to shorter requests.
    """
    tier, gate, gateway = call.tenant.tier, call.gate, call.gateway
    spared = 0 if tier.band <= gateway.top_band else gate.admission.limit // 4
    if gate.admission.inflight <= gate.admission.limit - spared:
        prolong(call, gateway.scaled.hold_s(tier.name, gate))
