"""The errors of a service's request. Each carries an outcome (the metric label and the machine-readable reason) and a
sentence for people; only `replies` turns them into statuses.

LogicError
├── BadRequest             the request is not valid HTTP
├── CallerLeft             the client left before it was answered
├── Refused                the input cannot be served; handlers raise it with their own sentence
│   ├── MediaUnsupported   the service does not read this media type
│   ├── NotAcceptable      `Accept` allows none of the media types that the service can send
│   ├── InputTooLarge      the body exceeds a size limit of the server or the service
│   └── ParameterWrong     one parameter of an OpenAI-compatible request is wrong
├── ModelUnknown           no model of this name is served to this caller
├── ServiceUnknown         there is no service of this name
├── ServiceBroken          the service was found but cannot run here
├── DeadlineExceeded       the request's deadline passed; `stage` was waiting or working
├── Saturated              too many requests, or displaced by a more urgent one
├── HandlerFailed          the service's code raised an error, or returned a value that cannot be sent
├── WorkerDied             the worker process that ran the job died
├── HandlerTimedOut        the job took longer than the service's own limit
├── MemoryExceeded         the job took more memory in a worker than the service's own limit
└── ModelError             a call of a model failed
    ├── ModelInputWrong    the service passed tensors that the model does not take
    ├── ModelUnavailable   the inference servers do not have the model, or it is not ready
    ├── ModelBusy          the inference server refused the call for now
    ├── ModelFailed        the inference server answered with an error, or with something unreadable
    └── ModelUnreachable   no inference server could be reached
"""

from enum import Enum
from typing import Any, ClassVar

MAX_MESSAGE = 500
MAX_RETRY_S = 86_400.0
FACTS = frozenset({"code", "field", "message", "param", "retry_after_s", "stage", "too_many"})


class Outcome(Enum):
    """The end of a request. The names are the events of `oriel_wire.outcomes`; the values are published, as
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
    """Root of these errors. `message` may be shown to the caller.

    retry_after_s: seconds until a later try may succeed, at most a day; None if it would not.
    """

    outcome: ClassVar[Outcome] = Outcome.HANDLER_FAILED

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.message = str(message)[:MAX_MESSAGE]
        super().__init__(self.message)
        self.retry_after_s = None if retry_after_s is None else min(max(0.0, retry_after_s), MAX_RETRY_S)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as the error of this module that it is or is derived from: other processes may know no others."""
        kind = next(each for each in type(self).__mro__ if each.__module__ == __name__)
        return remade, (kind, {name: value for name, value in vars(self).items() if name in FACTS})


def remade(kind: type[LogicError], facts: dict[str, Any]) -> LogicError:
    """Make the error that was pickled."""
    error = kind.__new__(kind, facts["message"])
    vars(error).update(facts)
    return error


class BadRequest(LogicError):
    outcome = Outcome.INVALID_REQUEST


class CallerLeft(LogicError):
    """The client left before it was answered."""

    outcome = Outcome.CALLER_LEFT

    def __init__(self) -> None:
        super().__init__("the client left")


class Refused(LogicError):
    """The input cannot be served as it is: `raise Refused("the field 'image' is missing")`.

    field: the path of the wrong field, such as "$.items[2].price"; "" if the fault is not in a single field.
    """

    outcome = Outcome.INPUT_REFUSED

    def __init__(self, message: str, *, retry_after_s: float | None = None, field: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.field = field


class MediaUnsupported(Refused):
    """The service does not read bodies of this media type."""

    outcome = Outcome.MEDIA_UNSUPPORTED


class NotAcceptable(Refused):
    """`Accept` allows none of the media types that the service can send."""

    outcome = Outcome.NOT_ACCEPTABLE


class InputTooLarge(Refused):
    """The body exceeds a size limit."""

    outcome = Outcome.TOO_LARGE


class ParameterWrong(Refused):
    """One parameter of an OpenAI-compatible request is wrong.

    param: its path, cut like the message; None for the whole body.
    code: the error code that the API defines for this case, or None.
    """

    outcome = Outcome.PARAMETER_WRONG

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param and param[:MAX_MESSAGE]
        self.code = code


class ModelUnknown(LogicError):
    """No model of this name is served to this caller. The text does not reveal whether others may use one."""

    outcome = Outcome.UNKNOWN_MODEL


class ServiceUnknown(LogicError):
    outcome = Outcome.SERVICE_UNKNOWN


class ServiceBroken(LogicError):
    outcome = Outcome.SERVICE_BROKEN


class DeadlineExceeded(LogicError):
    """`stage` names what was waiting or working when the time ran out, for example "pre" or "infer".

    reason: a model server's text about it.
    """

    outcome = Outcome.DEADLINE_EXCEEDED

    def __init__(self, stage: str, reason: str = "allow more time or try when it is quieter") -> None:
        super().__init__(f"the request's time ran out in stage '{stage}': {reason}")
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
    """A service's call of a model failed."""

    outcome = Outcome.MODEL_FAILED


class ModelInputWrong(ModelError):
    outcome = Outcome.MODEL_INPUT_WRONG


class ModelUnavailable(ModelError):
    outcome = Outcome.MODEL_UNAVAILABLE


class ModelBusy(ModelError):
    """The inference server refused the call for now. too_many: because of this caller's rate (429), not because the
    server is full (503).
    """

    outcome = Outcome.MODEL_BUSY

    def __init__(self, message: str, *, retry_after_s: float | None = None, too_many: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.too_many = too_many


class ModelFailed(ModelError):
    outcome = Outcome.MODEL_FAILED


class ModelUnreachable(ModelError):
    outcome = Outcome.MODEL_UNREACHABLE
