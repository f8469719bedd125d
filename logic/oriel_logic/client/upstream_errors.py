"""Converts an inference server's refusal to an error. v2 sends `{"error": "..."}`; Oriel's own servers may add a
reason.
"""

from typing import Any

import msgspec

from oriel_logic.errors import (
    DeadlineExceeded,
    LogicError,
    ModelBusy,
    ModelFailed,
    ModelInputWrong,
    ModelUnavailable,
    ModelUnreachable,
)
from oriel_wire.context import CallContext
from oriel_wire.engine.client import HttpResponse

# Reasons of Oriel's own servers: this one did not run it, another one may have the model. A full queue is not such a
# reason, because a retry elsewhere would fill that queue too.
ELSEWHERE = frozenset({"unknown_model", "model_not_ready", "no_available_version", "server_stopping"})
MAYBE_ELSEWHERE = frozenset({404, 503})
SPENT = "x-oriel-retry"  # on a 503 that a gateway passes on: it has tried again as far as it may
UNREACHABLE = "upstream_unreachable"  # a gateway's reason: no server of the model's pool came in time

NO_TICKET = (
    "models are called through the gateway, by the ticket that it adds to a request, and this request has none: send "
    "it through a gateway that has ticket keys"
)
MAX_RETRY_AFTER_S = 3600.0
NOT_READY_RETRY_S = 1.0


def refusal(model: str, response: HttpResponse) -> LogicError:
    """Return the error for an answer whose status is not 200."""
    wait_s = retry_after_s(response)
    if response.status == 502 and _body(response).get("reason") == UNREACHABLE:
        return ModelUnreachable(f"model '{model}': {sentence(response)}", retry_after_s=wait_s)
    return error_of(model, response.status, sentence(response), wait_s, is_absent=is_elsewhere(response))


def error_of(
    model: str, status: int, reason: str, wait_s: float, stage: str = "infer", *, is_absent: bool
) -> LogicError:
    """Return the error for a refusal. status: the HTTP status. reason: the server's text. wait_s: seconds to wait
    before another try. is_absent: the server does not have the model, or not now.
    """
    match status:
        case 400:
            return ModelInputWrong(f"model '{model}' refused its inputs: {reason}")
        case 404:
            return ModelUnavailable(f"model '{model}' is not served: {reason}", retry_after_s=NOT_READY_RETRY_S)
        case 429:
            return ModelBusy(f"model '{model}': {reason}", retry_after_s=wait_s, too_many=True)
        case 503 if is_absent:
            return ModelUnavailable(f"model '{model}' is not served now: {reason}", retry_after_s=wait_s)
        case 503:
            return ModelBusy(f"model '{model}' is not available now: {reason}", retry_after_s=wait_s)
        case 504:
            return DeadlineExceeded(stage, f"model '{model}': {reason}")
    return ModelFailed(f"model '{model}' failed ({status}): {reason}")


def check_ticket(call: CallContext) -> None:
    """Raises ModelFailed for a request without a ticket."""
    if not call.ticket:
        raise ModelFailed(NO_TICKET)


def is_elsewhere(response: HttpResponse) -> bool:
    """Return whether this server surely did not run the call and another may.

    A 404 is such an answer: every v2 server gives it for a model that it does not have.
    """
    return response.status == 404 or _body(response).get("reason") in ELSEWHERE


def is_restarting(response: HttpResponse) -> bool:
    """Return whether to try a server without the model again soon: it answered 503, and no gateway has retried yet."""
    return response.status == 503 and response.get(SPENT) is None


def sentence(response: HttpResponse) -> str:
    """Return the server's error text, at most 300 characters."""
    error = _body(response).get("error")
    if isinstance(error, dict):
        error = error.get("message")
    return error[:300] if isinstance(error, str) and error else "it gave no reason"


def _body(response: HttpResponse) -> dict[str, Any]:
    """Return the body of a refusal; empty if it is not a JSON object."""
    try:
        body = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def retry_after_s(response: HttpResponse) -> float:
    """Return the seconds of `Retry-After`, 1 if it is missing or a date."""
    value = response.get("retry-after") or ""
    if value.isascii() and value.isdigit() and len(value) < 9:
        return min(float(value), MAX_RETRY_AFTER_S)
    return NOT_READY_RETRY_S
