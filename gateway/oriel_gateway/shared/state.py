"""State that special routes share in one gateway: kept answers, open flights, copies on their way, and counters."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from oriel_gateway.shared.agreement import Agreement
from oriel_gateway.shared.canaries import Canaries
from oriel_policies.documents import Tenant
from oriel_policies.upstreams.answer_cache import AnswerCache

CACHE_BYTES = 64 * 1024 * 1024  # bytes of kept answers, over all routes
KEPT_BYTES = 1024 * 1024  # largest answer that is kept or given to more than one caller
REPLAY_BYTES = 64 * 1024  # largest body that is hashed, kept for a copy, or waits for an equal call's answer
SHADOWS = 64  # copies on their way at once


class Detached(Protocol):
    """A call that is made for others, with an owner that is not a client."""

    def cancel(self) -> None:
        """End the call: nobody waits for it, or the gateway closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """A whole answer that may be given to more than one caller. lines: status line and fields, without a length."""

    lines: tuple[bytes, ...]
    body: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes that keeping it costs, with a share for the objects around it."""
        return len(self.body) + sum(map(len, self.lines)) + 64 * len(self.lines) + 512


@dataclass(slots=True, kw_only=True)
class RoutingState:
    """Single writer: the gateway's loop. The counters' keys are label values."""

    cache: AnswerCache[KeptAnswer]
    flights: dict[Hashable, Any] = field(default_factory=dict)  # open ones, see `single_flight`
    detached: dict[Detached, None] = field(default_factory=dict)  # calls without a client, to be ended at close
    shadows: int = 0
    shadow_tenants: dict[Tenant, Tenant] = field(default_factory=dict)  # the same tenants in the lowest band
    cache_counts: dict[tuple[str, str], int] = field(default_factory=dict)  # (route, hit | joined | miss)
    shadow_counts: dict[tuple[str, str, str], int] = field(default_factory=dict)  # (route, pool, result)
    side_counts: dict[tuple[str, str], int] = field(default_factory=dict)  # (route, side)
    agreement: Agreement = field(default_factory=Agreement)
    canaries: Canaries = field(default_factory=Canaries)

    def answered_from(self, route: str, how: str) -> None:
        """Count how a call of a deterministic route was answered."""
        key = (route, how)
        self.cache_counts[key] = self.cache_counts.get(key, 0) + 1

    def compared(self, route: str, pool: str, result: str) -> None:
        """Count what became of one copy."""
        key = (route, pool, result)
        self.shadow_counts[key] = self.shadow_counts.get(key, 0) + 1

    def took_side(self, route: str, side: str) -> None:
        """Count a call that went to one side of a split."""
        key = (route, side)
        self.side_counts[key] = self.side_counts.get(key, 0) + 1

    def adopted(self) -> None:
        """Forget what refers to documents that were replaced. Kept answers stay until their time is up."""
        self.shadow_tenants = {}

    def close(self) -> None:
        """End the calls that are made for others."""
        for call in list(self.detached):
            call.cancel()
