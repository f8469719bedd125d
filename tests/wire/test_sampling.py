"""Which traces are kept, and what is written about it into `tracestate`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.observe.sampling import ALWAYS, NEVER, Sampling, threshold_text, with_threshold, without_threshold
from oriel_wire.observe.trace import (
    TraceContext,
    TraceIds,
    follow_trace,
    format_traceparent,
    new_trace,
    parse_traceparent,
    read_traceparent,
    start_trace,
)

ratios = st.floats(0.0, 1.0)
ids = st.integers(1, (1 << 128) - 1)


@pytest.mark.parametrize(
    ("ratio", "text"),
    # From the specification of OpenTelemetry.
    [(1.0, "0"), (0.5, "8"), (0.25, "c"), (0.01, "fd70a3d70a3d7")],
)
def test_the_threshold_is_written_without_the_zeros_at_its_end(ratio: float, text: str) -> None:
    assert Sampling.by_ratio(ratio).state.startswith(f"ot=th:{text}")


@given(ratios, ids)
def test_number_and_text_of_an_id_are_decided_alike(ratio: float, trace_id: int) -> None:
    sampling = Sampling.by_ratio(ratio)
    assert sampling.keeps(trace_id) == (f"{trace_id:032x}"[18:] >= sampling.hex_threshold)


@given(ids)
def test_the_whole_range(trace_id: int) -> None:
    assert ALWAYS.keeps(trace_id) and not NEVER.keeps(trace_id)


@given(ratios, ratios, ids)
def test_what_a_smaller_ratio_keeps_is_kept_by_a_larger_one(one: float, other: float, trace_id: int) -> None:
    small, large = (Sampling.by_ratio(ratio) for ratio in sorted((one, other)))
    assert large.keeps(trace_id) or not small.keeps(trace_id)


def test_the_share_of_new_traces_is_the_ratio() -> None:
    kept = sum(start_trace(Sampling.by_ratio(0.1)).sampled for _ in range(20_000))
    assert 1_600 < kept < 2_400  # ten standard deviations


def test_a_trace_of_our_own_has_the_random_bit_and_says_its_threshold() -> None:
    kept = start_trace(Sampling.by_ratio(1.0))
    assert (kept.sampled, kept.random, kept.state) == (True, True, "ot=th:0")
    assert format_traceparent(kept).endswith("-03")
    left = start_trace(NEVER)
    assert (left.sampled, left.random, left.state) == (False, True, "")
    assert format_traceparent(left).endswith("-02")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("00", "00"), ("01", "01"), ("02", "02"), ("03", "03"), ("ff", "03"), ("fe", "02"), ("04", "00")],
)
def test_the_random_bit_of_a_caller_is_kept_as_it_is(given: str, kept: str) -> None:
    value = f"00-{'a' * 32}-{'b' * 16}-{given}"
    parsed = parse_traceparent(value)
    assert parsed is not None and format_traceparent(parsed).endswith(f"-{kept}")
    read = read_traceparent(value)
    assert read is not None and read[2] == kept


@given(ids, st.booleans(), st.booleans(), ratios)
def test_the_decision_of_a_caller_counts_where_it_is_to(
    trace_id: int, sampled: bool, random: bool, ratio: float
) -> None:
    caller = TraceContext(trace_id, 1, sampled, "vendor=1", random)
    assert follow_trace(caller, Sampling.by_ratio(ratio)) is caller
    decided = follow_trace(caller, Sampling.by_ratio(ratio, parent_based=False))
    assert decided.sampled == Sampling.by_ratio(ratio).keeps(trace_id)
    assert (decided.trace_id, decided.span_id, decided.random) == (trace_id, 1, random)
    assert decided.state.startswith("ot=th:") == decided.sampled


@pytest.mark.parametrize(
    ("state", "changed", "without"),
    [
        ("", "ot=th:8", ""),
        ("vendor=1", "ot=th:8,vendor=1", "vendor=1"),
        ("vendor=1,ot=th:c", "ot=th:8,vendor=1", "vendor=1"),
        ("ot=th:c;rv:1234,vendor=1", "ot=th:8;rv:1234,vendor=1", "ot=rv:1234,vendor=1"),
        ("foot=th:c", "ot=th:8,foot=th:c", "foot=th:c"),
    ],
)
def test_our_threshold_in_the_state_of_others(state: str, changed: str, without: str) -> None:
    assert with_threshold(state, "ot=th:8") == changed
    assert without_threshold(state) == without


def test_a_full_state_loses_its_last_member() -> None:
    full = ",".join(f"v{number}=1" for number in range(32))
    assert with_threshold(full, "ot=th:8").split(",") == ["ot=th:8", *full.split(",")[:31]]


def test_text_of_the_smallest_threshold() -> None:
    assert threshold_text(1) == "00000000000001"


def test_new_ids_are_not_all_kept_or_all_left() -> None:
    found = TraceIds()
    found.refill()
    half = Sampling.by_ratio(0.5).hex_threshold
    assert len({trace[18:] >= half for trace in found.traces}) == 2
    assert not new_trace(False).sampled
