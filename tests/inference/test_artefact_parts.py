"""The parts of compiled artefacts: folder, comparison of outputs, configuration, swap of sessions."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeSession, Gate
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from oriel_inference.artefacts.folder import (
    FORM,
    STALE_WORK_S,
    ArtefactDamaged,
    ArtefactFolder,
    Manifest,
    Refusal,
    describe_files,
)
from oriel_inference.artefacts.process import ArtefactRefused, private_copy
from oriel_inference.artefacts.session import CompiledSession
from oriel_inference.backends import find_backend
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.dataplane.scripting import Scripting
from oriel_inference.errors import BackendFailed, LoadFailed
from oriel_inference.model import TensorInfo
from oriel_inference.repository.load import Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_policies.artefacts.comparison import TOLERANCES, Tolerance, disagreement
from oriel_policies.artefacts.differences import measure
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.artefacts.lifecycle import RefusalKind

from . import models
from .bench import Bench, spec
from .bench import X as BENCH_X
from .bench import Y as BENCH_Y

COMPILE = 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }\n'
KEY = ArtefactKey(model="m", compiler="c", compiler_version="1", device="d")


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


def test_no_room_for_temporary_files_is_not_said_of_the_artefact_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = published(tmp_path / "a", {"x": b"1"})
    with private_copy(folder, KEY.fingerprint, manifest) as copy:
        assert copy.read_bytes() == b"1"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ArtefactRefused, match="its private copy in .*/gone cannot be made: No such file") as refused:
        with private_copy(folder, KEY.fingerprint, manifest):
            raise AssertionError
    assert refused.value.kind is RefusalKind.NO_SPACE


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


def test_a_refusal_is_read_as_it_was_written_and_a_success_forgets_it(tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "a", {"x": b"1"})
    refusal = Refusal(
        key=KEY.parts(), kind=RefusalKind.TIMED_OUT, reason="too slow", conditions="c", model="double", at_s=1.0
    )
    folder.remember(refusal)
    assert folder.refusal(KEY.fingerprint) == refusal
    assert folder.refusals() == [KEY.fingerprint]
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
            "parameters['oriel.compile.tolerance']: must be of the form absolute=1e-5,relative=1e-3",
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
