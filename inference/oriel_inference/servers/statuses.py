"""How a refusal is said on each protocol: Triton's mapping, but a passed deadline is 504 / DEADLINE_EXCEEDED."""

import msgspec
from grpc import StatusCode

from oriel_inference.errors import InferenceError, InvalidRequest, Outcome
from oriel_wire.context import REQUEST_ID, new_request_id, valid_request_id
from oriel_wire.engine.buffered import Refusal
from oriel_wire.errors import BadMessage
from oriel_wire.h1 import RequestHead

__all__ = [
    "as_inference_error",
    "error_body",
    "grpc_status",
    "head_outcome",
    "head_refusal",
    "http_status",
    "identity",
    "status_number",
]

_STATUSES: dict[Outcome, tuple[int, StatusCode]] = {
    Outcome.OK: (200, StatusCode.OK),
    Outcome.INVALID: (400, StatusCode.INVALID_ARGUMENT),
    Outcome.TOO_LARGE: (413, StatusCode.RESOURCE_EXHAUSTED),
    Outcome.NOT_FOUND: (404, StatusCode.UNIMPLEMENTED),
    Outcome.WRONG_METHOD: (405, StatusCode.UNIMPLEMENTED),
    Outcome.UNKNOWN_MODEL: (404, StatusCode.NOT_FOUND),
    Outcome.NOT_READY: (503, StatusCode.UNAVAILABLE),
    Outcome.NO_VERSION: (404, StatusCode.NOT_FOUND),
    Outcome.NOT_SUPPORTED: (501, StatusCode.UNIMPLEMENTED),
    Outcome.QUEUE_FULL: (503, StatusCode.UNAVAILABLE),
    Outcome.QUEUE_TIMEOUT: (503, StatusCode.UNAVAILABLE),
    Outcome.DEADLINE: (504, StatusCode.DEADLINE_EXCEEDED),
    Outcome.TOO_SHORT: (504, StatusCode.DEADLINE_EXCEEDED),
    Outcome.CALLER_LEFT: (400, StatusCode.CANCELLED),
    Outcome.STOPPING: (503, StatusCode.UNAVAILABLE),
    Outcome.CONTROL: (503, StatusCode.UNAVAILABLE),
    Outcome.LOAD: (400, StatusCode.INVALID_ARGUMENT),
    Outcome.BACKEND: (500, StatusCode.INTERNAL),
    Outcome.MODEL_NOT_FOUND: (404, StatusCode.NOT_FOUND),
    Outcome.MODEL_EXISTS: (400, StatusCode.ALREADY_EXISTS),
    Outcome.MODEL_UNAVAILABLE: (503, StatusCode.UNAVAILABLE),
    Outcome.MODEL_CANCELLED: (400, StatusCode.CANCELLED),
    Outcome.MODEL_UNKNOWN: (400, StatusCode.UNKNOWN),
}
# What the engine refuses by itself has only a status.
_HEAD_OUTCOMES = {
    404: Outcome.NOT_FOUND,
    405: Outcome.WRONG_METHOD,
    413: Outcome.TOO_LARGE,
    414: Outcome.TOO_LARGE,
    431: Outcome.TOO_LARGE,
}


def http_status(error: InferenceError) -> int:
    """The HTTP status of a refusal."""
    return _STATUSES[error.outcome][0]


def grpc_status(error: InferenceError) -> StatusCode:
    """The gRPC status of a refusal."""
    return _STATUSES[error.outcome][1]


def status_number(outcome: Outcome, protocol: str) -> int:
    """What an outcome is called on "http", or on any other protocol as a gRPC status code."""
    http, grpc = _STATUSES[outcome]
    return http if protocol == "http" else int(grpc.value[0])


def as_inference_error(error: InferenceError | BadMessage) -> InferenceError:
    """A codec's complaint as one of ours. It forgets where it was raised: those frames hold the request and itself."""
    return error.with_traceback(None) if isinstance(error, InferenceError) else InvalidRequest(error.message)


def error_body(error: InferenceError, request_id: str) -> bytes:
    """`{"error": sentence, "reason": outcome, "request_id": ...}`: v2 clients read `error` and skip the rest."""
    return _said(error.message, error.outcome, request_id)


def _said(message: str, outcome: Outcome, request_id: str) -> bytes:
    return msgspec.json.encode({"error": message, "reason": outcome.value, "request_id": request_id})


def identity(head: RequestHead | None) -> tuple[str, str]:
    """The `x-request-id` of an answer that has no trail: the caller's, if it is fit to be one."""
    given = head.request_id if head is not None else None
    return REQUEST_ID, given if given and valid_request_id(given) else new_request_id()


def head_outcome(status: int, outcome: Outcome | None) -> Outcome:
    """What a refusal for the head alone is counted as."""
    return outcome or _HEAD_OUTCOMES.get(status, Outcome.INVALID)


def head_refusal(head: RequestHead | None, status: int, message: str, outcome: Outcome | None = None) -> Refusal:
    """A refusal for the head alone: wrong framing, path, method or encoding. outcome: follows from status if None."""
    name = identity(head)
    body = _said(message, head_outcome(status, outcome), name[1])
    return Refusal(status, [name, ("content-type", "application/json")], body)
