"""GCRA against its definition, under any arrival pattern."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.documents import RateLimit
from oriel_policies.limits import Gcra, policy_header, state_header

LIMIT = RateLimit(requests_per_s=10.0, burst=5)


def test_a_burst_passes_and_the_next_waits_exactly_one_interval() -> None:
    bucket = Gcra()
    assert [bucket.take(LIMIT, 100.0) for _ in range(5)] == [0.0] * 5
    wait = bucket.take(LIMIT, 100.0)
    assert abs(wait - 0.1) < 1e-6
    assert bucket.take(LIMIT, 100.0 + wait) == 0.0


def test_remaining_counts_down_and_comes_back() -> None:
    bucket = Gcra()
    seen = []
    for _ in range(5):
        seen.append(bucket.remaining(LIMIT, 7.0))
        bucket.take(LIMIT, 7.0)
    assert seen == [5, 4, 3, 2, 1] and bucket.remaining(LIMIT, 7.0) == 0 and bucket.remaining(LIMIT, 8.0) == 5


@given(
    st.floats(0.1, 1000.0),
    st.integers(1, 50),
    st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200),
)
def test_no_window_admits_more_than_burst_plus_rate(rate: float, burst: int, gaps: list[float]) -> None:
    limit, bucket, now = RateLimit(requests_per_s=rate, burst=burst), Gcra(), 1000.0
    admitted: list[float] = []
    for gap in gaps:
        now += gap
        wait = bucket.take(limit, now)
        if wait == 0.0:
            admitted.append(now)
        else:
            assert wait <= 1.0 / rate + 1e-6  # a refusal is never longer than until the next one conforms
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            window = admitted[last] - admitted[first]
            assert last - first + 1 <= burst + rate * window + 1e-3


def test_headers_are_structured_fields_with_whole_seconds() -> None:
    assert policy_header(LIMIT) == '"requests";q=5;w=1'
    assert state_header(0, 0.05) == '"requests";r=0;t=1'
