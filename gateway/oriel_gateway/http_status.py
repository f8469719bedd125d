"""The HTTP status of each outcome, and its words in the OpenAI API: the one place where refusals become those."""

from oriel_gateway.errors import Outcome

STATUS = {
    Outcome.INVALID_REQUEST: 400,
    Outcome.AMBIGUOUS_CREDENTIALS: 400,
    Outcome.UNAUTHENTICATED: 401,
    Outcome.IDENTITY_UNAVAILABLE: 503,
    Outcome.TIER_NOT_ALLOWED: 403,
    Outcome.NOT_READY: 503,
    Outcome.NOT_FOUND: 404,
    Outcome.METHOD_NOT_ALLOWED: 405,
    Outcome.TOO_LARGE: 413,
    Outcome.ENCODING_UNSUPPORTED: 415,
    Outcome.RATE_LIMITED: 429,
    Outcome.CONCURRENCY_LIMITED: 429,
    Outcome.TOKENS_LIMITED: 429,
    Outcome.QUOTA_EXCEEDED: 429,
    Outcome.BUDGET_SPENT: 429,
    Outcome.QUEUE_FULL: 503,
    Outcome.DISPLACED: 503,
    Outcome.UPSTREAM_UNREACHABLE: 502,
    Outcome.UPSTREAM_BROKEN: 502,
    Outcome.INFEASIBLE: 503,
    Outcome.DEADLINE_TOO_SHORT: 504,
    Outcome.DEADLINE_EXCEEDED: 504,
    Outcome.SERVER_STOPPING: 503,
}
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
