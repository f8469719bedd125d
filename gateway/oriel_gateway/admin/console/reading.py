"""Reads what the gateway knows into rows for the snapshot, the most important ones first.

Its cost must not grow with the calls that wait or with the number of tenants: it reads counts that are kept anyway, the
first call of each band, and the calls that `Recent` counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice, zip_longest
from typing import Any, Final

from oriel_gateway.admin.console.recent import REFUSED, Recent, Tally
from oriel_gateway.admin.console.reports import Language, Report, Reports
from oriel_gateway.admin.console.snapshot import SECTIONS, snapshot
from oriel_gateway.admin.queues import oldest_wait_s, tiers_of
from oriel_gateway.admin.slo import gateways
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome
from oriel_gateway.observe.record import Record
from oriel_gateway.pools.endpoint_state import EndpointState
from oriel_gateway.pools.pool import PoolGate
from oriel_policies.documents import Tier
from oriel_policies.promise.objectives import TOKENS

_UNKNOWN: Final[Mapping[str, Any]] = {"attainment": {}, "budget_left": None, "burn": {}, "causes": {}}
_CANARIES: Final = 3  # the latest canaries that were rolled back and are named
_CANARY_TEXT: Final = 80
# states of endpoints in the order in which they are shown; an ejected one is `ejected` whatever the cause
STATES: Final = ("ready", "unknown", "not_ready", "unreachable", "ejected")
_WORSE: Final = ("unknown", "ready", *STATES[2:])  # in rising order of importance


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The time of a snapshot. now: monotonic; wall: epoch seconds.

    since_s: the seconds since the snapshot before; None for the first one.
    """

    now: float
    wall: float
    since_s: float | None


FEW: Final = 10  # bad calls that say nothing about a budget yet; the alerts need as many
Promises = Mapping[str, Mapping[str, Any]]  # tier -> its promises


def promises(gateway: Gateway, wall: float) -> Promises:
    """Return attainment, error budget, burn rates and causes of misses of each tier, as the objectives keep them."""
    budgets = gateway.records.stats.objectives.budgets
    tiers = islice(_by_urgency(gateway), SECTIONS["tiers"][1])
    kept = {tier.name: budgets.of_tier(tier.name, tier.objective, wall) for tier in tiers}
    names = ("attainment", "budget_left", "burn", "causes")
    shown = {tier: {name: figures[name] for name in names} for tier, figures in kept.items()}
    for tier, figures in kept.items():
        if figures["budget_left"] <= 0.0 and figures["bad"]["30d"] < FEW:  # two calls before a start spend no budget
            shown[tier]["budget_left"] = None
    return shown


def read(
    gateway: Gateway,
    recent: Recent,
    reports: Reports,
    kept: Promises,
    moment: Moment,
    version: str,
    named: Sequence[str],
) -> bytes:
    """Return the snapshot of this moment.

    recent: updated to it. kept: the latest results of `promises`. named: sentences about what is wrong.
    """
    covers_s = recent.covers_s(moment.now)
    head = {
        "at": round(moment.wall, 3),
        "version": version,
        "gateways": gateways(gateway),
        "covers_s": round(covers_s),
        "rates": _rates(recent.fresh, moment.since_s),
        "lag_ms": round(gateway.overload.lag_s * 1e3, 1),
        "behind": gateway.overload.behind,
        "draining": gateway.draining,
        "rolled_back": [
            f"{each.route}: {each.side} ({each.reason})"[:_CANARY_TEXT]
            for each in islice(gateway.routing.canaries.shown(), _CANARIES)
        ],
        "troubles": named,
        "tenants_known": len(gateway.snapshot.tenants),
    }
    gates = [*gateway.pools.values(), *gateway.left_pools]
    sections = {
        "tiers": _tiers(gateway, [gate for gate in gates if len(gate.admission.queue)], recent, kept, covers_s),
        "pools": _pools(gateway, gates, reports.pools, moment.now),
        "targets": _targets(gateway, recent, reports.targets, covers_s),
        "tenants": _tenants(recent, covers_s),
        "calls": (_call(decided, moment) for decided in recent.bad),
    }
    totals = {
        "tiers": len(gateway.snapshot.tiers),
        "pools": len(gates),
        "targets": len(recent.targets),
        "tenants": len(recent.tenants),
        "calls": len(recent.bad),
    }
    return snapshot(head, sections, totals)


