"""Properties of the pure rules of the OpenAI API."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.errors import MAX_MESSAGE, ParameterWrong
from oriel_logic.openai.dispatch import OpenAI
from oriel_logic.openai.pooling import normalised, plan, pooled, shortened
from oriel_logic.openai.schema import CompletionRequest, parse


def test_the_list_of_models_stays_when_the_last_model_goes() -> None:
    nothing: Any = None
    routes: dict[tuple[str, str], Any] = {}
    OpenAI(routes, nothing, nothing).serve([])
    assert sorted(routes) == [("GET", "/v1/models"), ("GET", "/v1/models/")]


@given(st.data())
def test_padding_changes_no_vector(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    longest = max(lengths)
    mask = (np.arange(longest) < np.array(lengths)[:, np.newaxis]).astype(np.int64)
    hidden = random.standard_normal((rows, longest, width)).astype(np.float32)
    for index, length in enumerate(lengths):
        real = hidden[index, :length]
        assert np.allclose(pooled(hidden, mask, "mean")[index], real.mean(axis=0), atol=1e-5)
        assert np.array_equal(pooled(hidden, mask, "cls")[index], real[0])
        assert np.array_equal(pooled(hidden, mask, "last")[index], real[-1])
    unit = normalised(pooled(hidden, mask, "mean"))
    assert np.allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)


def test_vectors_that_are_pooled_already_and_shapes_that_fit_nothing() -> None:
    mask = np.ones((2, 3), dtype=np.int64)
    assert pooled(np.ones((2, 4)), mask, "mean").dtype == np.float32
    for shape in ((3, 4), (2, 4, 5), (4,)):
        with pytest.raises(ValueError):
            pooled(np.ones(shape), mask, "mean")
    assert normalised(np.zeros((1, 3), np.float32)).tolist() == [[0, 0, 0]]


def test_fewer_dimensions_are_the_first_ones_normalised_again() -> None:
    vectors = np.array([[3, 4, 12]], dtype=np.float32)
    assert np.allclose(shortened(vectors, 2, normalise=True), [[0.6, 0.8]])
    assert shortened(vectors, 2, normalise=False).tolist() == [[3, 4]]
    assert np.allclose(shortened(vectors, None, normalise=True), vectors / 13)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8), st.integers(1, 200))
def test_a_plan_takes_every_text_once_within_the_bounds(lengths: list[int], max_rows: int, max_tokens: int) -> None:
    batches = list(plan(lengths, max_rows=max_rows, max_tokens=max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[index] for index in batch) * len(batch)
        assert 1 <= len(batch) <= max_rows and (padded <= max_tokens or len(batch) == 1)


def test_an_unknown_parameter_comes_back_cut() -> None:
    with pytest.raises(ParameterWrong) as wrong:
        parse(b'{"model": "m", "prompt": "p", "%b": 1}' % (b"x" * 100_000), CompletionRequest)
    assert wrong.value.param == "x" * MAX_MESSAGE and len(wrong.value.message) == MAX_MESSAGE
