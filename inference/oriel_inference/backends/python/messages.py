"""What the server and the process of a Python model say to one another."""

import msgspec

from oriel_wire.v2.messages import ParameterValue

__all__ = [
    "Answers",
    "Cancel",
    "Credit",
    "Execute",
    "Failed",
    "Finalize",
    "Finalized",
    "Infer",
    "Inferred",
    "Initialize",
    "Load",
    "Loaded",
    "Message",
    "Ready",
    "RequestHead",
    "Respond",
    "ResultHead",
    "Returned",
    "Say",
    "TensorHead",
]


class TensorHead(msgspec.Struct, array_like=True):
    """size: bytes in the body, without padding."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int


class RequestHead(msgspec.Struct, array_like=True):
    """deadline, ends: monotonic seconds, the machine's, see `backends.Request`."""

    id: int
    request_id: str
    correlation: int | str
    flags: int
    timeout_us: int
    parameters: dict[str, ParameterValue]
    outputs: list[str]
    deadline: float
    ends: float
    idle_s: float
    inputs: list[TensorHead]


class ResultHead(msgspec.Struct, array_like=True):
    """error: a code of TritonError and a sentence."""

    tensors: list[TensorHead] = []
    parameters: dict[str, ParameterValue] = {}
    error: tuple[int, str] | None = None


class Load(msgspec.Struct, array_like=True, tag=1):
    """First message to a child. config: the model configuration as JSON, which the model may `complete`."""

    file: str
    name: str
    version: str
    config: str
    complete: bool
    max_body_bytes: int


class Loaded(msgspec.Struct, array_like=True, tag=2):
    """The file was imported. config: what `auto_complete_config` made of it; None if the model has no such function."""

    config: str | None


class Initialize(msgspec.Struct, array_like=True, tag=3):
    """args: of `initialize`. outputs: every output's name."""

    args: dict[str, str]
    decoupled: bool
    outputs: list[str]


class Ready(msgspec.Struct, array_like=True, tag=4):
    """`initialize` has returned."""


class Failed(msgspec.Struct, array_like=True, tag=5):
    """Loading or initialising raised. detail: the traceback."""

    reason: str
    detail: str


class Execute(msgspec.Struct, array_like=True, tag=6):
    batch: int
    requests: list[RequestHead]


class Answers(msgspec.Struct, array_like=True, tag=7):
    """One result per request of the batch. began, ended: of `execute`, monotonic seconds."""

    batch: int
    began: float
    ended: float
    results: list[ResultHead]


class Respond(msgspec.Struct, array_like=True, tag=8):
    """One response of a decoupled model, or only its end."""

    request: int
    result: ResultHead | None
    final: bool


class Returned(msgspec.Struct, array_like=True, tag=9):
    """`execute` of a decoupled model has returned; its responses may come later."""

    batch: int


class Finalize(msgspec.Struct, array_like=True, tag=10):
    pass


class Finalized(msgspec.Struct, array_like=True, tag=11):
    pass


class Cancel(msgspec.Struct, array_like=True, tag=12):
    """Nobody waits for this request any more; from a child: for what it asked of another model."""

    request: int


class Credit(msgspec.Struct, array_like=True, tag=13):
    """So many responses of this request have been taken; from a child: of what it asked of another model."""

    request: int
    count: int


class Say(msgspec.Struct, array_like=True, tag=14):
    """A line for the server's log. level: of `logging`."""

    level: int
    text: str


class Infer(msgspec.Struct, array_like=True, tag=15):
    """A model asks another model."""

    id: int
    model: str
    version: str
    request_id: str
    parameters: dict[str, ParameterValue]
    outputs: list[str]
    timeout_us: int
    decoupled: bool
    inputs: list[TensorHead]


class Inferred(msgspec.Struct, array_like=True, tag=16):
    """What the other model said. final: nothing more comes."""

    id: int
    result: ResultHead | None
    final: bool


Message = (
    Load
    | Loaded
    | Initialize
    | Ready
    | Failed
    | Execute
    | Answers
    | Respond
    | Returned
    | Finalize
    | Finalized
    | Cancel
    | Credit
    | Say
    | Infer
    | Inferred
)
