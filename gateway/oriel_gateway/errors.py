"""The errors with which the gateway refuses a request.

Refused    carries an `Outcome` (the metric label and `error.reason`) and a sentence; ingress files map it to a status
"""

from collections.abc import Mapping
from enum import StrEnum
from math import inf


class Outcome(StrEnum):
    """The end of a request. The names are the events of `oriel_wire.outcomes`; the values are published, as
    `error.reason`, metric label and log field, and docs/errors.md lists them.
    """

    ANSWERED = "answered"
    INVALID_REQUEST = "bad_request"
    UNAUTHENTICATED = "unauthenticated"
    IDENTITY_UNAVAILABLE = "identity_unavailable"
    TIER_NOT_ALLOWED = "tier_not_allowed"
    NOT_READY = "not_ready"
    AMBIGUOUS_CREDENTIALS = "ambiguous_credentials"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    ENCODING_UNSUPPORTED = "encoding_unsupported"
    RATE_LIMITED = "rate_limited"
    CONCURRENCY_LIMITED = "concurrency_limited"
    TOKENS_LIMITED = "tokens_limited"
    QUOTA_EXCEEDED = "quota_exceeded"
    BUDGET_SPENT = "budget_spent"
    QUEUE_FULL = "queue_full"
    DISPLACED = "displaced"
    INFEASIBLE = "infeasible"
    DEADLINE_TOO_SHORT = "deadline_too_short"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_BROKEN = "upstream_broken"
    SEQUENCE_LOST = "sequence_lost"
    SERVER_STOPPING = "server_stopping"
    CALLER_LEFT = "client_left"

    __hash__ = str.__hash__  # the enumeration's own is a function in Python, called wherever outcomes are counted


class Refused(Exception):
    """A call is not served, or not any more.

    retry_after_s: whole seconds; None if a retry does not help.
    headers: further header lines for HTTP, with lower-case names.
    more: further members of the error's JSON object, for clients of the OpenAI API.
    timing: a further entry of `Server-Timing`; "" for none.
    left_s: seconds that were left for the request, if it is refused for lack of time before it becomes a call.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        retry_after_s: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        more: Mapping[str, str | None] | None = None,
        timing: str = "",
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers
        self.more = more
        self.timing = timing
        self.left_s = inf


def displaced(retry_after_s: int) -> Refused:
    """Build the refusal of a call that made room for another one, by the rule of `oriel_policies.waiting.shares`."""
    message = "the pool is full: a more urgent call, or one of a tenant with less than its share, took the place"
    return Refused(Outcome.DISPLACED, message, retry_after_s=retry_after_s)


def stopping() -> Refused:
    """Build the refusal of a call that this gateway has not sent to a server before it shuts down."""
    message = "the gateway is shutting down, and the call has not been sent to a server"
    return Refused(Outcome.SERVER_STOPPING, message, retry_after_s=1)
