"""The parts of compiled artefacts: folder, comparison of outputs, bounds of a build, swap of sessions."""

import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from memory_objects import MemoryObjects
from onnx import numpy_helper

from oriel_inference.artefacts.folder import (
    FORM,
    STALE_WORK_S,
    ArtefactDamaged,
    ArtefactFolder,
    Manifest,
    describe_files,
)
from oriel_inference.artefacts.offline import build_ahead, compilations, unfit, verify_outputs
from oriel_inference.artefacts.process import (
    ArtefactRefused,
    BuildBounds,
    ChildProcesses,
    build,
    circumstances,
    lacks_memory,
    read_samples,
    write_samples,
)
from oriel_inference.artefacts.session import CompiledSession
from oriel_inference.backends import find_backend
from oriel_inference.backends.compilers import cpu_instructions
from oriel_inference.backends.fake import FakeSession, Gate
from oriel_inference.backends.onnx_graph import ENTRY, WEIGHTS
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.errors import BackendFailed, LoadFailed
from oriel_inference.model import TensorInfo
from oriel_inference.repository import onnx_files
from oriel_inference.repository.compiling import Compilation, made_samples
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.scripting import Scripting
from oriel_inference.stores.local import LocalStore
from oriel_policies.artefacts.comparison import TOLERANCES, Tolerance, disagreement
from oriel_policies.artefacts.differences import measure
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.artefacts.lease import LeaseRecord
from oriel_policies.artefacts.refusals import Circumstances, Refusal, RefusalKind, is_void
from oriel_wire.engine.child import Child

from . import models
from .bench import Bench, spec
from .bench import X as BENCH_X
from .bench import Y as BENCH_Y
from .control_server import put, times
from .ensembles import model, tensor
from .remote_models import model as model_bytes
from .remote_stores import remote

COMPILE = 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }\n'
KEY = ArtefactKey(model="m", compiler="c", compiler_version="1", device="d")
UNDER = Circumstances(seconds=1.0, memory_bytes=0, artefact_bytes=1)


# The folder


def published(root: Path, files: dict[str, bytes]) -> tuple[ArtefactFolder, Manifest]:
    folder = ArtefactFolder(root, max_bytes=1 << 30)
    assert folder.open() == ""
    with folder.work() as work:
        for name, data in files.items():
            (work / name).write_bytes(data)
        manifest = Manifest(
            form=FORM,
            key=KEY.parts(),
            entry=next(iter(files)),
            files=describe_files(work),
            model="double",
            version=1,
            built_at_s=0.0,
            build_s=0.0,
            errors="",
        )
        folder.publish(work, manifest)
    return folder, manifest


