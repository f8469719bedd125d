"""What can go wrong with a request or a model.

InferenceError              one request cannot be answered; carries an Outcome and facts, never a status code
├── InvalidRequest          it does not fit the model
├── RequestTooLarge         its body, decompressed, passes the limit
├── UnknownModel            no such model or version
├── ModelNotReady           known, but it does not serve
│   └── NoVersion           nor will it before someone loads it, or mends what failed to load
├── NotSupported            this server does not do that
├── QueueFull               never entered the queue, or displaced by a more urgent call
├── QueueTimeout            the model's own queue policy gave up on it
├── DeadlineExceeded        its deadline passed
├── DeadlineTooShort        its deadline would pass before the model could be done
├── CallerLeft              the client went away (nobody reads the answer)
├── ServerStopping          the server shuts down
├── StepFailed              a step of an ensemble failed; its outcome is the step's
├── ControlRefused          the model control mode does not allow to load or unload
├── LoadRefused             a load that a client asked for failed
├── BackendFailed           the runtime refused or broke
└── ModelError              the model's own code refused it, with a code of its choice

LoadFailed                  a model version cannot serve; the text is for the operator and for the model index
├── ConfigInvalid           its configuration is wrong: file, field, reason
├── StoreUnavailable        the object store cannot be reached, breaks off, or refuses this server
├── NotKept                 this machine cannot keep what was fetched: no room, no right, no folder
├── ObjectChanged           an object is not the one that was listed
├── ObjectRefused           the store answers, and does not give this server this one object
└── TooManyObjects          more lie below a prefix than are listed
"""

from collections.abc import Callable, Collection
from enum import Enum
from typing import ClassVar

from oriel_wire.near_names import did_you_mean
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = [
    "BackendFailed",
    "CallerLeft",
    "ConfigInvalid",
    "ControlRefused",
    "DeadlineExceeded",
    "DeadlineTooShort",
    "InferenceError",
    "InvalidRequest",
    "LoadFailed",
    "LoadRefused",
    "ModelError",
    "ModelNotReady",
    "NoVersion",
    "NotKept",
    "NotSupported",
    "ObjectChanged",
    "ObjectRefused",
    "Outcome",
    "QueueFull",
    "QueueTimeout",
    "RequestTooLarge",
    "ServerStopping",
    "StepFailed",
    "StoreUnavailable",
    "TooManyObjects",
    "UnknownModel",
]

MAX_TEXT = 500


class Outcome(Enum):
    """How a request ended; the values are metric labels and the `reason` of error bodies."""

    OK = "ok"
    INVALID = "invalid_request"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    WRONG_METHOD = "method_not_allowed"
    UNKNOWN_MODEL = "unknown_model"
    NOT_READY = "model_not_ready"
    NO_VERSION = "no_available_version"
    NOT_SUPPORTED = "not_supported"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline_exceeded"
    TOO_SHORT = "deadline_too_short"
    CALLER_LEFT = "caller_left"
    STOPPING = "server_stopping"
    CONTROL = "control_refused"
    LOAD = "load_failed"
    BACKEND = "backend_failed"
    MODEL_NOT_FOUND = "model_says_not_found"
    MODEL_EXISTS = "model_says_exists"
    MODEL_UNAVAILABLE = "model_says_unavailable"
    MODEL_CANCELLED = "model_says_cancelled"
    MODEL_UNKNOWN = "model_says_unknown"


class InferenceError(Exception):
    """Root of what ends one request. `message` is a sentence for its sender, at most MAX_TEXT characters.

    detail: what only the log may have, in place of the message.
    """

    outcome = Outcome.BACKEND

    def __init__(self, message: str, detail: str = "") -> None:
        self.detail = detail
        self.message = message if len(message) <= MAX_TEXT else message[: MAX_TEXT - 3] + "..."
        super().__init__(self.message)


class InvalidRequest(InferenceError):
    """The request does not fit the model it names."""

    outcome = Outcome.INVALID


class RequestTooLarge(InferenceError):
    """The body is larger than the server takes once it is decompressed."""

    outcome = Outcome.TOO_LARGE


