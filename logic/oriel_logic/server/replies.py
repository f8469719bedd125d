"""Converts values and errors to HTTP answers. No other module of this unit knows status codes."""

import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from oriel_logic.bodies.messages import Answer
from oriel_logic.errors import DeadlineExceeded, LogicError, ModelBusy, ModelUnknown, Outcome, ParameterWrong, Refused

JSON = "application/json"
STATUS = {
    Outcome.CALLER_LEFT: 499,
    Outcome.INVALID_REQUEST: 400,
    Outcome.INPUT_REFUSED: 422,
    Outcome.MEDIA_UNSUPPORTED: 415,
    Outcome.NOT_ACCEPTABLE: 406,
    Outcome.TOO_LARGE: 413,
    Outcome.PARAMETER_WRONG: 400,
    Outcome.UNKNOWN_MODEL: 404,
    Outcome.SERVICE_UNKNOWN: 404,
    Outcome.SERVICE_BROKEN: 503,
    Outcome.DEADLINE_EXCEEDED: 504,
    Outcome.QUEUE_FULL: 503,
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


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to send; `headers` without content-type and content-length.

    pieces: a streamed answer, instead of `body`; it is closed early if the client leaves. is_bounded: True if it never
    waits long for its next piece.
    trailers: called for the fields after its last piece; None if there are none.
    """

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    pieces: AsyncIterator[bytes] | None = None
    is_bounded: bool = False
    trailers: Callable[[], tuple[tuple[str, str], ...]] | None = None


def reply_of(value: Any) -> Reply:
    """Make the reply of a service's answer, or of a plain value as JSON."""
    if isinstance(value, Answer):
        return Reply(status=200, body=value.body, content_type=value.content_type, headers=value.pairs)
    return Reply(status=200, body=msgspec.json.encode(value))


def not_ready(reason: str) -> Reply:
    """Make the reply of a probe that finds the server not ready."""
    return Reply(status=503, body=msgspec.json.encode({"ready": False, "reason": reason}))


def error_reply(error: LogicError, request_id: str) -> Reply:
    """Make the reply of an error: its status, when to come back, and a body with its reason and the request id."""
    return Reply(status=status_of(error), body=body_of(error, request_id), headers=retry_after(error))


def body_of(error: LogicError, request_id: str) -> bytes:
    return msgspec.json.encode(facts_of(error, request_id))


def facts_of(error: LogicError, request_id: str) -> dict[str, Any]:
    """Return the value of an error body, with the stage that ran out of time or the path of the field at fault."""
    facts: dict[str, str | None] = {}
    if isinstance(error, DeadlineExceeded):
        facts["stage"] = error.stage
    elif isinstance(error, ParameterWrong):
        facts["param"] = error.param
        if error.code:
            facts["code"] = error.code
    elif isinstance(error, Refused) and error.field:
        facts["field"] = error.field
    elif isinstance(error, ModelUnknown):
        facts["code"] = "model_not_found"
    return error_facts(status_of(error), error.message, error.outcome.value, request_id, **facts)


def status_of(error: LogicError) -> int:
    return 429 if isinstance(error, ModelBusy) and error.too_many else STATUS[error.outcome]


def retry_after(error: LogicError) -> tuple[tuple[str, str], ...]:
    """Return the header that says when to try again, or that a call that was late is not worth repeating."""
    if status_of(error) == 504:
        return (("x-should-retry", "false"),)
    return (("retry-after", str(math.ceil(error.retry_after_s))),) if error.retry_after_s is not None else ()


def error_facts(status: int, message: str, reason: str, request_id: str, **facts: str | None) -> dict[str, Any]:
    """Return the value of an error body in the form of the OpenAI API, with our own members."""
    kind = "requests" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    error = {
        "message": plain(message),
        "type": kind,
        "param": None,
        "code": reason,
        "reason": reason,
        "request_id": request_id,
    }
    return {"error": {**error, **{name: value and plain(value) for name, value in facts.items()}}}


def plain(text: object) -> str:
    """Return text that services made up as valid UTF-8: it may quote what is not."""
    return str(text).encode(errors="backslashreplace").decode()


def error_body(status: int, message: str, reason: str, request_id: str) -> bytes:
    return msgspec.json.encode(error_facts(status, message, reason, request_id))
