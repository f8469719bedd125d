"""What a client reads about its limits, to the letter: refusals, headers, and the list of limits."""

from typing import Any

import pytest

from oriel_gateway.errors import Outcome
from oriel_gateway.limits.error_text import amount_text, refusal, shown, states, token_headers
from oriel_gateway.limits.grants import Grant, Terms
from oriel_gateway.limits.meters import Meter, RateMeter
from oriel_policies.bounds.calendar import Period
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import Bound
from oriel_policies.documents import RateLimit
from oriel_policies.metering.budgets import Budget

EUROS = Budget(unit="EUR", amount=12_500_000_000, period=Period.DAY)
TOKENS = Budget(unit="tokens", amount=1200, period=Period.MONTH, stop=False, warn=0.5)


def rate(counts: Counts = Counts.REQUESTS, name: str = "requests", per_s: float = 2.0, burst: int = 4) -> Bound:
    return Bound(name=name, counts=counts, limit=burst, rate=RateLimit(requests_per_s=per_s, burst=burst))


def quota(counts: Counts, limit: int, period: Period = Period.DAY, budget: Budget | None = None) -> Bound:
    return Bound(name="q", counts=counts, limit=limit, period=period, budget=budget)


class Left(Meter):
    """A meter of which so much is left."""

    def __init__(self, bound: Bound, left: float, more_s: float = 0.0) -> None:
        super().__init__(bound)
        self.now_left = (left, more_s)

    def remaining(self, now: float) -> tuple[float, float]:
        return self.now_left

    acquire = wait = charge = droppable = None  # type: ignore[assignment]


Left.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("bound", "wait_s", "outcome", "message", "after_s", "state"),
    [
        (
            rate(),
            0.25,
            Outcome.RATE_LIMITED,
            "this tenant may send 2 requests per second (bursts of 4); the next is possible in 0.25 s",
            1,
            '"requests";r=0;t=1',
        ),
        (
            rate(per_s=1.0),
            0.25,
            Outcome.RATE_LIMITED,
            "this tenant may send 1 request per second (bursts of 4); the next is possible in 0.25 s",
            1,
            '"requests";r=0;t=1',
        ),
        (
            rate(Counts.BYTES, "model:big*/bytes"),
            1.01,
            Outcome.RATE_LIMITED,
            "this tenant's calls of model:big* may send 2 bytes per second (bursts of 4); the next is possible in "
            "1.01 s",
            2,
            '"model:big*/bytes";r=3;t=2',
        ),
        (
            rate(Counts.TOKENS, "tokens"),
            2.0,
            Outcome.TOKENS_LIMITED,
            "this tenant may use 120 tokens per minute (bursts of 4); those for the prompt and the longest answer that "
            "this one asks for are free in 2.00 s",
            2,
            '"tokens";r=3;t=2',
        ),
        (
            Bound(name="concurrency", counts=Counts.REQUESTS, limit=7, slots=True),
            0.0,
            Outcome.CONCURRENCY_LIMITED,
            "this tenant may have 7 calls at once, and as many are under way",
            1,
            '"concurrency";r=0',
        ),
        (
            quota(Counts.REQUESTS, 9),
            61.5,
            Outcome.QUOTA_EXCEEDED,
            "this tenant may use 9 requests per day (UTC), and that is used up or promised to calls under way",
            62,
            '"q";r=0;t=62',
        ),
        (
            quota(Counts.COMPUTE_US, 1_999_999, Period.MONTH),
            61.0,
            Outcome.QUOTA_EXCEEDED,
            "this tenant may use 1999 ms of computing per month (UTC), and that is used up or promised to calls under "
            "way",
            61,
            '"q";r=0;t=61',
        ),
        (
            quota(Counts.BUDGET, EUROS.amount, budget=EUROS),
            5.0,
            Outcome.BUDGET_SPENT,
            "the budget of this tenant is spent: 12.5 EUR per day (UTC)",
            5,
            '"q";r=0;t=5',
        ),
    ],
)
def test_a_refusal_names_the_limit_and_the_true_wait(
    bound: Bound, wait_s: float, outcome: Outcome, message: str, after_s: int, state: str
) -> None:
    found = refusal(Left(bound, 3.9), wait_s, 100.0)
    assert (found.outcome, str(found), found.retry_after_s) == (outcome, message, after_s)
    assert dict(found.headers)["ratelimit-policy"] == bound.policy and dict(found.headers)["ratelimit"] == state
    assert ("x-ratelimit-limit-tokens" in dict(found.headers)) is (bound.counts is Counts.TOKENS)


