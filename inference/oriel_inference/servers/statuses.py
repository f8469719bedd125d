"""How a refusal is said on each protocol: Triton's mapping, but a passed deadline is 504 / DEADLINE_EXCEEDED."""

import msgspec
from grpc import StatusCode

from oriel_inference.errors import InferenceError, InvalidRequest, Outcome
from oriel_wire.errors import BadMessage

__all__ = ["as_inference_error", "error_body", "grpc_status", "http_status"]

_STATUSES: dict[Outcome, tuple[int, StatusCode]] = {
    Outcome.INVALID: (400, StatusCode.INVALID_ARGUMENT),
    Outcome.UNKNOWN_MODEL: (404, StatusCode.NOT_FOUND),
    Outcome.NOT_READY: (503, StatusCode.UNAVAILABLE),
    Outcome.NOT_SUPPORTED: (501, StatusCode.UNIMPLEMENTED),
    Outcome.QUEUE_FULL: (503, StatusCode.UNAVAILABLE),
    Outcome.QUEUE_TIMEOUT: (503, StatusCode.UNAVAILABLE),
    Outcome.DEADLINE: (504, StatusCode.DEADLINE_EXCEEDED),
    Outcome.CALLER_LEFT: (400, StatusCode.CANCELLED),
    Outcome.STOPPING: (503, StatusCode.UNAVAILABLE),
    Outcome.CONTROL: (503, StatusCode.UNAVAILABLE),
    Outcome.LOAD: (400, StatusCode.INVALID_ARGUMENT),
    Outcome.BACKEND: (500, StatusCode.INTERNAL),
}


def http_status(error: InferenceError) -> int:
    """The HTTP status of a refusal."""
    return _STATUSES[error.outcome][0]


def grpc_status(error: InferenceError) -> StatusCode:
    """The gRPC status of a refusal."""
    return _STATUSES[error.outcome][1]


def as_inference_error(error: InferenceError | BadMessage) -> InferenceError:
    """A codec's complaint as one of ours."""
    return error if isinstance(error, InferenceError) else InvalidRequest(error.message)


def error_body(error: InferenceError) -> bytes:
    """`{"error": sentence, "reason": outcome}`."""
    return msgspec.json.encode({"error": error.message, "reason": error.outcome.value})
