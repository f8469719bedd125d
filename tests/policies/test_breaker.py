"""The circuit breaker: it opens after five failures in a row, probes once a second, and trusts a flapping store less
each time.
"""

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.breaker import MAX_PROBES, Breaker


def opened(breaker: Breaker, now: float) -> None:
    while breaker.closed:
        breaker.record_failure(now)


def test_it_opens_after_five_failures_in_a_row_and_closes_after_one_probe() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.record_failure(1.0)
    breaker.succeeded(1.0)
    for _ in range(4):
        breaker.record_failure(1.0)
    assert breaker.closed
    breaker.record_failure(1.0)
    assert not breaker.closed
    assert not breaker.probe(1.9) and breaker.probe(2.0) and not breaker.probe(2.5)
    breaker.record_failure(2.0)
    assert breaker.probe(3.0)
    breaker.succeeded(3.0)
    assert breaker.closed


def test_on_probation_one_failure_is_enough_and_more_probes_are_needed() -> None:
    breaker, now = Breaker(), 1.0
    opened(breaker, now)
    for probes in (1, 4, 8, MAX_PROBES):
        for number in range(probes):
            now += 1.0
            assert not breaker.closed and breaker.probe(now), (probes, number)
            breaker.succeeded(now)
        assert breaker.closed
        now += 1.0
        breaker.record_failure(now)
        assert not breaker.closed
    for _ in range(MAX_PROBES):
        now += 1.0
        assert breaker.probe(now)
        breaker.succeeded(now)
    now += 11.0
    breaker.succeeded(now)  # the probation is over: trusted as before
    breaker.record_failure(now)
    assert breaker.closed


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 10)), max_size=100))
def test_an_open_breaker_is_probed_at_most_once_a_second(events: list[tuple[bool, int]]) -> None:
    breaker, now, probes = Breaker(), 0.0, []
    for good, passes in events:
        now += passes / 1024  # sums and differences of these are exact
        if not breaker.closed and breaker.probe(now):
            probes.append(now)
        (breaker.succeeded if good else breaker.record_failure)(now)
    assert all(later - earlier >= 1.0 for earlier, later in zip(probes, probes[1:], strict=False))
