"""One repository that fails costs its own models, and one model that fails costs itself: a running server's side."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_objects import MemoryObjects

from oriel_inference.app import open_unit
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from . import models
from .exposed import read
from .remote_models import model, outages_end_soon

FIRST, SECOND = "s3://first/r", "s3://second/r"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    outages_end_soon(monkeypatch)


def objects_of(*names: str) -> MemoryObjects:
    """`<name>` at version 1, each after the other's pattern."""
    found = {f"r/{name}/1/model.onnx": model(2) for name in names}
    return MemoryObjects(found | {f"r/{name}/config.pbtxt": config(name) for name in names})


def config(name: str) -> bytes:
    return models.DOUBLE.replace("double", name).encode()


def local(root: Path, name: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_bytes(config(name))
    (folder / "model.onnx").write_bytes(model(2))


class Stores:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **named: MemoryObjects) -> None:
        monkeypatch.setattr("oriel_inference.stores.opening.open_client", lambda location: named[location.bucket])


@asynccontextmanager
async def serving(repositories: tuple[Path | str, ...], cache: Path, mode: str, **more: Any) -> AsyncIterator[Any]:
    ports = {"http_port": 0, "grpc_port": None, "metrics_port": 0}
    settings = Settings(
        repositories=repositories,
        model_cache=cache,
        cores=2,
        drain_s=5.0,
        control_mode=mode,
        poll_s=0.05,
        **ports,
        **more,
    )
    async with open_unit(settings, sink=ListSink()) as unit:
        address = f"http://127.0.0.1:{unit.http_port}"
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as client:
            yield Served(unit, client)


class Served:
    def __init__(self, unit: Any, client: httpx.AsyncClient) -> None:
        self.unit, self.client = unit, client

    async def ready(self, name: str = "") -> bool:
        path = f"/v2/models/{name}/ready" if name else "/v2/health/ready"
        return (await self.client.get(path)).status_code == 200

    async def until_ready(self, *names: str) -> None:
        async def ready() -> bool:
            return all([await self.ready(name) for name in names])

        await until(ready)

    async def until_up(self, **up: float) -> None:
        """Wait until the metrics say so of every repository; `first` is the bucket."""
        wanted = {{"first": FIRST}.get(name, name): value for name, value in up.items()}

        async def said() -> bool:
            return await self.up() == wanted

        await until(said)

    async def load(self, name: str) -> httpx.Response:
        return await self.client.post(f"/v2/repository/models/{name}/load", json={})

    async def reasons(self) -> dict[str, str]:
        index = (await self.client.post("/v2/repository/index", json={})).json()
        return {each["name"]: each.get("reason", "") for each in index}

    async def up(self) -> dict[str, float]:
        found = (await read(self.unit)).where("oriel_model_store_up")
        return {dict(labels)["repository"]: value for labels, value in found.items()}


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_models_whose_objects_are_refused_cost_no_other_and_come_when_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    names = [f"m{number}" for number in range(8)]
    objects = objects_of(*names)
    objects.forbids |= {"r/m0/1/model.onnx", "r/m3/config.pbtxt"}
    Stores(monkeypatch, first=objects)
    async with serving((FIRST,), tmp_path, mode) as served:
        assert [name for name in names if not await served.ready(name)] == ["m0", "m3"]
        assert await served.up() == {FIRST: 1} and not await served.ready()

        # Between two tries; while it is tried again it is LOADING, without a reason.
        async def refused() -> bool:
            return "does not give this process 'r/m0/1/model.onnx'" in (await served.reasons())["m0"]

        await until(refused)
        objects.forbids.clear()
        await served.until_ready("m0", "m3", "")


