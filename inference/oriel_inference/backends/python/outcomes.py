"""Maps the error codes of Python models to this server's errors and back."""

from oriel_inference.errors import InferenceError, ModelError, Outcome

_UNKNOWN, _INTERNAL, _NOT_FOUND, _INVALID, _UNAVAILABLE, _UNSUPPORTED, _EXISTS, _CANCELLED = range(8)
_OUTCOMES = {
    _UNKNOWN: Outcome.MODEL_SAYS_UNKNOWN,
    _INTERNAL: Outcome.BACKEND_FAILED,
    _NOT_FOUND: Outcome.MODEL_SAYS_NOT_FOUND,
    _INVALID: Outcome.INVALID_REQUEST,
    _UNAVAILABLE: Outcome.MODEL_SAYS_UNAVAILABLE,
    _UNSUPPORTED: Outcome.NOT_SUPPORTED,
    _EXISTS: Outcome.MODEL_SAYS_EXISTS,
    _CANCELLED: Outcome.MODEL_SAYS_CANCELLED,
}
_CODES = {
    Outcome.INVALID_REQUEST: _INVALID,
    Outcome.TOO_LARGE: _INVALID,
    Outcome.UNKNOWN_MODEL: _NOT_FOUND,
    Outcome.NOT_SUPPORTED: _UNSUPPORTED,
    Outcome.MODEL_NOT_READY: _UNAVAILABLE,
    Outcome.QUEUE_FULL: _UNAVAILABLE,
    Outcome.QUEUE_TIMEOUT: _UNAVAILABLE,
    Outcome.DEADLINE_EXCEEDED: _UNAVAILABLE,
    Outcome.SERVER_STOPPING: _UNAVAILABLE,
    Outcome.CALLER_LEFT: _CANCELLED,
    **{outcome: code for code, outcome in _OUTCOMES.items()},
}


def error_of(code: int, message: str) -> InferenceError:
    """Return the error of a model as an error of the request."""
    outcome = _OUTCOMES.get(code, Outcome.MODEL_SAYS_UNKNOWN)
    return ModelError(outcome, message or "the model returned an error without a message")


def code_of(error: InferenceError) -> int:
    """Return the code with which a model sees an error of another model that it called."""
    return _CODES.get(error.outcome, _INTERNAL)
