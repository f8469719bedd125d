"""Judges requests that are no calls yet: whether they can be in time, may be held, and have room for their bodies."""

from time import monotonic
from typing import Any

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant

__all__ = ["hold", "judge_request", "no_bytes_for", "reserve_or_displace"]


def hold(
    gate: PoolGate,
    these: EndpointSet[Any],
    tenant: Tenant,
    received_s: float,
    requested_until: float,
    size_bytes: int,
    *,
    urgent: bool = False,
) -> float | None:
    """Judge a call whose body is not here yet, while no endpoint of `these` is usable.

    requested_until: see `PoolColdStart.until`. Returns when it is given up, with `size_bytes` reserved for its body;
    None: it is not held, but waits until its deadline. Raises Refused, and then counts the call as demand.
    """
    cold = gate.cold_start
    if cold is None or these.usable:
        return None
    try:
        until = cold.until(these, tenant, received_s, requested_until, monotonic())
    except Refused:
        if gate.demand is not None:
            gate.demand.turned_away(tenant.tier.name)
        raise
    if until is not None and not reserve_or_displace(gate, size_bytes, tenant.tier.band, urgent=urgent):
        raise no_bytes_for(gate, tenant)
    return until


def judge_request(gate: PoolGate, target: Target, tenant: Tenant, size_bytes: int, left_s: float) -> None:
    """Judge a request that is no call yet, as `PoolGate.judge` does; one that capacity would help counts as demand."""
    try:
        gate.judge(target, size_bytes, left_s)
    except Refused as refused:
        refused.left_s = left_s
        if gate.demand is not None and refused.outcome is Outcome.INFEASIBLE:
            gate.demand.turned_away(tenant.tier.name)
        raise


def no_bytes_for(gate: PoolGate, tenant: Tenant) -> Refused:
    """Return the refusal of a request for which the budget has no bytes, and count it as demand."""
    if gate.demand is not None:
        gate.demand.turned_away(tenant.tier.name)
    return Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=gate.retry_after_s())


def reserve_or_displace(gate: PoolGate, size_bytes: int, band: int, *, urgent: bool) -> bool:
    """Reserve bytes of the budget, if need be those of less urgent calls that wait for an endpoint and are displaced.

    urgent: see `PoolGate.reserve_bytes`. Returns False if that is not enough; nobody is displaced then, except
    when a displaced call goes on to another pool and a call of that one comes here and takes the bytes.
    """
    if gate.reserve_bytes(size_bytes, urgent=urgent):
        return True
    both = (gate.endpoints, gate.grpc)
    free = sum([these.displaceable_bytes(band) for these in both])
    if not free or not gate.fits_bytes(size_bytes - free, urgent=urgent):
        return False
    while not gate.reserve_bytes(size_bytes, urgent=urgent):
        if not any(these.displace(band) for these in both):
            return False
    return True
