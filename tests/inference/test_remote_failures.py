"""A remote repository when one object is refused, or when this machine cannot store what was fetched."""

import asyncio
import errno
import os
from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
from memory_objects import MemoryObjects

from oriel_inference.errors import LoadFailed, NotKept, ObjectRefused, StoreUnavailable
from oriel_inference.stores.cache import Cache
from oriel_inference.stores.opening import open_stores
from oriel_inference.stores.remote import RemoteStore

from .remote_stores import remote

KEY = "repo/m/1/model.onnx"
CONFIG = "repo/m/config.pbtxt"
unpaused = partial(remote, pause_s=0.0)


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects({KEY: b"m" * 1000, CONFIG: b"max_batch_size: 4", "repo/n/1/model.onnx": b"n" * 1000})


def seen(store: RemoteStore, model: str = "m") -> object:
    store.models()
    return store.fingerprint(model)


@pytest.mark.parametrize("key", [KEY, CONFIG])
def test_an_object_that_is_refused_costs_its_model_and_is_tried_again(
    objects: MemoryObjects, tmp_path: Path, key: str
) -> None:
    objects.forbids.add(key)
    with unpaused(objects, tmp_path) as store:
        before = seen(store)
        for _ in range(2):
            with pytest.raises(ObjectRefused, match=key):
                store.text("m", "config.pbtxt") and store.artifact("m", 1, "model.onnx")
        assert store.artifact("n", 1, "model.onnx").read_bytes() == b"n" * 1000
        assert store.up and store.retries("m") and not store.retries("n")
        assert store.counts.failures["refused"] == 2 and not store.counts.failures["unavailable"]
        assert seen(store) != before
        objects.forbids.clear()
        assert store.text("m", "config.pbtxt") and store.artifact("m", 1, "model.onnx").read_bytes() == b"m" * 1000


def test_a_model_that_finds_no_room_is_tried_again_and_one_that_left_gives_its_room(
    objects: MemoryObjects, tmp_path: Path
) -> None:
    with unpaused(objects, tmp_path, max_bytes=1500) as store:
        before = seen(store, "n")
        store.artifact("m", 1, "model.onnx")
        with pytest.raises(NotKept, match="no room for 1000 beside what serves or is being loaded"):
            store.artifact("n", 1, "model.onnx")
        store.loaded("m")  # it serves no more, or never did
        assert store.retries("n") and seen(store, "n") != before
        assert store.artifact("n", 1, "model.onnx").read_bytes() == b"n" * 1000
        assert store.counts.failures["cache"] == 1


@pytest.mark.parametrize("where", ["partial", "publish", "keep_shared"])
def test_a_disk_that_is_full_is_named_and_tried_again(
    objects: MemoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with unpaused(objects, tmp_path) as store:
        before = seen(store)
        with monkeypatch.context() as patch:
            patch.setattr(Cache, where, full)
            with pytest.raises(NotKept, match=r"m/.* cannot be written into the model cache: No space left on device"):
                store.text("m", "config.pbtxt")
                store.artifact("m", 1, "model.onnx")
        assert store.retries("m") and seen(store) != before
        assert store.text("m", "config.pbtxt") and store.artifact("m", 1, "model.onnx").read_bytes() == b"m" * 1000


def test_a_surprise_in_a_fetch_is_tried_again_too(
    objects: MemoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unpaused(objects, tmp_path) as store:
        before = seen(store)
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(objects, "head", lambda key: {}[key])
            store.artifact("m", 1, "model.onnx")
        assert seen(store) != before
        assert store.artifact("m", 1, "model.onnx").read_bytes() == b"m" * 1000


def test_a_cache_that_is_removed_under_the_server_is_made_again(objects: MemoryObjects, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with unpaused(objects, folder) as store:
        seen(store)
        store.text("m", "config.pbtxt")
        store.artifact("m", 1, "model.onnx")
        rmtree(folder)
        objects.put("repo/o/1/model.onnx", b"o")
        assert store.models() == ["m", "n", "o"]
        assert store.artifact("o", 1, "model.onnx").read_bytes() == b"o"
        assert store.artifact("m", 1, "model.onnx").read_bytes() == b"m" * 1000
        assert store.text("m", "config.pbtxt") == "max_batch_size: 4"
        with pytest.raises(LoadFailed, match="another server uses this --model-cache"):
            Cache(folder, max_bytes=1)
        rmtree(folder / "partial")
        objects.put("repo/p/1/model.onnx", b"p")
        store.models()
        assert store.artifact("p", 1, "model.onnx").read_bytes() == b"p"


def test_a_connection_that_breaks_while_the_store_answers_waits_like_a_file_that_is_wrong(
    objects: MemoryObjects, tmp_path: Path
) -> None:
    objects.held = asyncio.Event()
    with remote(objects, tmp_path, stall_s=-1.0, pause_s=600.0) as store:
        fingerprints = {repr(seen(store))}
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"bytes came in"):
                store.artifact("m", 1, "model.onnx")
            fingerprints.add(repr(seen(store)))
        assert len(fingerprints) == 2 and store.retries("m")  # once more at once, then after its pause


# Who may write the folder ------------------------------------------------------------------------------------------


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    Cache(folder, max_bytes=1).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "versions").chmod(0o777)
    with pytest.raises(LoadFailed, match=r"--model-cache: 'versions' in it may be written by others \(mode 777\)"):
        Cache(folder, max_bytes=1)
    (folder / "versions").chmod(0o770)  # a volume of a pod, whose group this process has
    Cache(folder, max_bytes=1).close()
    assert (folder / "versions").stat().st_mode & 0o777 == 0o750
    (folder / "partial").rmdir()
    (folder / "partial").symlink_to(tmp_path)
    with pytest.raises(LoadFailed, match="'partial' in it is a link, not a folder"):
        Cache(folder, max_bytes=1)


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oriel_inference.stores.own_files.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LoadFailed, match=f"'cache' in it belongs to user {os.getuid()}, and this server runs as"):
        Cache(tmp_path / "cache", max_bytes=1)


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to"])
def test_what_was_planted_where_a_fetch_writes_is_not_written_through(
    objects: MemoryObjects, tmp_path: Path, plant: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    with unpaused(objects, tmp_path / "cache") as store:
        store.models()
        digest = store.fingerprint("m").versions[1]
        files = tmp_path / "cache/partial" / digest / "files"
        files.mkdir(parents=True)
        getattr(files / "model.onnx", plant)(victim)
        shared = tmp_path / "cache/shared"
        (small,) = (file.digest for file in store._model("m").shared.values())
        getattr(shared / f"{small}.new", plant)(victim)
        assert store.artifact("m", 1, "model.onnx").read_bytes() == b"m" * 1000
        assert store.text("m", "config.pbtxt") == "max_batch_size: 4"
    assert victim.read_bytes() == b"keep"


def test_one_repository_is_not_named_twice(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="--model-repository s3://bucket/a/? is given twice"):
        open_stores(["s3://bucket/a", "s3://bucket/a/"], tmp_path, max_cache_bytes=1 << 20, in_use=tuple)
