"""The errors of a request and of a model.

InferenceError              one request cannot be answered; carries an Outcome and facts, never a status code
├── InvalidRequest          it does not fit the model
├── RequestTooLarge         its body, decompressed, exceeds the limit
├── UnknownModel            no such model or version
├── ModelNotReady           the model is known but does not serve
│   ├── NotLoaded           a call may load it: the caller waits for that
│   ├── ModelMemoryFull     it cannot be loaded, because no other model may go for it
│   └── NoVersion           nor will it before someone loads it, or fixes what failed to load
├── NotSupported            this server does not do that
├── Restricted              the caller does not have the secret of this API
├── QueueFull               it never entered the queue, or was displaced by a more urgent call
├── QueueTimeout            the model's own queue policy gave up on it
├── DeadlineExceeded        its deadline passed
├── DeadlineTooShort        its deadline would pass before the model could be done
├── CallerLeft              the client went away (nobody reads the answer)
├── ServerStopping          the server shuts down
├── StepFailed              a step of an ensemble failed; its outcome is the step's
├── ControlRefused          the model control mode does not allow loading and unloading
├── LoadRefused             a load requested by a client failed
├── BackendFailed           the runtime refused the batch or failed
└── ModelError              the model's own code refused it, with a code of its choice

LoadFailed                  a model version cannot serve; the text is for the operator and for the model index
├── ConfigInvalid           its configuration is wrong: file, field, reason
├── CompilerMissing         the compiler of its artefact is not installed; the model itself can serve
├── StoreUnavailable        the object store cannot be reached, breaks off, or refuses this server
├── NotKept                 this machine cannot keep what was fetched: no space, no permission, no folder
├── ObjectChanged           an object is not the one that was listed
├── ObjectRefused           the store answers, but refuses this server this one object
└── TooManyObjects          there are more objects below a prefix than are listed
"""

from collections.abc import Callable, Collection
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from oriel_wire.near_names import did_you_mean

if TYPE_CHECKING:
    from oriel_wire.v2.proto import model_config_pb2 as pb

MAX_TEXT = 500


class Outcome(Enum):
    """The ways in which a request can end.

    The names are the events of `oriel_wire.outcomes`. The values are published as `error.reason`, as a metric label
    and as a log field; docs/errors.md lists them.
    """

    OK = "ok"
    INVALID_REQUEST = "invalid_request"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNKNOWN_MODEL = "unknown_model"
    MODEL_NOT_READY = "model_not_ready"
    MODEL_MEMORY_FULL = "model_memory_full"
    NO_AVAILABLE_VERSION = "no_available_version"
    NOT_SUPPORTED = "not_supported"
    RESTRICTED = "restricted"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    DEADLINE_TOO_SHORT = "deadline_too_short"
    CALLER_LEFT = "caller_left"
    SERVER_STOPPING = "server_stopping"
    CONTROL_REFUSED = "control_refused"
    LOAD_FAILED = "load_failed"
    BACKEND_FAILED = "backend_failed"
    MODEL_SAYS_NOT_FOUND = "model_says_not_found"
    MODEL_SAYS_EXISTS = "model_says_exists"
    MODEL_SAYS_UNAVAILABLE = "model_says_unavailable"
    MODEL_SAYS_CANCELLED = "model_says_cancelled"
    MODEL_SAYS_UNKNOWN = "model_says_unknown"


class InferenceError(Exception):
    """Root of the errors that end one request. `message` is a sentence for its sender, at most MAX_TEXT characters.

    detail: text for the log only, in place of the message.
    retry_s: for refusals that may pass: seconds after which another try is worth it.
    usual_text: the message of an error that always says the same.
    """

    outcome = Outcome.BACKEND_FAILED
    retry_s = 1.0
    usual_text = ""

    def __init__(self, message: str = "", detail: str = "") -> None:
        message = message or self.usual_text
        self.detail = detail
        self.message = message if len(message) <= MAX_TEXT else message[: MAX_TEXT - 3] + "..."
        super().__init__(self.message)


class InvalidRequest(InferenceError):
    """The request does not fit the model it names."""

    outcome = Outcome.INVALID_REQUEST


class RequestTooLarge(InferenceError):
    """The decompressed body is larger than the server accepts."""

    outcome = Outcome.TOO_LARGE


class UnknownModel(InferenceError):
    """No model or version has that name. requested: the name in the request. known: the existing names."""

    outcome = Outcome.UNKNOWN_MODEL

    def __init__(self, message: str, *, requested: str = "", known: Collection[str] = ()) -> None:
        super().__init__(message)
        self._requested = requested
        self._known = known

    def with_near_name(self, may_see: Callable[[str], bool]) -> "UnknownModel":
        """Return the same error with the name of the model that was probably meant. may_see: returns whether the caller
        may know a name.
        """
        near = did_you_mean(self._requested, (name for name in self._known if may_see(name)))
        return UnknownModel(f"{self.message}{near}") if near else self


