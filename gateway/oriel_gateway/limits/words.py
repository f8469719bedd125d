"""What a client reads about its limits: the sentence and the headers of a refusal, the headers of an answer."""

from math import ceil

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits.meters import Meter
from oriel_policies.calendar import Period
from oriel_policies.limits import Bound, Counts, policy_item, state_item

__all__ = ["MAX_ITEMS", "policy", "refusal", "states"]

MAX_ITEMS = 8  # policies named on one answer
_DAYS = {Period.DAY: 1, Period.MONTH: 31}


def refusal(meter: Meter, wait_s: float, now: float) -> Refused:
    """Why `meter` does not let a call through; wait_s: when it would."""
    bound = meter.bound
    outcome = Outcome.RATE_LIMITED
    scope, _, _ = bound.name.rpartition("/")
    whose = f"this key's calls of {scope} may" if scope else "this key may"
    if bound.slots:
        outcome = Outcome.CONCURRENCY_LIMITED
        message = f"{whose} have {bound.limit} at once, and as many are under way"
    elif bound.rate is not None:
        what = "requests" if bound.counts is Counts.REQUESTS else "bytes"
        message = (
            f"{whose} send {bound.rate.requests_per_s:g} {what} per second (bursts of {bound.rate.burst}); "
            f"the next is possible in {wait_s:.2f} s"
        )
    else:
        outcome = Outcome.QUOTA_EXCEEDED
        of = f"{bound.limit} requests" if bound.counts is Counts.REQUESTS else f"{bound.limit // 1000} ms of computing"
        message = f"{whose} use {of} per {bound.period} (UTC), and that is used up or promised to calls under way"
    wait = max(1, ceil(wait_s))
    left = max(0.0, meter.left(now)[0])
    if bound.counts is Counts.REQUESTS:
        left = 0.0  # what is left of bytes or computing may be too little for this call, and is said
    return Refused(
        outcome,
        message,
        retry_after_s=wait,
        headers=(("ratelimit-policy", policy(bound)), ("ratelimit", state_item(bound, left, wait_s))),
    )


def policy(bound: Bound) -> str:
    """The member of `RateLimit-Policy`; a month is the longest there is."""
    return policy_item(bound, _DAYS[bound.period] * 86400.0 if bound.period else 0.0)


def states(meters: list[Meter], now: float) -> str:
    """The value of `RateLimit` on an answer."""
    return ", ".join([state_item(meter.bound, *meter.left(now)) for meter in meters[:MAX_ITEMS]])
