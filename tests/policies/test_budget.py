"""R9: the retry budget: in any 10 s that end with a repeat, at most one in ten requests is a repeat."""

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.upstreams.budget import MAX_ATTEMPTS, RetryBudget

steps = st.lists(st.tuples(st.sampled_from(["request"] * 6 + ["repeat"]), st.floats(0.0, 3.0)), max_size=200)


@settings(max_examples=100)
@given(steps, st.floats(0.0, 1e6))
def test_repeats_never_pass_a_tenth_of_the_requests_before_them(steps: list[tuple[str, float]], now: float) -> None:
    budget = RetryBudget()
    requests: list[float] = []
    repeats: list[float] = []
    for kind, gap_s in steps:
        now += gap_s
        if kind == "request":
            budget.requested(now)
            requests.append(now)
        elif budget.spend(now):
            repeats.append(now)
            recent = sum(now - 10.0 < at <= now for at in requests)
            assert sum(now - 10.0 < at <= now for at in repeats) <= ceil(0.1 * recent)
    assert budget.spent == len(repeats)


def test_a_storm_gets_exactly_its_tenth() -> None:
    budget = RetryBudget()
    for n in range(1000):
        budget.requested(100.0 + n * 0.001)
    assert sum(budget.spend(101.0) for _ in range(1000)) == 100
    assert not budget.spend(105.0)


def test_what_was_spent_comes_back_with_new_requests_only() -> None:
    budget = RetryBudget()
    assert not budget.spend(1.0)
    budget.requested(1.0)
    assert budget.spend(1.5) and not budget.spend(1.6)
    assert not budget.spend(30.0)
    budget.requested(30.0)
    assert budget.spend(30.5)
    assert MAX_ATTEMPTS == 2
