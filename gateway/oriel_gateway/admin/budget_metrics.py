"""Export how much of their budgets tenants have spent as Prometheus metrics. Only the fullest budgets have series."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from oriel_gateway.core import Gateway
from oriel_wire.engine.families import gauge


def budget_metrics(gateway: Gateway) -> Iterator[Metric]:
    """Yield the budgets of tenants that have spent something."""
    gateway.records.stats.count()
    fills = [((fill.tenant, fill.budget), fill) for fill in gateway.spending.fills()]
    text = "Share of a tenant's budget that is spent."
    yield gauge("oriel_gateway_budget_spent_ratio", text, "tenant budget", [(of, fill.ratio) for of, fill in fills])
    text = "Share of a tenant's budget from which a warning is due."
    yield gauge("oriel_gateway_budget_warn_ratio", text, "tenant budget", [(of, fill.warn) for of, fill in fills])
    text = "1 if calls are refused once the budget is spent."
    yield gauge("oriel_gateway_budget_stops", text, "tenant budget", [(of, fill.stop) for of, fill in fills])
