import math

from hypothesis import given
from hypothesis import strategies as st

from oriel_tools.load.histogram import ERROR, Histogram
from oriel_tools.load.lag import LagRule
from oriel_tools.load.tally import MAX_BINS, MAX_REASONS, Outcome, Tally, Timeline, total

DURATIONS = st.floats(1e-6, 1e4)


def histogram(values: list[float]) -> Histogram:
    found = Histogram()
    for value in values:
        found.add(value)
    return found


@given(st.lists(DURATIONS, min_size=1, max_size=200), st.floats(0, 1))
def test_a_percentile_is_the_exact_one_or_at_most_half_a_percent_above(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = histogram(values).percentile_s(share)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + ERROR) * (1 + 1e-9)


@given(st.lists(DURATIONS, max_size=50), st.lists(DURATIONS, max_size=50))
def test_merged_histograms_say_what_one_would_have_said(left: list[float], right: list[float]) -> None:
    both = histogram(left)
    both.merge(histogram(right))
    one = histogram(left + right)
    shares = (0, 0.5, 0.99, 1)
    assert (both.count, both.max_s) == (one.count, one.max_s)
    assert [both.percentile_s(share) for share in shares] == [one.percentile_s(share) for share in shares]


@given(st.lists(st.one_of(st.floats(allow_nan=False), st.just(math.inf))))
def test_a_histogram_holds_any_duration_in_few_buckets(values: list[float]) -> None:
    assert histogram(values).count == len(values)
    assert Histogram().percentile_s(0.99) == 0


ENDS = st.lists(
    st.tuples(
        st.sampled_from(
            [Outcome("good"), Outcome("refused", "503 queue_full", 2.0), Outcome("failed", "broken"), None]
        ),
        st.floats(0.001, 1),
    )
)


@given(ENDS)
def test_every_arrival_ends_in_exactly_one_count(ends: list[tuple[Outcome | None, float]]) -> None:
    tally = Tally()
    for outcome, latency_s in ends:
        tally.scheduled += 1
        if outcome is None:
            tally.left_out("too late")
        else:
            tally.sent += 1
            tally.finished(outcome, latency_s, latency_s, 0.5)
    whole = total([tally, Tally()])
    others = [*whole.refused.values(), *whole.failed.values(), *whole.unsent.values()]
    assert whole.scheduled == len(ends) == whole.good + sum(others)
    assert whole.sent == whole.good + sum(whole.refused.values()) + sum(whole.failed.values())
    kept = sum(outcome is not None and outcome.kind == "good" and latency_s <= 0.5 for outcome, latency_s in ends)
    assert whole.kept == kept
    assert whole.attainment == (kept / len(ends) if ends else None), (
        "whatever was not answered in time counts against it"
    )
    assert whole.latency.count == whole.good


def test_reasons_from_outside_are_bounded_and_never_lost() -> None:
    tally = Tally()
    for number in range(1000):
        tally.finished(Outcome("refused", f"reason {number}"), 0, 0, None)
    assert len(tally.refused) == MAX_REASONS + 1 and sum(tally.refused.values()) == 1000
    assert tally.refusals.keys() == tally.refused.keys()


def test_how_long_refusals_took_is_kept_by_reason_and_merged() -> None:
    one, other = Tally(), Tally()
    for tally, seconds in ((one, 0.001), (one, 0.002), (other, 0.5)):
        tally.finished(Outcome("refused", "504 deadline_exceeded"), 9, seconds, None)
    other.finished(Outcome("failed", "broken"), 9, 9, None)
    (found,) = total([one, other]).refusals.values()
    assert (found.count, found.max_s, one.refusals["504 deadline_exceeded"].max_s) == (3, 0.5, 0.002)


@given(st.floats(0.01, 1e6), st.floats(0, 100), st.lists(st.floats(-1, 2e6), max_size=50))
def test_a_timeline_is_bounded_however_long_the_run(seconds: float, tail_s: float, moments: list[float]) -> None:
    line = Timeline(seconds, tail_s)
    for moment in moments:
        line.at(moment).arrivals += 1
    assert len(line.bins) <= MAX_BINS + 1 and sum(each.arrivals for each in line.bins) == len(moments)


@given(st.lists(st.floats(0, 0.05), min_size=1, max_size=300))
def test_a_phase_is_quoted_only_if_the_generator_kept_up(lags: list[float]) -> None:
    rule = LagRule(max_lag_ms=10)
    late = sum(lag > 0.010 * (1 + ERROR) for lag in lags)
    if late > 0.01 * len(lags):
        assert "late" in (rule.objection(histogram(lags), 0, 0.1) or "")
    elif all(lag <= 0.010 / (1 + ERROR) for lag in lags):
        assert rule.objection(histogram(lags), 0, 0.1) is None and rule.allows_p999(histogram(lags))
    assert "not sent" in (rule.objection(histogram(lags), 1, 0.1) or "")


def test_a_generator_short_of_processor_is_not_quoted() -> None:
    assert "96 % of a core" in (LagRule().objection(histogram([0.001]), 0, 0.96) or "")


def test_the_far_tail_is_left_out_when_it_is_the_generators() -> None:
    lags = histogram([0.001] * 995 + [0.02] * 5)
    assert LagRule().objection(lags, 0, 0.1) is None and not LagRule().allows_p999(lags)
