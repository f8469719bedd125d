"""What can go wrong around a handler. Each error carries an outcome (the metric label and the machine-readable
reason) and a sentence for people; only `replies` turns them into statuses.

LogicError
├── BadRequest             no request of HTTP as this server reads it
├── CallerLeft             nobody waits for the answer any more
├── Refused                the input's fault; handlers raise it with a sentence of their own
│   ├── MediaUnsupported   a kind of body the service does not read
│   ├── NotAcceptable      the client takes none of the media types that the service gives
│   ├── InputTooLarge      a bound of the server or the service was passed
│   └── ParameterWrong     one named parameter of an OpenAI-compatible request
├── ModelUnknown           no model is served under this name, or not for this caller
├── ServiceUnknown         no service of that name
├── ServiceBroken          it was found, but cannot run here
├── DeadlineExceeded       the time the caller gave is over; `stage` was waiting or working
├── Saturated              no room: too many requests, or displaced by a more urgent one
├── HandlerFailed          the service's own code raised or gave something that cannot be sent
├── WorkerDied             the process that worked on it ended
├── HandlerTimedOut        it took longer than the service's own limit
├── MemoryExceeded         it took more memory in a worker than the service's own limit
└── ModelError
    ├── ModelInputWrong    the service passed tensors that the model does not take
    ├── ModelUnavailable   unknown to the inference servers, or not ready
    ├── ModelBusy          the inference server refused for now
    ├── ModelFailed        the inference server answered with an error, or nonsense
    └── ModelUnreachable   no inference server could be reached
"""

from enum import Enum
from typing import ClassVar

MAX_MESSAGE = 500


class Outcome(Enum):
    """How a request ended. The names are the events of `oriel_wire.outcomes`; the values are published, as
    `error.reason`, metric label and log field, and docs/errors.md lists them.
    """

    OK = "ok"
    CALLER_LEFT = "client_left"
    INVALID_REQUEST = "bad_request"
    INPUT_REFUSED = "input_refused"
    MEDIA_UNSUPPORTED = "media_unsupported"
    NOT_ACCEPTABLE = "not_acceptable"
    TOO_LARGE = "input_too_large"
    PARAMETER_WRONG = "parameter_wrong"
    UNKNOWN_MODEL = "model_unknown"
    SERVICE_UNKNOWN = "service_unknown"
    SERVICE_BROKEN = "service_broken"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    QUEUE_FULL = "saturated"
    HANDLER_FAILED = "handler_failed"
    WORKER_DIED = "worker_died"
    HANDLER_TIMED_OUT = "handler_timed_out"
    MEMORY_EXCEEDED = "memory_exceeded"
    MODEL_INPUT_WRONG = "model_input_wrong"
    MODEL_UNAVAILABLE = "model_unavailable"
    MODEL_BUSY = "model_busy"
    MODEL_FAILED = "model_failed"
    MODEL_UNREACHABLE = "model_unreachable"


class LogicError(Exception):
    """Root. `message` may be shown to the caller; `retry_after_s` is set where trying again later can help."""

    outcome: ClassVar[Outcome] = Outcome.HANDLER_FAILED

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message[:MAX_MESSAGE])
        self.message = message[:MAX_MESSAGE]
        self.retry_after_s = retry_after_s


class BadRequest(LogicError):
    outcome = Outcome.INVALID_REQUEST


class CallerLeft(LogicError):
    """Nobody is there to answer."""

    outcome = Outcome.CALLER_LEFT

    def __init__(self) -> None:
        super().__init__("the client left")


class Refused(LogicError):
    """The input cannot be served as it is: `raise Refused("the field 'image' is missing")`.

    field: the path of the field at fault, like "$.items[2].price"; "" if it is none in particular.
    """

    outcome = Outcome.INPUT_REFUSED

    def __init__(self, message: str, *, retry_after_s: float | None = None, field: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.field = field


class MediaUnsupported(Refused):
    """The body is of a kind that the service does not read."""

    outcome = Outcome.MEDIA_UNSUPPORTED


class NotAcceptable(Refused):
    """`Accept` names none of the media types that the service gives."""

    outcome = Outcome.NOT_ACCEPTABLE


class InputTooLarge(Refused):
    """The body passes a size bound."""

    outcome = Outcome.TOO_LARGE


class ParameterWrong(Refused):
    """One parameter of an OpenAI-compatible request. param: its path, None for the body; code: that API's, or None."""

    outcome = Outcome.PARAMETER_WRONG

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelUnknown(LogicError):
    """No model is served under this name, or not for this caller: the same words for both."""

    outcome = Outcome.UNKNOWN_MODEL


class ServiceUnknown(LogicError):
    outcome = Outcome.SERVICE_UNKNOWN


class ServiceBroken(LogicError):
    outcome = Outcome.SERVICE_BROKEN


class DeadlineExceeded(LogicError):
    """`stage` names what was waiting or working when the time ran out, for example "pre" or "infer"."""

    outcome = Outcome.DEADLINE_EXCEEDED

    def __init__(self, stage: str) -> None:
        super().__init__(f"the request's time ran out in stage '{stage}': allow more time or try when it is quieter")
        self.stage = stage


class Saturated(LogicError):
    outcome = Outcome.QUEUE_FULL


class HandlerFailed(LogicError):
    outcome = Outcome.HANDLER_FAILED


class WorkerDied(LogicError):
    outcome = Outcome.WORKER_DIED


class HandlerTimedOut(LogicError):
    outcome = Outcome.HANDLER_TIMED_OUT


class MemoryExceeded(LogicError):
    outcome = Outcome.MEMORY_EXCEEDED


class ModelError(LogicError):
    """What went wrong between the service and its models."""

    outcome = Outcome.MODEL_FAILED


class ModelInputWrong(ModelError):
    outcome = Outcome.MODEL_INPUT_WRONG


class ModelUnavailable(ModelError):
    outcome = Outcome.MODEL_UNAVAILABLE


class ModelBusy(ModelError):
    """`too_many`: the server counts this caller's requests (429), rather than being full as a whole (503)."""

    outcome = Outcome.MODEL_BUSY

    def __init__(self, message: str, *, retry_after_s: float | None = None, too_many: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.too_many = too_many


class ModelFailed(ModelError):
    outcome = Outcome.MODEL_FAILED


class ModelUnreachable(ModelError):
    outcome = Outcome.MODEL_UNREACHABLE