def test_what_was_published_is_found_and_copied_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder, manifest = published(tmp_path / "a", {"x": b"1", "y": b"22"})
    assert folder.find(KEY.fingerprint) == manifest
    (tmp_path / "copy").mkdir()
    folder.copy(KEY.fingerprint, manifest, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {"x": b"1", "y": b"22"}
    assert [path.name for path in folder.root.iterdir()] == [KEY.fingerprint]
    assert folder.find("0" * 40) is None
    published(tmp_path / "a", {"x": b"3"})
    assert folder.find(KEY.fingerprint) == manifest, "the first to publish wins"
    assert folder.remove(KEY.fingerprint) and not folder.remove(KEY.fingerprint)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_change_of_a_file_or_of_the_manifest_goes_unnoticed(data: st.DataObject) -> None:
    root = Path(os.environ.get("TMPDIR", "/tmp"), f"oriel-artefact-test-{os.getpid()}")
    shutil.rmtree(root, ignore_errors=True)
    try:
        folder, manifest = published(root, {"x": b"content of x", "y": b"content of y"})
        path = root / KEY.fingerprint / data.draw(st.sampled_from(["x", "y", "manifest.json"]))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        byte = data.draw(st.integers(0, 255).filter(lambda each: each != content[at]))
        content[at] = byte
        path.write_bytes(content[: data.draw(st.sampled_from([at, at + 1, len(content)]))])
        try:
            found = folder.find(KEY.fingerprint)
            assert found is not None
            folder.copy(KEY.fingerprint, found, None)
        except ArtefactDamaged:
            return
        assert path.name == "manifest.json", "only what says nothing about the bytes may change"
        assert (found.files, found.entry, found.key) == (manifest.files, found.entry, manifest.key)
        assert found.entry in manifest.files
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize(
    "change",
    [
        {"entry": "z"},
        {"entry": "../x"},
        {"files": {}},
        {"files": {"../x": {"size_bytes": 1, "sha256": ""}}},
        {"files": {"manifest.json": {"size_bytes": 1, "sha256": ""}}, "entry": "manifest.json"},
        {"key": {**KEY.parts(), "device": "other"}},
        {"key": {}},
        {"form": FORM + 1},
        {"more": 1},
    ],
)
def test_a_manifest_that_is_not_as_we_write_them_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    folder, _ = published(tmp_path / "a", {"x": b"1"})
    path = folder.root / KEY.fingerprint / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ArtefactDamaged):
        folder.find(KEY.fingerprint)


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, manifest = published(tmp_path / "a", {"x": b"1"})
    (tmp_path / "x").write_bytes(b"1")
    path = folder.root / KEY.fingerprint / "x"
    path.unlink()
    path.symlink_to(tmp_path / "x")
    with pytest.raises(ArtefactDamaged, match="x cannot be read"):
        folder.copy(KEY.fingerprint, manifest, None)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert ArtefactFolder(tmp_path / "b", max_bytes=1).open() == "the artefact folder is a link, not a folder"


