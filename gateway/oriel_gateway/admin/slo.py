"""Reports whether the promises of tiers are kept, for `GET /slo`, `oriel slo` and the console.

`slo_report` returns a JSON object:

    at          epoch seconds
    windows     {"5m": 300.0, ..., "30d": 2592000.0}: name -> seconds
    kept        whether the counts survive a restart
    gateways    how many gateways share a limiter's Redis: the counts are those of all of them, also of those that ended
    tiers       one object per tier of the documents, by band
    targets     one object per tenant, tier and target: those with the most bad calls of 30 days first
    more        how many of those are not listed

An object of `tiers` has `tier`, `target_ms` and `objective`; one of `targets` has `tenant`, `tier` and `target`
(`model:NAME`, `service:NAME`; `none`: refused before it was known; tenant and target `other`: all that have no history
of their own). Both have:

    calls, bad      {window: number}: calls that count, and the late and missed ones among them
    attainment      {window: share of calls that kept the promise, null without calls}
    burn            {window: how many times faster than allowed the budget was used, null without calls}
    budget_left     the share of the budget of 30 days that is left; below 0 if more was used
    causes          {cause: bad calls of the last hour}, the most frequent first

Windows of up to 3 days are made of slots of 5 minutes, and the one of 30 days of hours; of the oldest slot, the part
inside the window counts. Causes are those that came while this gateway runs: a restart forgets them.
"""

from time import time
from typing import Any, Final

from oriel_gateway.core import Gateway
from oriel_gateway.limits.shared import SharedLimiter
from oriel_policies.promise.error_budget import WINDOWS

LISTED: Final = 100
MOST_LISTED: Final = 1000


def gateways(gateway: Gateway) -> int:
    """Return how many gateways count together with this one, itself among them."""
    return gateway.limiter.ledger_client.replicas if isinstance(gateway.limiter, SharedLimiter) else 1


def slo_report(gateway: Gateway, *, tenant: str = "", limit: int = LISTED) -> dict[str, Any]:
    """Return the report above. tenant: only what concerns this one is listed in `targets`."""
    now = time()
    budgets = gateway.records.stats.objectives.budgets
    tiers = sorted(gateway.snapshot.tiers.values(), key=lambda tier: (tier.band, tier.target_s, tier.name))
    objectives = {tier.name: tier.objective for tier in tiers}
    listed, found = budgets.of_pairs(objectives, now, tenant=tenant, limit=limit)
    return {
        "at": round(now, 3),
        "windows": WINDOWS,
        "kept": budgets.keeps or budgets.unshared is not None,
        "gateways": gateways(gateway),
        "tiers": [
            {
                "tier": tier.name,
                "target_ms": round(tier.target_s * 1e3, 3),
                "objective": tier.objective,
                **budgets.of_tier(tier.name, tier.objective, now),
            }
            for tier in tiers
        ],
        "targets": [
            {"tenant": of, "tier": tier, "target": target, **figures} for (of, tier, target), figures in listed
        ],
        "more": found - len(listed),
    }
