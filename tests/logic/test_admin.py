"""Health and metrics of a unit."""

import asyncio
from typing import Any

import httpx

from oriel_logic.errors import Outcome
from oriel_logic.metrics import MAX_STAGES, Metrics
from oriel_logic.stages import Ledger
from oriel_wire.trace import new_trace

SERVICE = "from oriel_logic import service\n@service\ndef plain(request): return 1\n"


async def test_health_follows_the_unit(stack: Any, services: Any) -> None:
    logic = await stack(services(plain=SERVICE))
    stop = asyncio.Event()
    transport = httpx.ASGITransport(logic.unit.admin(stop))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        assert (await admin.get("/health/ready")).status_code == 200
        stop.set()
        stopping = await admin.get("/health/ready")
        assert (stopping.status_code, stopping.json()["reason"]) == (503, "the server is stopping")
        assert (await admin.get("/health/live")).status_code == 200


async def test_metrics_count_requests_by_service_and_outcome(stack: Any, services: Any) -> None:
    logic = await stack(services(plain=SERVICE))
    await logic.post("plain")
    await logic.post("made-up-name")
    transport = httpx.ASGITransport(logic.unit.admin(asyncio.Event()))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        text = (await admin.get("/metrics")).text
    assert 'oriel_logic_requests_total{outcome="ok",service="plain"} 1.0' in text
    assert 'oriel_logic_requests_total{outcome="service_unknown",service=""} 1.0' in text
    assert 'oriel_logic_stage_seconds_count{service="plain",stage="work",tier=""} 1.0' in text
    assert "oriel_logic_workers_ready 1.0" in text
    assert "made-up-name" not in text


async def test_stage_names_are_bounded() -> None:

    metrics = Metrics()
    ledger = Ledger(new_trace(False))
    for index in range(100):
        with ledger.stage(f"s{index}"):
            pass
    metrics.observe("x", "gold", Outcome.OK, 1.0, ledger.stages)
    value = metrics.registry.get_sample_value
    assert (
        value("oriel_logic_stage_seconds_count", {"service": "x", "stage": "other", "tier": "gold"}) == 100 - MAX_STAGES
    )
