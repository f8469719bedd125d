"""What an upstream's gRPC error means: who failed, whether anything ran, what the caller is told of it.

gRPC gives an error of the connection and an error that the server sent the same code, UNAVAILABLE, and tells them
apart only in words; the words of a connection's error name addresses, which are nobody's business outside.
"""

import re
from collections.abc import Iterable
from typing import Any

import grpc
from grpc import aio

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.refusals import NOT_EXECUTED, NOT_HERE, Said, says_absent, says_refused
from oriel_wire.context import COST_US

__all__ = [
    "broken",
    "busy_for_s",
    "not_connected",
    "passed_on",
    "refusal",
    "reported_cost_us",
    "servers_fault",
    "surely_not_executed",
    "what_it_says",
]

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
_MAX_WORDS = 500


def not_connected() -> aio.AioRpcError:
    """What gRPC says when it has no connection, for one that was not waited for."""
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), _NOT_CONNECTED[0], None)


def surely_not_executed(error: aio.AioRpcError) -> bool:
    """Whether the call never left."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NOT_CONNECTED)


def broken(error: aio.AioRpcError) -> bool:
    """Whether the connection was lost: perhaps it was executed."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE or surely_not_executed(error):
        return False
    return _said(error, _REASON) is None and _LOST.search(error.details() or "") is not None


def servers_fault(error: aio.AioRpcError) -> bool:
    """Whether a server failed, rather than its caller."""
    return error.code() in _FAULTS


def what_it_says(error: aio.AioRpcError, *, model: bool) -> Said:
    """Of a status that a server sent. model: the call names one. See `attempts.what_it_says`."""
    code, reason, words = error.code(), _said(error, _REASON), error.details() or ""
    if code not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE) or broken(error):
        return Said.ANSWER
    if reason is not None:
        if model and reason in NOT_HERE:
            return Said.ABSENT
        refused = reason in NOT_EXECUTED
    elif model and says_absent(words):
        return Said.ABSENT
    else:
        refused = says_refused(words)
    if code is grpc.StatusCode.NOT_FOUND:
        return Said.PERHAPS_ABSENT if model and reason is None else Said.ANSWER
    # Not again what somebody behind it was asked twice for already, nor what has cost: a service can be full after its
    # model has run.
    again = _said(error, _RETRY) is None and reported_cost_us(error.trailing_metadata()) <= 0
    return Said.REFUSED if refused and again else Said.ANSWER


def busy_for_s(error: aio.AioRpcError) -> float:
    """For how long a server that has no room asks not to be asked, 0.0 if it does not say."""
    wait_s = _said(error, "retry-after") or ""
    return float(wait_s) if wait_s.isdecimal() and len(wait_s) < 6 else 0.0


def refusal(error: aio.AioRpcError) -> Refused | None:
    """In our own words, what the server did not say itself."""
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
        and _said(error, _REASON) is None
        and (error.details() or "").lower() in ("", "deadline exceeded")
    ):
        return Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for the upstream")
    return None


def passed_on(error: aio.AioRpcError) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The server's own words without addresses, and the metadata that goes with them."""
    words = _ADDRESS.sub("(an address)", error.details() or "")[:_MAX_WORDS]
    reason = _said(error, _REASON)
    if reason is None or not _WORD.match(reason):
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        reason = Outcome.DEADLINE_EXCEEDED.value if late else _UPSTREAM_ERROR
    metadata = [(_REASON, reason)]
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        metadata += [("retry-after", "1"), (_RETRY, "spent")]
    return words, tuple(metadata)


def reported_cost_us(metadata: Iterable[Any] | None) -> int:
    """What a server says in its trailing metadata that a call cost, in microseconds; -1: nothing that can be read."""
    for key, value in metadata or ():
        if key == COST_US and isinstance(value, str):
            return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else -1
    return -1


def _said(error: aio.AioRpcError, name: str) -> str | None:
    """The first text of that name in the trailing metadata."""
    pairs: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in pairs:
        if key == name and isinstance(value, str):
            return value
    return None
