"""The tests that every `Backend` and its sessions have to pass; the model is y = x + x."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from fake_backend import FakeBackend

from oriel_inference.backends import Backend, Session, find_backend
from oriel_inference.backends.compilers import find_compiler
from oriel_inference.backends.openvino_cpu import MISSING
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions, TensorInfo

from . import onnx_files

OPTIONS = EngineOptions(intra_op_threads=1)


class BackendSuite:
    """Subclasses define the fixture `backend`."""

    @pytest.fixture
    def session(self, backend: Backend, tmp_path: Path) -> Iterator[Session]:
        path = tmp_path / "model.onnx"
        path.write_bytes(onnx_files.DOUBLE)
        session = backend.open(path, OPTIONS)
        yield session
        session.close()

    def test_it_has_a_name_and_says_what_it_runs_on(self, backend: Backend, session: Session) -> None:
        assert backend.name and session.provider
        assert backend.lacks(session.provider) == ""
        assert all(gpu.number >= 0 for gpu in backend.gpus())

    def test_tensors_are_described(self, session: Session) -> None:
        assert [(each.name, each.datatype, list(each.shape)) for each in (*session.inputs, *session.outputs)] == [
            ("x", "FP32", [-1, 4]),
            ("y", "FP32", [-1, 4]),
        ]

    def test_results_follow_what_was_asked_and_inputs_stay_as_they_were(self, session: Session) -> None:
        for rows in (1, 3):
            x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
            kept = x.copy()
            (y,) = session.run({"x": x}, ["y"])
            assert y.dtype == np.float32 and np.array_equal(y, kept * 2) and np.array_equal(x, kept)
            assert not np.shares_memory(x, y)

    def test_runs_of_several_threads_do_not_meet(self, session: Session) -> None:
        def run(number: int) -> bool:
            x = np.full((2, 4), number, np.float32)
            return bool((session.run({"x": x}, ["y"])[0] == 2 * number).all())

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(run, range(64)))

    def test_sessions_of_one_file_are_apart(self, backend: Backend, session: Session, tmp_path: Path) -> None:
        backend.open(tmp_path / "model.onnx", OPTIONS).close()
        assert session.run({"x": np.ones((1, 4), np.float32)}, ["y"])[0].tolist() == [[2.0] * 4]


class FileSuite(BackendSuite):
    """Check that backends which open the files themselves refuse a broken one."""

    def test_a_file_that_is_none_is_refused(self, backend: Backend, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(b"junk")
        for name in ("model.onnx", "absent.onnx"):
            with pytest.raises(LoadFailed) as caught:
                backend.open(tmp_path / name, OPTIONS)
            assert str(tmp_path) not in caught.value.reason


class TestOnnxRuntime(FileSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return find_backend("onnxruntime")


@pytest.mark.skipif(find_spec("openvino") is None, reason=MISSING)
class TestOpenVinoModels(FileSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return find_backend("openvino")


class _Compiled(Backend):
    """The sessions of a compiler, as a backend."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, path: Path, options: EngineOptions) -> Session:
        compiler = find_compiler(self.name)
        folder = Path(mkdtemp(dir=path.parent))
        return compiler.open(folder / compiler.build(path, options, folder), options)


@pytest.mark.skipif(find_spec("openvino") is None, reason=MISSING)
class TestOpenVino(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return _Compiled("openvino")


class TestOnnxGraph(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return _Compiled("onnxruntime-graph")


class TestFakeBackend(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        x, y = (TensorInfo(name=name, datatype="FP32", shape=(-1, 4)) for name in "xy")
        return FakeBackend((x,), (y,))
