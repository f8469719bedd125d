"""What was decided about recent requests: tuples in a ring while requests run, explained only when somebody asks.

A request's tuple is made once, when it ends, and is also what the access log writes. It holds names, sizes, times and
outcomes; no body, no header, no credential.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from oriel_gateway.errors import Outcome
from oriel_gateway.targets import Target
from oriel_gateway.tracing import Mark
from oriel_policies.documents import Tenant

__all__ = ["NOT_REACHED", "Address", "Decided", "Decisions", "Plain", "explain"]

KEPT = 4096
ANSWERS = 100  # of one question, at most
TOLD = 8  # endpoints that were asked in vain, the latest


class Address(Protocol):
    """An endpoint, as far as a decision names it."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Decided(NamedTuple):
    """One request that has ended. Times are monotonic seconds, 0.0 = not reached; sizes are bytes.

    tenant, target: None if it was refused before they were known. ahead: calls before it in the queue when it came to
    it, -1 if it did not queue. endpoint: who answered or was asked last; tried: who was asked before in vain.
    answered_s: when it was what its target is about: its end, or the first byte of a stream.
    """

    ended_s: float
    mark: Mark
    method: str
    protocol: str
    tenant: Tenant | None
    target: Target | None
    outcome: Outcome
    status: int
    error: str
    received_s: float
    queued_s: float = 0.0
    permit_s: float = 0.0
    sent_s: float = 0.0
    response_s: float = 0.0
    deadline: float = 0.0
    ahead: int = -1
    bytes_in: int = 0
    bytes_out: int = 0
    endpoint: Address | None = None
    tried: tuple[Address, ...] = ()
    answered_s: float = 0.0


NOT_REACHED = tuple(Decided._field_defaults.values())  # what a request that was turned away never came to

# As made on the hot path: a plain tuple costs a third of a named one.
Plain = tuple[Any, ...]


class Decisions:
    """The latest `max_kept` requests. Single writer: the gateway's loop; read on it as well."""

    def __init__(self, max_kept: int = KEPT) -> None:
        self._ring: deque[Plain] = deque(maxlen=max_kept)
        self.append = self._ring.append

    def of(self, request_id: str) -> list[Decided]:
        """Every kept request that had this id, the latest first: clients choose ids, and may choose one twice."""
        return self._latest(decided for decided in self._kept() if decided.mark.request_id == request_id)

    def where(self, *, tenant: str = "", reason: str = "", limit: int = 20) -> list[Decided]:
        """The latest of one tenant or with one reason, "" is any. limit: 1 to ANSWERS."""
        found = (
            decided
            for decided in self._kept()
            if (not tenant or (decided.tenant is not None and decided.tenant.name == tenant))
            and (not reason or decided.outcome.value == reason)
        )
        return self._latest(found, limit)

    def _kept(self) -> Iterator[Decided]:
        for plain in reversed(self._ring):
            yield Decided(*plain)

    def _latest(self, found: Iterator[Decided], limit: int = ANSWERS) -> list[Decided]:
        return [decided for decided, _ in zip(found, range(max(1, min(limit, ANSWERS))), strict=False)]


def explain(decided: Decided, offset_s: float) -> dict[str, Any]:
    """As JSON says it. offset_s: from the monotonic clock to the wall clock, epoch seconds."""
    mark, tenant, target = decided.mark, decided.tenant, decided.target
    said: dict[str, Any] = {
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
        "budget_ms": _budget(decided),
    }
    if target is not None:
        said["target"] = target.route
        said["route"] = target.plan.name
        said["pool"] = target.pool
        said["side"] = next((number for number, side in enumerate(target.plan.split) if side.pool == target.pool), None)
        said["limits"] = [allowance.name for allowance in target.allowances]
        said["queue"] = None if decided.ahead < 0 else {"ahead_at_arrival": decided.ahead}
        said["tried"] = [_address(endpoint) for endpoint in decided.tried]
        said["endpoint"] = None if decided.endpoint is None else _address(decided.endpoint)
    return said


def stages(decided: Decided) -> dict[str, float]:
    """Milliseconds in each room it came to; together they are `total`."""
    rooms = (
        ("receive", decided.received_s),
        ("queue", decided.queued_s),
        ("connect", decided.permit_s),
        ("upstream", decided.sent_s),
        ("answer", decided.response_s),
    )
    reached = [(name, start) for name, start in rooms if start]
    ends = [start for _, start in reached[1:]] + [decided.ended_s]
    took = {name: _ms(end - start) for (name, start), end in zip(reached, ends, strict=True)}
    return {**took, "total": _ms(decided.ended_s - decided.received_s)}


def _budget(decided: Decided) -> dict[str, float]:
    """Milliseconds to the deadline at each hop; below 0: it had passed."""
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