def _rates(fresh: Tally, since_s: float | None) -> dict[str, float] | None:
    """Calls per second since the snapshot before, by what became of them."""
    if not since_s:
        return None
    names = ("met", "late", "missed", "excused")
    return {name: round(getattr(fresh, name) / since_s, 1) for name in names}


def _by_urgency(gateway: Gateway) -> list[Tier]:
    return sorted(gateway.snapshot.tiers.values(), key=lambda tier: (tier.band, tier.target_s))


def _tiers(
    gateway: Gateway, gates: list[PoolGate], recent: Recent, kept: Promises, covers_s: float
) -> Iterator[dict[str, Any]]:
    """Rows of the tiers, the most urgent first. gates: the pools in which calls wait."""
    tiers = _by_urgency(gateway)
    bands = Counter(tier.band for tier in tiers)
    for tier in islice(tiers, SECTIONS["tiers"][1]):
        yield {
            "tier": tier.name,
            "band": tier.band,
            "target_ms": round(tier.target_s * 1e3, 3),
            "objective": tier.objective,
            **({"token_ms": round(tier.token_s * 1e3, 3)} if tier.token_s else {}),
            **_counts(recent.tiers.get(tier.name), covers_s),
            "waiting": sum(gate.admission.queue.depth(tier.band) for gate in gates),
            "oldest_ms": _ms(max((oldest_wait_s(gate, [tier.band]) for gate in gates), default=0.0)),
            # tiers of one band wait in one queue
            "shares_band": bands[tier.band] > 1,
            **kept.get(tier.name, _UNKNOWN),
        }


def _pools(
    gateway: Gateway, gates: list[PoolGate], language: Mapping[str, Language], now: float
) -> Iterator[dict[str, Any]]:
    def urgency(gate: PoolGate) -> tuple[int, int, int]:
        parked = gate.endpoints.parked + gate.grpc.parked
        known = len(gate.endpoints) + len(gate.grpc)
        usable = len(gate.endpoints.usable) + len(gate.grpc.usable)
        return len(gate.admission.queue) + parked, known - usable, gate.admission.inflight

    for gate in nlargest(SECTIONS["pools"][1], gates, key=urgency):
        queue, tiers = gate.admission.queue, tiers_of(gateway, gate)
        seen: set[int] = set()
        waiting: dict[str, int] = {}
        for name, band in tiers:
            if band not in seen and (depth := queue.depth(band)) and len(waiting) < 8:
                waiting[name] = depth
            seen.add(band)
        row: dict[str, Any] = {
            "pool": gate.name,
            "left": gate in gateway.left_pools,
            "permits": gate.admission.limit,
            "inflight": gate.admission.inflight,
            "waiting": waiting,
            "room": gate.pool.max_queue,
            "parked": gate.endpoints.parked + gate.grpc.parked,
            "oldest_ms": _ms(oldest_wait_s(gate, seen)),
            "endpoints": _endpoints(gate),
        }
        if (found := language.get(gate.name)) is not None:
            calls = {name: found.calls[str(band)] for name, band in tiers[:8] if str(band) in found.calls}
            row["language"] = {"cache": found.cache, "calls": calls}
            row["language"] |= {"tokens_s": _rounded(found.made_s)} if found.made_s else {}
        elif gate.engines is not None and gate.engines.readable:
            load = gate.engines.load
            row["language"] = {"cache": load.cache, "calls": {"all": (load.running, load.waiting, 0)}}
        if (cold := gate.cold_start) is not None:
            rest_s, elapsed_s = cold.starts.rest_s(now), cold.starts.elapsed_s(now)
            row["phase"] = cold.phase.value
            row["elapsed_ms"] = None if elapsed_s is None else _ms(elapsed_s)
            row["expected_ms"] = None if rest_s is None else _ms(rest_s)
        if gateway.scaled.followed and (plan := gateway.scaled.plans.get(gate.name)) is not None:
            row |= {"wanted": plan.latest.wanted, "replicas": plan.replicas, "ready": plan.ready}
        yield row


