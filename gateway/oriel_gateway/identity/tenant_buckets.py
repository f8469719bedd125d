"""Fixed limits of what a tenant may do beside its calls: keep traces, and send requests that become no calls."""

from time import monotonic
from typing import Final

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Tenant

OTHERS_PER_S: Final = 100.0  # requests that become no calls
OTHERS_BURST: Final = 1000.0
RATE_PER_S: Final = 10.0
BURST: Final = 20.0
MAX_TENANTS: Final = 8192


class TenantBuckets:
    """A leaky bucket per tenant: `rate_per_s` a second, `burst` at once. The gateway's loop is the only writer.

    The defaults bound the traces that a tenant's clients may have kept by setting the sampled bit of their requests.

    A tenant is remembered by one number, the time at which its bucket is empty, and forgotten when that is past.
    """

    def __init__(self, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._empty_s: dict[str, float] = {}

    def allows(self, tenant: str, now: float) -> bool:
        """Count one of them; False: it is one too many and is not counted."""
        empty_s = max(self._empty_s.get(tenant, now), now)
        if empty_s - now > (self._burst - 1.0) / self._rate_per_s:
            return False
        if len(self._empty_s) >= MAX_TENANTS and tenant not in self._empty_s:
            self._empty_s = {name: at for name, at in self._empty_s.items() if at > now}
            if len(self._empty_s) >= MAX_TENANTS:
                return False
        self._empty_s[tenant] = empty_s + 1.0 / self._rate_per_s
        return True


class OtherRequests:
    """Counts the requests of a tenant that become no calls: wrong paths, and pages that the gateway makes for it."""

    def __init__(self) -> None:
        self._buckets = TenantBuckets(OTHERS_PER_S, OTHERS_BURST)

    def count(self, tenant: Tenant) -> None:
        """Count one. Raises Refused RATE_LIMITED if it is one too many."""
        if not self._buckets.allows(tenant.name, monotonic()):
            message = f"more than {OTHERS_PER_S:.0f} requests a second for pages of this gateway and for wrong paths"
            raise Refused(Outcome.RATE_LIMITED, message, retry_after_s=1)

    def count_refused(self, tenant: Tenant, refused: Refused) -> None:
        """Count a request that was refused because nothing is served at its path. Raises Refused RATE_LIMITED."""
        if refused.outcome in (Outcome.NOT_FOUND, Outcome.METHOD_NOT_ALLOWED):
            self.count(tenant)
