"""The tests that every `ModelStore` has to pass. For a store of your own, subclass `ModelStoreSuite` and define the
fixture `written`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from oriel_inference.backends import find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores import ModelStore

from . import onnx_files


class Written(Protocol):
    """A store, and functions that change its contents. Names are `<model>/<path>`; `remove` removes folders too."""

    @property
    def store(self) -> ModelStore: ...

    def put(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


class ModelStoreSuite:
    @pytest.fixture
    def repository(self, written: Written) -> Written:
        for name, data in {
            "m/config.pbtxt": b"\xef\xbb\xbfmax_batch_size: 4",
            "m/labels.txt": b"a\nb\n",
            "m/1/model.onnx": onnx_files.DOUBLE,
            "m/3/model.onnx": onnx_files.DOUBLE,
            "m/3/parts/w.bin": b"weights",
            "m/12/model.onnx": b"twelve",
            "m/warmup/x": b"\0\1\xff",
            "b/1/model.onnx": b"b",
            ".hidden/1/model.onnx": b"",
        }.items():
            written.put(name, data)
        return written

    def test_models_are_sorted_and_have_names_a_model_may_have(self, repository: Written) -> None:
        assert list(repository.store.models()) == ["b", "m"]

    def test_versions_are_numbers_in_their_order(self, repository: Written) -> None:
        repository.put("m/01/model.onnx", b"")
        repository.put("m/next/model.onnx", b"")
        repository.put("m/0/model.onnx", b"")
        assert list(repository.store.versions("m")) == [0, 1, 3, 12]
        with pytest.raises(LoadFailed):
            repository.store.versions("absent")

    def test_files_of_a_version(self, repository: Written) -> None:
        assert list(repository.store.files("m", 3)) == ["model.onnx", "parts"]
        assert list(repository.store.files("m", 7)) == [] == list(repository.store.files("absent", 1))

    def test_text_and_data(self, repository: Written) -> None:
        store = repository.store
        assert store.text("m", "config.pbtxt") == "max_batch_size: 4"
        assert store.text("m", "absent.txt") is None
        assert store.data("m", "warmup/x") == b"\0\1\xff"
        with pytest.raises(LoadFailed, match="m/warmup/y is missing"):
            store.data("m", "warmup/y")
        with pytest.raises(LoadFailed, match="m/warmup/x is not UTF-8 text"):
            store.text("m", "warmup/x")

    @pytest.mark.parametrize("name", ["../b/1/model.onnx", "/etc/passwd", "", "a//b", "./labels.txt", "x\0y"])
    def test_names_that_lead_out_are_refused_everywhere(self, repository: Written, name: str) -> None:
        store = repository.store
        reads: tuple[Callable[[], object], ...] = (
            lambda: store.text("m", name),
            lambda: store.data("m", name),
            lambda: store.artifact("m", 1, name),
        )
        for read in reads:
            with pytest.raises(LoadFailed, match="must be relative and stay inside"):
                read()

    def test_artifact_is_a_file_beside_the_others_of_its_version(self, repository: Written) -> None:
        path = repository.store.artifact("m", 3, "model.onnx")
        assert path.read_bytes() == onnx_files.DOUBLE
        assert (path.parent / "parts/w.bin").read_bytes() == b"weights"
        for version, filename in ((3, "absent.onnx"), (7, "model.onnx")):
            with pytest.raises(LoadFailed) as caught:
                repository.store.artifact("m", version, filename)
            assert str(path.parents[2]) not in caught.value.reason

    @pytest.mark.parametrize(
        ("folder", "entry"), [("model.onnx", "model.onnx"), ("model.savedmodel", "saved_model.pb")]
    )
    def test_artifact_may_be_a_folder(self, repository: Written, folder: str, entry: str) -> None:
        repository.put(f"m/5/{folder}/{entry}", b"inside")
        repository.put(f"m/5/{folder}/variables/w", b"beside")
        assert list(repository.store.files("m", 5)) == [folder]
        path = repository.store.artifact("m", 5, folder)
        assert path.read_bytes() == b"inside" and (path.parent / "variables/w").read_bytes() == b"beside"

    def test_copy_is_whole_and_stays_as_it_was(self, repository: Written, tmp_path: Path) -> None:
        into = tmp_path / "copy"
        into.mkdir()
        assert repository.store.copy("m", 3, into)
        repository.put("m/3/parts/w.bin", b"changed")
        assert (into / "parts/w.bin").read_bytes() == b"weights"
        assert (into / "model.onnx").read_bytes() == onnx_files.DOUBLE
        assert not (into / "config.pbtxt").exists()

    def test_fingerprints_change_with_what_they_stand_for_and_only_then(self, repository: Written) -> None:
        look = repository.store.fingerprint
        before, other = look("m"), look("b")
        assert look("m") == before and sorted(before.versions) == [1, 3, 12]
        repository.put("m/3/model.onnx", b"longer than before, and other bytes")
        changed = look("m")
        assert changed.versions[3] != before.versions[3] and changed.shared == before.shared
        assert {n: changed.versions[n] for n in (1, 12)} == {n: before.versions[n] for n in (1, 12)}
        repository.put("m/labels.txt", b"c\n")
        assert look("m").shared != before.shared and look("m").versions == changed.versions
        repository.put("m/12/more", b"")
        assert look("m").versions[12] != changed.versions[12]
        repository.remove("m/12")
        assert 12 not in look("m").versions and look("b") == other
        assert not look("absent").versions

    def test_a_model_of_it_loads(self, repository: Written) -> None:
        (loaded,) = load_model(
            Loading(self._without(repository, "m/12").store, "m", find_backend=find_backend, cores=1, models=1)
        ).values()
        assert isinstance(loaded, LoadedVersion) and (loaded.spec.version, loaded.spec.max_batch_size) == (3, 4)
        loaded.close()

    def test_what_is_removed_is_gone(self, repository: Written) -> None:
        assert list(self._without(repository, "b").store.models()) == ["m"]

    @staticmethod
    def _without(repository: Written, name: str) -> Written:
        repository.remove(name)
        return repository
