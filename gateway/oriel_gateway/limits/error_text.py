"""Build the texts about limits for clients: error text and headers of a refusal, headers of an answer."""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import Any

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits.meters import Meter
from oriel_policies.bounds.kinds import UNITS, Counts
from oriel_policies.bounds.limits import Bound, state_item
from oriel_policies.metering.budgets import Budget
from oriel_policies.metering.prices import decimal_text

MAX_ITEMS = 8  # the most policies that are named on one answer


def refusal(meter: Meter, wait_s: float, now: float) -> Refused:
    """Build the refusal of a call by `meter`. wait_s: seconds until the meter would let it through."""
    bound, rate = meter.bound, meter.bound.rate
    outcome = Outcome.RATE_LIMITED
    if bound.counts is Counts.TOKENS and rate is not None:
        outcome = Outcome.TOKENS_LIMITED
        per_minute = counted(rate.requests_per_s * 60, "tokens")
        message = (
            f"{_whose(bound.name)} use {per_minute} per minute (bursts of {rate.burst}); those "
            f"for the prompt and the longest answer that this one asks for are free in {wait_s:.2f} s"
        )
    elif rate is not None:
        rate_text = _rate(bound.name, rate.requests_per_s, rate.burst, UNITS[bound.counts].plural)
        message = f"{rate_text}the next is possible in {wait_s:.2f} s"
    elif bound.slots:
        outcome = Outcome.CONCURRENCY_LIMITED
        message = f"{_whose(bound.name)} have {counted(bound.limit, 'calls')} at once, and as many are under way"
    elif bound.budget is not None:
        outcome = Outcome.BUDGET_SPENT
        message = (
            f"the budget of this tenant is spent: {amount_text(bound.limit, bound.budget)} {bound.budget.unit} "
            f"per {bound.period} (UTC)"
        )
    else:
        outcome = Outcome.QUOTA_EXCEEDED
        unit = UNITS[bound.counts]
        of = counted(bound.limit // unit.scale, unit.plural)
        message = (
            f"{_whose(bound.name)} use {of} per {bound.period} (UTC), "
            "and that is used up or promised to calls under way"
        )
    left = 0.0
    if bound.counts not in (Counts.REQUESTS, Counts.BUDGET):  # some may be left, but too little for this call
        left = meter.remaining(now)[0]
    headers: tuple[tuple[str, str], ...] = (
        ("ratelimit-policy", bound.policy),
        ("ratelimit", state_item(bound, left, wait_s)),
    )
    if bound.counts is Counts.TOKENS:
        headers += token_headers(bound, left, meter.remaining(now)[1])
    return Refused(outcome, message, retry_after_s=ceil(wait_s) or 1, headers=headers)


@lru_cache(maxsize=1024)
def _rate(name: str, per_s: float, burst: int, what: str) -> str:
    return f"{_whose(name)} send {counted(per_s, what)} per second (bursts of {burst}); "


def _whose(name: str) -> str:
    scope, _, _ = name.rpartition("/")
    return f"this tenant's calls of {scope} may" if scope else "this tenant may"


def counted(amount: float, plural: str) -> str:
    """Return the amount and its unit, as "1 request" or "2.5 requests"."""
    return f"{amount:.15g} {plural.removesuffix('s') if amount == 1 and plural.endswith('s') else plural}"


def amount_text(units: int, budget: Budget) -> str:
    """Return an amount of a budget in its unit, exactly, as "12.5"."""
    if budget.scale == 1:
        return str(units)
    return decimal_text(units).rstrip("0").rstrip(".")


def token_headers(bound: Bound, left: float, full_s: float) -> tuple[tuple[str, str], ...]:
    """Return the headers about tokens that clients of the OpenAI API know. full_s: seconds until the whole burst is
    there.
    """
    return (
        ("x-ratelimit-limit-tokens", str(bound.limit)),
        ("x-ratelimit-remaining-tokens", str(max(0, int(left)))),
        ("x-ratelimit-reset-tokens", f"{max(0.0, full_s):.3f}s"),
    )


def shown(bound: Bound, left: float, more_s: float) -> dict[str, Any]:
    """Return a bound and what is left of it, as a tenant sees it. more_s: the seconds until there is more of it."""
    if (budget := bound.budget) is not None:
        return {
            "name": bound.name,
            "kind": "budget",
            "unit": budget.unit,
            "limit": amount_text(bound.limit, budget),
            "left": amount_text(max(0, int(left)), budget),
            "per": str(budget.period),
            "warn": budget.warn,
            "stops": budget.stop,
            "more_in_s": ceil(more_s),
        }
    kind = "concurrency" if bound.slots else "quota" if bound.period is not None else "rate"
    unit, per, rate = UNITS[bound.counts].shown, str(bound.period) if bound.period is not None else None, bound.rate
    speed: dict[str, float | None] = {"per_second": None if rate is None else rate.requests_per_s}
    if rate is not None:
        per = "second"
        if bound.counts is Counts.TOKENS:
            per, speed = "minute", {"per_minute": round(rate.requests_per_s * 60, 6)}
    return {
        "name": bound.name,
        "kind": kind,
        "unit": unit,
        "limit": bound.limit,
        "left": max(0, int(left)),
        "per": per,
        **speed,
        "more_in_s": ceil(more_s),
    }


def states(meters: Sequence[Meter], now: float) -> str:
    """Return the value of `RateLimit` for an answer."""
    if len(meters) == 1:
        return meters[0].state(now)
    return ", ".join([meter.state(now) for meter in meters[:MAX_ITEMS]])
