"""List for the admin port what waits, by pool, tier and tenant."""

from collections.abc import Iterable, Iterator
from itertools import islice
from time import monotonic
from typing import Any

from oriel_gateway.core import Gateway
from oriel_gateway.pools.cold_start import PoolColdStart
from oriel_gateway.pools.pool import PoolGate, Waiter
from oriel_gateway.pools.scaling import PoolPlan

TENANTS = 50  # the tenants that are listed per pool: those with the most calls
# waiting calls of a pool that are read; a longer queue shows its counts, and only these calls by tenant
LOOKED_AT = 20_000


def live_queues(gateway: Gateway) -> dict[str, Any]:
    """Return the queues by pool. A call beyond `LOOKED_AT` counts in `waiting` but in no tenant's line."""
    left = {f"{gate.name} (not in the documents any more)": gate for gate in gateway.left_pools}
    return {name: _pool(gateway, gate, monotonic()) for name, gate in (*gateway.pools.items(), *left.items())}


def tiers_of(gateway: Gateway, gate: PoolGate) -> list[tuple[str, int]]:
    """Return (name, band) of every tier, and of those bands of earlier documents in which calls still wait."""
    named = [(tier.name, tier.band) for tier in gateway.snapshot.tiers.values()]
    bands = {band for _, band in named}
    depths = gate.admission.queue.depths()
    return named + [(f"former band {band}", band) for band, depth, _ in depths if depth and band not in bands]


def oldest_wait_s(gate: PoolGate, bands: Iterable[int]) -> float:
    """Return the seconds that the oldest call waits; 0.0 if none waits."""
    first = [since for band in bands for since in islice(_since(gate, band), 1)]
    return max(0.0, monotonic() - min(first)) if first else 0.0


def _pool(gateway: Gateway, gate: PoolGate, now: float) -> dict[str, Any]:
    queue = gate.admission.queue
    tiers = tiers_of(gateway, gate)
    tenants: dict[str, list[float]] = {}  # since when each call waits, by arrival within a band
    for call in islice(_calls(gate, sorted({band for _, band in tiers})), LOOKED_AT):
        tenants.setdefault(call.tenant.name, []).append(call.queued_s)
    top = sorted(tenants.items(), key=lambda item: (-len(item[1]), item[0]))
    return {
        "permits": gate.admission.limit,
        "calls": gate.calls,
        "inflight": gate.admission.inflight,
        "waiting": {name: queue.depth(band) for name, band in tiers},
        "waiting_bytes": gate.held_bytes,
        "waiting_for_endpoints": gate.endpoints.parked + gate.grpc.parked,
        "repeated": gate.retries.spent,
        "oldest_ms": {name: round(oldest_wait_s(gate, [band]) * 1e3, 3) for name, band in tiers},
        "tenants": [
            {"tenant": name, "waiting": len(since), "oldest_ms": round((now - min(since)) * 1e3, 3)}
            for name, since in top[:TENANTS]
        ],
        "more_tenants": max(0, len(top) - TENANTS),
        "endpoints": [
            {
                "address": f"{e.host}:{e.port}",
                "state": e.state,
                "outstanding": e.outstanding,
                "idle": len(e.idle),
            }
            for e in gate.endpoints
        ],
        "cold_start": _cold_start(gate.cold_start, now) if gate.cold_start is not None else None,
        "scaling": _scaling(plan) if (plan := gateway.scaled.plans.get(gate.name)) is not None else None,
    }


def _cold_start(cold: PoolColdStart, now: float) -> dict[str, Any]:
    starts = cold.starts
    elapsed_s, rest_s = starts.elapsed_s(now), starts.rest_s(now)
    return {
        "phase": cold.phase.value,
        "loaded_bytes": cold.loading[0] if cold.loading is not None else None,
        "load_bytes": cold.loading[1] if cold.loading is not None else None,
        "elapsed_ms": None if elapsed_s is None else round(elapsed_s * 1e3),
        "expected_ms": None if rest_s is None else round(rest_s * 1e3),
        "starts": starts.count,
        "p50_ms": round(starts.quantile_s(0.5) * 1e3),
        "p95_ms": round(starts.quantile_s(0.95) * 1e3),
        "refused": cold.refused,
    }


def _scaling(plan: PoolPlan) -> dict[str, Any]:
    total, latest = plan.demand.total, plan.latest
    return {
        "wanted": latest.wanted,
        "replicas": plan.replicas,
        "ready": plan.ready,
        "active": latest.active,
        "floor": latest.floor,
        "woken": total.woken,
        "woken_ms": round(total.woken_s * 1e3),
        "keep_alive_ms": round(latest.keep_alive_s * 1e3),
        "held": total.held,
        "in_flight": total.in_flight,
        "rate": {tier: round(rate, 3) for tier, rate in latest.rates.items()},
        "work": {tier: round(work, 6) for tier, work in latest.work.items()},
        "refused": {name: tier.refused for name, tier in total.tiers.items()},
    }


def _calls(gate: PoolGate, bands: Iterable[int]) -> Iterator[Waiter]:
    queue = gate.admission.queue
    return (ticket.payload for band in bands for ticket in queue.waiting(band) if ticket.payload is not None)


def _since(gate: PoolGate, band: int) -> Iterator[float]:
    return (call.queued_s for call in _calls(gate, [band]))
