"""The gateway's control plane: health, metrics and what is in the queues."""

from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oriel_gateway.core import Gateway
from oriel_gateway.documents import TokensReport
from oriel_gateway.limits import SharedLimiter
from oriel_gateway.limits.metrics import CourierCollector
from oriel_gateway.routing_stats import RoutingCollector
from oriel_gateway.stats import StatsCollector
from oriel_wire.engine.control import health_routes

__all__ = ["admin_app"]


def admin_app(gateway: Gateway) -> Starlette:
    """`/health/live`, `/health/ready`, `/metrics`, `/queues`, `/policies`."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(gateway.stats, lambda: gateway.pools))
    registry.register(RoutingCollector(lambda: gateway.routing))
    registry.register(gateway.documents)

    def key_sets() -> list[dict[str, Any]]:
        return gateway.key_sets.report() if gateway.key_sets is not None else []

    registry.register(TokensReport(gateway.tokens_refused, key_sets))
    if isinstance(gateway.limiter, SharedLimiter):
        registry.register(CourierCollector(gateway.limiter.courier))

    def ready() -> tuple[bool, str]:
        return not gateway.draining, "the gateway is shutting down" if gateway.draining else ""

    async def queues(_: Request) -> Response:
        bands = {tier.name: tier.band for tier in gateway.snapshot.tiers.values()}
        return JSONResponse(
            {
                name: {
                    "permits": gate.admission.limit,
                    "inflight": gate.admission.inflight,
                    "waiting": {tier: gate.admission.queue.depth(band) for tier, band in bands.items()},
                    "waiting_bytes": gate.admission.queue.size_bytes,
                    "endpoints": [
                        {"address": f"{e.host}:{e.port}", "outstanding": e.outstanding, "idle": len(e.idle)}
                        for e in gate.endpoints
                    ],
                }
                for name, gate in gateway.pools.items()
            }
        )

    async def policies(_: Request) -> Response:
        report = gateway.documents.report(gateway.snapshot)
        return JSONResponse({**report, "key_sets": key_sets()})

    routes = [Route("/queues", queues), Route("/policies", policies)]
    return Starlette(routes=[*health_routes(ready, registry), *routes])
