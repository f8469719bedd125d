"""The metrics port: `/metrics`, `/health/*`, and `/models` for operators and the supervisor."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oriel_inference.lifecycle import Entry
from oriel_inference.metrics import build_registry
from oriel_inference.servers.surface import Surface
from oriel_wire.engine.control import health_routes

__all__ = ["control_app"]


def control_app(surface: Surface) -> Starlette:
    """The ASGI application of the metrics port."""

    async def models(_: Request) -> Response:
        return JSONResponse([_line(entry) for entry in surface.catalog.index()])

    routes = health_routes(surface.readiness, build_registry(surface.catalog))
    return Starlette(routes=[*routes, Route("/models", models)])


def _line(entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {
        "name": entry.name,
        "version": str(entry.version) if entry.version else "",
        "state": entry.state.value,
        "reason": entry.reason,
    }
    serving = entry.serving
    if serving is not None:
        bounds = serving.spec.bounds
        line["provider"] = serving.provider
        line["instances"] = serving.spec.instances
        line["threads"] = serving.batcher.units
        line["batching"] = {
            "enabled": bounds is not None,
            "max_batch_size": serving.spec.max_batch_size,
            "preferred_batch_size": list(bounds.preferred_rows) if bounds else [],
            "max_queue_delay_microseconds": round(bounds.max_delay_s * 1e6) if bounds else 0,
        }
    return line
