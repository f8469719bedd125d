"""The status of a refusal on each protocol: Triton's mapping, except that a passed deadline is 504 /
DEADLINE_EXCEEDED.
"""

import logging

import msgspec

from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest, Outcome
from oriel_wire.context import REQUEST_ID, new_request_id, valid_request_id
from oriel_wire.engine.buffered import Refusal
from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2 import grpc

_log = logging.getLogger(__name__)

_STATUSES: dict[Outcome, tuple[int, int]] = {
    Outcome.OK: (200, grpc.OK),
    Outcome.INVALID_REQUEST: (400, grpc.INVALID_ARGUMENT),
    Outcome.TOO_LARGE: (413, grpc.RESOURCE_EXHAUSTED),
    Outcome.NOT_FOUND: (404, grpc.UNIMPLEMENTED),
    Outcome.METHOD_NOT_ALLOWED: (405, grpc.UNIMPLEMENTED),
    Outcome.UNKNOWN_MODEL: (404, grpc.NOT_FOUND),
    Outcome.MODEL_NOT_READY: (503, grpc.UNAVAILABLE),
    Outcome.MODEL_MEMORY_FULL: (503, grpc.UNAVAILABLE),
    Outcome.NO_AVAILABLE_VERSION: (404, grpc.NOT_FOUND),
    Outcome.NOT_SUPPORTED: (501, grpc.UNIMPLEMENTED),
    Outcome.RESTRICTED: (403, grpc.UNAVAILABLE),
    Outcome.QUEUE_FULL: (503, grpc.UNAVAILABLE),
    Outcome.QUEUE_TIMEOUT: (503, grpc.UNAVAILABLE),
    Outcome.DEADLINE_EXCEEDED: (504, grpc.DEADLINE_EXCEEDED),
    Outcome.DEADLINE_TOO_SHORT: (504, grpc.DEADLINE_EXCEEDED),
    Outcome.CALLER_LEFT: (400, grpc.CANCELLED),
    Outcome.SERVER_STOPPING: (503, grpc.UNAVAILABLE),
    Outcome.CONTROL_REFUSED: (503, grpc.UNAVAILABLE),
    Outcome.LOAD_FAILED: (400, grpc.INVALID_ARGUMENT),
    Outcome.BACKEND_FAILED: (500, grpc.INTERNAL),
    Outcome.MODEL_SAYS_NOT_FOUND: (404, grpc.NOT_FOUND),
    Outcome.MODEL_SAYS_EXISTS: (400, grpc.ALREADY_EXISTS),
    Outcome.MODEL_SAYS_UNAVAILABLE: (503, grpc.UNAVAILABLE),
    Outcome.MODEL_SAYS_CANCELLED: (400, grpc.CANCELLED),
    Outcome.MODEL_SAYS_UNKNOWN: (400, grpc.UNKNOWN),
}
# Refusals by the HTTP engine itself have only a status.
_HEAD_OUTCOMES = {
    404: Outcome.NOT_FOUND,
    405: Outcome.METHOD_NOT_ALLOWED,
    413: Outcome.TOO_LARGE,
    414: Outcome.TOO_LARGE,
    431: Outcome.TOO_LARGE,
}


def http_status(error: InferenceError) -> int:
    """Return the HTTP status of a refusal."""
    return _STATUSES[error.outcome][0]


def grpc_status(error: InferenceError) -> int:
    """Return the gRPC status of a refusal."""
    return _STATUSES[error.outcome][1]


def status_number(outcome: Outcome, protocol: str) -> int:
    """Return the status of an outcome on "http"; for any other protocol the gRPC status code."""
    http, code = _STATUSES[outcome]
    return http if protocol == "http" else code


def as_inference_error(error: Exception) -> InferenceError:
    """Return the refusal for an error, without the traceback, whose frames refer to the request and to the error.

    An unexpected error is logged here. It must not affect other requests, nor show internals to the client.
    """
    if isinstance(error, InferenceError):
        return error.with_traceback(None)
    if isinstance(error, BadMessage):
        return InvalidRequest(error.message)
    _log.error("a request failed unexpectedly", exc_info=error)
    return BackendFailed("the server failed on this request")


def error_body(message: str, outcome: Outcome, request_id: str) -> bytes:
    """Encode `{"error": sentence, "reason": outcome, "request_id": ...}`: v2 clients read `error` and skip the rest."""
    return msgspec.json.encode({"error": message, "reason": outcome.value, "request_id": request_id})


def identity(head: RequestHead | None) -> tuple[str, str]:
    """Return the `x-request-id` of an answer without a request record: the caller's, if it is a valid one."""
    given = head.request_id if head is not None else None
    return REQUEST_ID, given if given and valid_request_id(given) else new_request_id()


def head_outcome(status: int, outcome: Outcome | None) -> Outcome:
    """Return the outcome that a refusal of a head is counted as."""
    return outcome or _HEAD_OUTCOMES.get(status, Outcome.INVALID_REQUEST)


def head_refusal(head: RequestHead | None, status: int, message: str, outcome: Outcome | None = None) -> Refusal:
    """Build a refusal of a head: wrong framing, path, method or encoding. outcome: follows from the status if None."""
    name = identity(head)
    body = error_body(message, head_outcome(status, outcome), name[1])
    return Refusal(status, [name, ("content-type", "application/json")], body)
