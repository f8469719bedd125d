"""The `Limiter` seam and the embedded limiter: exact within this process, gone with it."""

from math import ceil
from typing import Protocol

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Tenant
from oriel_policies.limits import Gcra, policy_header, state_header

__all__ = ["EmbeddedLimiter", "Limiter"]


class Limiter(Protocol):
    """Counts a call against its tenant's limits."""

    def take(self, tenant: Tenant, now: float) -> None:
        """Count one request at monotonic time `now`. Raises Refused RATE_LIMITED with the true wait."""


class EmbeddedLimiter:
    """GCRA per tenant name, so that a reload of the documents forgives nothing."""

    def __init__(self, *, max_tenants: int = 100_000) -> None:
        self._buckets: dict[str, Gcra] = {}
        self._max_tenants = max_tenants

    def take(self, tenant: Tenant, now: float) -> None:
        if not tenant.allowances or (limit := tenant.allowances[0].rate) is None:
            return
        bucket = self._buckets.get(tenant.name)
        if bucket is None:
            if len(self._buckets) >= self._max_tenants:
                self._forget(now)
            bucket = self._buckets[tenant.name] = Gcra()
        wait_s = bucket.take(limit, now)
        if wait_s > 0.0:
            retry_after_s = max(1, ceil(wait_s))
            raise Refused(
                Outcome.RATE_LIMITED,
                f"this key may send {limit.requests_per_s:g} requests per second (bursts of {limit.burst}); "
                f"the next is possible in {wait_s:.2f} s",
                retry_after_s=retry_after_s,
                headers=(
                    ("ratelimit-policy", policy_header(limit)),
                    ("ratelimit", state_header(0, wait_s)),
                ),
            )

    def _forget(self, now: float) -> None:
        """Drop tenants that are back at their full burst."""
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket.arrival > now}
