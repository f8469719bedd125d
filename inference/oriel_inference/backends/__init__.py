"""Runtimes behind one interface: a backend opens model files, a session executes batches.

Nothing outside this folder imports a runtime, and the module of a backend is imported when a model first needs it.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from oriel_inference.backends.device_tensor import Memory
from oriel_inference.errors import InferenceError, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_wire.v2.messages import Array, InferRequest, ParameterValue

if TYPE_CHECKING:
    # The processes of Python models import this package, and start sooner without protobuf.
    from oriel_wire.context import CallContext
    from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = [
    "WARM_RESPONSES",
    "AcceleratedBackend",
    "Backend",
    "CapturingSession",
    "ConfiguredBackend",
    "DecoupledSession",
    "Execution",
    "NeededBytes",
    "Outputs",
    "OutsideProfile",
    "Request",
    "RequestSession",
    "Reserve",
    "ReservingBackend",
    "ResidentSession",
    "Session",
    "find_backend",
    "lacks",
    "memory_bytes",
    "most_rows",
    "resident_memory",
    "stays_resident",
    "takes_requests",
    "usable_gpus",
    "without_folders",
]

# A warm-up reads this many responses of a decoupled model and then stops, because some models never end.
WARM_RESPONSES = 1000
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s\"'/]+/)+")
_BACKENDS = {
    "onnxruntime": "oriel_inference.backends.onnx_runtime:OnnxRuntime",
    "tensorrt": "oriel_inference.backends.tensorrt.backend:TensorRt",
}


class OutsideProfile(InvalidRequest):
    """The shapes or values of a batch are none that the model was compiled for. Another session of the model may run
    it.
    """


class Session(Protocol):
    """A loaded model file, ready to execute; several threads may run it at once.

    provider: the execution provider that is really in use, as reported by the runtime.
    """

    @property
    def provider(self) -> str: ...

    @property
    def inputs(self) -> Sequence[TensorInfo]: ...

    @property
    def outputs(self) -> Sequence[TensorInfo]: ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; blocks.

        inputs: name -> C-contiguous array.
        outputs: the names of the outputs to compute; the result has one array for each, in this order.
        BYTES are object arrays of bytes in both directions. Raises InvalidRequest if the runtime refuses the inputs,
        BackendFailed for everything else.
        """
        ...

    def close(self) -> None:
        """Release memory and threads. No `run` may be in progress or follow."""
        ...


class ResidentSession(Session, Protocol):
    """A session whose inputs and outputs may stay in the memory of its device, as `DeviceTensor`s.

    memory: the allocator of its device.
    """

    @property
    def memory(self) -> Memory: ...

    def run_resident(self, inputs: Mapping[str, Array], outputs: Sequence[str], kept: Collection[str]) -> list[Array]:
        """Do what `run` does, with some inputs and outputs in the memory of the device.

        kept: the outputs to leave there if that is possible; the others are arrays of the host.
        """
        ...


