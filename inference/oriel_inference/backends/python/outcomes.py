"""The error codes of Python models and this server's errors, both ways."""

from oriel_inference.errors import InferenceError, ModelError, Outcome

__all__ = ["code_of", "error_of"]

_UNKNOWN, _INTERNAL, _NOT_FOUND, _INVALID, _UNAVAILABLE, _UNSUPPORTED, _EXISTS, _CANCELLED = range(8)
_OUTCOMES = {
    _UNKNOWN: Outcome.MODEL_UNKNOWN,
    _INTERNAL: Outcome.BACKEND,
    _NOT_FOUND: Outcome.MODEL_NOT_FOUND,
    _INVALID: Outcome.INVALID,
    _UNAVAILABLE: Outcome.MODEL_UNAVAILABLE,
    _UNSUPPORTED: Outcome.NOT_SUPPORTED,
    _EXISTS: Outcome.MODEL_EXISTS,
    _CANCELLED: Outcome.MODEL_CANCELLED,
}
_CODES = {
    Outcome.INVALID: _INVALID,
    Outcome.TOO_LARGE: _INVALID,
    Outcome.UNKNOWN_MODEL: _NOT_FOUND,
    Outcome.NOT_SUPPORTED: _UNSUPPORTED,
    Outcome.NOT_READY: _UNAVAILABLE,
    Outcome.QUEUE_FULL: _UNAVAILABLE,
    Outcome.QUEUE_TIMEOUT: _UNAVAILABLE,
    Outcome.DEADLINE: _UNAVAILABLE,
    Outcome.STOPPING: _UNAVAILABLE,
    Outcome.CALLER_LEFT: _CANCELLED,
    **{outcome: code for code, outcome in _OUTCOMES.items()},
}


def error_of(code: int, message: str) -> InferenceError:
    """What a model said, as an error of the request."""
    outcome = _OUTCOMES.get(code, Outcome.MODEL_UNKNOWN)
    return ModelError(outcome, message or "the model gave an error without a message")


def code_of(error: InferenceError) -> int:
    """How an error looks to a model that asked another one."""
    return _CODES.get(error.outcome, _INTERNAL)
