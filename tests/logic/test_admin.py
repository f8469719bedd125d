"""Health and metrics of a unit."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from oriel_logic.app import Unit
from oriel_logic.errors import Outcome
from oriel_logic.loading.listing import read_listing, together
from oriel_logic.observe.metrics import MAX_STAGES, MAX_TIERS, Metrics
from oriel_logic.observe.stages import Ledger
from oriel_logic.settings import Settings
from oriel_logic.workers.launch import ForkServer
from oriel_wire.observe.exposition import exposition
from oriel_wire.observe.trace import ListSink, new_trace
from oriel_wire.process.control import health_routes

SERVICE = "from oriel_logic import service\n@service\ndef plain(request): return 1\n"


def admin_app(unit: Unit) -> Starlette:
    return Starlette(routes=health_routes(unit.ready, unit.metrics.registry))


async def test_health_and_metrics_follow_the_unit(stack: Any, services: Any) -> None:
    logic = await stack(services(plain=SERVICE))
    stop = logic.unit._stop
    transport = httpx.ASGITransport(admin_app(logic.unit))
    await logic.post("plain")
    await logic.post("made-up-name")
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        text = (await admin.get("/metrics")).text
        assert (await admin.get("/health/ready")).status_code == 200
        stop.set()
        stopping = await admin.get("/health/ready")
        assert (stopping.status_code, stopping.json()["reason"]) == (503, "the server is stopping, 0 call(s) under way")
        assert (await admin.get("/health/live")).status_code == 200
    assert 'oriel_logic_requests_total{outcome="ok",service="plain"} 1.0' in text
    assert 'oriel_logic_requests_total{outcome="service_unknown",service=""} 1.0' in text
    assert 'oriel_logic_stage_seconds_count{service="plain",stage="work",tier=""} 1.0' in text
    assert "oriel_logic_workers_ready " in text
    assert "made-up-name" not in text
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics-logic.md").read_text()
    rows = {row.split("`")[1]: row.split("|")[2].strip() for row in page.splitlines() if row.startswith("| `")}
    families = {
        f"{each.name}_total" if each.type == "counter" else each.name: each.type
        for each in logic.unit.metrics.registry.collect()
    }
    assert rows == families


async def test_the_service_port_is_ready_with_its_workers_and_not_before(services: Any, tmp_path: Path) -> None:
    """A gateway probes the address that it calls; calls that came before the workers were ready were lost."""
    folder, gate = services(), tmp_path / "gate"
    os.mkfifo(gate)
    waits_in_workers = SERVICE + f"import os\nif os.getpid() != {os.getpid()}: open({str(gate)!r}).read()\n"
    (folder / "plain.py").write_text(waits_in_workers)
    settings = Settings(services=(folder,), inference=(("127.0.0.1", 1),), workers=1, watch=False, max_in_flight=0)
    listing = read_listing(settings.services)
    server = ForkServer.launch(together(listing), max_frame_bytes=settings.max_frame_bytes)
    stop = asyncio.Event()
    unit = Unit(settings, server, listing, ListSink(), stop=stop)
    try:
        await unit.start()
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        front = await unit.open(sock)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}", trust_env=False) as client:
            early = await client.get("/health/ready")
            assert (early.status_code, early.json()["reason"]) == (503, "the services are being set up")
            assert (await client.get("/v2/health/ready")).status_code == 503  # probed where models share the pool
            await asyncio.to_thread(gate.write_text, "")
            await unit.pool.wait_ready()
            for path in ("/health/ready", "/v2/health/ready"):
                assert (await client.get(path)).status_code == 200  # although no call may run
            stop.set()
            assert (await client.get("/health/ready")).status_code == 503
        assert unit.metrics.registry.get_sample_value("oriel_logic_in_flight") == 0
        assert "oriel_logic_requests_total{" not in "".join(exposition(unit.metrics.registry, openmetrics=False))
        await front.drain(0.0)
    finally:
        await unit.close()


async def test_what_hung_at_start_and_was_fixed_keeps_nobody_waiting(services: Any) -> None:
    folder = services()
    hangs_in_workers = SERVICE + f"import os, time\nif os.getpid() != {os.getpid()}: time.sleep(60)\n"
    (folder / "plain.py").write_text(hangs_in_workers)
    settings = Settings(services=(folder,), inference=(("127.0.0.1", 1),), workers=1, watch=False)
    listing = read_listing(settings.services)
    server = ForkServer.launch(together(listing), max_frame_bytes=settings.max_frame_bytes)
    unit = Unit(settings, server, listing, ListSink())
    try:
        await unit.start()
        assert not unit.is_ready
        (folder / "plain.py").write_text(SERVICE)
        for _ in range(2):
            await unit.updates.poll()
        await unit.updates.settled()
        assert unit.is_ready
    finally:
        await unit.close()


async def test_stage_names_are_bounded() -> None:
    metrics = Metrics()
    ledger = Ledger(new_trace(False))
    for index in range(100):
        with ledger.stage(f"s{index}"):
            pass
    metrics.observe("x", "gold", Outcome.OK, 1.0, ledger.stages)
    value = metrics.registry.get_sample_value
    labels = {"service": "x", "stage": "other", "tier": "gold"}
    assert value("oriel_logic_stage_seconds_count", labels) == 100 - MAX_STAGES


async def test_tiers_are_bounded_and_told_apart() -> None:
    metrics = Metrics()
    for index in range(100):
        metrics.observe("x", f"tier-{index}", Outcome.OK, 0.002, ())
    metrics.observe("x", "tier-0", Outcome.QUEUE_FULL, 0.2, ())
    value = metrics.registry.get_sample_value
    # One place is that of requests without a tier.
    assert value("oriel_logic_request_seconds_count", {"service": "x", "tier": "other"}) == 100 - MAX_TIERS + 1
    buckets = [
        value("oriel_logic_request_seconds_bucket", {"service": "x", "tier": "tier-0", "le": le})
        for le in ("0.001", "0.0025", "0.1", "0.25", "+Inf")
    ]
    assert buckets == [0, 1, 1, 2, 2]
    assert value("oriel_logic_requests_total", {"service": "x", "outcome": "ok"}) == 100
    assert value("oriel_logic_requests_total", {"service": "x", "outcome": "saturated"}) == 1


async def test_no_counter_falls_when_a_pool_is_closed(stack: Any, services: Any) -> None:
    folder = services(plain=SERVICE)
    logic = await stack(folder)
    value = logic.unit.metrics.registry.get_sample_value

    async def save(text: str) -> None:
        (folder / "plain.py").write_text(text)
        for _ in range(2):
            await logic.unit.updates.poll()
        await logic.unit.updates.settled()

    await logic.post("plain")
    assert value("oriel_logic_jobs_total") == 1 and value("oriel_logic_worker_busy_seconds_total") > 0
    assert value("oriel_logic_job_wait_seconds_total") >= 0
    await save(SERVICE.replace("1", "2"))
    assert value("oriel_logic_jobs_total") == 1 and value("oriel_logic_workers_ready") >= 1
    await logic.post("plain")
    assert value("oriel_logic_jobs_total") == 2
    assert value("oriel_logic_updates_total", {"result": "published"}) == 1
    await save("nonsense (")
    assert value("oriel_logic_updates_total", {"result": "failed"}) == 1
    states = {state: value("oriel_logic_releases", {"state": state}) for state in ("serving", "draining", "failed")}
    assert states == {"serving": 1, "draining": 0, "failed": 1}
