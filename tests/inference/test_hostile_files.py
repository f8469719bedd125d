"""Special files, large files and very many files in a repository are refused in bounded time."""

import os
import re
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, FunctionProto, ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from oriel_inference.errors import LoadFailed
from oriel_inference.repository.load import LoadedVersion
from oriel_inference.repository.onnx_files import check_model_file
from oriel_inference.stores.local import MAX_ENTRIES, MAX_TEXT_BYTES, LocalStore

from . import models
from .hostile_models import LABELS, WARM, load, refusal


def device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: reading it would never end
    except PermissionError:
        pytest.skip("devices cannot be made here")


def listening(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:
        made = socket.socket(socket.AF_UNIX)
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # socket paths are short
        made.close()
    finally:
        os.close(here)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [device, pipe, listening])
@pytest.mark.parametrize("where", ["1/model.onnx", "1/beside.bin", "config.pbtxt", "labels.txt", "warmup/data"])
def test_what_is_no_file_is_refused_and_blocks_nothing(
    tmp_path: Path, make: Callable[[Path], None], where: str
) -> None:
    models.put(tmp_path, "double", models.double(), LABELS + WARM.replace("FILE", "data"))
    (tmp_path / "double/warmup").mkdir()
    (tmp_path / "double/warmup/data").write_bytes(bytes(16))
    (tmp_path / "double/labels.txt").write_text("a\n")
    path = tmp_path / "double" / where
    path.unlink(missing_ok=True)
    make(path)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(refusal(tmp_path)), daemon=True)
    thread.start()
    thread.join(60)
    assert said, "it blocked"
    assert Path(where).name in said[0] and re.search(
        r"pipes, sockets and devices|is not a file|cannot be read", said[0]
    )
    LocalStore(tmp_path).fingerprint("double")  # nor does scanning it


def test_huge_device_like_file_is_not_read(tmp_path: Path) -> None:
    """Sparse: it costs its writer nothing."""
    path = models.put(tmp_path, "double", models.double(), models.DOUBLE) / "1/model.onnx"
    os.truncate(path, 17 << 30)
    assert refusal(tmp_path) == "double/1 holds more than 17179869184 bytes"


# --- bounds, set small --------------------------------------------------------------------------------------------


def test_size_of_a_version_is_bounded(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    (tmp_path / "double/1/weights.bin").write_bytes(bytes(1000))
    store = LocalStore(tmp_path, max_version_bytes=1000)
    assert refusal(tmp_path, store=store) == "double/1 holds more than 1000 bytes"


def test_private_copy_is_bounded(tmp_path: Path) -> None:
    folder = models.put(tmp_path, "double", models.double(), models.DOUBLE)
    into = tmp_path / "copy"
    into.mkdir()
    size = (folder / "1/model.onnx").stat().st_size
    assert not LocalStore(tmp_path, max_copy_bytes=size - 1).copy("double", 1, into)
    assert list(into.iterdir()) == []
    assert LocalStore(tmp_path, max_copy_bytes=size).copy("double", 1, into)
    assert (into / "model.onnx").read_bytes() == (folder / "1/model.onnx").read_bytes()


@pytest.mark.parametrize("why", ["no folder", "no space"])
def test_model_loads_where_it_lies_if_no_copy_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    store = LocalStore(tmp_path)
    if why == "no folder":
        monkeypatch.setattr("oriel_inference.repository.version_files.TemporaryDirectory", fail)
    else:
        monkeypatch.setattr(store, "copy", fail)
    assert isinstance(load(tmp_path, store=store)[1], LoadedVersion)


def test_private_copies_are_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    models.put(tmp_path / "root", "double", models.double(), models.DOUBLE)
    assert isinstance(load(tmp_path / "root")[1], LoadedVersion)
    (tmp_path / "root/double/1/model.onnx").write_bytes(b"junk")
    assert isinstance(load(tmp_path / "root")[1], LoadFailed)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("name", "config"), [("config.pbtxt", None), ("labels.txt", LABELS)])
def test_small_files_are_bounded(tmp_path: Path, name: str, config: str) -> None:
    models.put(tmp_path, "double", models.double(), config)
    (tmp_path / "double" / name).write_text("#" * (MAX_TEXT_BYTES + 1))
    assert refusal(tmp_path) == f"double/{name} is larger than {MAX_TEXT_BYTES} bytes"


