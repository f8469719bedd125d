"""Maps the error codes of Python models to this server's errors and back."""

from oriel_inference.backends.python.pb_errors import TritonError
from oriel_inference.errors import InferenceError, ModelError, Outcome

_OUTCOMES: dict[int, Outcome] = {
    TritonError.UNKNOWN: Outcome.MODEL_SAYS_UNKNOWN,
    TritonError.INTERNAL: Outcome.BACKEND_FAILED,
    TritonError.NOT_FOUND: Outcome.MODEL_SAYS_NOT_FOUND,
    TritonError.INVALID_ARG: Outcome.INVALID_REQUEST,
    TritonError.UNAVAILABLE: Outcome.MODEL_SAYS_UNAVAILABLE,
    TritonError.UNSUPPORTED: Outcome.NOT_SUPPORTED,
    TritonError.ALREADY_EXISTS: Outcome.MODEL_SAYS_EXISTS,
    TritonError.CANCELLED: Outcome.MODEL_SAYS_CANCELLED,
}
_CODES = {
    Outcome.INVALID_REQUEST: TritonError.INVALID_ARG,
    Outcome.TOO_LARGE: TritonError.INVALID_ARG,
    Outcome.UNKNOWN_MODEL: TritonError.NOT_FOUND,
    Outcome.NOT_SUPPORTED: TritonError.UNSUPPORTED,
    Outcome.MODEL_NOT_READY: TritonError.UNAVAILABLE,
    Outcome.QUEUE_FULL: TritonError.UNAVAILABLE,
    Outcome.QUEUE_TIMEOUT: TritonError.UNAVAILABLE,
    Outcome.DEADLINE_EXCEEDED: TritonError.UNAVAILABLE,
    Outcome.SERVER_STOPPING: TritonError.UNAVAILABLE,
    Outcome.CALLER_LEFT: TritonError.CANCELLED,
    **{outcome: code for code, outcome in _OUTCOMES.items()},
}


def error_of(code: int, message: str) -> InferenceError:
    """Return the error of a model as an error of the request."""
    outcome = _OUTCOMES.get(code, Outcome.MODEL_SAYS_UNKNOWN)
    return ModelError(outcome, message or "the model returned an error without a message")


def code_of(error: InferenceError) -> int:
    """Return the code with which a model sees an error of another model that it called."""
    return _CODES.get(error.outcome, TritonError.INTERNAL)
