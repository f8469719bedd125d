"""Makes one answer of the admin port from those of all workers.

Numbers are added where each worker has its part, such as calls; elsewhere each has the whole, and the largest one is
shown: the worst time, or what the worker knows that has served for longest.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

_SUMMED: Final = frozenset(
    "rate rates met late missed excused waiting parked inflight permits room tokens_s refused used calls more_tenants "
    "waiting_bytes waiting_for_endpoints repeated outstanding idle".split()
)
_WHOLE: Final = frozenset({"scaling", "language", "cold_start", "causes", "attainment", "burn", "budget_left", "more"})
_NAMED: Final = {
    "tiers": "tier", "pools": "pool", "targets": "name", "tenants": "tenant", "calls": "id", "endpoints": "address",
}  # fmt: skip
_CALLS: Final = 48  # rows of calls in a snapshot
# gauges of which each worker has a part, and those where less is worse
_PARTS: Final = frozenset(
    "inflight permits waiting waiting_bytes waiting_for_endpoint held_back unread_bytes cache_bytes flights "
    "shadow_copies_inflight spans_queued spans_capacity".split()
)
_LEAST: Final = ("_up", "_rest", "_remaining_ratio", "_left_ratio")


def merged(values: Sequence[Any], key: str = "") -> Any:
    """Return one JSON value for those of the workers, which are not empty. key: its name in the object around it."""
    values = [each for each in values if each is not None]
    first = values[0] if values else None
    if len(values) < 2 or key in _WHOLE or isinstance(first, str):
        return first
    if isinstance(first, dict):
        names = dict.fromkeys(name for each in values for name in each)
        return {name: merged([each.get(name) for each in values], _inner(key, name)) for name in names}
    if isinstance(first, list):
        name = _NAMED.get(key, "")
        rows: dict[Any, list[Any]] = {}
        for row in (row for each in values for row in each):
            rows.setdefault(row.get(name) if isinstance(row, dict) else str(row), []).append(row)
        found = [merged(alike) for alike in rows.values()]
        return sorted(found, key=lambda row: -row["at"])[:_CALLS] if key == "calls" else found
    return round(sum(values), 3) if key in _SUMMED and not isinstance(first, bool) else max(values)


def _inner(outer: str, name: str) -> str:
    """Return the name by which a member is merged: in an object of sums each member is one."""
    return outer if outer in _SUMMED else name


def merged_decisions(answers: Iterable[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return the latest decisions of all workers, and all troubles."""
    found = list(answers)
    decisions = sorted((each for one in found for each in one["decisions"]), key=lambda each: -each["ended_at"])
    troubles = list(dict.fromkeys(each for one in found for each in one["troubles"]))
    return {"decisions": decisions[:limit], "troubles": troubles}


def one_value(name: str, kind: str, one: float, other: float) -> float:
    """Return one value of a metric for those of two workers. name, kind: those of its family."""
    short = name.removeprefix("oriel_").removeprefix("gateway_")
    if kind == "gauge" and short.endswith(_LEAST):
        return min(one, other)
    # policies are adopted by all workers alike
    return max(one, other) if kind == "gauge" and short not in _PARTS or short.startswith("policy_") else one + other
