"""Maps the error codes of Python models to this server's errors and back."""

from enum import IntEnum

from oriel_inference.errors import InferenceError, ModelError, Outcome


class _Code(IntEnum):
    """An error code of Triton's `pb_utils`."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    EXISTS = 6
    CANCELLED = 7


_OUTCOMES: dict[int, Outcome] = {
    _Code.UNKNOWN: Outcome.MODEL_SAYS_UNKNOWN,
    _Code.INTERNAL: Outcome.BACKEND_FAILED,
    _Code.NOT_FOUND: Outcome.MODEL_SAYS_NOT_FOUND,
    _Code.INVALID: Outcome.INVALID_REQUEST,
    _Code.UNAVAILABLE: Outcome.MODEL_SAYS_UNAVAILABLE,
    _Code.UNSUPPORTED: Outcome.NOT_SUPPORTED,
    _Code.EXISTS: Outcome.MODEL_SAYS_EXISTS,
    _Code.CANCELLED: Outcome.MODEL_SAYS_CANCELLED,
}
_CODES = {
    Outcome.INVALID_REQUEST: _Code.INVALID,
    Outcome.TOO_LARGE: _Code.INVALID,
    Outcome.UNKNOWN_MODEL: _Code.NOT_FOUND,
    Outcome.NOT_SUPPORTED: _Code.UNSUPPORTED,
    Outcome.MODEL_NOT_READY: _Code.UNAVAILABLE,
    Outcome.QUEUE_FULL: _Code.UNAVAILABLE,
    Outcome.QUEUE_TIMEOUT: _Code.UNAVAILABLE,
    Outcome.DEADLINE_EXCEEDED: _Code.UNAVAILABLE,
    Outcome.SERVER_STOPPING: _Code.UNAVAILABLE,
    Outcome.CALLER_LEFT: _Code.CANCELLED,
    **{outcome: code for code, outcome in _OUTCOMES.items()},
}


def error_of(code: int, message: str) -> InferenceError:
    """Return the error of a model as an error of the request."""
    outcome = _OUTCOMES.get(code, Outcome.MODEL_SAYS_UNKNOWN)
    return ModelError(outcome, message or "the model returned an error without a message")


def code_of(error: InferenceError) -> int:
    """Return the code with which a model sees an error of another model that it called."""
    return int(_CODES.get(error.outcome, _Code.INTERNAL))
