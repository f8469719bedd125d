"""Runtimes behind one interface: a backend opens model files, a session executes batches.

Nothing outside this folder imports a runtime, and the module of a backend is imported when a model first needs it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oriel_inference.backends.device_tensor import Memory
from oriel_inference.errors import InferenceError, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_wire.v2.messages import Array, InferRequest, ParameterValue

if TYPE_CHECKING:
    # The processes of Python models import this package, and start sooner without protobuf.
    from oriel_wire.context import CallContext
    from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = [
    "Backend",
    "CodeModel",
    "ConfiguredBackend",
    "Execution",
    "NeededBytes",
    "Outputs",
    "OutsideProfile",
    "Request",
    "RequestSession",
    "Reserve",
    "Session",
    "find_backend",
    "resident_memory",
    "without_folders",
]

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s\"'/]+/)+")
_BACKENDS = {
    "onnxruntime": "oriel_inference.backends.onnx_runtime:OnnxRuntime",
    "tensorrt": "oriel_inference.backends.tensorrt.backend:TensorRt",
    "pytorch": "oriel_inference.backends.pytorch.process:PyTorch",
    "fil": "oriel_inference.backends.forests:Forests",
    "openvino": "oriel_inference.backends.openvino_models:OpenVinoModels",
    "language": "oriel_inference.language.backend:Language",
}
_UNKNOWN = (
    "copy the model.py of a Python-based backend into the version's folder and name python (docs/python-models.md); "
    "the code of a library belongs into a logic service (docs/logic.md)"
)


class OutsideProfile(InvalidRequest):
    """The shapes or values of a batch are none that the model was compiled for. Another session of the model may run
    it.
    """


class Session(ABC):
    """A loaded model file, ready to execute; several threads may run it at once.

    provider: the execution provider that is really in use, as reported by the runtime.
    memory: the allocator of its device, where inputs and outputs may stay as `DeviceTensor`s; None if they never do.
    rows: the most rows that a batch may have, 0 if it cannot have any; None if the session has no bound.
    steps: executions of the model in the last `run`; only sessions for one thread have more than one.
    """

    provider: str
    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    memory: Memory | None = None
    rows: int | None = None
    steps: int = 1

    @abstractmethod
    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; blocks.

        inputs: name -> C-contiguous array.
        outputs: the names of the outputs to compute; the result has one array for each, in this order.
        BYTES are object arrays of bytes in both directions. Raises InvalidRequest if the runtime refuses the inputs,
        BackendFailed for everything else.
        """

    def run_resident(self, inputs: Mapping[str, Array], outputs: Sequence[str], kept: Collection[str]) -> list[Array]:
        """Do what `run` does, with some inputs and outputs in the memory of the device.

        kept: the outputs to leave there if that is possible; the others are arrays of the host.
        """
        return self.run(inputs, outputs)

    def capture(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Capture a CUDA graph for each of these shapes of all required inputs; blocks. Raises LoadFailed."""
        raise LoadFailed(f"no CUDA graph: {self.provider} captures none")

    def memory_bytes(self) -> int:
        """Return the bytes of memory that it is known to occupy; 0 if unknown. Only one in its own process knows."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release memory and threads. No `run` may be in progress or follow."""


class Outputs(list[Any]):
    """A response that may leave outputs out: arrays in the order of the model's outputs, None where the output is
    missing.

    parameters: parameters of the response itself.
    datatypes: position -> datatype of the outputs whose datatype is not that of the model's configuration.
    plain: no output is missing or of another datatype and there are no parameters, so it can be handled like the
    response of any other model.
    last: the model marked it as the last response of a decoupled request.
    again: there is no response yet, because the model wants to execute the request once more.
    """

    __slots__ = ("again", "datatypes", "last", "parameters", "plain")

    def __init__(
        self,
        arrays: Sequence[Array | None] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        *,
        datatypes: Mapping[int, str] | None = None,
        last: bool = False,
        again: bool = False,
    ):
        super().__init__(arrays)
        self.datatypes = datatypes or {}
        self.parameters = dict(parameters or {})
        self.last = last
        self.again = again
        self.plain = not parameters and not datatypes and not any(array is None for array in arrays)


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


class RequestSession(Session):
    """A session that takes the requests of a batch one by one and answers later, each of them any number of times if
    the model is decoupled (`model_transaction_policy`). `close` may be called at any time.

    An execution whose callers have all left may be ended by force; the instance then recovers by itself.
    on_death: called when it has lost what its model remembered, before the executions in progress fail.
    """

    on_death: Callable[[], None] | None = None

    @abstractmethod
    def execute(self, execution: Execution) -> None:
        """Begin an execution; never waits and never raises. Called on the loop."""

    @abstractmethod
    def caller_left(self, execution: Execution, index: int) -> None:
        """Report that the caller of this request has left. Called on the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededBytes:
    """The memory that the sessions of one file need on one GPU.

    shared: bytes for all together. per_session: bytes for each of them. host_per_session: the same on the host.
    """

    gpu: int
    shared: int
    per_session: int
    host_per_session: int


# Called before memory is taken, and again when more is known of what is needed. Raises LoadFailed without room.
Reserve = Callable[[NeededBytes], None]


class Backend(ABC):
    """Opens model files of one runtime.

    apart: a session lives in a process of its own, which is started again from the same file when it has ended. Such a
    file is not tried in another process first.
    """

    name: str
    apart: bool = False

    @abstractmethod
    def open(self, path: Path, options: EngineOptions) -> Session:
        """Load `path`; blocks. Raises LoadFailed, also if another execution provider than the requested one would run
        the model.
        """

    def open_within(self, path: Path, options: EngineOptions, reserve: Reserve) -> Session:
        """Do what `open` does. A backend that knows what memory it needs calls `reserve` before it takes it."""
        return self.open(path, options)

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs that sessions really run on; each was tried, not only listed. The first call may block."""
        return ()

    def lacks(self, provider: str) -> str:
        """Return why `provider` cannot be used in this installation and what to install; "" if it can be used, as far
        as is known before a session is open.
        """
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeModel:
    """A model that is code, and how its instances are opened.

    path: its file.
    config: its configuration, which the code may complete in place.
    judge: validates the completed configuration, fills in its defaults, and returns the number of instances.
    """

    path: Path
    config: "pb.ModelConfig"
    options: EngineOptions
    version: int
    judge: "Callable[[pb.ModelConfig], int]"


class ConfiguredBackend(Backend):
    """A backend whose model files do not describe their tensors: the configuration does, and the code may complete
    it.
    """

    @abstractmethod
    def open_all(self, model: CodeModel) -> Sequence[RequestSession]:
        """Let the model complete its configuration, and open all instances at the same time; blocks. Raises LoadFailed,
        including what `judge` raises.
        """


def resident_memory(sessions: Sequence[Session]) -> Memory | None:
    """Return the device whose memory all of these sessions share; None if there is none."""
    found = {session.memory for session in sessions}
    return found.pop() if len(found) == 1 else None


def find_backend(name: str) -> Backend:
    """Return the backend that configurations call `name`. Raises LoadFailed if it is unknown or not installed."""
    target = _BACKENDS.get(name)
    if name == "python":
        raise LoadFailed("a Python model runs in processes of an inference server only: load it there")
    if target is None:
        raise LoadFailed(f"{name[:64]!r} is not supported, use one of {', '.join(_BACKENDS)}, python: {_UNKNOWN}")
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
