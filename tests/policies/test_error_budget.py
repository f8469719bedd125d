"""Error budgets: burn rates and what is left, from counts in slots that are kept for 30 days."""

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.promise.error_budget import LONG, SHORT, WINDOWS, BudgetHistory, Slots, attainment, burn, remaining

NOW = 1_800_000_000.0
DAY = 86400.0


def test_the_arithmetic_of_a_budget() -> None:
    assert attainment(1000, 5) == pytest.approx(0.995)
    assert burn(1000, 5, 0.99) == pytest.approx(0.5) and remaining(1000, 5, 0.99) == pytest.approx(0.5)
    assert burn(1000, 144, 0.99) == pytest.approx(14.4)
    assert remaining(1000, 20, 0.99) == pytest.approx(-1.0)  # twice the budget was used
    assert attainment(0, 0) is None and burn(0, 0, 0.99) is None and remaining(0, 0, 0.99) == 1.0


def test_a_burn_of_one_for_thirty_days_leaves_nothing() -> None:
    history = BudgetHistory()
    for hour in range(30 * 24):
        history.add(NOW + hour * 3600, 1000, 10)
    total, bad = history.over(WINDOWS["30d"], NOW + 30 * DAY - 1)
    assert remaining(total, bad, 0.99) == pytest.approx(0.0, abs=1e-9) and burn(total, bad, 0.99) == pytest.approx(1.0)


def test_a_bad_minute_leaves_each_window_in_its_time() -> None:
    history = BudgetHistory()
    history.add(NOW, 100, 100)
    for window_s in WINDOWS.values():
        assert history.over(window_s, NOW + 1)[1] == 100
        assert history.over(window_s, NOW + window_s + 3601) == (0.0, 0.0)


def test_the_oldest_slot_counts_with_the_part_of_it_that_is_inside_the_window() -> None:
    slots = Slots(300, 10)
    slots.add(3000.0, 100, 10)  # the slot from 3000 to 3300
    slots.add(3300.0, 40, 4)
    assert slots.over(300.0, 3375.0) == pytest.approx((40 + 100 * 0.75, 4 + 10 * 0.75))


def test_a_history_has_the_promised_size() -> None:
    history = BudgetHistory()
    held = sum(
        len(part) * part.itemsize for slots in (history.short, history.long) for part in (slots._total, slots._bad)
    )
    assert held == 12_672


@given(
    st.lists(st.tuples(st.floats(-4 * DAY, 40 * DAY), st.integers(0, 100), st.integers(0, 100)), max_size=60),
    st.sampled_from([SHORT, LONG]),
)
def test_counts_are_never_made_up_and_never_lost_within_what_is_kept(
    steps: list[tuple[float, int, int]], shape: tuple[int, int]
) -> None:
    slots = Slots(*shape)
    kept_s = shape[0] * shape[1]
    for offset, total, bad in steps:
        slots.add(NOW + offset, total + bad, bad)
    end = NOW + max([offset for offset, _, _ in steps], default=0.0)
    total, bad = slots.over(kept_s, end)
    assert 0 <= bad <= total <= sum(total + bad for _, total, bad in steps) + 1e-6
    sure = [step for step in steps if NOW + step[0] > end - kept_s + 2 * shape[0]]
    if len(sure) == len(steps):
        assert isclose(total, sum(total + bad for _, total, bad in steps))


@given(st.lists(st.tuples(st.floats(0, 35 * DAY), st.integers(1, 100)), min_size=1, max_size=40))
def test_what_was_written_down_is_there_again_after_a_restart(steps: list[tuple[float, int]]) -> None:
    history, written = BudgetHistory(), dict[tuple[int, int], tuple[int, int]]()
    for offset, total in sorted(steps):
        history.add(NOW + offset, total, total // 2)
        for width_s, start_s, calls, bad in history.rows(NOW + offset):
            written[width_s, start_s] = (calls, bad)
    again = BudgetHistory()
    for (width_s, start_s), (calls, bad) in sorted(written.items(), reverse=True):
        again.load(width_s, start_s, calls, bad)
    again.load(60, int(NOW), 1, 1)  # of a width that nobody keeps
    end = NOW + max(offset for offset, _ in steps)
    for window_s in WINDOWS.values():
        assert again.over(window_s, end) == history.over(window_s, end)


def test_a_count_that_does_not_fit_stays_at_its_most() -> None:
    slots = Slots(300, 3)
    slots.add(0.0, 0xFFFFFFFF, 1)
    slots.add(0.0, 5, 5)
    assert slots.over(300.0, 299.0) == (0xFFFFFFFF, 6)


def test_the_slots_are_kept_for_as_long_as_the_longest_window_that_they_answer() -> None:
    assert SHORT[0] * SHORT[1] == WINDOWS["3d"] and LONG[0] * LONG[1] == WINDOWS["30d"]
    assert (SHORT[0], LONG[0]) == (WINDOWS["5m"], WINDOWS["1h"]), "the shortest windows are one slot"
