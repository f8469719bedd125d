"""Classify gRPC errors of an upstream: who failed, whether anything was executed, what the caller may read.

gRPC gives connection errors and errors that the server sent the same code, UNAVAILABLE, and only the text tells them
apart. The text of a connection error names addresses, which must not be visible outside.
"""

import re
from collections.abc import Iterable
from typing import Any

import grpc
from grpc import aio

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.upstream_answers import NOT_EXECUTED, NOT_HERE, AnswerKind, means_absent, means_refused
from oriel_wire.context import COST_US
from oriel_wire.outcomes import event_of

_REASON = "x-oriel-reason"
_RETRY = "x-oriel-retry"
_UPSTREAM_ERROR = "upstream_error"
_NOT_CONNECTED = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_LOST = re.compile(
    r"ipv[46]:|unix:|Socket closed|Connection (?:reset|refused|timed out)|Broken pipe|Cancelling all calls"
    r"|GOAWAY|RST_STREAM|Stream removed|keepalive|recvmsg|sendmsg|Transport closed|Endpoint closing",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"(?:ipv[46]:\S+|unix(?:-abstract)?:\S+|\b(?=[^:\s]*[A-Za-z])[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,9}:\d{3,5}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?|\[[0-9a-fA-F:]{2,}\](?::\d{1,5})?)"
)
_WORD = re.compile(r"[a-z_]{1,64}\Z")
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DATA_LOSS,
    }
)
_MAX_TEXT = 500


def not_connected() -> aio.AioRpcError:
    """Build the error that gRPC raises without a connection, for a connection that was not waited for."""
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), _NOT_CONNECTED[0], None)


def surely_not_executed(error: aio.AioRpcError) -> bool:
    """Whether the call was never sent."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NOT_CONNECTED)


def broken(error: aio.AioRpcError) -> bool:
    """Whether the connection was lost; then the call may have been executed."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE or surely_not_executed(error):
        return False
    return _trailing_text(error, _REASON) is None and _LOST.search(error.details() or "") is not None


def servers_fault(error: aio.AioRpcError) -> bool:
    """Whether the server failed, rather than its caller."""
    return error.code() in _FAULTS


def classify_error(error: aio.AioRpcError, *, model: bool) -> AnswerKind:
    """Classify a status that a server sent. model: whether the call names a model. See
    `upstream_answers.classify_answer`.
    """
    code, reason, text = error.code(), _trailing_text(error, _REASON), error.details() or ""
    if code not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE) or broken(error):
        return AnswerKind.ANSWER
    if reason is not None:
        if model and reason in NOT_HERE:
            return AnswerKind.ABSENT
        refused = event_of(reason) in NOT_EXECUTED
    elif model and means_absent(text):
        return AnswerKind.ABSENT
    else:
        refused = means_refused(text)
    if code is grpc.StatusCode.NOT_FOUND:
        return AnswerKind.PERHAPS_ABSENT if model and reason is None else AnswerKind.ANSWER
    # It is not sent again if a gateway behind this one has tried twice already, nor if it has a cost: a service can be
    # full after its model has run.
    again = _trailing_text(error, _RETRY) is None and reported_cost_us(error.trailing_metadata()) <= 0
    return AnswerKind.REFUSED if refused and again else AnswerKind.ANSWER


def busy_for_s(error: aio.AioRpcError) -> float:
    """Return for how many seconds a full server asks not to be called again; 0.0 if it does not say."""
    wait_s = _trailing_text(error, "retry-after") or ""
    return float(wait_s) if wait_s.isdecimal() and len(wait_s) < 6 else 0.0


def refusal(error: aio.AioRpcError) -> Refused | None:
    """Build a refusal for an error that the server did not send itself; None for one that it did."""
    if surely_not_executed(error):
        return Refused(Outcome.UPSTREAM_UNREACHABLE, "the upstream does not accept connections", retry_after_s=1)
    if broken(error):
        lost = "the upstream closed the connection before its answer was complete"
        return Refused(Outcome.UPSTREAM_BROKEN, lost, retry_after_s=1)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "CLIENT: Received message larger" in (
        error.details() or ""
    ):
        return Refused(Outcome.UPSTREAM_BROKEN, "the upstream's answer is larger than its pool allows", retry_after_s=1)
    if (
        error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        and _trailing_text(error, _REASON) is None
        and (error.details() or "").lower() in ("", "deadline exceeded")
    ):
        return Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for the upstream")
    return None


def passed_on(error: aio.AioRpcError) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the server's own error text without addresses, and the metadata that goes with it."""
    text = _ADDRESS.sub("(an address)", error.details() or "")[:_MAX_TEXT]
    reason = _trailing_text(error, _REASON)
    if reason is None or not _WORD.match(reason):
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        reason = Outcome.DEADLINE_EXCEEDED.value if late else _UPSTREAM_ERROR
    metadata = [(_REASON, reason)]
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        metadata += [("retry-after", "1"), (_RETRY, "spent")]
    return text, tuple(metadata)


def reported_cost_us(metadata: Iterable[Any] | None) -> int:
    """Return the cost in microseconds that a server reports in its trailing metadata; -1 if it reports none."""
    for key, value in metadata or ():
        if key == COST_US and isinstance(value, str):
            return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else -1
    return -1


def _trailing_text(error: aio.AioRpcError, name: str) -> str | None:
    """Return the first text of this name in the trailing metadata."""
    pairs: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in pairs:
        if key == name and isinstance(value, str):
            return value
    return None