class ModelNotReady(InferenceError):
    """The model exists but cannot serve now."""

    outcome = Outcome.MODEL_NOT_READY

    def __init__(self, message: str, *, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class NotLoaded(ModelNotReady):
    """The model is available on demand: a call for it waits in its load queue."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model {model[:128]!r} is not loaded: it is loaded by the first call for it")
        self.model = model


class ModelMemoryFull(ModelNotReady):
    """The models in memory leave no room for this one, and none of them may go now."""

    outcome = Outcome.MODEL_MEMORY_FULL


class NoVersion(ModelNotReady):
    """The model exists, but no version of it is loaded or on its way."""

    outcome = Outcome.NO_AVAILABLE_VERSION


class NotSupported(InferenceError):
    """A valid request for something that this server does not do."""

    outcome = Outcome.NOT_SUPPORTED


class Restricted(InferenceError):
    """The API needs a secret, and the caller did not send it."""

    outcome = Outcome.RESTRICTED


class QueueFull(InferenceError):
    """The model's queue has no place, or gave the place of this call to a more urgent one."""

    outcome = Outcome.QUEUE_FULL


class QueueTimeout(InferenceError):
    """The model's `default_queue_policy` gave up on it."""

    outcome = Outcome.QUEUE_TIMEOUT


class DeadlineExceeded(InferenceError):
    """The call's deadline passed. `stage`: the stage in which the call was then, a key of `STAGES`."""

    STAGES: ClassVar[dict[str, str]] = {
        "queue": "waited in the queue",
        "loading": "waited for the model to be loaded",
        "compute": "was being computed",
        "json": "was being converted from or to JSON",
        "order": "was answered, but waited for the answers before it",
        "arrival": "was arriving",
        "progress": "was in progress",
    }

    outcome = Outcome.DEADLINE_EXCEEDED

    def __init__(self, stage: str) -> None:
        super().__init__(f"the deadline passed while the request {self.STAGES[stage]}")
        self.stage = stage


class DeadlineTooShort(InferenceError):
    """The time until its deadline is shorter than this model takes even when it is quick."""

    outcome = Outcome.DEADLINE_TOO_SHORT
    usual_text = "the time left until the deadline is shorter than this model takes"


class CallerLeft(InferenceError):
    """The client closed the connection or cancelled the call."""

    outcome = Outcome.CALLER_LEFT
    usual_text = "the caller left"


class ServerStopping(InferenceError):
    """The server is shutting down and accepts nothing new."""

    outcome = Outcome.SERVER_STOPPING
    usual_text = "the server is shutting down"


class StepFailed(InferenceError):
    """A step of an ensemble failed for a reason of its own. Clients match on Triton's sentences, which name the step's
    model once.
    """

    def __init__(self, ensemble: str, model: str, cause: InferenceError) -> None:
        step = f"{model[:64]!r}"
        message = cause.message if step in cause.message else f"model {step}: {cause.message}"
        super().__init__(f"in ensemble {ensemble[:64]!r}, {message}")
        self.outcome = cause.outcome


class ControlRefused(InferenceError):
    """The server's model control mode does not allow it."""

    outcome = Outcome.CONTROL_REFUSED


class LoadRefused(InferenceError):
    """The model that a client wanted to load cannot serve; what served before still does."""

    outcome = Outcome.LOAD_FAILED


class BackendFailed(InferenceError):
    """The runtime could not execute the batch."""

    outcome = Outcome.BACKEND_FAILED


class ModelError(InferenceError):
    """A Python model answered a request with an error; the code it chose is the outcome."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def not_polled(name: str) -> str:
    """Return the beginning of Triton's sentence about a load for which there is nothing to try; clients match on it."""
    return f"failed to load {name[:128]!r}, failed to poll from model repository"


class LoadFailed(Exception):
    """A model version cannot serve; `reason` names what to fix, without absolute paths.

    config: the configuration as far as it was read, None if it was not. Set by the code that loads.
    """

    config: "pb.ModelConfig | None" = None

    def __init__(self, reason: str) -> None:
        self.reason = reason if len(reason) <= MAX_TEXT else reason[: MAX_TEXT - 3] + "..."
        super().__init__(self.reason)


class ConfigInvalid(LoadFailed):
    """A model configuration is wrong. file: relative to the repository; field: its path in the text format."""

    def __init__(self, file: str, field: str, reason: str) -> None:
        super().__init__(f"{file}: {field}: {reason}" if field else f"{file}: {reason}")
        self.file = file
        self.field = field


class CompilerMissing(LoadFailed):
    """The compiler of an artefact is not installed on this machine; the text says what to install."""


class StoreUnavailable(LoadFailed):
    """The object store does not answer, or refuses this server. Another try may succeed."""


class NotKept(LoadFailed):
    """This machine cannot keep what was fetched: no space, no permission, no folder. Another try may succeed."""


class ObjectChanged(LoadFailed):
    """The object was written anew or deleted since it was listed."""


class ObjectRefused(LoadFailed):
    """The store answers but refuses this server this one object: a permission or a key is missing, or the object is
    archived.
    """


class TooManyObjects(LoadFailed):
    """The prefix has more objects than the limit of a listing."""
