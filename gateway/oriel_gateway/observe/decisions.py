"""Keep the records of recent requests in a ring buffer. A record is explained only when an operator asks for it."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from oriel_gateway.observe.objectives import times_of
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.tracing import Address
from oriel_policies.metering.budgets import Use
from oriel_policies.promise.objectives import STAGES
from oriel_wire.context import parse_cost

KEPT = 4096
ANSWERS = 100  # the most decisions that one question returns
MAX_TRIED = 8  # the latest endpoints that a call tried in vain


class Decisions:
    """The latest `max_kept` requests. The gateway's loop is the single writer and the only reader."""

    def __init__(self, max_kept: int = KEPT) -> None:
        self._ring: deque[Record] = deque(maxlen=max_kept)
        self.append = self._ring.append

    def of(self, request_id: str) -> list[Record]:
        """Return all kept requests with this id, the latest first: a client may choose the same id twice."""
        return self._latest(decided for decided in reversed(self._ring) if decided.mark.request_id == request_id)

    def where(self, *, tenant: str = "", reason: str = "", limit: int = 20) -> list[Record]:
        """Return the latest requests of one tenant or with one reason; "" means any. limit: 1 to ANSWERS."""
        found = (
            decided
            for decided in reversed(self._ring)
            if (not tenant or (decided.tenant is not None and decided.tenant.name == tenant))
            and (not reason or decided.outcome.value == reason)
        )
        return self._latest(found, limit)

    def latest(self, count: int) -> list[Record]:
        """Return the last `count` that are kept, or all if they are fewer, the oldest first."""
        found = list(islice(reversed(self._ring), count))
        found.reverse()
        return found

    def _latest(self, found: Iterator[Record], limit: int = ANSWERS) -> list[Record]:
        return [decided for decided, _ in zip(found, range(max(1, min(limit, ANSWERS))), strict=False)]


def explain(decided: Record, offset_s: float) -> dict[str, Any]:
    """Return a decision as a JSON object. offset_s: wall clock (epoch) minus monotonic clock, in seconds."""
    mark, tenant, target = decided.mark, decided.tenant, decided.target
    found: dict[str, Any] = {
        "request_id": mark.request_id,
        "trace_id": mark.trace,
        "ended_at": round(decided.ended_s + offset_s, 3),
        "protocol": decided.protocol,
        "method": decided.method,
        "reason": decided.outcome.value,
        "status": decided.status,
        "cause": decided.error,
        "bytes_in": decided.bytes_in,
        "bytes_out": decided.bytes_out,
        "tenant": None if tenant is None else tenant.name,
        "tier": None if tenant is None else tenant.tier.name,
        "band": None if tenant is None else tenant.tier.band,
        "stages_ms": stages(decided),
        "server_timing": decided.timing,
        "promise": _promise(decided),
        "budget_ms": _budget(decided),
        "used": _used(use_of(decided)),
    }
    if target is not None:
        found["target"] = target.route
        found["route"] = target.plan.name
        found["pool"] = target.pool
        found["side"] = next(
            (number for number, side in enumerate(target.plan.split) if side.pool == target.pool), None
        )
        found["spilled"] = [{"pool": spill.pool, "reason": spill.reason} for spill in target.spills]
        found["limits"] = [allowance.name for allowance in target.allowances]
        found["queue"] = None if decided.ahead < 0 else {"ahead_at_arrival": decided.ahead}
        found["tried"] = [_address(endpoint) for endpoint in decided.tried]
        found["endpoint"] = None if decided.endpoint is None else _address(decided.endpoint)
    return found


def use_of(decided: Record) -> Use | None:
    """Return what the server reported that the request used; None if it reported nothing."""
    cost = parse_cost(decided.used) if decided.used else None
    if cost is None:
        return None
    return Use(
        tier="" if decided.tenant is None else decided.tenant.tier.name,
        device_ns={cost.device_class: cost.device_ns},
        cpu_ns=cost.cpu_ns,
        bytes_out=decided.bytes_out,
        tokens_in=cost.tokens_in,
        tokens_out=cost.tokens_out,
    )


def _used(use: Use | None) -> dict[str, Any] | None:
    if use is None:
        return None
    device_class, device_ns = next(iter(use.device_ns.items()))
    return {
        "device_ms": round(device_ns / 1e6, 3),
        "device_class": device_class,
        "cpu_ms": round(use.cpu_ns / 1e6, 3),
        "tokens_in": use.tokens_in,
        "tokens_out": use.tokens_out,
    }


def stages(decided: Record) -> dict[str, float]:
    """Return the milliseconds in each stage that the request reached; their sum is `total`."""
    starts = (
        ("receive", decided.received_s),
        ("queue", decided.queued_s),
        ("connect", decided.permit_s),
        ("upstream", decided.sent_s),
        ("answer", decided.response_s),
    )
    reached = [(name, start) for name, start in starts if start]
    ends = [start for _, start in reached[1:]] + [decided.ended_s]
    took = {name: _ms(end - start) for (name, start), end in zip(reached, ends, strict=True)}
    return {**took, "total": _ms(decided.ended_s - decided.received_s)}


def _promise(decided: Record) -> dict[str, Any] | None:
    """Return what became of the promise of the request's tier; None if its sender is not known."""
    if decided.tenant is None:
        return None
    judged = decided.judged
    return {
        "result": "met" if judged is None else judged.result,
        "target_ms": _ms(decided.tenant.tier.target_s),
        "cause": None if judged is None else judged.cause or None,
        "excess_ms": 0.0 if judged is None else _ms(judged.excess_s),
        "passed_in": None if judged is None else judged.passed or None,
        **({} if decided.token_s < 0.0 else {"token_ms": _ms(decided.token_s)}),
        "places_ms": {
            place: _ms(seconds) for place, seconds in zip(STAGES, times_of(decided), strict=True) if seconds > 0.0
        },
    }


def _budget(decided: Record) -> dict[str, float]:
    """Return the milliseconds to the deadline at each hop; below 0 if it had passed."""
    if not decided.deadline:
        return {}
    hops = {
        "arrival": decided.received_s,
        "queue": decided.queued_s,
        "permit": decided.permit_s,
        "upstream": decided.sent_s,
        "answer": decided.response_s,
        "end": decided.ended_s,
    }
    return {hop: _ms(decided.deadline - at) for hop, at in hops.items() if at}


def _address(endpoint: Address) -> str:
    return f"{endpoint.host}:{endpoint.port}"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
