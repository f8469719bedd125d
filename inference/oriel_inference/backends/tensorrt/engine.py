"""The engine of a plan, loaded once per GPU for all instances of a model: they share its weights."""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oriel_inference.backends.tensorrt.library import Library
from oriel_inference.backends.tensorrt.plan import Plan, read_plan
from oriel_inference.errors import LoadFailed

NO_REASON = "it gave no reason"


class Engine:
    """A loaded plan. size_bytes: bytes of its file, which is about what its weights take on the GPU.

    lock: held while an execution context is made.
    """

    def __init__(self, library: Library, path: Path, *, host_code: bool) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.size_bytes = path.stat().st_size
        tensorrt = library.tensorrt
        library.log.pop_errors()
        if hasattr(tensorrt, "init_libnvinfer_plugins"):
            tensorrt.init_libnvinfer_plugins(library.log, "")
        self._runtime: Any = tensorrt.Runtime(library.log)
        if host_code:
            self._runtime.engine_host_code_allowed = True
        self._engine: Any = _deserialise(self._runtime, path)
        if self._engine is None:
            reason = library.log.pop_errors() or NO_REASON
            raise LoadFailed(f"TensorRT {library.version} cannot load {path.name}: {reason}")
        wrong = ""
        try:
            self.plan: Plan = read_plan(self._engine, tensorrt)
        except LoadFailed as failure:
            wrong = failure.reason
        if wrong:  # outside of the block above: its traceback refers to the engine
            self.close()
            raise LoadFailed(f"{path.name}: {wrong}")

    def create_context(self) -> Any:
        """Return a new execution context, None if TensorRT makes none."""
        with self.lock:
            return self._engine.create_execution_context()

    def close(self) -> None:
        """Release the engine. All its contexts have been released."""
        self._engine = None
        self._runtime = None


class Engines:
    """The engines of one load, by file and GPU. Any thread may use it."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._held: dict[tuple[Path, int], tuple[Engine, int]] = {}  # with the number of its users

    def acquire(self, path: Path, gpu: int, *, host_code: bool, before: Callable[[int], None]) -> Engine:
        """Return the engine of a file, loaded unless another instance has done so. The GPU is current in this thread.

        before: called with the bytes that the weights will take, before they are taken; may raise.
        Raises LoadFailed.
        """
        with self._lock:
            engine, users = self._held.get((path, gpu), (None, 0))
            if engine is None:
                before(path.stat().st_size)
                engine = Engine(self._library, path, host_code=host_code)
            self._held[path, gpu] = engine, users + 1
            return engine

    def release(self, engine: Engine, gpu: int) -> None:
        """Give an engine back; the last user of it closes it."""
        with self._lock:
            held, users = self._held[engine.path, gpu]
            if users > 1:
                self._held[engine.path, gpu] = held, users - 1
                return
            del self._held[engine.path, gpu]
            held.close()


def _deserialise(runtime: Any, path: Path) -> Any:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return runtime.deserialize_cuda_engine(data)
    except ValueError as error:
        raise LoadFailed(f"{path.name} is empty") from error
    except OSError as error:
        raise LoadFailed(f"{path.name} cannot be read: {error.strerror}") from error