def _endpoints(gate: PoolGate) -> dict[str, int]:
    """Return the number of servers by state.

    Each server of a host has an endpoint for HTTP, for gRPC, or both; the worse of the two is its state. Those of one
    host, such as replicas on one machine, are in the same order.
    """
    ports: defaultdict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    sides: tuple[Sequence[EndpointState], ...] = (gate.endpoints.members, gate.grpc.members)
    for index, members in enumerate(sides):
        for member in members:
            ports[member.address[0]][index].append(_WORSE.index(member.state.partition(":")[0]))
    counted = Counter(_WORSE[max(pair)] for both in ports.values() for pair in zip_longest(*both, fillvalue=0))
    return {state: counted[state] for state in STATES if counted[state]}


def _targets(
    gateway: Gateway, recent: Recent, reports: Mapping[str, Report], covers_s: float
) -> Iterator[dict[str, Any]]:
    agreement = gateway.routing.agreement.lowest()
    for name, tally in _busiest(recent.targets.items(), SECTIONS["targets"][1], lambda tally: (tally.calls,)):
        target, report = recent.of_target.get(name), reports.get(name)
        row: dict[str, Any] = {
            "kind": target.kind if target is not None else "",
            "name": target.name or target.route if target is not None else name,
            "pool": target.pool if target is not None else "",
            **_counts(tally, covers_s),
            "p50_ms": _rounded(tally.quantile_ms(0.5)),
            "p99_ms": _rounded(tally.quantile_ms(0.99)),
            "rows": _rounded(report.rows) if report is not None else None,
            "provider": report.provider.removesuffix("ExecutionProvider") if report is not None else "",
            "version": (target.version if target is not None else "") or (report.version if report is not None else ""),
        }
        if target is not None and target.kind == "model" and target.name in agreement:
            row["agrees"] = _rounded(agreement[target.name])
        if report is not None and report.artefact:
            row["artefact"] = report.artefact
        yield row


def _tenants(recent: Recent, covers_s: float) -> Iterator[dict[str, Any]]:
    def misses(tally: Tally) -> tuple[float, ...]:
        return tally.missed + tally.late, tally.refused, tally.used_s, tally.calls

    for name, tally in _busiest(recent.tenants.items(), SECTIONS["tenants"][1], misses):
        yield {
            "tenant": name,
            "tier": recent.of_tenant.get(name, ""),
            **_counts(tally, covers_s),
            "refused": tally.refused,
            "used": _rounded(tally.used_s / covers_s),
        }


def _call(decided: Record, moment: Moment) -> dict[str, Any]:
    tenant, target, judged = decided.tenant, decided.target, decided.judged
    answered = decided.outcome is Outcome.ANSWERED and decided.status < 400
    result = "late" if answered else "refused" if decided.outcome in REFUSED else "missed"
    return {
        "id": decided.mark.request_id,
        "trace": decided.mark.trace,
        "at": round(decided.ended_s + moment.wall - moment.now, 3),
        "tenant": tenant.name if tenant is not None else "",
        "tier": tenant.tier.name if tenant is not None else "",
        "target": target.route if target is not None else "",
        "result": result,
        "reason": decided.outcome.value,
        "cause": "" if judged is None else judged.cause,
        "status": decided.status,
        "took_ms": _ms((decided.answered_s or decided.ended_s) - decided.received_s),
        "target_ms": round(tenant.tier.target_s * 1e3, 3) if tenant is not None else None,
        # of a stream that began in time: how much longer its tokens took than its tier's time per token allows
        **({"over_ms": _ms(judged.excess_s)} if judged is not None and judged.cause == TOKENS else {}),
    }


def _counts(tally: Tally | None, covers_s: float) -> dict[str, Any]:
    found = tally or Tally()
    names = ("met", "late", "missed", "excused")
    counts = {name: getattr(found, name) for name in names}
    tokens = {"tokens_s": _rounded(found.tokens / covers_s)} if found.tokens else {}
    return {"rate": round(found.calls / covers_s, 2), **counts, **tokens}


def _busiest(items: Iterable[tuple[str, Tally]], count: int, key: Any) -> list[tuple[str, Tally]]:
    return nlargest(count, items, key=lambda item: key(item[1]))


def _rounded(value: float | None) -> float | None:
    """Three digits that count."""
    return None if value is None else float(f"{value:.3g}")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
