"""Artefacts that servers share through an object store, and what a server is told when the store fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from memory_objects import MemoryObjects, MemoryWriter

from oriel_inference.artefacts import group_store
from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore, GroupStoreFailed

from .artefact_folders import FILES, key_of_here, other_folder, published
from .artefact_stores import LONG_S, Silent
from .artefact_stores import group as group_of


@contextmanager
def group(objects: MemoryObjects, writer: MemoryWriter | None = None) -> Iterator[GroupStore]:
    with group_of(objects, writer or MemoryWriter(objects)) as store:
        yield store


async def test_a_server_fetches_what_another_one_sent_and_of_two_builds_the_first_one_stays(tmp_path: Path) -> None:
    objects, key = MemoryObjects(), key_of_here()
    first = published(tmp_path / "first", key)
    second = published(tmp_path / "second", key, {**FILES, "optimised.onnx": b"built a little later"})
    folder = other_folder(tmp_path / "other")
    with group(objects) as one, group(objects) as two, group(objects) as three:
        assert not await three.fetch(folder, key.fingerprint, LONG_S)
        await one.send(first, key.fingerprint)
        puts = [key for kind, key, *_ in objects.requests if kind == "put"]
        assert puts[-1] == f"engines/{key.fingerprint}/manifest.json", "so that what has one is whole"
        stored = dict(objects.objects)
        await two.send(second, key.fingerprint)
        assert objects.objects == stored
        assert await three.fetch(folder, key.fingerprint, LONG_S)
    assert folder.find(key.fingerprint) == first.find(key.fingerprint)
    assert {name: (folder.root / key.fingerprint / name).read_bytes() for name in FILES} == FILES


async def test_a_store_that_fails_is_said_so_and_nothing_else_happens(tmp_path: Path) -> None:
    objects, key = MemoryObjects(), key_of_here()
    folder, writer = published(tmp_path / "one", key), MemoryWriter(objects)
    with group(objects, writer) as one:
        writer.denied = True
        with pytest.raises(GroupStoreFailed, match="does not take"):
            await one.send(folder, key.fingerprint)
        objects.down = True
        with pytest.raises(GroupStoreFailed, match="the store is down"):
            await one.fetch(folder, key.fingerprint, LONG_S)
    assert objects.objects == {}


async def test_a_store_that_does_not_answer_is_left_after_a_bounded_time(tmp_path: Path) -> None:
    silent = Silent()
    with group_of(silent, MemoryWriter(silent), request_s=0.01) as one:
        with pytest.raises(GroupStoreFailed, match=r"did not answer within 0\.01 s"):
            await one.fetch(other_folder(tmp_path), key_of_here().fingerprint, LONG_S)


async def test_a_fetch_that_breaks_leaves_nothing_and_a_damaged_artefact_is_named(tmp_path: Path) -> None:
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one:
        await one.send(published(tmp_path / "one", key), key.fingerprint)
        folder = other_folder(tmp_path / "other")
        objects.spoils.update(name for name, data in objects.objects.items() if data == b"graph")
        with pytest.raises(GroupStoreFailed, match=r"remove it there: optimised\.onnx is not the file that was built"):
            await one.fetch(folder, key.fingerprint, LONG_S)
        assert list(folder.root.iterdir()) == []
        objects.spoils.clear()
        objects.breaks, objects.breaks_after = 1, 0
        with pytest.raises(GroupStoreFailed, match="the connection broke"):
            await one.fetch(folder, key.fingerprint, LONG_S)
        assert list(folder.root.iterdir()) == []
        assert await one.fetch(folder, key.fingerprint, LONG_S)
        assert folder.find(key.fingerprint) is not None


async def test_an_artefact_with_a_file_that_is_too_large_to_send_stays_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_store, "MAX_SENT_FILE_BYTES", 6)
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one:
        with pytest.raises(GroupStoreFailed, match="a file of more than 6 bytes"):
            await one.send(published(tmp_path / "one", key), key.fingerprint)
    assert objects.objects == {}


async def test_an_artefact_that_is_larger_than_the_folder_may_be_is_not_fetched(tmp_path: Path) -> None:
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one:
        await one.send(published(tmp_path / "one", key), key.fingerprint)
        small = ArtefactFolder(tmp_path / "small", max_bytes=11)
        assert small.open() == ""
        with pytest.raises(GroupStoreFailed, match="its 12 bytes exceed --artefact-folder-bytes: raise it"):
            await one.fetch(small, key.fingerprint, LONG_S)
        assert list(small.root.iterdir()) == []
        assert not [key for kind, key, *_ in objects.requests if kind == "read" and "manifest.json" not in str(key)]
