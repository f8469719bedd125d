"""The gateway's control plane: health, metrics and what is in the queues."""

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oriel_gateway.core import Gateway
from oriel_gateway.stats import StatsCollector
from oriel_wire.engine.control import health_routes

__all__ = ["admin_app"]


def admin_app(gateway: Gateway) -> Starlette:
    """`/health/live`, `/health/ready`, `/metrics`, `/queues`."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(gateway.stats, lambda: gateway.pools))

    def ready() -> tuple[bool, str]:
        if gateway.draining:
            return False, "the gateway is shutting down"
        return gateway.ready, "" if gateway.ready else "the gateway has not yet asked its upstreams"

    async def queues(_: Request) -> Response:
        bands = {tier.name: tier.band for tier in gateway.snapshot.tiers.values()}
        return JSONResponse(
            {
                name: {
                    "permits": gate.admission.limit,
                    "inflight": gate.admission.inflight,
                    "waiting": {tier: gate.admission.queue.depth(band) for tier, band in bands.items()},
                    "waiting_bytes": gate.admission.queue.size_bytes,
                    "waiting_for_endpoints": gate.endpoints.parked + gate.grpc.parked,
                    "repeated": gate.retries.spent,
                    "endpoints": [
                        {
                            "address": f"{e.host}:{e.port}",
                            "state": e.state,
                            "outstanding": e.outstanding,
                            "idle": len(e.idle),
                        }
                        for e in gate.endpoints
                    ],
                }
                for name, gate in gateway.pools.items()
            }
        )

    return Starlette(routes=[*health_routes(ready, registry), Route("/queues", queues)])
