"""Artefacts in an object store: only whole ones are published in a folder, and only where they fit."""

from pathlib import Path
from typing import Any

import pytest
from memory_objects import MemoryObjects, MemoryWriter

from oriel_inference.artefacts.folder import ArtefactFolder, Refusal
from oriel_inference.artefacts.objects import Copied, pull, push
from oriel_policies.artefacts.lifecycle import RefusalKind
from oriel_wire.objects.errors import ObjectChanged, StoreUnavailable

from .artefact_folders import FILES, key_of_here, other_folder, published


async def pushed(folder: ArtefactFolder, objects: MemoryObjects) -> list[Copied]:
    writer = MemoryWriter(objects)
    found = [await push(folder, objects, writer, "engines/", each.fingerprint) for each in folder.stored()]
    return [each for each in found if each is not None]


async def pulled(folder: ArtefactFolder, objects: MemoryObjects, **more: Any) -> list[Copied]:
    return [each async for each in pull(folder, objects, "engines/", **more)]


async def test_what_is_pushed_is_pulled_once_and_byte_for_byte(tmp_path: Path) -> None:
    key, objects = key_of_here(), MemoryObjects()
    one, other = published(tmp_path / "one", key), other_folder(tmp_path / "other")
    assert [(each.state, each.model) for each in await pushed(one, objects)] == [("pushed", "double")]
    assert [each.state for each in await pushed(one, objects)] == ["there"]
    assert [each.state for each in await pulled(other, objects)] == ["pulled"]
    assert [each.state for each in await pulled(other, objects)] == ["there"]
    manifest = other.find(key.fingerprint)
    assert manifest is not None and manifest == one.find(key.fingerprint)
    (tmp_path / "copy").mkdir()
    other.copy(key.fingerprint, manifest, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == FILES
    assert [path.name for path in other.root.iterdir()] == [key.fingerprint]


async def test_two_machines_that_built_different_bytes_do_not_mix(tmp_path: Path) -> None:
    """The first may have gone before its manifest was stored."""
    key, objects = key_of_here(), MemoryObjects()
    one = published(tmp_path / "one", key)
    two = published(tmp_path / "two", key, {**FILES, "optimised.onnx": b"other"})
    await pushed(one, objects)
    objects.remove(f"engines/{key.fingerprint}/manifest.json")
    assert [each.state for each in await pushed(two, objects)] == ["pushed"]
    other = other_folder(tmp_path / "other")
    assert [each.state for each in await pulled(other, objects)] == ["pulled"]
    assert (other.root / key.fingerprint / "optimised.onnx").read_bytes() == b"other"


class Contended(MemoryWriter):
    """A store in which another machine is always writing the same object."""

    async def put(self, key: str, data: bytes) -> bool:
        raise ObjectChanged(f"{key} is being written by another process")


async def test_what_another_machine_is_storing_right_now_is_left_to_it(tmp_path: Path) -> None:
    key, objects = key_of_here(), MemoryObjects()
    found = await push(published(tmp_path / "one", key), objects, Contended(objects), "engines/", key.fingerprint)
    assert found is not None and (found.state, found.reason) == ("there", "")
    assert objects.objects == {}


async def test_what_is_not_whole_is_not_published(tmp_path: Path) -> None:
    key, objects = key_of_here(), MemoryObjects()
    await pushed(published(tmp_path / "one", key), objects)
    other, base = other_folder(tmp_path / "other"), f"engines/{key.fingerprint}/"
    (graph,) = [name for name, data in objects.objects.items() if data == b"graph"]
    objects.spoils.add(graph)
    (found,) = await pulled(other, objects)
    assert (found.state, found.reason) == ("damaged", "optimised.onnx is not the file that was built")
    objects.spoils.clear()
    objects.put(graph, b"longer than before")
    (found,) = await pulled(other, objects)
    assert found.state == "damaged" and "optimised.onnx is not in the store" in found.reason
    objects.put(f"{base}manifest.json", b"{}")
    (found,) = await pulled(other, objects)
    assert found.state == "damaged" and found.reason.startswith("its manifest is not valid")
    objects.remove(f"{base}manifest.json")
    assert await pulled(other, objects) == [], "it is being pushed"
    assert list(other.root.iterdir()) == []


async def test_what_is_damaged_here_is_not_pushed(tmp_path: Path) -> None:
    key, objects = key_of_here(), MemoryObjects()
    one = published(tmp_path / "one", key)
    (one.root / key.fingerprint / "more").write_bytes(b"changed")
    (found,) = await pushed(one, objects)
    assert (found.state, found.reason) == ("damaged", "more is not the file that was built")
    assert objects.objects == {}


async def test_what_does_not_fit_this_machine_is_left_there_unless_all_is_wanted(tmp_path: Path) -> None:
    objects = MemoryObjects()
    await pushed(published(tmp_path / "one", key_of_here(compiler_version="0.1")), objects)
    other = other_folder(tmp_path / "other")
    (found,) = await pulled(other, objects)
    assert found.state == "unfit" and found.reason.startswith("it was built for compiler version '0.1', here is ")
    assert [each.state for each in await pulled(other, objects, everything=True)] == ["pulled"]


async def test_what_was_refused_on_this_machine_stays_refused(tmp_path: Path) -> None:
    key, objects = key_of_here(), MemoryObjects()
    await pushed(published(tmp_path / "one", key), objects)
    other = other_folder(tmp_path / "other")
    other.remember(
        Refusal(
            key=key.parts(),
            kind=RefusalKind.OUTPUTS_DIFFER,
            reason="it differs",
            conditions="",
            model="double",
            at_s=0.0,
        )
    )
    assert [each.state for each in await pulled(other, objects)] == ["refused"]
    assert other.refusal(key.fingerprint) is not None


async def test_a_store_that_is_down_leaves_nothing_behind(tmp_path: Path) -> None:
    objects = MemoryObjects()
    await pushed(published(tmp_path / "one", key_of_here()), objects)
    other = other_folder(tmp_path / "other")
    objects.breaks, objects.breaks_after = 1, 0
    with pytest.raises(StoreUnavailable):
        await pulled(other, objects)
    objects.down = True
    with pytest.raises(StoreUnavailable):
        await pulled(other, objects)
    assert list(other.root.iterdir()) == []