async def test_a_full_disk_at_the_start_is_tried_again_without_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oriel_inference.stores.cache import Cache

    Stores(monkeypatch, first=objects_of("a"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "partial", full)
        async with serving((FIRST,), tmp_path, "none") as served:
            assert not await served.ready("a")
            patch.undo()
            await served.until_ready("a", "")


async def test_a_dead_repository_does_not_hide_changes_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, folder = objects_of("far"), tmp_path / "models"
    local(folder, "near")
    Stores(monkeypatch, first=objects)
    async with serving((folder, FIRST), tmp_path / "cache", "poll") as served:
        await served.until_ready("near", "far", "")
        objects.down = True
        local(folder, "new")
        await served.until_ready("new", "far", "")
        await served.until_up(models=1, first=0)
        objects.put("r/back/1/model.onnx", model(2))
        objects.put("r/back/config.pbtxt", config("back"))
        objects.down = False
        await served.until_ready("back")


async def test_a_dead_repository_does_not_refuse_loads_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, folder = objects_of("far"), tmp_path / "models"
    local(folder, "near")
    first.down = True
    Stores(monkeypatch, first=first)
    async with serving((folder, FIRST), tmp_path / "cache", "explicit") as served:
        assert (await served.load("near")).status_code == 200 and await served.ready("near")
        refused = await served.load("far")
        assert refused.status_code == 400 and "the store is down" in refused.text
        first.down = False

        async def loaded() -> bool:
            return (await served.load("far")).status_code == 200

        await until(loaded)


async def test_a_repository_that_hangs_keeps_no_load_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = objects_of("far"), objects_of("near")
    Stores(monkeypatch, first=first, second=second)
    monkeypatch.setattr("oriel_inference.repository.scan.LATE_S", 0.0)
    async with serving((FIRST, SECOND), tmp_path, "explicit") as served:
        held = asyncio.Event()

        async def hangs(prefix: str, *, limit: int) -> Any:
            await held.wait()

        monkeypatch.setattr(first, "list", hangs)
        assert (await served.load("near")).status_code == 200


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_a_cold_start_with_one_dead_repository_serves_the_others_and_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = objects_of("far"), objects_of("near")
    first.down = True
    Stores(monkeypatch, first=first, second=second)
    async with serving((FIRST, SECOND), tmp_path, mode) as served:
        await served.until_ready("near")
        assert served.unit.surface.readiness() == (False, f"the model repository {FIRST} could not be read yet")
        assert f"{FIRST}: the store is down" in caplog.text and await served.up() == {FIRST: 0, SECOND: 1}
        answer = await served.client.post("/v2/models/far/infer", json={"inputs": []})
        assert answer.status_code == 503
        first.down = False
        await served.until_ready("far", "")
        assert await served.up() == {FIRST: 1, SECOND: 1}


async def test_who_wants_everything_at_the_start_gets_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = objects_of("far")
    first.down = True
    Stores(monkeypatch, first=first, second=objects_of("near"))
    with pytest.raises(BaseException) as caught:
        async with serving((FIRST, SECOND), tmp_path, "none", exit_on_error=True):
            pass
    failure = caught.value
    while isinstance(failure, BaseExceptionGroup):
        (failure,) = failure.exceptions
    assert isinstance(failure, StartFailed) and "the store is down" in str(failure)
    async with serving((FIRST, SECOND), tmp_path, "none", strict_readiness=False) as served:
        assert await served.ready()


async def test_a_surprise_in_one_repository_does_not_end_the_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, folder = objects_of("far"), tmp_path / "models"
    local(folder, "near")
    Stores(monkeypatch, first=first)
    async with serving((folder, FIRST), tmp_path / "cache", "poll") as served:
        await served.until_ready("near", "far")
        with monkeypatch.context() as patch:
            patch.setattr(first, "list", lambda prefix, *, limit: {}[prefix])
            await served.until_up(models=1, first=0)
        local(folder, "new")
        await served.until_ready("new", "far")
        await served.until_up(models=1, first=1)


class Slow(MemoryObjects):
    """Its files named in `slow` never come."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects.objects)
        self.opens = asyncio.Event()
        self.slow: set[str] = set()
        self.waiting: set[str] = set()

    async def read(self, key: str, **part: Any) -> AsyncIterator[bytes]:
        if key in self.slow:
            self.waiting.add(key)
            await self.opens.wait()
        async for piece in super().read(key, **part):
            yield piece


async def test_slow_fetches_keep_no_other_model_from_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [f"s{number}" for number in range(6)]
    objects, folder = Slow(objects_of("first")), tmp_path / "models"
    local(folder, "near")
    Stores(monkeypatch, first=objects)
    async with serving((folder, FIRST), tmp_path / "cache", "poll", load_threads=2) as served:
        await served.until_ready("near", "first")
        for name in slow:
            objects.slow.add(f"r/{name}/1/model.onnx")
            objects.put(f"r/{name}/1/model.onnx", model(2))
            objects.put(f"r/{name}/config.pbtxt", config(name))
        await until(lambda: len(objects.waiting) >= len(slow))
        objects.put("r/good/1/model.onnx", model(2))
        objects.put("r/good/config.pbtxt", config("good"))
        local(folder, "new")
        await served.until_ready("good", "new")
        assert not [name for name in slow if await served.ready(name)]
        objects.opens.set()
        await served.until_ready(*slow)