class CapturingSession(Session, Protocol):
    """A session that runs batches of known shapes as CUDA graphs."""

    def capture(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Capture a graph for each of these shapes of all required inputs; blocks. Raises LoadFailed."""
        ...


class DecoupledSession(Session, Protocol):
    """A session that may answer one request with any number of responses (`model_transaction_policy`)."""

    def stream(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], cancelled: Callable[[], bool]
    ) -> Generator[list[Array], None, None]:
        """Yield any number of responses, each with one array per name in `outputs`; blocks between them. Arguments and
        errors are those of `run`.

        cancelled: returns true once the caller no longer waits; check it in long steps. The generator is closed as soon
        as its responses are not needed any more, so clean up in `finally`.
        """
        ...


class Outputs(list[Any]):
    """A response that may leave outputs out: arrays in the order of the model's outputs, None where the output is
    missing.

    parameters: parameters of the response itself.
    plain: no output is missing and there are no parameters, so it can be handled like the response of any other model.
    last: the model marked it as the last response of a decoupled request.
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
    """One request of a batch, for sessions that take the requests one by one.

    inputs: name -> array in the shape that the runtime expects.
    deadline: absolute; each response of a stream extends it to `idle_s` from then, but not beyond `ends`.
    client_request, context: the client's request and its call context; None in a warm-up.
    """

    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    deadline: float
    ends: float
    idle_s: float = 0.0
    client_request: InferRequest | None = None
    context: "CallContext | None" = None


class Execution(Protocol):
    """The requests that a RequestSession works on, and the callbacks for their results. Used on the loop only."""

    @property
    def requests(self) -> Sequence[Request]: ...

    def computing(self, began_s: float, ended_s: float) -> None:
        """Report when the model worked on the requests, if known; called before the answers."""
        ...

    def answer(self, index: int, result: Outputs | InferenceError | None) -> None:
        """End one request; called exactly once per request. None: a decoupled request has had all its responses."""
        ...

    def respond(self, index: int, outputs: Outputs, consumed: Callable[[], None]) -> None:
        """Deliver one response of a decoupled request. consumed: called once it is written."""
        ...

    def returned(self) -> None:
        """Report, exactly once, that the instance can take more; decoupled requests may still be in progress."""
        ...


class RequestSession(Session, Protocol):
    """A session that takes the requests of a batch one by one and answers later. `close` may be called at any time.

    An execution whose callers have all left may be ended by force; the instance then recovers by itself.
    """

    def execute(self, execution: Execution) -> None:
        """Begin an execution; never waits and never raises. Called on the loop."""
        ...

    def leave(self, execution: Execution, index: int) -> None:
        """Report that the caller of this request has left. Called on the loop."""
        ...


class Backend(Protocol):
    """Opens model files of one runtime."""

    @property
    def name(self) -> str: ...

    def open(self, path: Path, options: EngineOptions) -> Session:
        """Load `path`; blocks. Raises LoadFailed, also if another execution provider than the requested one would run
        the model.
        """
        ...


class ConfiguredBackend(Backend, Protocol):
    """A backend whose model files do not describe their tensors: the configuration does, and the code may complete
    it.
    """

    def open_all(
        self,
        path: Path,
        config: "pb.ModelConfig",
        options: EngineOptions,
        version: int,
        judge: "Callable[[pb.ModelConfig], int]",
    ) -> Sequence[RequestSession]:
        """Let the model complete `config` in place, and open all instances at the same time; blocks.

        judge: validates the completed configuration, fills in its defaults, and returns the number of instances.

        Raises LoadFailed, including what `judge` raises.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededBytes:
    """The memory that the sessions of one file need on one GPU.

    shared: once for all sessions. per_session: for each of them. host_per_session: the same of the host's memory.
    """

    gpu: int
    shared: int
    per_session: int
    host_per_session: int


# Called before memory is taken, and again when more is known of what is needed. Raises LoadFailed without room.
Reserve = Callable[[NeededBytes], None]


@runtime_checkable
class ReservingBackend(Backend, Protocol):
    """A backend that knows how much memory a session needs before it takes it."""

    def open_within(self, path: Path, options: EngineOptions, reserve: Reserve) -> Session:
        """Do what `open` does, and call `reserve` before memory is taken."""
        ...


def most_rows(session: Session) -> int | None:
    """Return the most rows that a batch may have, 0 if it cannot have any; None if the session has no bound."""
    rows: int | None = getattr(session, "rows", None)
    return rows


def memory_bytes(session: Session) -> int:
    """Return the bytes of memory that a session is known to occupy; 0 if unknown. Only a session in its own process
    knows.
    """
    measure: Callable[[], int] | None = getattr(session, "memory_bytes", None)
    return measure() if measure is not None else 0


def stays_resident(session: Session) -> TypeGuard[ResidentSession]:
    """Return whether the session takes tensors in the memory of its device and can leave its outputs there."""
    return getattr(session, "memory", None) is not None


def resident_memory(sessions: Sequence[Session]) -> Memory | None:
    """Return the device whose memory all of these sessions share; None if there is none."""
    found = {getattr(session, "memory", None) for session in sessions}
    return found.pop() if len(found) == 1 else None


def takes_requests(session: Session) -> TypeGuard[RequestSession]:
    """Return whether the session takes the requests of a batch one by one."""
    return hasattr(session, "execute")


@runtime_checkable
class AcceleratedBackend(Backend, Protocol):
    """A backend with execution providers beyond the CPU's."""

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs that sessions really run on; each was tried, not only listed."""
        ...

    def lacks(self, provider: str) -> str:
        """Return why `provider` cannot be used in this installation and what to install; "" if it can be used."""
        ...


def usable_gpus(backend: Backend) -> Sequence[Gpu]:
    """Return the GPUs that `backend` can run on. The first call may block."""
    return backend.gpus() if isinstance(backend, AcceleratedBackend) else ()


def lacks(backend: Backend, provider: str) -> str:
    """Return why `backend` cannot use `provider`; "" if it can, as far as is known before a session is open."""
    return backend.lacks(provider) if isinstance(backend, AcceleratedBackend) else ""


def find_backend(name: str) -> Backend:
    """Return the backend that configurations call `name`. Raises LoadFailed if it is unknown or not installed."""
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


def without_folders(text: str) -> str:
    """Returns an error text as one line that names files, but not the folders they are in: clients may see it."""
    return " ".join(_FOLDERS.sub("", text).split())