@pytest.mark.parametrize("name", ["x", "manifest.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_ordinary_file_is_damaged_and_nobody_waits_for_it(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder, manifest = published(tmp_path / "a", {"x": b"1"})
    path = folder.root / KEY.fingerprint / name
    path.unlink()
    make(path)
    with pytest.raises(ArtefactDamaged, match=f"{name} is not this server's own"):
        folder.copy(KEY.fingerprint, folder.find(KEY.fingerprint) or manifest, None)


def test_one_of_two_takes_a_lease_and_only_its_holder_renews_and_releases_it(tmp_path: Path) -> None:
    folder = ArtefactFolder(tmp_path / "a", max_bytes=1)
    folder.open()
    assert folder.lease("f") is None
    assert folder.take("f", "one") and not folder.take("f", "two")
    assert folder.renew("f", LeaseRecord("one", 1)) and not folder.renew("f", LeaseRecord("two", 9))
    folder.release("f", "two")
    assert folder.lease("f") == LeaseRecord("one", 1)
    folder.break_lease("f", LeaseRecord("one", 0))
    assert folder.lease("f") == LeaseRecord("one", 1), "it was renewed since"
    folder.break_lease("f", LeaseRecord("one", 1))
    assert folder.take("f", "two")
    folder.release("f", "two")
    assert list(folder.root.iterdir()) == []


def test_a_refusal_is_read_as_it_was_written_and_a_success_forgets_it(tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "a", {"x": b"1"})
    refusal = Refusal(kind=RefusalKind.TIMED_OUT, reason="too slow", under=UNDER)
    folder.remember(KEY, refusal, "double")
    assert folder.refusal(KEY.fingerprint) == (KEY, "double", refusal)
    assert folder.refused() == [KEY.fingerprint]
    folder.discard(KEY.fingerprint)
    published(tmp_path / "a", {"x": b"1"})
    assert folder.refusal(KEY.fingerprint) is None
    (folder.root / f"{KEY.fingerprint}.refused").write_text("{}")
    assert folder.refusal(KEY.fingerprint) is None, "what cannot be read refuses nothing"


def test_what_builds_and_records_left_behind_is_removed_a_day_later(tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "a", {"x": b"1"})
    work, record = folder.root / ".work-build", folder.root / ".work-record"
    work.mkdir()
    (work / "x").write_bytes(b"1")
    record.write_bytes(b"{}")
    folder.retire({KEY.fingerprint})
    assert work.exists() and record.exists(), "they may still be written"
    for path in (work, record):
        os.utime(path, (time.time() - STALE_WORK_S - 60.0,) * 2)
    folder.retire({KEY.fingerprint})
    assert [path.name for path in folder.root.iterdir()] == [KEY.fingerprint]


def test_the_least_recently_used_artefact_goes_when_the_folder_is_full_and_never_one_in_use(tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "a", {"x": b"1"})
    folder.max_bytes = 0
    assert folder.retire({KEY.fingerprint}) == []
    assert folder.retire(()) == [KEY.fingerprint]
    assert list(folder.root.iterdir()) == []


# Outputs

floats = npst.arrays(np.float32, npst.array_shapes(max_dims=2, max_side=4), elements=st.floats(width=32))


@given(floats, floats)
def test_measured_errors_agree_with_numpys_allclose(one: Any, other: Any) -> None:
    one = np.resize(one, other.shape)
    tolerance = TOLERANCES["FP32"]
    with np.errstate(all="ignore"):
        expected = np.isclose(
            one.astype(np.float64), other.astype(np.float64), tolerance.relative, tolerance.absolute, equal_nan=True
        )
    found = measure("y", "FP32", [(one, other)], tolerance)
    assert found.outside == np.count_nonzero(~expected)
    assert (disagreement([found]) == "") == bool(expected.all())


@pytest.mark.parametrize(
    ("datatype", "ours", "theirs", "outside", "odd"),
    [
        ("FP32", [np.nan, np.inf, -np.inf, 1], [np.nan, np.inf, -np.inf, 1], 0, 0),
        ("FP32", [np.nan, np.inf, 1, 1], [1, -np.inf, np.inf, 1], 3, 3),
        ("FP16", [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.01, 5.0], 1, 0),
        ("FP64", [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0 + 1e-5], 1, 0),
        ("INT64", [1, 2, 3, 4], [1, 2, 3, 5], 1, 0),
        ("BOOL", [True, True, True, False], [True, True, True, True], 1, 0),
        ("BYTES", [b"a", b"b", b"c", b"d"], [b"a", b"b", b"c", b"d"], 0, 0),
        ("BF16", [0x3F80, 0x4000, 0x7FC0, 0x3F80], [0x3F81, 0x4000, 0x7FC0, 0x4000], 1, 0),
    ],
)
def test_each_data_type_is_compared_by_its_own_rule(
    datatype: str, ours: list[Any], theirs: list[Any], outside: int, odd: int
) -> None:
    dtypes = {"FP32": "f4", "FP16": "f2", "FP64": "f8", "INT64": "i8", "BOOL": "?", "BYTES": "O", "BF16": "u2"}
    pair = np.array(ours, dtypes[datatype]), np.array(theirs, dtypes[datatype])
    found = measure("y", datatype, [pair], TOLERANCES.get(datatype, Tolerance()))
    assert (found.elements, found.outside, found.not_finite) == (4, outside, odd)


def test_another_shape_disagrees_and_top1_counts_rows() -> None:
    one, other = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)
    assert measure("y", "FP32", [(one, other)], Tolerance()).shapes == "float32 [2, 3] instead of float32 [3, 2]"
    rows = np.array([[0.1, 0.2], [0.2, 0.1]], np.float32)
    assert measure("y", "FP32", [(rows, rows[::-1])], TOLERANCES["FP32"]).top1 == 0.0


# Configuration


def refused(root: Path, config: str) -> str:
    models.put(root, "double", models.double(), config)
    (root / "double/1/model.py").write_text("class TritonPythonModel: pass")

    def backend_of(name: str) -> Any:
        return PythonBackend(Scripting(time.monotonic)) if name == "python" else find_backend(name)

    try:
        found = load_model(Loading(LocalStore(root), "double", find_backend=backend_of, cores=1, models=1))
    except LoadFailed as failure:
        return failure.reason
    (loaded,) = found.values()
    assert isinstance(loaded, LoadFailed)
    return loaded.reason


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"oriel.compile": "tvm"}, "parameters['oriel.compile']: 'tvm' is not one of onnxruntime-graph"),
        ({"oriel.compile.tolerance": "absolute=1"}, "parameters['oriel.compile.tolerance']: needs parameters"),
        (
            {"oriel.compile": "onnxruntime-graph", "oriel.compile.tolerance": "1e-3"},
            "parameters['oriel.compile.tolerance']: must be as absolute=1e-5,relative=1e-3",
        ),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(tmp_path: Path, parameters: dict[str, str], reason: str) -> None:
    texts = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    assert reason in refused(tmp_path, models.DOUBLE + "\n".join(texts))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            models.DOUBLE
            + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }',
            "is for the CPU, and the model has an execution provider of its own",
        ),
        (models.DOUBLE + "model_transaction_policy { decoupled: true }", "does not go with a decoupled model"),
        (models.DOUBLE.replace("onnxruntime", "python"), "is for models of backend 'onnxruntime' only"),
        (
            models.DOUBLE.replace('backend: "onnxruntime"', 'platform: "ensemble"')
            + 'ensemble_scheduling { step { model_name: "m" model_version: -1 input_map { key: "x" value: "x" } '
            'output_map { key: "y" value: "y" } } }',
            "is for models of backend 'onnxruntime' only",
        ),
    ],
)
async def test_what_cannot_be_compiled_is_refused_by_name(tmp_path: Path, config: str, reason: str) -> None:
    assert reason in refused(tmp_path, config + COMPILE)


