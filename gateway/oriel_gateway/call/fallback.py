"""Sends calls on to the next pools of their route (`fallback`), when their own cannot serve them in time.

| what happened | what is done |
|---|---|
| the call would be late, by the wait in the queue and the usual time of such calls | on, but for one in 20 |
| no endpoint is usable | on, instead of waiting for one |
| its queue is full, or a more urgent call took its place | on |
| no connection could be made, or the request was never read | on |
| all servers that may be asked refused it before it was executed (`call.attempts`) | on, within the retry budget |
| its tenant's limits refused it, its deadline has passed, it may have been executed | ends as without further pools |

`oriel_policies.upstreams.fallback` decides which of the next pools can serve it; where none can, the call stays. It
never goes back. Deadline, limits and charges stay its own, and it counts as demand of every pool that it came to. A
call that was sent on says so to its server: the next gateway does not send it on again, or two of them could send it to
and fro.
"""

from dataclasses import replace
from time import monotonic
from typing import Final

from oriel_gateway.call.contracts import Call
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.routing.targets import Spill
from oriel_policies.upstreams.fallback import Hindrance, hindrance

__all__ = ["SENT_ON", "SPILLING", "leave_late_pool", "spill"]

SENT_ON: Final = "x-oriel-fallback"
# The refusals after which a call was surely not executed, and another pool may have what it lacked here.
SPILLING: Final = frozenset(
    {
        Outcome.QUEUE_FULL,
        Outcome.DISPLACED,
        Outcome.INFEASIBLE,
        Outcome.DEADLINE_TOO_SHORT,
        Outcome.UPSTREAM_UNREACHABLE,
    }
)


def leave_late_pool(call: Call) -> bool:
    """Send a call on that would be late in its own pool. Returns whether it went on or was refused."""
    gate, target, now = call.gate, call.target, monotonic()
    left_s = call.deadline - now
    if not gate.endpoints_for(grpc=call.side.grpc).usable:
        # its queue's times do not matter then: the call goes on, or is held, at the moment when it has to wait
        return False
    try:
        if 0.0 < left_s < gate.slow_s:
            gate.judge(target, call.bytes_in, left_s)
    except Refused as refused:
        if not spill(call, refused.outcome, now):
            call.refuse(refused)
        return True
    prospect = gate.prospect(target, call.tenant, call.bytes_in, usable=True)
    late = hindrance(prospect, left_s) is Hindrance.LATE
    return late and not gate.keeps_late_call() and spill(call, Outcome.INFEASIBLE, now)


def spill(call: Call, reason: Outcome, now: float, *, sent: bool = False) -> bool:
    """Let a call go on in the first of its further pools that can serve it in time. Returns whether there is one.

    sent: True if it was sent to a server, which refused it; then the retry budget of its pool has to pay.
    """
    left_s = call.deadline - now
    if left_s <= 0.0 or not call.may_move or call.head.get(SENT_ON) is not None:
        return False
    target, tenant, size = call.target, call.tenant, call.bytes_in
    passed = [*target.spills, Spill(target.pool, reason.value)]
    for number, further in enumerate(target.fallbacks):
        gate = call.gateway.pools.get(further.pool)
        if gate is None or size > gate.pool.max_body_bytes:
            continue
        why = hindrance(
            gate.prospect(further, tenant, size, usable=bool(gate.endpoints_for(grpc=call.side.grpc).usable)), left_s
        )
        if why is not None:
            passed.append(Spill(further.pool, why.value))
        elif sent and not call.gate.retries.spend(now):
            return False
        else:
            on = replace(further, fallbacks=target.fallbacks[number + 1 :], spills=tuple(passed))
            since = call.queued_s
            if call.move(on, gate, now):
                call.gateway.records.stats.spilled(target.plan.name, target.pool, on.pool, reason.value)
                call.acquire_permit(now)
                if since:
                    call.queued_s = since  # the time it has waited already counts on in the new queue
                return True
    return False
