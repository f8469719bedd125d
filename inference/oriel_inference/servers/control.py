"""The metrics port: `/metrics`, `/health/*`, `/models` for operators and the supervisor, and `/quality/MODEL`."""

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oriel_inference.backends.nvml import GpuLoads
from oriel_inference.catalog import Entry
from oriel_inference.errors import InferenceError
from oriel_inference.host import HostLoad
from oriel_inference.metrics import exposition
from oriel_inference.quality.sampler import VersionQuality
from oriel_inference.servers.surface import Surface
from oriel_policies.quality.drift import MIN_ROWS
from oriel_wire.engine.families import Reading
from oriel_wire.observe.exposition import exposition as registry_text
from oriel_wire.observe.span_metrics import span_metrics
from oriel_wire.observe.telemetry import wants_openmetrics
from oriel_wire.process.control import health_routes, metrics_response


def control_app(surface: Surface, gpus: GpuLoads | None) -> Starlette:
    """Build the ASGI application of the metrics port. gpus: reader of GPU loads; None leaves out their metrics."""

    async def models(_: Request) -> Response:
        return JSONResponse([_line(entry) for entry in surface.catalog.index()])

    async def quality(request: Request) -> Response:
        try:
            found = surface.catalog.get(request.path_params["model"], request.query_params.get("version", ""))
        except InferenceError as error:
            return JSONResponse({"error": error.message}, status_code=404)
        sampled = surface.quality.of(found.spec.name, found.spec.version)
        if sampled is None:
            text = "its rows are not sampled: docs/prediction-quality.md says which are"
            return JSONResponse({"error": f"model {found.spec.name!r}: {text}"}, status_code=409)
        if not request.url.path.endswith("/reference"):
            return JSONResponse(_quality_of(sampled))
        # It sorts up to 4,096 values of each of 64 tensors.
        reference = await asyncio.to_thread(sampled.reference, datetime.now(UTC).isoformat(timespec="seconds"))
        if reference is None:
            text = f"{sampled.samples['counted']} rows were sampled, a reference needs {MIN_ROWS} of one tensor"
            return JSONResponse({"error": f"model {found.spec.name!r}: {text}"}, status_code=409)
        return Response(reference.encode(), media_type="application/json")

    host = HostLoad()
    spans = CollectorRegistry()
    spans.register(Reading(lambda: span_metrics("inference", surface.sink, surface.meter.kept, None)))

    async def metrics(request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        loads = [] if gpus is None else await gpus.latest()
        of_spans = registry_text(spans, openmetrics=openmetrics)
        of_models = exposition(surface, host, loads, openmetrics=openmetrics)
        return await metrics_response(chain(of_spans, of_models), openmetrics=openmetrics)

    routes = health_routes(surface.readiness, registry=None)
    own = [Route(path, quality) for path in ("/quality/{model}", "/quality/{model}/reference")]
    return Starlette(routes=[*routes, Route("/metrics", metrics), Route("/models", models), *own])


def _quality_of(sampled: VersionQuality) -> dict[str, Any]:
    return {
        "name": sampled.spec.name,
        "version": str(sampled.spec.version),
        "reference": sampled.has_reference,
        "rows": dict(sampled.samples),
        "tensors": {name: asdict(state) for name, state in sampled.states().items()},
    }


def _line(entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {
        "name": entry.name,
        "version": entry.shown_version,
        "state": entry.state.value,
        "reason": entry.reason,
    }
    serving = entry.serving
    if serving is not None:
        bounds = serving.spec.bounds
        line["provider"] = serving.provider
        if (life := serving.artefact) is not None:
            line["artefact"] = {
                "compiler": life.compiler,
                "state": life.state.value,
                "fingerprint": life.fingerprint,
                "reason": life.reason,
                "errors": life.note,
            }
        line["instances"] = serving.spec.instances
        line["instances_by"] = "demand" if serving.spec.by_demand else "configuration"
        line["instances_running"] = serving.batcher.running
        line["threads"] = serving.batcher.units
        line["batching"] = {
            "enabled": bounds is not None,
            "max_batch_size": serving.spec.max_batch_size,
            "preferred_batch_size": list(bounds.preferred_rows) if bounds else [],
            "max_queue_delay_microseconds": round(bounds.max_delay_s * 1e6) if bounds else 0,
        }
    return line