# Builds


def compilation(root: Path) -> Compilation:
    ((_, found),) = compilations(root)
    assert isinstance(found, Compilation), found
    return found


def silent(phase: str, seconds: float) -> None:
    """Report nothing."""


@pytest.mark.parametrize(
    ("bounds", "kind"),
    [
        (BuildBounds(seconds=0.0), "timed_out"),
        (BuildBounds(memory_bytes=1 << 20), "out_of_memory"),
        (BuildBounds(artefact_bytes=16), "too_large"),
    ],
)
def test_a_build_beyond_its_bounds_ends_and_is_remembered(tmp_path: Path, bounds: BuildBounds, kind: str) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    folder, one = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    with pytest.raises(ArtefactRefused) as first:
        build_ahead(one, folder, bounds, silent)
    assert first.value.kind.value == kind, first.value.reason
    with pytest.raises(ArtefactRefused, match="it was refused before"):
        build_ahead(one, folder, bounds, silent)
    assert not list(folder.root.glob(".work-*")) and not list(folder.root.glob("*.lease"))
    outcome, _ = build_ahead(one, folder, BuildBounds(), silent, again=True)
    assert outcome == "built"


@pytest.mark.parametrize("name", [ENTRY, WEIGHTS])
def test_a_full_disk_is_no_refusal_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """ONNX Runtime writes its files itself, and reports no more than that a serialisation failed."""
    weights = numpy_helper.from_array(np.ones((4, 4096), np.float32), "w")
    node = models.helper.make_node("MatMul", ["x", "w"], ["y"])
    wide = models.graph([node], [("x", models.FLOAT, ["n", 4])], [("y", models.FLOAT, ["n", 4096])], [weights])
    models.put(tmp_path / "models", "wide", wide, "max_batch_size: 4\n" + COMPILE)
    work = ArtefactFolder.work

    @contextmanager
    def full(self: ArtefactFolder) -> Iterator[Path]:
        with work(self) as found:
            (found / name).symlink_to("/dev/full")
            yield found

    monkeypatch.setattr(ArtefactFolder, "work", full)
    folder = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30)
    with pytest.raises(ArtefactRefused, match="its files cannot be written: No space left on device") as refused:
        build_ahead(compilation(tmp_path / "models"), folder, BuildBounds(), silent)
    assert refused.value.kind is RefusalKind.NO_SPACE and folder.refused() == []


