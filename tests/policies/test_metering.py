"""Device time: the parts are the whole, for any order of starts, ends and leavers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.metering.device_clock import DeviceClock
from oriel_policies.metering.prices import Amounts, Price, amounts
from oriel_policies.metering.shares import split
from oriel_policies.metering.usage import OTHER, UsageBook, UsageKey, by_label, unbilled_ns

STEPS = st.lists(st.tuples(st.integers(0, 10**10), st.booleans(), st.integers(0, 7)), max_size=60)


@given(STEPS)
def test_charges_of_all_batches_are_the_time_during_which_the_device_was_busy(
    steps: list[tuple[int, bool, int]],
) -> None:
    clock, running, charges = DeviceClock(), list[int](), list[int]()
    now = busy = 0
    for wait, starts, which in steps:
        now += wait
        busy += wait if running else 0
        if starts or not running:
            running.append(clock.start(now))
        else:
            charges.append(clock.end(running.pop(which % len(running)), now))
    while running:
        now += 7
        busy += 7
        charges.append(clock.end(running.pop(), now))
    assert sum(charges) == busy == clock.busy_ns == clock.charged_ns
    assert min(charges, default=0) >= 0


@given(STEPS)
def test_a_batch_is_never_charged_more_than_it_took_by_more_than_the_batches_beside_it(
    steps: list[tuple[int, bool, int]],
) -> None:
    clock, running = DeviceClock(), list[tuple[int, int]]()
    now = 0
    most = 1
    for wait, starts, which in steps:
        now += wait
        if starts or not running:
            running.append((clock.start(now), now))
            most = max(most, len(running))
        else:
            started, at = running.pop(which % len(running))
            assert clock.end(started, now) <= now - at + most


def test_two_batches_at_once_share_the_time() -> None:
    clock = DeviceClock()
    first = clock.start(1000)
    second = clock.start(1100)
    assert clock.end(first, 1300) == 100 + 100
    assert clock.end(second, 1400) == 100 + 100
    assert clock.busy_ns == 400


def test_time_that_goes_backwards_counts_nothing() -> None:
    clock = DeviceClock()
    started = clock.start(1000)
    assert clock.end(started, 900) == 0
    assert clock.busy_ns == 0


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**6), min_size=1, max_size=70))
def test_shares_are_the_whole_and_off_by_less_than_one(total: int, weights: list[int]) -> None:
    shares = split(total, weights)
    assert sum(shares) == total
    whole = sum(weights)
    for share, weight in zip(shares, weights, strict=True):
        exact = (total * weight, whole) if whole else (total, len(weights))
        assert abs(share * exact[1] - exact[0]) < exact[1]


def test_largest_remainders_are_rounded_up_first() -> None:
    assert split(100, [1, 2, 4]) == [14, 29, 57]
    assert split(7, [1, 1, 1]) == [3, 2, 2]
    with pytest.raises(ValueError, match="nothing"):
        split(1, [])


def key(tenant: str, target: str = "m", version: str = "1", why: str = "") -> UsageKey:
    return UsageKey(tenant, "gold", target, version, "host", "cpu", why)


def test_the_book_returns_what_was_added_since_it_was_asked_last() -> None:
    book = UsageBook()
    row = book.row(key("a"))
    row.device_ns += 5
    row.requests += 1
    book.row(key("", why="left")).device_ns += 3
    assert book.added() == [(key("a"), (1, 0, 5, 0, 0, 0, 0, 0)), (key("", why="left"), (0, 0, 3, 0, 0, 0, 0, 0))]
    assert book.added() == []
    row.touch()
    row.device_ns += 2
    assert book.added() == [(key("a"), (0, 0, 2, 0, 0, 0, 0, 0))]
    assert book.device_ns == 10
    assert unbilled_ns(book.rows())["left"] == 3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 100)), max_size=80))
def test_bounds_of_names_lose_no_time(uses: list[tuple[int, int, int]]) -> None:
    book = UsageBook(max_rows=6)
    for tenant, target, ns in uses:
        book.row(key(f"t{tenant}", f"m{target}")).device_ns += ns
    rows = list(book.rows())
    assert len(rows) <= 7
    shown = by_label(book.rows(), max_tenants=2, max_pairs=4)
    whole = sum(ns for _, _, ns in uses)
    assert sum(row.device_ns for row in rows) == sum(row.device_ns for row in shown) == whole
    assert len({row.key.tenant for row in shown} - {OTHER}) <= 2


def test_versions_of_a_target_are_one_series_and_unbilled_time_is_none_of_a_tenant() -> None:
    book = UsageBook()
    book.row(key("a", version="1")).device_ns += 1
    book.row(key("a", version="2")).device_ns += 2
    book.row(key("", why="failed")).device_ns += 9
    (row,) = by_label(book.rows())
    assert row.device_ns == 3 and row.key.version == ""


def test_rows_that_nobody_uses_make_room_and_lose_no_time() -> None:
    book = UsageBook(max_rows=4, quiet=2)
    for name in "abc":
        book.row(key(name)).device_ns += 1
    for _ in range(3):
        book.row(key("a")).device_ns += 1
        book.added()
    assert [row.key.tenant for row in book.rows()] == ["a"]
    assert (book.generation, book.device_ns) == (1, 6)


def test_what_has_no_price_costs_nothing() -> None:
    assert Amounts() == Amounts(0, 0, 0, 0, 0) and Amounts().total == 0
    free = Price(name="x", device_class="", currency="EUR", valid_from="2026-11-01")
    use = {"device_ns": 10**15, "cpu_ns": 10**15, "bytes_out": 10**15, "tokens_in": 10**12, "tokens_out": 10**12}
    assert amounts(free, **use) == Amounts()
