"""Export the tokens that tenants used, and what is left of their token limits, as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from oriel_gateway.admin.families import counter, gauge
from oriel_gateway.core import Gateway


class TokenCollector(Collector):
    """Collects the tokens of the pairs of tenant and route that used the most, and the token limits that have the least
    left. `type` is what the semantic conventions of OpenTelemetry call `gen_ai.token.type`.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        usage = self._gateway.records.stats.usage
        tokens = counter("oriel_gateway_tokens", "Tokens that calls read and wrote.", "tenant", "route", "type")
        for (tenant, route), counts in usage.tokens.read().items():
            for kind, count in counts.items():
                tokens.add_metric([tenant, route, kind], count)
        left = gauge(
            "oriel_gateway_token_limit_left_ratio", "Share of a tenant's token limit that is free.", "tenant", "limit"
        )
        for each in self._gateway.spending.tokens_left():
            left.add_metric([each.tenant, each.limit], each.ratio)
        yield from (tokens, left)