@pytest.mark.parametrize(
    ("left", "full_s", "remaining", "reset"),
    [(3.9, 1.25, "3", "1.250s"), (-2.0, -1.0, "0", "0.000s"), (0.0, 0.0, "0", "0.000s"), (1.0, 0.0004, "1", "0.000s")],
)
def test_headers_about_tokens_are_never_negative(left: float, full_s: float, remaining: str, reset: str) -> None:
    assert dict(token_headers(rate(Counts.TOKENS), left, full_s)) == {
        "x-ratelimit-limit-tokens": "4",
        "x-ratelimit-remaining-tokens": remaining,
        "x-ratelimit-reset-tokens": reset,
    }


@pytest.mark.parametrize(
    ("bound", "left", "found"),
    [
        (rate(), 2.9, {"kind": "rate", "unit": "requests", "left": 2, "per": "second", "per_second": 2.0}),
        (rate(Counts.BYTES), -1.0, {"kind": "rate", "unit": "bytes", "left": 0, "per": "second", "per_second": 2.0}),
        (
            rate(Counts.TOKENS, per_s=1 / 3),
            1.0,
            {"kind": "rate", "unit": "tokens", "left": 1, "per": "minute", "per_minute": 20.0},
        ),
        (
            rate(Counts.TOKENS, per_s=0.12345678),
            1.0,
            {"kind": "rate", "unit": "tokens", "left": 1, "per": "minute", "per_minute": 7.407407},
        ),
        (
            Bound(name="requests", counts=Counts.REQUESTS, limit=4, slots=True),
            4.0,
            {"kind": "concurrency", "unit": "requests", "left": 4, "per": None, "per_second": None},
        ),
    ],
)
def test_a_limit_is_shown_with_what_is_left(bound: Bound, left: float, found: dict[str, Any]) -> None:
    assert shown(bound, left, 0.25) == {"name": "requests", "limit": 4, "more_in_s": 1, **found}


@pytest.mark.parametrize(
    ("budget", "left", "header", "shown_left"),
    [
        (Budget(unit="tokens", amount=30, period=Period.DAY), 30, 30, "30"),
        (Budget(unit="tokens", amount=30, period=Period.DAY), 15, 15, "15"),
        (Budget(unit="EUR", amount=30 * 10**9, period=Period.DAY), 30 * 10**9, 30, "30"),
        (Budget(unit="EUR", amount=1000, period=Period.DAY), 1000, 1, "0.000001"),
        (Budget(unit="EUR", amount=1000, period=Period.DAY), 1, 1, "0.000000001"),
        (Budget(unit="EUR", amount=2 * 10**9, period=Period.DAY), 10**9 - 1, 1, "0.999999999"),
    ],
)
def test_an_answer_and_the_list_of_limits_say_the_same_of_a_budget(
    budget: Budget, left: int, header: int, shown_left: str
) -> None:
    """The call of the answer has taken one unit of `left`, and gives it back when it ends."""
    bound = quota(Counts.BUDGET, budget.amount, budget=budget)
    assert states([Left(bound, left - 1)], 100.0) == f'"q";r={header}'
    assert shown(bound, left, 0.0)["left"] == shown_left
    assert bound.policy.startswith(f'"q";q={max(1, budget.amount // budget.scale)};')


def test_quotas_and_budgets_are_shown_in_their_units() -> None:
    assert shown(quota(Counts.COMPUTE_US, 5000, Period.MONTH), -3.0, 2.0) == {
        **{"name": "q", "kind": "quota", "unit": "compute_us", "limit": 5000, "left": 0, "per": "month"},
        **{"per_second": None, "more_in_s": 2},
    }
    assert shown(quota(Counts.BUDGET, EUROS.amount, budget=EUROS), 1_000_000_001.5, 0.0) == {
        **{"name": "q", "kind": "budget", "unit": "EUR", "limit": "12.5", "left": "1.000000001", "per": "day"},
        **{"warn": 0.8, "stops": True, "more_in_s": 0},
    }
    found = shown(quota(Counts.BUDGET, 1200, Period.MONTH, TOKENS), -1.0, 0.0)
    assert (found["limit"], found["left"], found["warn"], found["stops"]) == ("1200", "0", 0.5, False)


@pytest.mark.parametrize(
    ("units", "text"), [(0, "0"), (10_000_000_000, "10"), (500_000_000, "0.5"), (1, "0.000000001")]
)
def test_amounts_have_no_zeros_at_their_end(units: int, text: str) -> None:
    assert amount_text(units, EUROS) == text and amount_text(1200, TOKENS) == "1200"


