"""The tests of `ModelStoreSuite` on the model stores that Oriel ships."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_store import MemoryStore

from oriel_inference.stores.cache import Cache
from oriel_inference.stores.local import LocalStore
from oriel_inference.stores.remote import RemoteStore
from oriel_inference.stores.source import Source

from .memory_objects import MemoryObjects
from .model_store import ModelStoreSuite, Written


class Folder:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.store = LocalStore(root)

    def put(self, name: str, data: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, name: str) -> None:
        shutil.rmtree(self._root / name)


class TestLocalStore(ModelStoreSuite):
    @pytest.fixture
    def written(self, tmp_path: Path) -> Written:
        root = tmp_path / "repository"
        root.mkdir()
        return Folder(root)


class Memory:
    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.put, self.remove = store.put, store.remove


class TestMemoryStore(ModelStoreSuite):
    @pytest.fixture
    def written(self) -> Iterator[Written]:
        with MemoryStore() as store:
            yield Memory(store)


def test_large_versions_are_not_copied_and_the_folder_ends_with_the_double(tmp_path: Path) -> None:
    with MemoryStore({"m/1/model.onnx": b"12345"}, max_copy_bytes=4) as store:
        assert not store.copy("m", 1, tmp_path) and list(tmp_path.iterdir()) == []
        path = store.artifact("m", 1, "model.onnx")
        assert path.exists()
    assert not path.exists()


class Bucket:
    """Changes a bucket, and has the remote store poll it after each change."""

    def __init__(self, store: RemoteStore, objects: MemoryObjects) -> None:
        self.store, self._objects = store, objects

    def put(self, name: str, data: bytes) -> None:
        self._objects.put(f"repo/{name}", data)
        self.store.models()

    def remove(self, name: str) -> None:
        self._objects.remove(f"repo/{name}")
        self.store.models()


class TestRemoteStore(ModelStoreSuite):
    @pytest.fixture
    def written(self, tmp_path: Path) -> Iterator[Written]:
        objects = MemoryObjects()
        store = RemoteStore(Source(objects), "repo/", Cache(tmp_path, max_bytes=1 << 30), shown="s3://bucket/repo")
        yield Bucket(store, objects)
        store.close()
