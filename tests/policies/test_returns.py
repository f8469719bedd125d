from math import inf

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.batch import Backlog, BatchBounds, Run, ServiceCurve, WaitUntil, decide
from oriel_policies.waiting.returns import MIN_WINDOW_S, Returns, pays


def curve(fixed_s: float = 0.007, per_row_s: float = 0.0013) -> ServiceCurve:
    known = ServiceCurve()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        known.observe(rows, fixed_s + per_row_s * rows)
    return known


def closed_loop(returns: Returns, rounds: int, rows: int = 57, lag_s: float = 0.002) -> float:
    now = 100.0
    for _ in range(rounds):
        returns.batch_finished(rows, 0.01, now)
        for number in range(rows):
            returns.queued(1, now + lag_s * (number + 1) / rows)
        now += 0.1
    return now


def test_callers_who_return_are_expected() -> None:
    returns = Returns()
    assert returns.expected(57) == 0
    now = closed_loop(returns, 20)
    returns.batch_finished(57, 0.01, now)
    assert returns.expected(57) >= 55
    soon, until_s, lag_s = returns.coming(now)
    assert soon >= 55 and until_s == now + MIN_WINDOW_S
    assert 0.0019 < lag_s < 0.0025
    returns.queued(soon, now + 0.001)
    assert returns.coming(now + 0.001)[0] == 0
    assert returns.coming(now + MIN_WINDOW_S) == (0, 0.0, 0.0)


def test_arrivals_at_a_steady_rate_are_not_taken_for_returns() -> None:
    returns = Returns()
    now = 0.0
    for _ in range(200):  # 700 rows per second whatever is answered, in batches of 57
        returns.batch_finished(57, 0.01, now)
        for number in range(57):
            returns.queued(1, now + number / 700)
        now += 57 / 700
    assert returns.expected(57) == 0


def test_it_pays_where_rows_share_a_fixed_cost() -> None:
    assert pays(7, 57, 0.002, curve().predict)
    assert not pays(7, 57, 0.010, curve().predict)
    assert not pays(7, 57, 0.002, curve(fixed_s=0.0).predict)
    assert not pays(0, 57, 0.0, curve().predict) and not pays(7, 0, 0.0, curve().predict)
    assert not pays(7, 57, 0.002, ServiceCurve().predict)


def test_a_plan_waits_for_returns_only_without_harm() -> None:
    bounds = BatchBounds(max_rows=64)

    def plan(tightest_s: float = inf, *, rows: int = 7, soon: int = 57, until_s: float = 100.004) -> object:
        return decide(Backlog(rows, 99.0, tightest_s, 0, soon, until_s, 0.002), bounds, curve(), 100.0)

    assert plan() == WaitUntil(100.004)
    assert plan(soon=0) == Run(7, "idle_instance")
    assert plan(100.05) == Run(7, "idle_instance")  # the larger batch would be too late for one that waits
    assert plan(rows=64) == Run(64, "full")


@given(
    st.integers(1, 64),
    st.integers(0, 200),
    st.floats(0, 0.01),
    st.floats(0.001, 10),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
)
def test_waiting_ends_with_the_window_and_before_the_last_moment(
    rows: int, soon: int, wait_s: float, slack_s: float, fixed_s: float, per_row_s: float
) -> None:
    known = curve(fixed_s, per_row_s)
    bounds = BatchBounds(max_rows=64)
    decision = decide(Backlog(rows, 99.0, 100.0 + slack_s, 0, soon, 100.0 + wait_s, wait_s), bounds, known, 100.0)
    if isinstance(decision, WaitUntil):
        assert decision.at_s == 100.0 + wait_s
        together = min(64, rows + soon)
        assert decision.at_s + known.predict(together) <= 100.0 + slack_s + 1e-9
