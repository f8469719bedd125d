import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oriel_logic.client.tensors import narrowed

INTEGERS = hnp.integer_dtypes() | hnp.unsigned_integer_dtypes()
NUMBERS = hnp.boolean_dtypes() | INTEGERS | hnp.floating_dtypes(sizes=(16, 32, 64))


@given(hnp.arrays(dtype=NUMBERS, shape=st.integers(0, 4)), NUMBERS)
def test_an_array_is_the_nearest_of_its_dtype_or_refused(array: np.ndarray, target: np.dtype) -> None:
    try:
        made = narrowed(array, target)
    except ValueError as error:
        assert str(error)
        return
    assert made.dtype == target and made.shape == array.shape
    if target.kind != "f":
        assert made.tolist() == array.tolist()
        return
    assert np.array_equal(np.isfinite(made), np.isfinite(array)) and np.array_equal(np.isnan(made), np.isnan(array))


@pytest.mark.parametrize(
    ("array", "target", "why"),
    [
        (np.array([1e39]), "float32", "larger than the maximum of 3.40282e+38"),
        (np.array([70000]), "float16", "larger than the maximum of 65504"),
        (np.array([1.5]), "int8", "the given values are float64"),
        (np.array([True]), "int8", "the given values are booleans"),
        (np.array([200]), "int8", "not within -128 and 127"),
    ],
)
def test_what_does_not_fit_is_said(array: np.ndarray, target: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("+", "[+]")):
        narrowed(array, np.dtype(target))


def test_what_is_infinite_already_stays_so() -> None:
    assert narrowed(np.array([np.inf, np.nan, 1e-50]), np.dtype("float32")).tolist()[:1] == [np.inf]