def test_an_answer_names_eight_limits_at_most() -> None:
    bounds = [rate(name=f"r{number}") for number in range(9)]
    terms = Terms.of(bounds)
    assert terms.policies == ", ".join(f'"r{number}";q=4;w=2' for number in range(8))
    assert states([RateMeter(bound) for bound in bounds], 100.0) == ", ".join(f'"r{n}";r=4' for n in range(8))
    assert states([RateMeter(bounds[0])], 100.0) == '"r0";r=4'


@pytest.mark.parametrize(
    ("bound", "counts_bytes", "settles"),
    [
        (rate(), False, False),
        (rate(Counts.BYTES), True, False),
        (rate(Counts.TOKENS), False, True),
        (quota(Counts.REQUESTS, 1), False, True),
        (Bound(name="s", counts=Counts.REQUESTS, limit=1, slots=True), False, True),
    ],
)
def test_the_end_of_a_call_changes_what_is_no_rate(bound: Bound, counts_bytes: bool, settles: bool) -> None:
    for bounds in ([bound], [rate(), bound], [bound, rate()]):
        terms = Terms.of(bounds)
        assert (terms.bytes, terms.settles) == (counts_bytes, settles)


class Counted(Left):
    """A quota whose window began at 50. charged: the units of each charge."""

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound, 0.0)
        self.charged: list[int] = []

    def charge(self, units: int, now: float) -> None:
        self.charged.append(units)

    def began(self, now: float) -> float:
        return 50.0


class Learner:
    def __init__(self) -> None:
        self.learned: list[int] = []

    def learn(self, route: str, tenant: str, cost_us: int) -> None:
        self.learned.append(cost_us)


@pytest.mark.parametrize(
    ("counts", "executed", "cost_us", "since", "charged"),
    [
        (Counts.REQUESTS, True, 70, 60.0, []),
        (Counts.REQUESTS, False, 70, 60.0, [-1]),
        (Counts.REQUESTS, False, 70, 50.0, [-1]),
        (Counts.REQUESTS, False, 70, 49.0, []),
        (Counts.COMPUTE_US, True, 70, 49.0, [20]),
        (Counts.COMPUTE_US, True, 50, 60.0, []),
        (Counts.COMPUTE_US, True, 20, 60.0, [-30]),
        (Counts.COMPUTE_US, True, 20, 49.0, []),
        (Counts.COMPUTE_US, False, 70, 60.0, [-50]),
        (Counts.BUDGET, True, 70, 60.0, [-1]),
        (Counts.BUDGET, True, 70, 49.0, []),
    ],
)
def test_a_reservation_is_settled_in_its_own_window(
    counts: Counts, executed: bool, cost_us: int, since: float, charged: list[int]
) -> None:
    budget = EUROS if counts is Counts.BUDGET else None
    meter, learner = Counted(quota(counts, 1000, budget=budget)), Learner()
    terms = Terms.of([meter.bound])
    grant = Grant(learner.learn, [meter], (1, 0, 50, 0, 1), terms, "t", "r", since)
    grant.settle(cost_us, executed, 100.0)
    assert meter.charged == charged and grant.over and not grant.meters
    assert learner.learned == ([cost_us] if executed else [])
    grant.settle(cost_us, executed, 100.0)
    assert meter.charged == charged


@pytest.mark.parametrize(("messages", "learned"), [(0, []), (1, [70]), (2, [35]), (3, [23])])
def test_the_cost_of_a_stream_is_learned_per_message(messages: int, learned: list[int]) -> None:
    learner = Learner()
    meter = Counted(quota(Counts.COMPUTE_US, 1000))
    grant = Grant(learner.learn, [meter], (1, 0, 50, 0, 1), Terms.of([meter.bound]), "t", "r", 60.0)
    grant.settle(70, True, 100.0, {meter: 65}, messages)
    assert learner.learned == learned and meter.charged == [15]


def test_tokens_are_settled_by_their_difference() -> None:
    meter = Counted(rate(Counts.TOKENS))
    grant = Grant(Learner().learn, [], (1, 0, 0, 0, 1), Terms.of([]), "t", "r", 60.0)
    assert grant.add_tokens([meter], 30, Terms.of([meter.bound])) == (1, 0, 0, 30, 1)
    assert grant.units(meter) == 30
    for used in (20, 20, 31):
        grant.settle_tokens(used, 100.0)
    assert meter.charged == [-10, 11]
