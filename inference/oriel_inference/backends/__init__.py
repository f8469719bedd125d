"""Runtimes behind one seam. A backend opens model files, a session executes batches.

Nothing outside this folder imports a runtime, and a backend's module is imported when a model first asks for it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from oriel_inference.errors import InferenceError, LoadFailed
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_wire.v2.messages import Array, InferRequest, ParameterValue

if TYPE_CHECKING:
    # The processes of Python models import this package: they start sooner without protobuf.
    from oriel_wire.context import CallContext
    from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = [
    "WARM_RESPONSES",
    "AcceleratedBackend",
    "Backend",
    "ConfiguredBackend",
    "DecoupledSession",
    "Execution",
    "Outputs",
    "Request",
    "RequestSession",
    "Session",
    "find_backend",
    "lacks",
    "memory_bytes",
    "takes_requests",
    "usable_gpus",
]

# A warm-up reads so many responses of a decoupled model and leaves: some have no end.
WARM_RESPONSES = 1000
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


class Outputs(list[Any]):
    """A response that may leave outputs out: arrays in the order of the model's outputs, None for those it has not.

    parameters: the response's own. plain: it has neither, and is like any other model's. last: the model said with it
    that a decoupled request has no further response.
    """

    __slots__ = ("last", "parameters", "plain")

    def __init__(
        self,
        arrays: Sequence[Array | None] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        *,
        last: bool = False,
    ):
        super().__init__(arrays)
        self.parameters = dict(parameters or {})
        self.last = last
        self.plain = not parameters and not any(array is None for array in arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a batch, for sessions that take them one by one.

    inputs: name -> array as the runtime wants it. deadline: absolute; each response of a stream moves it to `idle_s`
    from there, at most to `ends`.
    asked, context: what the client sent and on whose behalf, None in a warm-up.
    """

    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    deadline: float
    ends: float
    idle_s: float = 0.0
    asked: InferRequest | None = None
    context: "CallContext | None" = None


class Execution(Protocol):
    """Requests under way on a RequestSession, and whom it tells about them. Everything on the loop."""

    @property
    def requests(self) -> Sequence[Request]: ...

    def computing(self, began_s: float, ended_s: float) -> None:
        """When the model worked on them, if it can be said; before the answers."""
        ...

    def answer(self, index: int, result: Outputs | InferenceError | None) -> None:
        """The end of one request, exactly once; None: a decoupled one has had all its responses."""
        ...

    def respond(self, index: int, outputs: Outputs, consumed: Callable[[], None]) -> None:
        """One response of a decoupled request. consumed: called once it is written."""
        ...

    def returned(self) -> None:
        """The instance can take more, exactly once; decoupled requests may still be under way."""
        ...


class RequestSession(Session, Protocol):
    """A session that takes the requests of a batch one by one and answers later. `close` may be called at any time.

    An execution for which nobody waits any more may be ended by force; the instance then comes back by itself.
    """

    def execute(self, execution: Execution) -> None:
        """Begin; never waits, never raises. On the loop."""
        ...

    def leave(self, execution: Execution, index: int) -> None:
        """Nobody waits for this request any more. On the loop."""
        ...


class Backend(Protocol):
    """Opens model files of one runtime."""

    @property
    def name(self) -> str: ...

    def open(self, path: Path, options: EngineOptions) -> Session:
        """Load `path`; blocks. Raises LoadFailed, also when another provider than asked for would run it."""
        ...


class ConfiguredBackend(Backend, Protocol):
    """A backend whose model files say nothing about tensors: the configuration does, and the code may complete it."""

    def open_first(
        self,
        path: Path,
        config: "pb.ModelConfig",
        options: EngineOptions,
        version: int,
        judge: "Callable[[pb.ModelConfig], None]",
    ) -> RequestSession:
        """Let the model complete `config` in place, have it judged, initialise the first instance; blocks.

        Raises LoadFailed, also what `judge` raises.
        """
        ...

    def open_next(
        self, path: Path, config: "pb.ModelConfig", options: EngineOptions, version: int, index: int
    ) -> RequestSession:
        """Instance `index` of a model whose configuration is complete; blocks. Raises LoadFailed."""
        ...


def memory_bytes(session: Session) -> int:
    """What a session surely occupies now, 0 if it cannot say: only one in a process of its own can."""
    measure: Callable[[], int] | None = getattr(session, "memory_bytes", None)
    return measure() if measure is not None else 0


def takes_requests(session: Session) -> TypeGuard[RequestSession]:
    """Whether it wants the requests of a batch one by one."""
    return hasattr(session, "execute")


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
        raise LoadFailed(f"{name[:64]!r} is not supported, use one of {', '.join((*_BACKENDS, 'python'))}")
    module, _, attribute = target.partition(":")
    try:
        factory: Callable[[], Backend] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise LoadFailed(
            f"{name!r} is not installed: pip install 'oriel-serving[cpu]' (in a checkout: make clean setup)"
        ) from error
    return factory()
