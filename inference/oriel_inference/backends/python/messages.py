"""The messages between the server and the process of a Python model."""

import msgspec

from oriel_wire.v2.messages import ParameterValue


class TensorHead(msgspec.Struct, array_like=True):
    """A tensor in the body. size: its bytes, without padding."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int


class RequestHead(msgspec.Struct, array_like=True):
    """One request. deadline, ends: seconds of the machine's monotonic clock, see `backends.Request`."""

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
    traceparent: str = ""


class ResultHead(msgspec.Struct, array_like=True):
    """One result. error: a code of TritonError and an error text. again: the request is to be executed once more."""

    tensors: list[TensorHead] = []
    parameters: dict[str, ParameterValue] = {}
    error: tuple[int, str] | None = None
    again: bool = False


class Load(msgspec.Struct, array_like=True, tag=1):
    """The first message to a child. config: the model configuration as JSON, which the model may `complete`."""

    file: str
    name: str
    version: str
    config: str
    complete: bool
    max_body_bytes: int


class Loaded(msgspec.Struct, array_like=True, tag=2):
    """The file was imported. config: the configuration after `auto_complete_config`; None if the model has no such
    function.
    """

    config: str | None


class Initialize(msgspec.Struct, array_like=True, tag=3):
    """Initialise the model. args: the arguments of `initialize`. outputs: the names of all outputs."""

    args: dict[str, str]
    decoupled: bool
    outputs: list[str]


class Ready(msgspec.Struct, array_like=True, tag=4):
    """The model's `initialize` has returned."""


class Failed(msgspec.Struct, array_like=True, tag=5):
    """Loading or initialising has failed. detail: the traceback."""

    reason: str
    detail: str


class Execute(msgspec.Struct, array_like=True, tag=6):
    batch: int
    requests: list[RequestHead]


class Answers(msgspec.Struct, array_like=True, tag=7):
    """One result per request of the batch. began, ended: the begin and end of `execute`, in monotonic seconds."""

    batch: int
    began: float
    ended: float
    results: list[ResultHead]


class Respond(msgspec.Struct, array_like=True, tag=8):
    """One response of a decoupled model, or only the end of its responses."""

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
    """The caller of this request has left. From a child: cancel a request to another model."""

    request: int


class Credit(msgspec.Struct, array_like=True, tag=13):
    """Permission to send `count` more responses of the request, because `count` responses have been taken.

    From a child: for responses of its own request to another model.
    """

    request: int
    count: int


class Say(msgspec.Struct, array_like=True, tag=14):
    """A line for the server's log. level: a level of `logging`."""

    level: int
    text: str


class Infer(msgspec.Struct, array_like=True, tag=15):
    """A request of this model to another model."""

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
    """A response of another model, or the server's answer to another question. final: nothing follows."""

    id: int
    result: ResultHead | None
    final: bool


class MakeMetric(msgspec.Struct, array_like=True, tag=17):
    """Make an object for a metric family, or for a metric of one.

    handle: the object's number in its process.
    family: the number of the metric's family; 0 for a family, which alone has name, kind and text.
    """

    id: int
    handle: int
    family: int
    name: str = ""
    kind: str = ""
    text: str = ""
    labels: dict[str, str] = {}
    buckets: list[float] | None = None


class UseMetric(msgspec.Struct, array_like=True, tag=18):
    """Change, read or delete a metric. id: the number of the answer; 0 for none."""

    id: int
    handle: int
    how: str
    value: float = 0.0


class Manage(msgspec.Struct, array_like=True, tag=19):
    """Load or unload a model, or find out whether it is ready.

    action: "load", "unload" or "ready".
    config: replaces the configuration file; "" for none.
    files: their bytes as tensors.
    dependents: unload the models of an ensemble's steps, too.
    """

    id: int
    action: str
    model: str
    version: str = ""
    config: str = ""
    files: list[TensorHead] = []
    dependents: bool = False


Orders = Load | Initialize | Execute | Finalize | Cancel | Credit | Inferred
Reports = Loaded | Ready | Failed | Answers | Respond | Returned | Finalized | Say
Questions = Infer | MakeMetric | UseMetric | Manage
Message = Orders | Reports | Questions
