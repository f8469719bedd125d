"""Answers `GET /v1/usage` and `GET /v1/limits`: a tenant sees its own use and limits with its key."""

from time import monotonic

import msgspec

from oriel_gateway.api_docs.pages import JSON, Page
from oriel_gateway.core import Gateway
from oriel_gateway.limits.error_text import shown
from oriel_policies.documents import Tenant
from oriel_policies.promise.tiers import allowing_more

USAGE = "/v1/usage"
LIMITS = "/v1/limits"
PATHS = frozenset({USAGE, LIMITS})
_PRIVATE = (
    ("cache-control", "private, no-store"),
    ("vary", "authorization, x-api-key"),
    ("x-content-type-options", "nosniff"),
)


def use_page(path: str, tenant: Tenant, gateway: Gateway) -> Page:
    """Return the page of a tenant: what it used, or its limits and what is left of them."""
    if path == USAGE:
        page: dict[str, object] = gateway.records.stats.usage.of(tenant.name)
        if tenant.budgets:
            page["budgets"] = gateway.spending.of(tenant)
    else:
        gateway.records.stats.count()  # adds the calls that have ended to the spent amounts
        now = monotonic()
        limits = [
            shown(*bound)
            for allowance in tenant.allowances
            for bound in gateway.limiter.remaining(tenant.name, allowance, now)
        ]
        tier, tiers = tenant.tier, gateway.snapshot.tiers
        more_ms = {each.name: round(each.give_up_s * 1e3) for each in allowing_more(tier, tiers)}
        deadline = {"most_ms": round(tier.give_up_s * 1e3), "set_by": f"tier {tier.name}", "more_ms": more_ms}
        scalings = [pool.scaling for pool in gateway.snapshot.pools.values() if pool.scaling is not None]
        deadline["held_ms"] = round(max([each.hold_for(tier.name) or 0.0 for each in scalings], default=0.0) * 1e3)
        page = {"tenant": tenant.name, "tier": tier.name, "deadline": deadline, "limits": limits}
    return Page(JSON, msgspec.json.encode(page), _PRIVATE)