def test_a_refusal_for_want_of_memory_holds_until_a_build_may_use_more_than_the_default(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    one = compilation(tmp_path / "models")
    with one.source() as source:
        usual, more, less = (
            circumstances(one, source, BuildBounds(memory_bytes=each), one.samples()) for each in (0, 1 << 40, 1 << 20)
        )
    refusal = Refusal(kind=RefusalKind.OUT_OF_MEMORY, reason="", under=usual)
    assert [is_void(refusal, each) for each in (usual, more, less)] == [False, True, False]


def test_a_model_of_an_object_store_has_an_artefact_too(tmp_path: Path) -> None:
    config = (models.DOUBLE + COMPILE).encode()
    objects = MemoryObjects({"repo/double/1/model.onnx": model_bytes(2.0), "repo/double/config.pbtxt": config})
    with remote(objects, tmp_path / "cache") as store:
        store.models()
        (loaded,) = load_model(Loading(store, "double", find_backend=find_backend, cores=1, models=1)).values()
        assert isinstance(loaded, LoadedVersion) and loaded.compilation is not None
        loaded.close()
        folder = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30)
        outcome, manifest = build_ahead(loaded.compilation, folder, BuildBounds(), silent)
        assert (outcome, manifest.model) == ("built", "double")
        objects.put("repo/double/1/model.onnx", model_bytes(3.0))
        store.models()
        with pytest.raises(LoadFailed, match="have changed since it was loaded"):
            build_ahead(loaded.compilation, folder, BuildBounds(), silent)


