"""Judges requests that are no calls yet: whether they can be in time and may be held."""

from time import monotonic
from typing import Any

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.shares import Holding

__all__ = ["holding_of", "hold", "judge_request", "no_bytes_for"]


def hold(
    gate: PoolGate,
    these: EndpointSet[Any],
    tenant: Tenant,
    received_s: float,
    requested_until: float,
) -> float | None:
    """Judge a call whose body is not here yet, while no endpoint of `these` is usable.

    requested_until: see `PoolColdStart.until`. Returns when it is given up; None: it is not held, but waits until its
    deadline. Raises Refused, and then counts the call as demand.
    """
    cold = gate.cold_start
    if cold is None or these.usable:
        return None
    try:
        return cold.until(these, tenant, received_s, requested_until, monotonic())
    except Refused:
        if gate.demand is not None:
            gate.demand.turned_away(tenant.tier.name)
        raise


def judge_request(gate: PoolGate, target: Target, tenant: Tenant, size_bytes: int, left_s: float) -> None:
    """Judge a request that is no call yet, as `PoolGate.judge` does; one that capacity would help counts as demand."""
    try:
        gate.judge(target, size_bytes, left_s)
    except Refused as refused:
        refused.left_s = left_s
        if gate.demand is not None and refused.outcome is Outcome.INFEASIBLE:
            gate.demand.turned_away(tenant.tier.name)
        raise


def holding_of(tenant: Tenant, payload: Any = None) -> Holding:
    """Return what will be a tenant's part of a shared budget. payload: see `Holding`."""
    return Holding(tenant.tier.band, tenant.name, tenant.weight, payload)


def no_bytes_for(gate: PoolGate, tenant: Tenant) -> Refused:
    """Return the refusal of a request for which the budget has no bytes, and count it as demand."""
    if gate.demand is not None:
        gate.demand.turned_away(tenant.tier.name)
    return Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=gate.retry_after_s())