class UnknownModel(InferenceError):
    """No model, or no version of it, has that name. asked: the name; known: those that there are."""

    outcome = Outcome.UNKNOWN_MODEL

    def __init__(self, message: str, *, asked: str = "", known: Collection[str] = ()) -> None:
        super().__init__(message)
        self._asked = asked
        self._known = known

    def with_near_name(self, may_see: Callable[[str], bool]) -> "UnknownModel":
        """The same, naming the model that was probably meant. may_see: whether the caller may know that name."""
        near = did_you_mean(self._asked, (name for name in self._known if may_see(name)))
        return UnknownModel(f"{self.message}{near}") if near else self


class ModelNotReady(InferenceError):
    """The model exists but cannot serve now."""

    outcome = Outcome.NOT_READY


class NoVersion(ModelNotReady):
    """The model exists, but no version of it is loaded or on its way."""

    outcome = Outcome.NO_VERSION


class NotSupported(InferenceError):
    """A valid request for something this server does not do."""

    outcome = Outcome.NOT_SUPPORTED


class QueueFull(InferenceError):
    """The model's queue has no place, or gave this call's place to a more urgent one."""

    outcome = Outcome.QUEUE_FULL


class QueueTimeout(InferenceError):
    """The model's `default_queue_policy` gave up on it."""

    outcome = Outcome.QUEUE_TIMEOUT


class DeadlineExceeded(InferenceError):
    """The call's deadline passed. `stage`: where it was then, a key of `STAGES`."""

    STAGES: ClassVar[dict[str, str]] = {
        "queue": "waited in the queue",
        "compute": "was being computed",
        "json": "was being converted from or to JSON",
        "order": "was answered, but waited for the answers before it",
    }

    outcome = Outcome.DEADLINE

    def __init__(self, stage: str) -> None:
        super().__init__(f"the deadline passed while the request {self.STAGES[stage]}")
        self.stage = stage


class DeadlineTooShort(InferenceError):
    """What is left until its deadline is less than this model takes even when it is quick."""

    outcome = Outcome.TOO_SHORT

    def __init__(self) -> None:
        super().__init__("the time left until the deadline is shorter than this model takes")


class CallerLeft(InferenceError):
    """The client closed the connection or cancelled the call."""

    outcome = Outcome.CALLER_LEFT

    def __init__(self) -> None:
        super().__init__("the caller left")


class ServerStopping(InferenceError):
    """The server is going away and takes nothing new."""

    outcome = Outcome.STOPPING

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class StepFailed(InferenceError):
    """A step of an ensemble failed for a reason of its own."""

    def __init__(self, ensemble: str, model: str, cause: InferenceError) -> None:
        super().__init__(f"in ensemble {ensemble[:64]!r}, model {model[:64]!r}: {cause.message}")
        self.outcome = cause.outcome


class ControlRefused(InferenceError):
    """The server's model control mode does not allow it."""

    outcome = Outcome.CONTROL


class LoadRefused(InferenceError):
    """The model a client wanted loaded cannot serve; what served before still does."""

    outcome = Outcome.LOAD


class BackendFailed(InferenceError):
    """The runtime could not execute the batch."""

    outcome = Outcome.BACKEND


class ModelError(InferenceError):
    """A Python model answered a request with an error; the code it chose is the outcome."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class LoadFailed(Exception):
    """A model version cannot serve; `reason` names what to mend, without absolute paths.

    config: what was read of its configuration, None if nothing was. Filled in by whoever loads.
    """

    config: pb.ModelConfig | None = None

    def __init__(self, reason: str) -> None:
        self.reason = reason if len(reason) <= MAX_TEXT else reason[: MAX_TEXT - 3] + "..."
        super().__init__(self.reason)


class ConfigInvalid(LoadFailed):
    """A model configuration is wrong. file: relative to the repository; field: its path in the text format."""

    def __init__(self, file: str, field: str, reason: str) -> None:
        super().__init__(f"{file}: {field}: {reason}" if field else f"{file}: {reason}")
        self.file = file
        self.field = field


class StoreUnavailable(LoadFailed):
    """The object store does not answer, or not this server. Another try may go better."""


class NotKept(LoadFailed):
    """This machine cannot keep what was fetched: no room, no right, no folder. Another try may go better."""


class ObjectChanged(LoadFailed):
    """The object was written anew or deleted since it was listed."""


class ObjectRefused(LoadFailed):
    """The store answers, and does not give this server this one object: for want of a right or a key, or archived."""


class TooManyObjects(LoadFailed):
    """Below a prefix lie more objects than are listed."""
