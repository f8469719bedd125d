"""Runtimes behind one seam. A backend opens model files, a session executes batches.

Nothing outside this folder imports a runtime, and a backend's module is imported when a model first asks for it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_wire.v2.messages import Array

__all__ = ["AcceleratedBackend", "Backend", "DecoupledSession", "Session", "find_backend", "lacks", "usable_gpus"]

_BACKENDS = {"onnxruntime": "oriel_inference.backends.onnx_runtime:OnnxRuntime"}


class Session(Protocol):
    """One loaded model file, ready to execute; safe to run from several threads at once.

    provider: the execution provider really in use, by the runtime's own word.
    """

    @property
    def provider(self) -> str: ...

    @property
    def inputs(self) -> Sequence[TensorInfo]: ...

    @property
    def outputs(self) -> Sequence[TensorInfo]: ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; blocks. inputs: name -> C-contiguous array; the result follows `outputs`.

        BYTES are object arrays of bytes both ways. Raises InvalidRequest if the runtime refuses the inputs,
        BackendFailed for everything else.
        """
        ...

    def close(self) -> None:
        """Give memory and threads back. No `run` may be under way or follow."""
        ...


class DecoupledSession(Session, Protocol):
    """A session that may answer one request with any number of responses (`model_transaction_policy`)."""

    def stream(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], cancelled: Callable[[], bool]
    ) -> Generator[list[Array], None, None]:
        """Yield 0 to n responses, each following `outputs`; blocks between them. Arguments and errors are `run`'s.

        cancelled: true once nobody waits for more; worth a look inside long steps. The generator is closed as soon as
        a response is not wanted any more: clean up in `finally`.
        """
        ...


class Backend(Protocol):
    """Opens model files of one runtime."""

    @property
    def name(self) -> str: ...

    def open(self, path: Path, options: EngineOptions) -> Session:
        """Load `path`; blocks. Raises LoadFailed, also when another provider than asked for would run it."""
        ...


@runtime_checkable
class AcceleratedBackend(Backend, Protocol):
    """A backend with execution providers beside the CPU's."""

    def gpus(self) -> Sequence[Gpu]:
        """The GPUs it surely runs on: tried, not only listed."""
        ...

    def lacks(self, provider: str) -> str:
        """Why `provider` cannot be used in this installation and what to install; empty if it is there."""
        ...


def usable_gpus(backend: Backend) -> Sequence[Gpu]:
    """What `backend` can run on beside the CPU; may block when it is asked first."""
    return backend.gpus() if isinstance(backend, AcceleratedBackend) else ()


def lacks(backend: Backend, provider: str) -> str:
    """Why `backend` cannot use `provider`; empty if it can, as far as can be told before a session is open."""
    return backend.lacks(provider) if isinstance(backend, AcceleratedBackend) else ""


def find_backend(name: str) -> Backend:
    """The backend that configurations call `name`. Raises LoadFailed if it is unknown or not installed."""
    target = _BACKENDS.get(name)
    if target is None:
        raise LoadFailed(f"{name[:64]!r} is not supported, use one of {', '.join(_BACKENDS)}")
    module, _, attribute = target.partition(":")
    try:
        factory: Callable[[], Backend] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise LoadFailed(
            f"{name!r} is not installed: pip install 'oriel[cpu]' (in a checkout: make clean setup)"
        ) from error
    return factory()
