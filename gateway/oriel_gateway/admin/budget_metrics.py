"""Export how much of their budgets tenants have spent as Prometheus metrics. Only the fullest budgets have series."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from oriel_gateway.admin.families import gauge
from oriel_gateway.core import Gateway


class BudgetCollector(Collector):
    """Collects the budgets of tenants that have spent something."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        self._gateway.records.stats.count()
        labels = ("tenant", "budget")
        spent = gauge("oriel_gateway_budget_spent_ratio", "Share of a tenant's budget that is spent.", *labels)
        warn = gauge(
            "oriel_gateway_budget_warn_ratio", "Share of a tenant's budget from which a warning is due.", *labels
        )
        stops = gauge("oriel_gateway_budget_stops", "1 if calls are refused once the budget is spent.", *labels)
        for fill in self._gateway.spending.fills():
            names = [fill.tenant, fill.budget]
            spent.add_metric(names, fill.ratio)
            warn.add_metric(names, fill.warn)
            stops.add_metric(names, fill.stop)
        yield from (spent, warn, stops)
