"""Servers that share no folder, but an object store: each artefact is built once, and a store that fails delays no
call.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_objects import MemoryObjects, MemoryWriter

from oriel_inference import app, assembly
from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore
from oriel_inference.artefacts.objects import push
from oriel_inference.backends.onnx_graph import ENTRY
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import location_of

from ..waiting import until
from .artefact_server import COMPILED, forge, only_artefact, outcomes, served, until_state
from .artefact_stores import Silent
from .control_server import Served, put, times

STORE = location_of("s3://bucket/engines")


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    """The bucket of all servers of a test."""
    objects = MemoryObjects()
    monkeypatch.setattr(assembly, "open_client", lambda location: objects)
    monkeypatch.setattr(assembly, "open_writer", lambda location: MemoryWriter(objects))
    monkeypatch.setattr(assembly, "GroupStore", partial(GroupStore, poll_s=0.02))
    return objects


@asynccontextmanager
async def four(tmp_path: Path, **more: Any) -> AsyncIterator[list[Served]]:
    """Give four servers that start together, each with a folder of its own."""
    async with AsyncExitStack() as stack:
        starts = (
            served(tmp_path / "models", tmp_path / f"artefacts-{number}", artefact_store=STORE, **more)
            for number in range(4)
        )
        yield list(await asyncio.gather(*map(stack.enter_async_context, starts)))


def manifests(objects: MemoryObjects) -> list[str]:
    return [key for key in list(objects.objects) if key.endswith("/manifest.json")]


async def test_four_servers_without_a_shared_folder_that_start_together_build_once(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with four(tmp_path) as servers:
        await asyncio.gather(*(until_state(each, "serving") for each in servers))
        found = sorted(outcome for each in servers for outcome in outcomes(each))
        assert found == ["built", "found", "found", "found"]
        assert [await each.answer() for each in servers] == [2.0] * 4
    (key,) = manifests(objects)
    assert {only_artefact(tmp_path / f"artefacts-{number}").name for number in range(4)} == {key.split("/")[1]}


async def test_four_servers_without_a_shared_folder_try_what_cannot_be_built_once(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with four(tmp_path, artefact_build_bytes=1 << 20) as servers:
        await asyncio.gather(*(until_state(each, "refused") for each in servers))
        found = [outcome for each in servers for outcome in outcomes(each)]
        assert found.count("remembered") == 3 and len(found) == 4, found
        assert [await each.answer() for each in servers] == [2.0] * 4
    assert manifests(objects) == []


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


async def test_a_damaged_artefact_of_the_store_is_never_opened(tmp_path: Path, objects: MemoryObjects) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with served(tmp_path / "models", tmp_path / "first", artefact_store=STORE) as one:
        await until_state(one, "serving")
        await until(lambda: manifests(objects))
    right = (only_artefact(tmp_path / "first") / ENTRY).read_bytes()
    (key,) = [key for key, data in objects.objects.items() if data == right]
    objects.put(key, times(5.0).SerializeToString())
    async with served(tmp_path / "models", tmp_path / "second", artefact_store=STORE) as one:
        await until_state(one, "serving")
        assert await one.answer() == 2.0
        assert outcomes(one) == {"store_failed": 1, "built": 1}


async def test_a_forged_artefact_of_the_store_is_refused_by_its_outputs(tmp_path: Path, objects: MemoryObjects) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with served(tmp_path / "models", tmp_path / "forged") as one:
        await until_state(one, "serving")
    artefact = only_artefact(tmp_path / "forged")
    forge(artefact, ENTRY, times(5.0).SerializeToString())
    folder = ArtefactFolder(tmp_path / "forged", max_bytes=0)
    pushed = push(folder, objects, MemoryWriter(objects), STORE.prefix, [artefact.name])
    assert [each.state async for each in pushed] == ["pushed"]
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until_state(one, "refused")
        assert await one.answer() == 2.0
        assert outcomes(one) == {"outputs_differ": 1}


class ReadOnly(MemoryWriter):
    """Takes nothing."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self.denied = True


class Unconditional(MemoryWriter):
    """Ignores that an object is stored only if there is none."""

    async def put(self, key: str, data: bytes) -> bool:
        self._objects.put(key, data)
        return True


class Denying(MemoryWriter):
    """Claims of every object that it is there already, and stores none."""

    async def put(self, key: str, data: bytes) -> bool:
        return False


class Overtaken(MemoryWriter):
    """Another server takes the lease first, and dies."""

    async def put(self, key: str, data: bytes) -> bool:
        if not key.endswith("/lease/00000001"):
            return await super().put(key, data)
        await super().put(key, b'{"holder": "gone"}')
        return False


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


async def test_a_server_that_may_not_write_builds_what_the_store_lacks_by_itself(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    written_by(monkeypatch, objects, ReadOnly)
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until_state(one, "serving")
        await until(lambda: outcomes(one) == {"store_failed": 2, "built": 1})  # the lease, and the artefact
    assert objects.objects == {}


async def test_without_conditional_puts_several_may_build_and_all_serve(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    written_by(monkeypatch, objects, Unconditional)
    async with four(tmp_path) as servers:
        await asyncio.gather(*(until_state(each, "serving") for each in servers))
        assert [await each.answer() for each in servers] == [2.0] * 4
        await until(lambda: manifests(objects))


async def test_a_store_that_gives_the_lease_to_nobody_is_left_after_some_tries(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    written_by(monkeypatch, objects, Denying)
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until_state(one, "serving")
        assert outcomes(one) == {"store_failed": 1, "built": 1}


async def test_the_build_of_a_server_that_died_is_taken_over(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    written_by(monkeypatch, objects, Overtaken)
    monkeypatch.setattr(assembly, "GroupStore", partial(GroupStore, poll_s=0.02, expire_s=0.1))
    async with served(tmp_path / "models", tmp_path / "artefacts", artefact_store=STORE) as one:
        await until_state(one, "serving")
        assert outcomes(one) == {"built": 1}
        await until(lambda: manifests(objects))
    assert sorted(key[-8:] for key in objects.objects if "/lease/" in key)[:2] == ["00000001", "00000002"]


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