class Disturbed(ChildProcesses):
    """Children of which the first one is asked while the model's file is replaced."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def ask(self, request: dict[str, Any], data: bytes, bounds: BuildBounds) -> dict[str, Any]:
        models.save_model(times(3.0), str(self._path))
        return super().ask(request, data, bounds)


def test_nothing_is_published_under_the_fingerprint_of_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    folder, small = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    assert folder.open() == ""
    one = replace(small, store=LocalStore(tmp_path / "models", max_copy_bytes=0))  # opened where it lies
    path = tmp_path / "models/double/1/model.onnx"
    key, children = one.key(path), Disturbed(path)
    with pytest.raises(ArtefactRefused) as changed:
        build(one, key, folder, BuildBounds(), one.samples(), children, lambda phase: None)
    assert changed.value.kind is RefusalKind.CHANGED
    assert list(folder.root.iterdir()) == []
    with pytest.raises(LoadFailed, match="have changed since it was loaded"):
        one.key(path)


def test_the_lease_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    folder, one = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    folder.open()
    fingerprint = one.key(tmp_path / "models/double/1/model.onnx").fingerprint
    assert folder.take(fingerprint, "somebody who was killed")
    phases: list[str] = []
    outcome, _ = build_ahead(
        one, folder, BuildBounds(), lambda phase, _: phases.append(phase), expire_s=0.05, poll_s=0.01
    )
    assert outcome == "built" and phases[0] == "waiting for another process that builds it"
    assert folder.lease(fingerprint) is None


def test_a_bound_on_the_size_of_files_leaves_no_half_bytecode_behind(tmp_path: Path) -> None:
    """A child once wrote the first bytes of the bytecode of what it imported, and nothing could import that again."""
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    one = compilation(tmp_path / "models")
    bytecode = Path(cache_from_source(onnx_files.__file__))
    bytecode.unlink(missing_ok=True)
    with pytest.raises(ArtefactRefused):
        build_ahead(one, ArtefactFolder(tmp_path / "a", max_bytes=1), BuildBounds(artefact_bytes=16), silent)
    assert not bytecode.exists() or bytecode.stat().st_size > 16


def test_outputs_are_verified_with_the_samples_of_the_configuration(tmp_path: Path) -> None:
    warm = """
    model_warmup {
      name: "w" batch_size: 2
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
    }
    """
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE + warm)
    folder, one = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    assert [sample["x"].shape for sample in one.samples()] == [(2, 4)]
    phases: list[str] = []
    outcome, manifest = build_ahead(one, folder, BuildBounds(), lambda phase, _: phases.append(phase))
    assert (outcome, list(dict.fromkeys(phases))) == ("built", ["building", "checking"])
    assert manifest.errors == "largest error 0 absolute, 0 relative over 1 samples"
    found = verify_outputs(one, folder, BuildBounds())
    assert (found.text, found.refused) == (manifest.errors, None)
    assert found.tolerance == "FP32 1e-05 absolute + 0.001 relative"
    assert unfit(one.key(tmp_path / "models/double/1/model.onnx")) == ""


def test_a_model_that_runs_with_no_sample_is_not_compared_and_does_not_serve(tmp_path: Path) -> None:
    fails = models.graph(
        [models.helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [("x", models.FLOAT, ["n", 4])],
        [("y", models.FLOAT, ["a", "b"])],
        [numpy_helper.from_array(np.array([-1, 7], dtype=np.int64), "shape")],
    )
    config = models.DOUBLE.replace("max_batch_size: 8", "max_batch_size: 2").replace(
        'name: "y" data_type: TYPE_FP32 dims: [ 4 ]', 'name: "y" data_type: TYPE_FP32 dims: [ 7 ]'
    )
    models.put(tmp_path / "models", "double", fails, config + COMPILE)
    with pytest.raises(ArtefactRefused) as failed:
        build_ahead(
            compilation(tmp_path / "models"), ArtefactFolder(tmp_path / "a", max_bytes=1), BuildBounds(), silent
        )
    assert failed.value.kind is RefusalKind.NOT_COMPARED


def test_weights_beside_the_model_belong_to_the_fingerprint_and_to_the_artefact(tmp_path: Path) -> None:
    models.put(tmp_path / "models", "slow", models.slow(2, 64), "max_batch_size: 4\n" + COMPILE)
    one = compilation(tmp_path / "models")
    source = tmp_path / "models/slow/1/model.onnx"
    before = one.key(source)
    (source.parent / "weights").write_bytes(b"1")
    one = compilation(tmp_path / "models")
    assert one.key(source) != before
    _, manifest = build_ahead(one, ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), BuildBounds(), silent)
    assert sorted(manifest.files) == ["optimised.onnx", "weights.bin"]


def test_an_artefact_of_another_machine_says_why_it_cannot_be_used(tmp_path: Path) -> None:
    here = ArtefactKey(
        model="m", compiler="onnxruntime-graph", compiler_version="0.1", device=f"{cpu_instructions()} avx9"
    )
    assert unfit(here).startswith("it was built for compiler version '0.1', here is ")
    put(tmp_path, 2.0, config=models.DOUBLE + COMPILE)
    key = compilation(tmp_path).key(tmp_path / "double/1/model.onnx")
    assert unfit(replace(key, device=f"{key.device} avx9")) == "it was built for another device: this one lacks avx9"


@given(st.sampled_from(["FP32", "FP16", "BF16", "INT64", "BOOL", "BYTES"]), st.integers(0, 3))
def test_samples_reach_the_child_as_they_were(datatype: str, rows: int) -> None:
    made = models_spec(datatype, rows)
    samples = made_samples(made)
    assert samples
    lines, data = write_samples(SimpleNamespace(spec=made), samples)  # type: ignore[arg-type]
    for sent, read in zip(samples, read_samples(json.loads(json.dumps(lines)), io.BytesIO(data)), strict=True):
        assert sent["in"].dtype == read["in"].dtype and (sent["in"] == read["in"]).all()


def models_spec(datatype: str, rows: int) -> Any:
    made = model("m", inputs=(replace(tensor("in", (-1, 2)), datatype=datatype),), outputs=(tensor("out", (2,)),))
    return replace(made, max_batch_size=rows)


@pytest.mark.parametrize(
    ("number", "on_gpu", "kind"),
    [
        (signal.SIGTERM, False, RefusalKind.STOPPED),
        (signal.SIGSEGV, False, RefusalKind.CRASHED),
        (signal.SIGKILL, False, RefusalKind.CRASHED),
        (signal.SIGSEGV, True, RefusalKind.CRASHED),
        (signal.SIGKILL, True, RefusalKind.NO_SPACE),
    ],
)
def test_a_build_that_is_ended_from_outside_is_not_held_against_the_artefact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, on_gpu: bool, kind: RefusalKind
) -> None:
    """A service manager sends SIGTERM to a server and to its children at once. Where memory is short, the kernel ends
    a build with SIGKILL; without a bound, as for a GPU, no later build would have made that refusal void.
    """
    monkeypatch.setattr("oriel_inference.artefacts.process.compiles_on_gpu", lambda compiler: on_gpu)
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    one, path = compilation(tmp_path / "models"), tmp_path / "models/double/1/model.onnx"
    folder, write = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), Child.write
    folder.open()

    def signalled(child: Child, data: bytes, deadline: float) -> None:
        os.kill(child.pid, number)
        write(child, data, deadline)

    monkeypatch.setattr(Child, "write", signalled)
    with pytest.raises(ArtefactRefused) as ended:
        build(one, one.key(path), folder, BuildBounds(), one.samples(), ChildProcesses(), lambda phase: None)
    assert ended.value.kind is kind, ended.value.reason
    assert "server" not in ended.value.reason, "it is not known to stop"


@pytest.mark.parametrize(("memory_bytes", "kind"), [(0, RefusalKind.NO_SPACE), (1 << 30, RefusalKind.OUT_OF_MEMORY)])
def test_what_lacks_memory_without_a_bound_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, kind: RefusalKind
) -> None:
    answer = {"kind": "out_of_memory", "reason": "out of memory"}
    monkeypatch.setattr("oriel_inference.artefacts.process._answer", lambda child, deadline, shown: answer)
    with pytest.raises(ArtefactRefused) as refused:
        ChildProcesses().ask({"shown": "", "memory_bytes": memory_bytes}, b"", BuildBounds())
    assert refused.value.kind is kind


def test_a_server_that_stops_starts_no_child() -> None:
    children = ChildProcesses()
    children.close()
    with pytest.raises(ArtefactRefused) as stopped:
        children.ask({}, b"", BuildBounds())
    assert stopped.value.kind is RefusalKind.STOPPED


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("std::bad_alloc", True),
        ("Failed to allocate memory for requested buffer", True),
        ("bad shape", False),
    ],
)
def test_an_error_for_want_of_memory_is_not_held_against_an_artefact(text: str, memory: bool) -> None:
    assert lacks_memory(f"ONNX Runtime cannot load model.onnx: {text}") == memory


# The swap

X = TensorInfo(name="in", datatype="FP32", shape=(-1, 2))
Y = TensorInfo(name="out", datatype="FP32", shape=(-1, 2))


@given(st.lists(st.sampled_from(["call", "turn", "step", "swap"]), max_size=40), st.integers(1, 3))
def test_whenever_sessions_are_swapped_every_call_is_answered_and_later_batches_run_on_the_new_ones(
    events: list[str], instances: int
) -> None:
    bench = Bench(spec(max_rows=2, instances=instances))
    made: list[list[FakeSession]] = [list(bench.sessions)]
    calls = []
    for event in events:
        if event == "call":
            calls.append(bench.call())
        elif event == "turn":
            bench.clock.run()
        elif event == "step":
            bench.step()
        else:
            made.append([FakeSession([BENCH_X], [BENCH_Y], gate=Gate()) for _ in range(instances)])
            began = len(bench.workers.jobs)
            runs = bench.batcher.swap(made[-1])
            assert runs() == (bench.batcher.running > 0) and bench.batcher.running == began
    bench.settle()
    assert all(len(bench.answer(number).outputs[0]) == 1 for number in calls)
    before = [len(each.batches) for group in made[:-1] for each in group]
    bench.call()
    bench.settle()
    assert [len(each.batches) for group in made[:-1] for each in group] == before
    assert len(bench.batcher._idle) == instances and {id(each) for each in bench.batcher._idle} == {
        id(each) for each in made[-1]
    }


def test_a_failure_that_the_reference_shares_is_the_callers_and_another_one_is_the_artefacts() -> None:
    gate, failures = Gate(), []
    broken, right = FakeSession([X], [Y], gate=gate, fail=True), FakeSession([X], [Y], gate=gate)
    inputs = {"in": np.ones((1, 2), np.float32)}
    session = CompiledSession(broken, right, failures.append)
    assert session.run(inputs, ["out"])[0].tolist() == [[2.0, 2.0]]
    assert [type(each) for each in failures] == [BackendFailed]
    with pytest.raises(BackendFailed):
        CompiledSession(broken, broken, failures.append).run(inputs, ["out"])
    assert len(failures) == 1
    session.close()
    assert broken.closed and not right.closed
