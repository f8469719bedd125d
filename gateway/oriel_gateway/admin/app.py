"""The gateway's control plane: health, metrics, and the calls in the queues."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from time import monotonic, time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from oriel_gateway.admin.console.live import STREAM, Live, Source
from oriel_gateway.admin.console.pages import PATHS, OnlyGet, Pages
from oriel_gateway.admin.console.tenants import tenant_report
from oriel_gateway.admin.guard import Guard
from oriel_gateway.admin.metrics import GatewayCollector, certificate_metrics
from oriel_gateway.admin.queues import live_queues
from oriel_gateway.admin.slo import LISTED, MOST_LISTED, slo_report
from oriel_gateway.admin.troubles import troubles
from oriel_gateway.admin.wake import BODY_S, MOST_BYTES, refusal, wake_pool
from oriel_gateway.core import Gateway
from oriel_gateway.documents.in_force import issuer_metrics
from oriel_gateway.errors import Outcome
from oriel_gateway.limits import SharedLimiter
from oriel_gateway.limits.shared import limiter_metrics
from oriel_gateway.observe.decisions import ANSWERS, explain, use_of
from oriel_gateway.observe.record import Record
from oriel_gateway.pools.model_placement import shown
from oriel_policies.metering.budgets import costs
from oriel_wire.engine.families import Reading
from oriel_wire.engine.tls import Certificates
from oriel_wire.observe.span_metrics import span_metrics
from oriel_wire.process.control import health_routes
from oriel_wire.usage.lines import LedgerCounts
from oriel_wire.usage.metrics import ledger_metrics


def admin_app(
    gateway: Gateway,
    *,
    token: str | None = None,
    certificates: Certificates | None = None,
    live: Live | None = None,
    trace_url: str = "",
    usage: LedgerCounts | None = None,
) -> Guard:
    """Build the application of the admin port.

    It serves `/health/live`, `/health/ready`, `/metrics` and the files of `/console`; and with the token, if there is
    one, `/queues`, `/decisions`, `/decisions/<request-id>` (latest first; 404 if none is kept), `/slo`, `/policies`,
    `/placement`, `/console/live`, `/console/tenants/<name>`, and `POST /pools/<name>/wake`.

    live: the console's streams, for those who have to end them.
    usage: counts of the usage ledger, if there is one.
    trace_url: the address at which a trace is shown, with `{trace_id}` in it; "" for nowhere.
    """
    registry, collected = CollectorRegistry(), GatewayCollector(gateway)

    def key_sets() -> list[dict[str, Any]]:
        return gateway.key_sets.report() if gateway.key_sets is not None else []

    def families() -> Iterator[Metric]:
        yield from collected.collect()
        if certificates is not None:
            yield from certificate_metrics(certificates)
        yield from ledger_metrics(usage or LedgerCounts())
        yield from gateway.documents.collect()
        yield from span_metrics("gateway", gateway.sink, gateway.records.kept, gateway.recaller)
        yield from issuer_metrics(gateway.tokens_refused, key_sets())
        if isinstance(gateway.limiter, SharedLimiter):
            yield from limiter_metrics(gateway.limiter.ledger_client)

    registry.register(Reading(families))

    async def queues(_: Request) -> Response:
        return JSONResponse(live_queues(gateway))

    def answer(found: Sequence[Record]) -> Response:
        decisions = [_decision(gateway, decided, trace_url) for decided in found]
        named = troubles(gateway, certificates, usage)
        return JSONResponse({"decisions": decisions, "troubles": named}, status_code=200 if found else 404)

    async def decision(request: Request) -> Response:
        return answer(gateway.records.decisions.of(request.path_params["request_id"]))

    async def decisions(request: Request) -> Response:
        query = request.query_params
        limit = query.get("limit", "20")
        if not _is_count(limit, ANSWERS):
            return JSONResponse({"error": {"message": f"limit is a number from 1 to {ANSWERS}"}}, status_code=400)
        tenant, reason = query.get("tenant", ""), query.get("reason", "")
        found = gateway.records.decisions.where(tenant=tenant, reason=reason, limit=int(limit))
        return answer(found)

    async def slo(request: Request) -> Response:
        limit = request.query_params.get("limit", str(LISTED))
        if not _is_count(limit, MOST_LISTED):
            return JSONResponse({"error": {"message": f"limit is a number from 1 to {MOST_LISTED}"}}, status_code=400)
        return JSONResponse(slo_report(gateway, tenant=request.query_params.get("tenant", ""), limit=int(limit)))

    async def policies(_: Request) -> Response:
        report = gateway.documents.report(gateway.snapshot)
        return JSONResponse({**report, "key_sets": key_sets()})

    async def placement(_: Request) -> Response:
        return JSONResponse(shown(gateway.placements))

    async def wake(request: Request) -> Response:
        return await _wake(gateway, request)

    async def tenant(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        found = tenant_report(gateway, request.path_params["name"], request.query_params)
        answer = found or refusal("no tenant of the documents has this name")
        await JSONResponse(answer, 200 if found else 404)(scope, receive, send)

    pages = OnlyGet(Pages(token=token is not None))
    routes = [
        *[Route(path, pages) for path in PATHS],
        Route(STREAM, OnlyGet(live or Live(Source(gateway, certificates, usage)))),
        Route("/console/tenants/{name}", OnlyGet(tenant)),
        Route("/queues", queues),
        Route("/decisions", decisions),
        Route("/decisions/{request_id}", decision),
        Route("/slo", slo),
        Route("/policies", policies),
        Route("/placement", placement),
        Route("/pools/{name}/wake", wake, methods=["POST"]),
    ]
    return Guard(Starlette(routes=[*health_routes(lambda: _ready(gateway), registry), *routes]), token)


def _ready(gateway: Gateway) -> tuple[bool, str]:
    """Return whether new connections are welcome, and why not."""
    if gateway.draining:
        gates = (*gateway.pools.values(), *gateway.left_pools)
        calls = sum(gate.admission.inflight + len(gate.admission.queue) for gate in gates)
        incomplete = sum(each.collecting for each in gateway.clock)
        return False, f"the gateway is shutting down, {calls} call(s) under way, {incomplete} not received yet"
    return gateway.ready, "" if gateway.ready else "the gateway has not yet probed its upstreams"


async def _wake(gateway: Gateway, request: Request) -> Response:
    """Wake a pool, as the body of the request says."""
    # A page in a browser could send this request without being able to read the answer. Only browsers send `Origin`.
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


def _is_count(text: str, most: int) -> bool:
    return len(text) <= 4 and text.isascii() and text.isdecimal() and 1 <= int(text) <= most


def _decision(gateway: Gateway, decided: Record, trace_url: str) -> dict[str, Any]:
    """Return the record of a request as JSON, with its cost and the address of its trace."""
    offset_s = time() - monotonic()
    each = explain(decided, offset_s)
    each["cost"] = _cost(gateway, decided, offset_s)
    if trace_url:
        each["trace_url"] = trace_url.replace("{trace_id}", each["trace_id"])
    return each


def _cost(gateway: Gateway, decided: Record, offset_s: float) -> dict[str, str] | None:
    """The costs of a call for its tenant, by currency; None if its server did not report what it used.

    Only calls that were answered cost something.
    """
    use = use_of(decided) if decided.outcome is Outcome.ANSWERED and decided.status < 400 else None
    if use is None:
        return None
    day = datetime.fromtimestamp(decided.ended_s + offset_s, UTC).strftime("%Y-%m-%d")
    return costs([use], gateway.snapshot.prices.values(), day)
