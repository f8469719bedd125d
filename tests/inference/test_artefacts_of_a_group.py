"""Servers that share no folder, but an object store: what one has built serves in the others, and a store that fails
delays no call.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from memory_objects import MemoryObjects, MemoryWriter

from oriel_inference import app, assembly
from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.objects import push
from oriel_inference.backends.onnx_graph import ENTRY
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import location_of

from ..waiting import until
from .artefact_server import COMPILED, built_ahead, forge, only_artefact, outcomes, served, until_state
from .artefact_stores import Silent
from .control_server import Served, put, times

STORE = location_of("s3://bucket/engines")


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    """The bucket of all servers of a test."""
    objects = MemoryObjects()
    monkeypatch.setattr(assembly, "open_client", lambda location: objects)
    monkeypatch.setattr(assembly, "open_writer", lambda location: MemoryWriter(objects))
    return objects


@asynccontextmanager
async def two(tmp_path: Path) -> AsyncIterator[list[Served]]:
    """Give two servers that start together, each with a folder of its own."""
    async with AsyncExitStack() as stack:
        starts = (
            served(tmp_path / "models", tmp_path / f"artefacts-{number}", artefact_store=STORE) for number in range(2)
        )
        yield list(await asyncio.gather(*map(stack.enter_async_context, starts)))


def manifests(objects: MemoryObjects) -> list[str]:
    return [key for key in list(objects.objects) if key.endswith("/manifest.json")]


async def test_servers_that_start_together_each_build_at_most_once_and_store_one_artefact(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with two(tmp_path) as servers:
        await asyncio.gather(*(until_state(each, "serving") for each in servers))
        found = [outcomes(each) for each in servers]
        assert {"built": 1} in found and all(each in ({"built": 1}, {"found": 1}) for each in found), found
        assert [await each.answer() for each in servers] == [2.0] * 2
        await until(lambda: manifests(objects))
    (key,) = manifests(objects)
    assert {only_artefact(tmp_path / f"artefacts-{number}").name for number in range(2)} == {key.split("/")[1]}


async def test_a_store_that_is_down_delays_nothing_and_the_server_builds_by_itself(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    objects.down = True
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        assert await one.answer() == 2.0
        await until_state(one, "serving")
        await until(lambda: outcomes(one) == {"store_failed": 2, "built": 1})  # to find one, and to send one
        assert await one.answer() == 2.0
    assert objects.objects == {}


async def test_a_forged_artefact_of_the_store_is_refused_by_its_outputs(tmp_path: Path, objects: MemoryObjects) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    artefact = built_ahead(tmp_path / "models", tmp_path / "forged")
    forge(artefact, ENTRY, times(5.0).SerializeToString())
    folder = ArtefactFolder(tmp_path / "forged", max_bytes=0)
    pushed = await push(folder, objects, MemoryWriter(objects), STORE.prefix, artefact.name)
    assert pushed is not None and pushed.state == "pushed"
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until_state(one, "refused")
        assert await one.answer() == 2.0
        assert outcomes(one) == {"outputs_differ": 1}


class ReadOnly(MemoryWriter):
    """Takes nothing."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self.denied = True


def written_by(monkeypatch: pytest.MonkeyPatch, objects: MemoryObjects, writer: type[MemoryWriter]) -> None:
    """Make servers that start from now on write through such a writer."""
    monkeypatch.setattr(assembly, "open_writer", lambda location: writer(objects))


async def test_what_a_build_job_pushed_is_served_from_a_store_that_servers_may_only_read(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with served(tmp_path / "models", tmp_path / "job", artefact_store=STORE) as one:
        await until_state(one, "serving")
        await until(lambda: manifests(objects))
    stored = dict(objects.objects)
    written_by(monkeypatch, objects, ReadOnly)
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until_state(one, "serving")
        assert outcomes(one) == {"found": 1}
        assert await one.answer() == 2.0
    assert objects.objects == stored


async def test_a_server_ends_while_its_store_does_not_answer(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    silent = Silent()
    monkeypatch.setattr(assembly, "open_client", lambda location: silent)
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until(lambda: silent.requests)
        assert await one.answer() == 2.0
    assert silent.closed


async def test_a_store_within_a_model_repository_is_refused_at_start(tmp_path: Path) -> None:
    repository, within = "s3://bucket/models", location_of("s3://bucket/models/engines")
    settings = Settings(repositories=(repository,), model_cache=tmp_path, artefact_store=within)
    with pytest.raises(StartFailed, match=r"--artefact-store s3://bucket/models/engines is part of the model repos"):
        async with app.open_unit(settings):
            """It does not start."""
