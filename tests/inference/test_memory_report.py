"""What the server tells a gateway of its models and their memory."""

import asyncio
from pathlib import Path
from typing import Any

from ..waiting import until
from .demand_server import BUDGET, MODEL_BYTES, PINNED, Demanded, demanded, put, put_ensemble


async def report(served: Demanded) -> dict[str, Any]:
    answer = await served.client.get("/v2/repository/memory")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def line(found: dict[str, Any], name: str) -> dict[str, Any]:
    (it,) = [each for each in found["models"] if each["name"] == name]
    return dict(it)


async def test_models_on_demand_are_listed_with_their_bytes_and_work(tmp_path: Path) -> None:
    put(tmp_path, "a")
    put(tmp_path, "b")
    put(tmp_path, "kept", PINNED)
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        before = await report(served)
        assert before["budgets"] == {"host": BUDGET} and before["fixed"] == {"host": MODEL_BYTES}
        assert [each["name"] for each in before["models"]] == ["a", "b"]
        assert line(before, "a")["state"] == "available" and line(before, "a")["bytes"] == {}
        for _ in range(3):
            assert (await served.infer("a")).status_code == 200
        after = await report(served)
        it = line(after, "a")
        assert it["state"] == "loaded" and it["bytes"] == {"host": MODEL_BYTES} and it["calls"] == 3
        assert 0.0 < it["busy_s"] < after["up_s"] and not it["wanted"] and it["load_s"] > 0.0
        assert line(after, "b")["state"] == "available"


async def test_a_load_shows_its_bytes_and_who_waits_for_it(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        served.fake.loads.close()
        call = asyncio.ensure_future(served.infer("a"))
        await until(lambda: served.waiting.get("a") == 1)
        progress = served.unit.surface.control.loader.progress
        await until(lambda: (progress.done_bytes, progress.total_bytes) == (0, MODEL_BYTES))
        found = await report(served)
        assert found["loading"] == [0, MODEL_BYTES]
        assert line(found, "a")["state"] == "loading" and line(found, "a")["waiting"] == 1
        served.fake.loads.open()
        assert (await call).status_code == 200
        assert (await report(served))["loading"] == [MODEL_BYTES, MODEL_BYTES]


async def test_a_model_without_room_is_wanted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path, name, PINNED)
    put(tmp_path, "c")
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        refused = await served.infer("c")
        assert refused.json()["reason"] == "model_memory_full"
        it = line(await report(served), "c")
        assert it["wanted"] and it["bytes"]["host"] >= MODEL_BYTES


async def test_an_ensemble_and_its_parts_stay_together(tmp_path: Path) -> None:
    put(tmp_path, "part")
    put(tmp_path, "alone")
    put_ensemble(tmp_path, "whole", "part")
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        assert (await served.infer("whole")).status_code == 200
        found = await report(served)
        assert [each["name"] for each in found["models"]] == ["alone"]
        assert found["fixed"] == {"host": MODEL_BYTES}


async def test_only_get_reads_it(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        assert (await served.client.post("/v2/repository/memory", json={})).status_code == 405
