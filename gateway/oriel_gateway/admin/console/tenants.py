"""The console's view of one tenant: what it used and its cost today, its limits with what is left of them, and what
`oriel policies explain` says.
"""

from collections.abc import Mapping
from time import monotonic, time
from typing import Any, Final

from oriel_gateway.core import Gateway
from oriel_gateway.limits.error_text import shown
from oriel_policies.bounds.kinds import UNITS
from oriel_policies.documents import ApiKey, Tenant
from oriel_policies.metering.budgets import costs
from oriel_policies.promise.explain import ExplainedCall, explain

MAX_LIMITS: Final = 64
MAX_STEPS: Final = 32
MAX_CHARACTERS: Final = 128  # longest name in the query


def tenant_report(gateway: Gateway, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the facts about a tenant; None if no tenant has this name.

    query: `model` or `service`, of the call to explain; without one nothing is explained.
    """
    tenant = gateway.snapshot.tenants.get(name)
    if tenant is None:
        return None
    gateway.records.stats.count()  # adds the calls that have ended to the spent amounts
    return {
        "tenant": tenant.name,
        "tier": tenant.tier.name,
        "weight": tenant.weight,
        "scopes": sorted(tenant.scopes),
        "models": list(tenant.models[:MAX_LIMITS]),
        "services": list(tenant.services[:MAX_LIMITS]),
        "today": _today(gateway, tenant),
        "limits": _limits(gateway, tenant),
        "steps": _steps(gateway, tenant, query),
    }


def _today(gateway: Gateway, tenant: Tenant) -> dict[str, Any]:
    """The tenant's use since midnight (UTC), and its cost by the prices in force."""
    day, uses = gateway.records.stats.usage.today(tenant.name)
    return {
        "device_ms": round(sum([sum(use.device_ns.values()) for use in uses]) / 1e6, 3),
        "cpu_ms": round(sum([use.cpu_ns for use in uses]) / 1e6, 3),
        "bytes_out": sum([use.bytes_out for use in uses]),
        "tokens_in": sum([use.tokens_in for use in uses]),
        "tokens_out": sum([use.tokens_out for use in uses]),
        "cost": costs(uses, gateway.snapshot.prices.values(), day),
    }


def _limits(gateway: Gateway, tenant: Tenant) -> list[dict[str, Any]]:
    limiter = gateway.limiter
    found = []
    for allowance in tenant.allowances:
        for bound, left, wait_s in limiter.remaining(tenant.name, allowance, monotonic()):
            if bound.budget is not None:
                amounts = shown(bound, left, wait_s)
                found.append(
                    {
                        "name": bound.name,
                        "counts": bound.budget.unit,
                        "limit": float(amounts["limit"]),
                        "period": amounts["per"],
                        "left": float(amounts["left"]),
                        "full_in_s": round(wait_s, 1),
                    }
                )
                continue
            line: dict[str, Any] = {"name": bound.name, "counts": UNITS[bound.counts].shown, "limit": bound.limit}
            if bound.rate is not None:
                line["per_s"] = bound.rate.requests_per_s
            if bound.period is not None:
                line["period"] = bound.period.value
            line["left"] = max(0, int(left + 1e-6))
            line["full_in_s"] = round(wait_s, 1)
            found.append(line)
    return found[:MAX_LIMITS]


def _steps(gateway: Gateway, tenant: Tenant, query: Mapping[str, str]) -> list[dict[str, str]]:
    model, service = query.get("model", "")[:MAX_CHARACTERS], query.get("service", "")[:MAX_CHARACTERS]
    if not model and not service:
        return []
    call = ExplainedCall(model=model or None, service=None if model else service)
    steps = explain(gateway.snapshot, ApiKey(tenant=tenant, expires_at=None), call, now=time())
    return [{"stage": step.stage, "text": step.says, "refused": step.refused} for step in steps[:MAX_STEPS]]
