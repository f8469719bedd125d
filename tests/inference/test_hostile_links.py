"""Names, links, and files that are swapped while they load, lead the server to nothing outside of the repository."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from onnx import TensorProto, external_data_helper

from oriel_inference.backends import Backend, Session, find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore

from . import models
from .hostile_models import LABELS, WARM, labelled, refusal

CLIMBING = ["../secret", "/etc/passwd", "a/../../secret", "./x", "a//b"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in ("default_model_filename", "label_filename", "warmup") for name in CLIMBING),
        ("warmup", ""),  # in the others an empty name means none
    ],
)
def test_names_cannot_climb(tmp_path: Path, name: str, kind: str) -> None:
    configs = {
        "default_model_filename": models.DOUBLE + f'default_model_filename: "{name}"',
        "label_filename": labelled(name),
        "warmup": models.DOUBLE + WARM.replace("FILE", name),
    }
    models.put(tmp_path, "double", models.double(), configs[kind])
    (tmp_path / "secret").write_bytes(bytes(16))
    assert "stay inside the model's folder" in refusal(tmp_path)


@pytest.mark.parametrize("what", ["model", "1", "1/model.onnx", "1/deep", "config.pbtxt", "labels.txt", "warmup"])
def test_links_out_are_refused(tmp_path: Path, what: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    folder = models.put(root, "double", models.double(), LABELS + WARM.replace("FILE", "data"))
    (folder / "warmup").mkdir()
    (folder / "warmup/data").write_bytes(bytes(16))
    (folder / "labels.txt").write_text("a\n")
    (folder / "1/deep").mkdir()
    path = folder if what == "model" else folder / what
    shutil.move(path, outside / "moved")
    path.symlink_to(outside / "moved")
    assert "leads out of the model repository" in refusal(root)


def test_links_may_lead_into_a_folder_that_the_operator_named(tmp_path: Path) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    blobs, snapshot = cache / "blobs", cache / "snapshots/1"  # as Hugging Face keeps them
    moved = models.put(tmp_path / "put", "double", models.double(), models.DOUBLE)
    for folder in (blobs, snapshot, root / "double"):
        folder.mkdir(parents=True)
    shutil.move(moved / "1/model.onnx", blobs / "abc")
    shutil.copy(moved / "config.pbtxt", root / "double")
    (snapshot / "model.onnx").symlink_to("../../blobs/abc")
    (root / "double/1").symlink_to(snapshot)
    assert "double/1 leads out of the model repository" in refusal(root)
    allowed = LocalStore(root, links_to=(cache,))
    (version,) = load_model(Loading(allowed, "double", find_backend=find_backend, cores=1, models=1)).values()
    assert isinstance(version, LoadedVersion), version
    version.close()
    before = allowed.fingerprint("double")
    (blobs / "abc").write_bytes(b"changed")
    assert allowed.fingerprint("double") != before
    (snapshot / "model.onnx").unlink()
    (snapshot / "model.onnx").symlink_to(tmp_path / "put/double/config.pbtxt")
    with pytest.raises(LoadFailed, match="model.onnx leads out of the model repository"):
        allowed.artifact("double", 1, "model.onnx")


@pytest.mark.parametrize("inside", [True, False], ids=["in the repository", "in a folder that the operator named"])
def test_files_in_a_folder_behind_a_link_are_checked_as_well(tmp_path: Path, inside: bool) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    behind = (root if inside else cache) / ".snapshot"
    behind.mkdir(parents=True)
    folder = models.put(root, "double", models.double(), models.DOUBLE) / "1"
    (folder / "model").symlink_to(behind)
    (folder / "again").symlink_to(folder)
    (behind / "back").symlink_to(folder)
    (behind / "config.json").write_bytes(bytes(7))
    store = LocalStore(root, links_to=(cache,))
    assert store.size_bytes("double", 1) == 7 + (folder / "model.onnx").stat().st_size
    assert store.artifact("double", 1, "model.onnx") == folder / "model.onnx"
    (behind / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(LoadFailed, match="model.safetensors leads out of the model repository"):
        store.artifact("double", 1, "model.onnx")


def test_weights_behind_a_link_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    model = models.lookup()
    tensor = model.graph.initializer[0]
    (outside / "w.bin").write_bytes(tensor.raw_data)
    external_data_helper.set_external_data(tensor, location="deep/w.bin")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    folder = models.put(root, "double", None, "") / "1"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "deep").symlink_to(outside)
    assert "deep leads out of the model repository" in refusal(root)


def test_file_nobody_may_read_is_refused() -> None:
    root = Path(tempfile.mkdtemp(prefix="oriel-test-"))
    try:
        root.chmod(0o755)
        folder = models.put(root, "double", models.double(), models.DOUBLE)
        (folder / "1/model.onnx").chmod(0)
        with as_nobody():
            assert refusal(root) == "double/1/model.onnx cannot be read: Permission denied"
        (folder / "config.pbtxt").chmod(0)
        with as_nobody():
            assert refusal(root) == "double/config.pbtxt cannot be read: Permission denied"
        folder.chmod(0)
        with as_nobody():
            assert "cannot be" in refusal(root) or "Permission" in refusal(root)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(root)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root reads everything."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


# --- swaps --------------------------------------------------------------------------------------------------------


class Swap:
    """A check during which somebody else is busy."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.seen: list[bytes] = []

    def check(self, path: Path, *_: object) -> bool:
        self.do()
        self.seen.append(path.read_bytes())
        return True


