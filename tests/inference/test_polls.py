"""Poll mode in virtual time: complete uploads are loaded within one poll, and incomplete ones are not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from . import models

POLL_S = 8.0


class Sleeps:
    """Takes the place of `sleep`: each ends when the test says so."""

    def __init__(self) -> None:
        self._begun: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self._ends: asyncio.Future[None] | None = None

    async def sleep(self, seconds: float) -> None:
        ends = asyncio.get_running_loop().create_future()
        self._begun.put_nowait((seconds, ends))
        await ends

    async def next(self) -> float:
        """Let the sleep under way end, and what follows go on to its next one: how long that is meant to be."""
        if self._ends is not None:
            self._ends.set_result(None)
        seconds, self._ends = await self._begun.get()
        return seconds


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    found = Sleeps()
    monkeypatch.setattr("oriel_inference.models.control.sleep", found.sleep)
    return found


@pytest.fixture
async def unit(tmp_path: Path, sleeps: Sleeps) -> AsyncIterator[Unit]:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    ports = {"http_port": 0, "grpc_port": None, "metrics_port": None}
    settings = Settings(repositories=(tmp_path,), control_mode="poll", poll_s=POLL_S, drain_s=5.0, **ports)
    async with open_unit(settings, sink=ListSink()) as running:
        yield running


def begun(unit: Unit) -> bool:
    """Whether version 2 serves, or a load is under way."""
    (repository,) = unit.surface.control.repositories
    return unit.catalog.serves("double", 2) or bool(repository.changes._under_way)


async def until_served(unit: Unit) -> None:
    await until(lambda: unit.catalog.serves("double", 2))


async def test_what_is_whole_right_after_a_look_is_being_loaded_within_one_poll(
    unit: Unit, sleeps: Sleeps, tmp_path: Path
) -> None:
    for _ in range(3):
        waited = await sleeps.next()  # the scan before this sleep found nothing
    models.put(tmp_path, "double", models.double(), models.DOUBLE, version=2)
    settling = await sleeps.next()
    assert not begun(unit) and 0 < settling <= 0.5
    after = await sleeps.next()
    assert begun(unit) and waited + settling <= POLL_S
    await until_served(unit)
    assert after + settling <= POLL_S


async def test_what_changes_between_the_two_looks_waits_for_the_next_poll(
    unit: Unit, sleeps: Sleeps, tmp_path: Path
) -> None:
    await sleeps.next()
    file = tmp_path / "double/2/model.onnx"
    file.parent.mkdir()
    whole = models.double().SerializeToString()
    for end in (10, 20, len(whole)):  # it grows after each first scan
        file.write_bytes(whole[: end // 2])
        settling = await sleeps.next()
        file.write_bytes(whole[:end])
        waited = await sleeps.next()
        assert not begun(unit)
    await sleeps.next()
    assert begun(unit) and settling + waited <= POLL_S
    await until_served(unit)
