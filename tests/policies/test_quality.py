"""The rules of prediction quality: bins, the population stability index and its noise, references."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.quality.drift import ACT, BINS, MIN_BIN_ROWS, MIN_ROWS, counts, edges, noise, outwards, psi
from oriel_policies.quality.reference import FORMAT, Reference, TensorReference, parse_reference

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
shares = st.lists(st.integers(0, 10_000), min_size=1, max_size=BINS).filter(any)


@given(shares, st.data())
def test_the_index_is_never_negative_symmetric_and_zero_for_equal_shares(first: list[int], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.integers(0, 10_000), min_size=len(first), max_size=len(first)).filter(any))
    assert psi(first, second) >= 0.0
    assert math.isclose(psi(first, second), psi(second, first), abs_tol=1e-9)
    assert psi(first, [3 * each for each in first]) == pytest.approx(0.0, abs=1e-9)
    assert math.isfinite(psi(first, second))


def test_the_index_of_known_shares() -> None:
    expected = (0.6 - 0.5) * math.log(0.6 / 0.5) + (0.4 - 0.5) * math.log(0.4 / 0.5)
    assert psi([60, 40], [50, 50]) == pytest.approx(expected)
    assert psi([1, 0], [1, 1]) == pytest.approx(0.5 * math.log(2) + (1e-4 - 0.5) * math.log(1e-4 / 0.5)), "the floor"


def test_noise_is_the_mean_index_of_two_samples_of_one_source() -> None:
    assert noise(BINS, 500, 500) == pytest.approx(9 * (1 / 500 + 1 / 500))
    source = random.Random(7)
    found = []
    for _ in range(40):
        reference = sorted(source.gauss(0, 1) for _ in range(2000))
        inner = edges(reference, 2000)
        live = sorted(source.gauss(0, 1) for _ in range(1000))
        found.append(psi(counts(live, inner), counts(reference, inner)))
    mean = sum(found) / len(found)
    assert mean == pytest.approx(noise(BINS, 1000, 2000), rel=0.35)


@given(st.lists(finite, min_size=1, max_size=80), st.integers(1, 40), st.integers(1, 4))
def test_bins_are_ascending_counted_whole_and_none_is_small(few: list[float], times: int, per_row: int) -> None:
    values = sorted(few * times)
    rows = max(1, len(values) // per_row)
    inner = edges(values, rows)
    assert inner == sorted(set(inner)) and len(inner) < BINS
    found = counts(values, inner)
    assert sum(found) == len(values) and len(found) == len(inner) + 1
    if inner:
        assert min(found) * rows >= MIN_BIN_ROWS * len(values) - len(values)


def test_distinct_values_make_ten_equal_bins_and_a_frequent_value_fewer() -> None:
    distinct = [float(each) for each in range(1000)]
    assert counts(distinct, edges(distinct, 1000)) == [100] * BINS
    frequent = [0.0] * 700 + [float(each) for each in range(1, 301)]
    assert counts(frequent, edges(frequent, 1000))[0] == 700
    assert edges([1.0] * 1000, 1000) == []


@given(finite, finite)
def test_a_range_is_widened_to_two_digits(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    wide = outwards(low, high)
    assert wide[0] <= low and high <= wide[1] and all(map(math.isfinite, wide))
    assert wide[1] - wide[0] <= (high - low) + 0.2 * max(abs(low), abs(high)) + 1e-300


def test_values_that_move_by_one_deviation_are_told_from_chance() -> None:
    source = random.Random(3)
    reference = sorted(source.gauss(0, 1) for _ in range(1000))
    inner = edges(reference, 1000)
    moved = sorted(source.gauss(1, 1) for _ in range(MIN_ROWS))
    assert psi(counts(moved, inner), counts(reference, inner)) - noise(BINS, MIN_ROWS, 1000) > ACT


VALUES = TensorReference(
    rows=500, edges=(0.0, 1.0), shares=(0.2, 0.3, 0.5), low=-1.0, high=2.0, mean=0.5, deviation=0.4
)
CLASSES = TensorReference(rows=900, classes={"0": 0.25, "7": 0.7}, rest=0.05)


def reference(**tensors: TensorReference) -> Reference:
    return Reference(model="digits", version="2", made="2026-11-25T00:00:00+00:00", tensors=tensors)


def test_a_reference_is_read_as_it_was_written() -> None:
    written = reference(x=VALUES, probs=CLASSES)
    assert parse_reference(written.encode()) == written


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        ({"rows": 499}, "fewer than 500 rows"),
        ({"shares": [0.2, 0.8]}, "exactly one more share than edges"),
        ({"edges": [1.0, 1.0]}, "do not ascend"),
        ({"shares": [0.2, -0.3, 1.1]}, "not positive"),
        ({"shares": [0.0, 0.0, 0.0]}, "not positive"),
        ({"edges": list(range(10)), "shares": [0.1] * 11}, "at most 10"),
        ({"classes": {"a": 1.0}}, "a class is not a number"),
        ({"classes": {str(each): 0.1 for each in range(1001)}}, "more than 1000 classes"),
        ({"low": "x"}, "Expected `float`"),
    ],
)
def test_a_wrong_reference_is_refused_with_the_reason(tensor: dict[str, object], why: str) -> None:
    document = json.loads(reference(x=VALUES).encode())
    document["tensors"]["x"].update(tensor)
    with pytest.raises(ValueError, match=why):
        parse_reference(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\ud800"])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_reference(text)


def test_a_later_format_and_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=f"is not {FORMAT}"):
        parse_reference(reference(x=VALUES).encode().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="more than 64 tensors"):
        parse_reference(reference(**{f"t{each}": VALUES for each in range(65)}).encode())
