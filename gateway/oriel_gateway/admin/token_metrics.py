"""Export the tokens that tenants used, and what is left of their token limits, as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from oriel_gateway.core import Gateway
from oriel_wire.engine.families import counter, gauge


def token_metrics(gateway: Gateway) -> Iterator[Metric]:
    """Yield the tokens of the pairs of tenant and route that used the most, and the token limits that have the least
    left. `type` is what the semantic conventions of OpenTelemetry call `gen_ai.token.type`.
    """
    used = gateway.records.stats.usage.tokens.read()
    tokens = [((*of, kind), count) for of, counts in used.items() for kind, count in counts.items()]
    yield counter("oriel_gateway_tokens", "Tokens that calls read and wrote.", "tenant route type", tokens)
    left = [((each.tenant, each.limit), each.ratio) for each in gateway.spending.tokens_left()]
    text = "Share of a tenant's token limit that is free."
    yield gauge("oriel_gateway_token_limit_left_ratio", text, "tenant limit", left)
