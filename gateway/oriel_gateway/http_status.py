"""The HTTP status of each outcome: the one place where refusals become statuses."""

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
