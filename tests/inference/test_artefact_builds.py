"""Builds of compiled artefacts in a process of their own: their bounds, how they end, and their samples."""

import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_objects import MemoryObjects
from onnx import numpy_helper

from oriel_inference.artefacts.folder import (
    ArtefactFolder,
)
from oriel_inference.artefacts.offline import build_ahead, compilations, unfit, verify_outputs
from oriel_inference.artefacts.process import (
    ArtefactRefused,
    BuildBounds,
    ChildProcesses,
    Wanted,
    build,
    lacks_memory,
    read_samples,
    write_samples,
)
from oriel_inference.backends import find_backend
from oriel_inference.backends.compilers import cpu_instructions
from oriel_inference.backends.onnx_graph import ENTRY, WEIGHTS, OnnxGraph
from oriel_inference.errors import LoadFailed
from oriel_inference.repository import onnx_files
from oriel_inference.repository.compiling import Compilation, made_samples
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_policies.artefacts.comparison import Tolerance
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.artefacts.lifecycle import RefusalKind
from oriel_wire.process.helper import Helper
from oriel_wire.v2.proto import model_config_pb2 as pb

from . import models
from .control_server import put, times
from .ensembles import model, tensor
from .remote_models import model as model_bytes
from .remote_stores import remote

COMPILE = 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }\n'


# Lowers its priority as the real one does, and answers with it.
NICE_CHILD = """
import json, os
from oriel_inference.artefacts import child
child._build = lambda *_: {"kind": "not_compiled", "reason": f"niceness {os.getpriority(os.PRIO_PROCESS, 0)}"}
child.main()
"""


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
def test_a_build_beyond_its_bounds_ends_and_is_remembered(
    tmp_path: Path, cold_children: None, bounds: BuildBounds, kind: str
) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    folder, one = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    with pytest.raises(ArtefactRefused) as first:
        build_ahead(one, folder, bounds, silent)
    assert first.value.kind.value == kind, first.value.reason
    with pytest.raises(ArtefactRefused, match="it was refused before"):
        build_ahead(one, folder, bounds, silent)
    assert not list(folder.root.glob(".work-*"))
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
    assert refused.value.kind is RefusalKind.NO_SPACE and folder.refusals() == []


def test_a_refusal_holds_until_the_bounds_the_tolerance_or_the_samples_are_others(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    folder, one = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    small = BuildBounds(artefact_bytes=16)
    with pytest.raises(ArtefactRefused):
        build_ahead(one, folder, small, silent)
    with pytest.raises(ArtefactRefused, match="it was refused before: "):
        build_ahead(one, folder, replace(small, niceness=1), silent)
    before = Wanted.of(one, small)
    lenient = replace(one, tolerance=Tolerance(1.0, 0.0))
    warmed = replace(one, config=pb.ModelConfig())
    warmed.config.CopyFrom(one.config)
    warmed.config.model_warmup.add(name="w", batch_size=3).inputs["x"].CopyFrom(
        pb.ModelWarmup.Input(data_type=pb.TYPE_FP32, dims=[4], zero_data=True)
    )
    bounds = [replace(small, **{name: 17}) for name in ("seconds", "memory_bytes", "artefact_bytes")]
    found = [Wanted.of(one, each) for each in bounds] + [Wanted.of(each, small) for each in (lenient, warmed)]
    assert {each.key for each in found} == {before.key}
    assert len({each.conditions for each in (before, *found)}) == 6
    assert build_ahead(one, folder, BuildBounds(), silent)[0] == "built"


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
        super().__init__(BuildBounds())
        self._path = path

    def ask(self, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        models.save_model(times(3.0), str(self._path))
        return super().ask(request, data)


def test_nothing_is_published_under_the_fingerprint_of_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    folder, small = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), compilation(tmp_path / "models")
    assert folder.open() == ""
    one = replace(small, store=LocalStore(tmp_path / "models", max_copy_bytes=0))  # opened where it lies
    path = tmp_path / "models/double/1/model.onnx"
    with pytest.raises(ArtefactRefused) as changed:
        build(Wanted.of(one, BuildBounds()), folder, Disturbed(path), lambda phase: None)
    assert changed.value.kind is RefusalKind.CHANGED
    assert list(folder.root.iterdir()) == []
    with pytest.raises(LoadFailed, match="have changed since it was loaded"):
        one.key(path)


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
    monkeypatch.setattr(OnnxGraph, "on_gpu", on_gpu)
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    one = compilation(tmp_path / "models")
    folder, write = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), Helper._write
    folder.open()

    def signalled(helper: Helper, data: bytes, deadline: float) -> None:
        if helper.pid is not None:
            os.kill(helper.pid, number)
        write(helper, data, deadline)

    monkeypatch.setattr(Helper, "_write", signalled)
    with pytest.raises(ArtefactRefused) as ended:
        build(Wanted.of(one, BuildBounds()), folder, ChildProcesses(BuildBounds()), lambda phase: None)
    assert ended.value.kind is kind, ended.value.reason
    assert "server" not in ended.value.reason, "it is not known to stop"


@pytest.mark.parametrize(("memory_bytes", "kind"), [(0, RefusalKind.NO_SPACE), (1 << 30, RefusalKind.OUT_OF_MEMORY)])
def test_what_lacks_memory_without_a_bound_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, kind: RefusalKind
) -> None:
    answer = {"kind": "out_of_memory", "reason": "out of memory"}
    monkeypatch.setattr(Helper, "ask", lambda *_, **__: (answer, []))
    with pytest.raises(ArtefactRefused) as refused:
        ChildProcesses(BuildBounds()).ask({"shown": "", "memory_bytes": memory_bytes, "file_bytes": 0}, b"")
    assert refused.value.kind is kind


def test_a_server_that_stops_starts_no_child() -> None:
    children = ChildProcesses(BuildBounds())
    children.close()
    with pytest.raises(ArtefactRefused) as stopped:
        children.ask({"file_bytes": 0}, b"")
    assert stopped.value.kind is RefusalKind.STOPPED


def test_a_build_has_the_niceness_of_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nice_child.py").write_text(NICE_CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("oriel_inference.artefacts.process._CHILD", "nice_child")
    put(tmp_path / "models", 2.0, config=models.DOUBLE + COMPILE)
    wanted, folder = Wanted.of(compilation(tmp_path / "models"), BuildBounds()), ArtefactFolder(tmp_path, max_bytes=1)
    with pytest.raises(ArtefactRefused) as refused:
        build(wanted, folder, ChildProcesses(BuildBounds(niceness=3)), lambda phase: None)
    assert refused.value.reason == f"niceness {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)}"


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
