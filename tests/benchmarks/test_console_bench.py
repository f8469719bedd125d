"""The bench of the console runs, and the scene of its pictures is there."""

import json

import httpx
from gateway_bench.console import cost
from gateway_bench.console_scene import POOLS, TENANTS, TIERS, scene


async def test_the_gateway_is_measured_with_a_viewer_and_without() -> None:
    found = await cost(waiting=20, ended=100, seconds=0.2)
    assert found["snapshot_bytes"] > 1000 and found["stall_ms"] >= found["snapshot_ms"] > 0.0


async def test_the_scene_has_tiers_pools_and_tenants() -> None:
    async with scene() as shown, httpx.AsyncClient(base_url=shown.admin, trust_env=False, timeout=60) as client:
        async with client.stream("GET", "/console/live") as answer:
            line = await anext(each async for each in answer.aiter_lines() if each.startswith("data: "))
        snapshot = json.loads(line.removeprefix("data: "))
        assert [each["tier"] for each in snapshot["tiers"]] == list(TIERS)
        assert {each["pool"] for each in snapshot["pools"]} == {*POOLS, "overnight"}
        assert snapshot["tenants_known"] == len(TENANTS)
