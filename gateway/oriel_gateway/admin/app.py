"""The gateway's control plane: health, metrics, and the calls in the queues."""

import asyncio
from collections.abc import Sequence
from time import monotonic, time
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from oriel_gateway.admin.guard import Guard
from oriel_gateway.admin.metrics import CertificateCollector, GatewayCollector
from oriel_gateway.admin.queues import live_queues
from oriel_gateway.admin.routing_metrics import RoutingCollector
from oriel_gateway.admin.wake import BODY_S, MOST_BYTES, refusal, wake_pool
from oriel_gateway.core import Gateway
from oriel_gateway.documents.in_force import TokensReport
from oriel_gateway.limits import SharedLimiter
from oriel_gateway.limits.metrics import LedgerClientCollector
from oriel_gateway.observe.decisions import ANSWERS, Decided, explain
from oriel_wire.engine.control import health_routes
from oriel_wire.engine.tls import Certificates


def admin_app(gateway: Gateway, *, token: str | None = None, certificates: Certificates | None = None) -> ASGIApp:
    """Build the application of the admin port.

    It serves `/health/live`, `/health/ready` and `/metrics`; and with the token, if there is one, `/queues`,
    `/decisions`, `/decisions/<request-id>` (latest first; 404 if none is kept), `/policies`, and
    `POST /pools/<name>/wake`.
    """
    registry = CollectorRegistry()
    registry.register(GatewayCollector(gateway))
    if certificates is not None:
        registry.register(CertificateCollector(certificates))
    registry.register(RoutingCollector(lambda: gateway.routing))
    registry.register(gateway.documents)

    def key_sets() -> list[dict[str, Any]]:
        return gateway.key_sets.report() if gateway.key_sets is not None else []

    registry.register(TokensReport(gateway.tokens_refused, key_sets))
    if isinstance(gateway.limiter, SharedLimiter):
        registry.register(LedgerClientCollector(gateway.limiter.ledger_client))

    def ready() -> tuple[bool, str]:
        if gateway.draining:
            gates = (*gateway.pools.values(), *gateway.left_pools)
            calls = sum(gate.admission.inflight + gate.admission.queue.items for gate in gates)
            return False, f"the gateway is shutting down, {calls} call(s) under way"
        return gateway.ready, "" if gateway.ready else "the gateway has not yet probed its upstreams"

    async def queues(_: Request) -> Response:
        return JSONResponse(live_queues(gateway))

    async def decision(request: Request) -> Response:
        return _decisions(gateway.records.decisions.of(request.path_params["request_id"]))

    async def decisions(request: Request) -> Response:
        query = request.query_params
        limit = query.get("limit", "20")
        if len(limit) > 3 or not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit) <= ANSWERS:
            return JSONResponse({"error": {"message": f"limit is a number from 1 to {ANSWERS}"}}, status_code=400)
        tenant, reason = query.get("tenant", ""), query.get("reason", "")
        return _decisions(gateway.records.decisions.where(tenant=tenant, reason=reason, limit=int(limit)))

    async def policies(_: Request) -> Response:
        report = gateway.documents.report(gateway.snapshot)
        return JSONResponse({**report, "key_sets": key_sets()})

    async def wake(request: Request) -> Response:
        # A page in a browser could send this request without being able to read the answer. Only browsers send
        # `Origin`.
        if "origin" in request.headers:
            message = "a call from a page in a browser: send it from a program"
            return JSONResponse(refusal(message), status_code=403)
        body = b""
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MOST_BYTES:
                        return JSONResponse(refusal(f"the body has more than {MOST_BYTES} bytes"), status_code=413)
        except (TimeoutError, ClientDisconnect):
            return JSONResponse(refusal(f"the body has not come within {BODY_S:g} s"), status_code=408)
        status, answer = wake_pool(gateway.scaled, request.path_params["name"], body)
        return JSONResponse(answer, status_code=status)

    routes = [
        Route("/queues", queues),
        Route("/decisions", decisions),
        Route("/decisions/{request_id}", decision),
        Route("/policies", policies),
        Route("/pools/{name}/wake", wake, methods=["POST"]),
    ]
    return Guard(Starlette(routes=[*health_routes(ready, registry), *routes]), token)


def _decisions(found: Sequence[Decided]) -> Response:
    offset_s = time() - monotonic()
    status = 200 if found else 404
    return JSONResponse({"decisions": [explain(decided, offset_s) for decided in found]}, status_code=status)
