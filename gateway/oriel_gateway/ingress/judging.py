"""Makes a call of an HTTP request whose sender and target are known, whatever version of HTTP it came by."""

from math import inf
from time import monotonic
from typing import Final

from oriel_gateway.call.http import Call
from oriel_gateway.contracts import Client
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import judge_head
from oriel_gateway.limits import Grant
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.overload import too_busy
from oriel_gateway.pools.holding import hold, judge_request
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_gateway.shared.model_list import ACCEPT_JSON, ModelList
from oriel_gateway.shared.special import attach
from oriel_policies.documents import Tenant
from oriel_wire.h1.request import RequestHead

__all__ = ["open_call", "overloaded"]

_LISTS: Final = ("list", "entry")


def open_call(
    gateway: Gateway,
    client: Client,
    head: RequestHead,
    tenant: Tenant,
    target: Target,
    mark: Mark,
    received_s: float,
    late_s: float,
    lines: bytes | None,
) -> Call:
    """Judge the deadline, the size and the limits of a request, and begin its call.

    late_s: how long the request lay unread. lines: what the upstream gets of the head, None if it is not known yet.
    Raises Refused.
    """
    if target.names:
        judge_head(head, target.names)
    deadline = gateway.deadline(tenant, received_s, head.timeout)
    gate = gateway.pools[target.pool]
    bound = gate.pool.max_body_bytes
    if head.content_length is not None and head.content_length > bound:
        raise Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes")
    # A call that has further pools (`fallback`) is judged when its body is complete.
    if 0.0 < (left_s := deadline - received_s - late_s) < gate.slow_s and not target.fallbacks:
        judge_request(gate, target, tenant, head.content_length or 0, left_s)
    grant = None
    if target.allowances:
        grant = gateway.limiter.acquire(tenant, target, head.content_length or 0, received_s + late_s)
    if gate.slow_s == inf and not target.fallbacks:
        until = _hold(gateway, gate, head, tenant, received_s, grant)
        if until is not None:
            # Its body has to come within the usual time; the hold begins when it is here (`Call.park`).
            deadline = min(deadline, until)
    receiver = None
    if target.names in _LISTS:
        lines, receiver = ACCEPT_JSON + gateway.targets.tenant_lines(tenant), ModelList()
    call = Call(gateway, client, gate, head, tenant, target, mark, received_s, deadline, lines, receiver)
    if grant is not None:
        call.limited(grant)
    if target.special:
        attach(call, gateway.routing)
    return call


def overloaded(gateway: Gateway, tenant: Tenant, target: Target, now: float) -> Refused:
    """Return the refusal of a request for which the loop has no time: that of its tenant's limits if it is over them.

    It counts against rates as if it had been served, so that a flood is its sender's own doing.
    """
    if target.allowances:
        try:
            grant = gateway.limiter.acquire(tenant, target, 0, now)
        except Refused as limited:
            return limited
        if grant is not None:
            grant.settle(0, False, now)
    return too_busy()


def _hold(
    gateway: Gateway, gate: PoolGate, head: RequestHead, tenant: Tenant, received_s: float, grant: Grant | None
) -> float | None:
    """Hold the call; see `holding.hold`."""
    try:
        return hold(gate, gate.endpoints, tenant, received_s, gateway.requested_until(received_s, head.timeout))
    except Refused:
        if grant is not None:
            grant.settle(0, False, monotonic())
        raise