def test_far_more_files_than_a_version_may_have_cost_a_bounded_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real bound is tried with an upload to a running server, in `make test SUITE=long`: test_control.py."""
    assert MAX_ENTRIES == 10_000
    folder = models.put(tmp_path, "double", models.double(), models.DOUBLE) / "1"
    for number in range(2000):
        (folder / f"f{number}").touch()
    looked: set[str] = set()
    for name in ("lstat", "stat", "resolve"):
        whole = getattr(Path, name)

        def counting(path: Path, *given: Any, whole: Any = whole, **more: Any) -> Any:
            if path.parent == folder:
                looked.add(path.name)
            return whole(path, *given, **more)

        monkeypatch.setattr(Path, name, counting)
    store = LocalStore(tmp_path, max_entries=100)
    assert refusal(tmp_path, store=store) == "double/1 has more than 100 entries"
    store.fingerprint("double")
    assert len(looked) <= 2 * 101


def test_a_look_enters_only_so_many_folders(tmp_path: Path) -> None:
    folder = models.put(tmp_path, "double", models.double(), models.DOUBLE) / "1"
    store = LocalStore(tmp_path)
    before = store.fingerprint("double")
    deep = folder / "/".join("d" * 16)
    deep.mkdir(parents=True)
    seen = store.fingerprint("double")
    assert seen != before
    (deep / "f").touch()
    assert store.fingerprint("double").shared == seen.shared
    (folder / "d/f").touch()
    assert store.fingerprint("double") != seen


# --- names that a runtime takes for an address ----------------------------------------------------------------------


def holders() -> dict[str, tuple[ModelProto, TensorProto]]:
    """Return a model for each place that can hold external weights, and the tensor there."""
    weights = numpy_helper.from_array(np.ones((2,), np.float32), "w")
    constant = helper.make_node("Constant", [], ["w"], value=weights)
    branch = helper.make_graph([constant], "g", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [2])])
    choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    function = helper.make_function("own", "f", [], ["w"], [constant], [helper.make_opsetid("", 17)])
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]

    def model(nodes: list[Any], *, initializers: Any = (), functions: Any = ()) -> ModelProto:
        graph = helper.make_graph(nodes, "g", [], output, list(initializers))
        return helper.make_model(graph, functions=list(functions))

    same, call = helper.make_node("Identity", ["w"], ["y"]), helper.make_node("f", [], ["y"], domain="own")
    initializer = model([same], initializers=[weights])
    attribute = model([constant, same])
    subgraph = model([choice])
    called = model([call], functions=[function])

    def value(node: Any) -> TensorProto:
        found: AttributeProto = node.attribute[0]
        return found.g.node[0].attribute[0].t if found.HasField("g") else found.t

    inside: FunctionProto = called.functions[0]
    return {
        "initializer": (initializer, initializer.graph.initializer[0]),
        "Constant": (attribute, value(attribute.graph.node[0])),
        "subgraph": (subgraph, value(subgraph.graph.node[0])),
        "function": (called, value(inside.node[0])),
    }


@pytest.mark.parametrize("holder", ["initializer", "Constant", "subgraph", "function"])
@pytest.mark.parametrize("location", ["*/_ORT_MEM_ADDR_/*", "weights*", "a/*/b"])
def test_weights_named_as_an_address_are_refused(tmp_path: Path, holder: str, location: str) -> None:
    """A file of that name passed the check, and the runtime then read its own memory instead."""
    model, tensor = holders()[holder]
    external_data_helper.set_external_data(tensor, location, offset=0, length=8)
    tensor.ClearField("raw_data")
    (tmp_path / location).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / location).write_bytes(bytes(8))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(LoadFailed, match="must have no asterisk"):
        check_model_file(tmp_path / "model.onnx", "m/1/model.onnx")


def test_a_configuration_names_no_file_with_an_asterisk(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE + ' default_model_filename: "*/model.onnx"')
    (tmp_path / "double/1/*").mkdir()
    (tmp_path / "double/1/model.onnx").rename(tmp_path / "double/1/*/model.onnx")
    assert "must have no asterisk" in refusal(tmp_path)
