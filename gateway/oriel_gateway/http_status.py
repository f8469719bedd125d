"""The HTTP and gRPC status of each outcome, and its words in the OpenAI API: where refusals become those."""

from typing import Final

from oriel_gateway.errors import Outcome
from oriel_wire.h2 import grpc

_STATUSES: Final = {
    Outcome.INVALID_REQUEST: (400, grpc.INVALID_ARGUMENT),
    Outcome.AMBIGUOUS_CREDENTIALS: (400, grpc.INVALID_ARGUMENT),
    Outcome.UNAUTHENTICATED: (401, grpc.UNAUTHENTICATED),
    Outcome.IDENTITY_UNAVAILABLE: (503, grpc.UNAVAILABLE),
    Outcome.TIER_NOT_ALLOWED: (403, grpc.PERMISSION_DENIED),
    Outcome.NOT_READY: (503, grpc.UNAVAILABLE),
    Outcome.NOT_FOUND: (404, grpc.NOT_FOUND),
    Outcome.METHOD_NOT_ALLOWED: (405, grpc.UNIMPLEMENTED),
    Outcome.TOO_LARGE: (413, grpc.RESOURCE_EXHAUSTED),
    Outcome.ENCODING_UNSUPPORTED: (415, grpc.UNIMPLEMENTED),
    Outcome.RATE_LIMITED: (429, grpc.RESOURCE_EXHAUSTED),
    Outcome.CONCURRENCY_LIMITED: (429, grpc.RESOURCE_EXHAUSTED),
    Outcome.TOKENS_LIMITED: (429, grpc.RESOURCE_EXHAUSTED),
    Outcome.QUOTA_EXCEEDED: (429, grpc.RESOURCE_EXHAUSTED),
    Outcome.BUDGET_SPENT: (429, grpc.RESOURCE_EXHAUSTED),
    Outcome.QUEUE_FULL: (503, grpc.UNAVAILABLE),
    Outcome.DISPLACED: (503, grpc.UNAVAILABLE),
    Outcome.UPSTREAM_UNREACHABLE: (502, grpc.UNAVAILABLE),
    Outcome.UPSTREAM_BROKEN: (502, grpc.UNAVAILABLE),
    Outcome.SEQUENCE_LOST: (502, grpc.ABORTED),
    Outcome.INFEASIBLE: (503, grpc.UNAVAILABLE),
    Outcome.DEADLINE_TOO_SHORT: (504, grpc.DEADLINE_EXCEEDED),
    Outcome.DEADLINE_EXCEEDED: (504, grpc.DEADLINE_EXCEEDED),
    Outcome.SERVER_STOPPING: (503, grpc.UNAVAILABLE),
}
STATUS: Final = {outcome: status for outcome, (status, _) in _STATUSES.items()}
CODES: Final = {outcome: code for outcome, (_, code) in _STATUSES.items()}
# The `type` and `code` that clients of the OpenAI API read. The code of other outcomes is their reason.
_WORDS = {
    Outcome.UNAUTHENTICATED: ("invalid_request_error", "invalid_api_key"),
    Outcome.RATE_LIMITED: ("requests", "rate_limit_exceeded"),
    Outcome.CONCURRENCY_LIMITED: ("requests", "rate_limit_exceeded"),
    Outcome.TOKENS_LIMITED: ("tokens", "rate_limit_exceeded"),
    Outcome.QUOTA_EXCEEDED: ("insufficient_quota", "insufficient_quota"),
    Outcome.BUDGET_SPENT: ("insufficient_quota", "insufficient_quota"),
}
WORDS = {
    outcome: _WORDS.get(outcome, ("invalid_request_error" if status < 500 else "server_error", outcome.value))
    for outcome, status in STATUS.items()
}
# Official clients would wait for a spent quota for hours, and send again a call that was late already.
FINAL = frozenset({Outcome.QUOTA_EXCEEDED, Outcome.BUDGET_SPENT, *(each for each in STATUS if STATUS[each] == 504)})
