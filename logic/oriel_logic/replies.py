"""Values and errors as HTTP answers. The only place of this unit that knows statuses."""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, LogicError, ModelBusy, Outcome
from oriel_logic.messages import Answer

__all__ = ["Reply", "error_body", "error_reply", "reply_of", "retry_after", "status_of"]

JSON = "application/json"
STATUS = {
    Outcome.CLIENT_LEFT: 499,
    Outcome.BAD_REQUEST: 400,
    Outcome.INPUT_REFUSED: 422,
    Outcome.MEDIA_UNSUPPORTED: 415,
    Outcome.INPUT_TOO_LARGE: 413,
    Outcome.PARAMETER_WRONG: 400,
    Outcome.MODEL_UNKNOWN: 404,
    Outcome.SERVICE_UNKNOWN: 404,
    Outcome.SERVICE_BROKEN: 503,
    Outcome.DEADLINE_EXCEEDED: 504,
    Outcome.SATURATED: 503,
    Outcome.HANDLER_FAILED: 500,
    Outcome.WORKER_DIED: 500,
    Outcome.HANDLER_TIMED_OUT: 504,
    Outcome.MEMORY_EXCEEDED: 500,
    Outcome.MODEL_INPUT_WRONG: 500,
    Outcome.MODEL_UNAVAILABLE: 503,
    Outcome.MODEL_BUSY: 503,
    Outcome.MODEL_FAILED: 502,
    Outcome.MODEL_UNREACHABLE: 502,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as it goes out; `headers` without content-type and content-length.

    pieces: of an answer that is streamed instead of `body`; closed early when the client leaves.
    """

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    pieces: AsyncIterator[bytes] | None = None


def reply_of(value: Any) -> Reply:
    """A handler's value: an Answer or bytes as they are, anything else as JSON (numpy arrays as lists).

    Raises HandlerFailed for what JSON cannot say.
    """
    if isinstance(value, Answer):
        return Reply(status=200, body=value.body, content_type=value.content_type)
    if isinstance(value, bytes):
        return Reply(status=200, body=value, content_type="application/octet-stream")
    try:
        return Reply(status=200, body=msgspec.json.encode(value, enc_hook=plain))
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise HandlerFailed("the service's answer cannot be sent as JSON: its log says why") from error


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def error_reply(error: LogicError, request_id: str) -> Reply:
    """Status, `Retry-After` and a body that says what, why and for which request."""
    facts = {"stage": error.stage} if isinstance(error, DeadlineExceeded) else {}
    body = error_body(error.message, error.outcome.value, request_id, **facts)
    return Reply(status=status_of(error), body=body, headers=retry_after(error))


def status_of(error: LogicError) -> int:
    return 429 if isinstance(error, ModelBusy) and error.too_many else STATUS[error.outcome]


def retry_after(error: LogicError) -> tuple[tuple[str, str], ...]:
    return (("retry-after", str(math.ceil(error.retry_after_s))),) if error.retry_after_s is not None else ()


def error_body(message: str, reason: str, request_id: str, **facts: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "reason": reason, "request_id": request_id, **facts}})