class Late(Backend):
    """A backend that is opened in the very moment somebody swaps the file."""

    name = "onnxruntime"

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.seen: list[bytes] = []

    def open(self, path: Path, options: EngineOptions) -> Session:
        self.do()
        self.seen.append(path.read_bytes())
        return find_backend("onnxruntime").open(path, options)


@pytest.mark.parametrize("moment", ["check", "open"])
@pytest.mark.parametrize("how", ["rename", "link", "write"])
def test_file_that_is_swapped_after_its_check_is_never_opened(tmp_path: Path, how: str, moment: str) -> None:
    root = tmp_path / "root"
    path = models.put(root, "double", models.double(), models.DOUBLE) / "1/model.onnx"
    evil = tmp_path / "evil.onnx"
    evil.write_bytes(b"evil")
    good = path.read_bytes()

    def swap() -> None:
        if how == "write":
            path.write_bytes(b"evil")
        elif how == "rename":
            os.replace(shutil.copy(evil, root / "new"), path)
        else:
            path.unlink()
            path.symlink_to(evil)

    if moment == "check":
        check = Swap(swap)
        assert refusal(root, check=check) == "the files of double changed while they were being loaded"
        assert check.seen == [good], "the check saw what was put there afterwards"
    else:
        backend = Late(swap)
        with pytest.raises(LoadFailed, match="changed while they were being loaded"):
            load_model(Loading(LocalStore(root), "double", find_backend=lambda _: backend, cores=1, models=1))
        assert backend.seen == [good], "the runtime saw what nobody had checked"


@pytest.mark.parametrize("links_to", [(), ("allowed",)])
def test_folder_that_becomes_a_link_after_it_was_resolved_is_not_read(tmp_path: Path, links_to: Sequence[str]) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    folder = models.put(root, "double", models.double(), models.DOUBLE)
    models.put(outside, "double", models.double(), "max_batch_size: 3")

    class Busy(LocalStore):
        def _inside(self, *parts: str) -> Path:
            found = super()._inside(*parts)
            if parts[-1] == "config.pbtxt" and not folder.is_symlink():
                folder.rename(tmp_path / "away")
                folder.symlink_to(outside / "double")
            return found

    with pytest.raises(LoadFailed, match="leads out of the model repository"):
        Busy(root, links_to=[tmp_path / each for each in links_to]).text("double", "config.pbtxt")
