"""Properties of the pure rules of the OpenAI API."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oriel_logic.errors import MAX_MESSAGE, ParameterWrong
from oriel_logic.openai.answers import event
from oriel_logic.openai.detokenize import DecoderUnknown, Detokenizer, Vocabulary, pieces_of
from oriel_logic.openai.dispatch import OpenAI
from oriel_logic.openai.pooling import normalised, plan, pooled, shortened
from oriel_logic.openai.sampling import Sampler, Sampling, candidates
from oriel_logic.openai.schema import CompletionRequest, parse
from oriel_logic.openai.sequence import StopScanner


def test_the_list_of_models_stays_when_the_last_model_goes() -> None:
    nothing: Any = None
    routes: dict[tuple[str, str], Any] = {}
    OpenAI(routes, nothing, nothing).serve([])
    assert sorted(routes) == [("GET", "/v1/models"), ("GET", "/v1/models/")]


LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(LETTERS, STOPS, st.data())
def test_stop_strings_are_found_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    scanner = StopScanner(stops)
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += scanner.feed(text[start:end])
        assert until_stop(text, stops)[0].startswith(shown), "what was shown is never taken back"
    assert (shown + scanner.flush(), scanner.stopped) == until_stop(text, stops)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = scanner.feed(text)
    held = text[len(shown) :]
    assert scanner.stopped or held == "" or any(stop.startswith(held) for stop in stops)


@given(st.lists(st.binary(max_size=3), max_size=30))
def test_bytes_of_tokens_come_out_as_whole_characters(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(Vocabulary(pieces=pieces, named={}))
    shown = "".join(detokenizer.feed(token) for token in range(len(pieces)))
    assert shown + detokenizer.flush() == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_a_character_over_several_tokens_is_never_shown_in_part(text: str) -> None:
    data = text.encode()
    detokenizer = Detokenizer(Vocabulary(pieces=[bytes([byte]) for byte in data], named={}))
    shown = [detokenizer.feed(token) for token in range(len(data))]
    assert "".join(shown) == text and all(text.startswith("".join(shown[:end])) for end in range(len(shown)))


def test_pieces_of_the_usual_decoders() -> None:
    assert pieces_of({"type": "ByteLevel"}, ["\u0120a", "\u00c3", "<s>", "tool"], {2: None, 3: "tool"}) == [
        b" a",
        b"\xc3",
        b"",
        b"tool",
    ]
    fallback: dict[str, Any] = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
    assert pieces_of(fallback, ["\u2581a", "<0xC3>"], {}) == [b" a", b"\xc3"]
    assert pieces_of({"type": "Metaspace"}, ["\u2581a", "<0xC3>"], {}) == [b" a", b"<0xC3>"]
    assert pieces_of({"type": "WordPiece", "prefix": "##"}, ["play", "##ing"], {}) == [b" play", b"ing"]
    for unknown in (None, {"type": "CTC"}):
        with pytest.raises(DecoderUnknown):
            pieces_of(unknown, [], {})
    assert Detokenizer(Vocabulary(pieces=[b"a"], named={})).feed(7) == ""


LOGITS = st.lists(st.floats(-50, 50), min_size=1, max_size=40).map(np.array)


@given(LOGITS, st.floats(0.01, 2), st.floats(0.01, 1), st.integers(0, 50))
def test_candidates_are_the_likeliest_and_as_few_as_asked(
    logits: NDArray[np.float64], temperature: float, top_p: float, top_k: int
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    kept, chances = candidates(logits, sampling)
    assert 1 <= kept.size <= (top_k or logits.size) and len(set(kept.tolist())) == kept.size
    assert abs(chances.sum() - 1) < 1e-9 and (top_p == 1 or (np.diff(chances) <= 0).all())
    rest = np.delete(logits, kept)
    # Chances of two logits that are very near one another may be equal.
    assert rest.size == 0 or logits[kept].min() >= rest.max() - 1e-9
    everything = np.sort(candidates(logits, Sampling(temperature=temperature, top_k=top_k))[1])[::-1]
    assert everything[: kept.size].sum() >= min(top_p, everything.sum()) - 1e-9
    assert top_p < 1 or kept.size == everything.size
    assert kept.size == 1 or everything[: kept.size - 1].sum() < top_p + 1e-9, "one fewer would not reach top_p"


@given(LOGITS, st.integers(0, 2**63 - 1))
def test_a_seed_draws_the_same_and_zero_temperature_the_likeliest(logits: NDArray[np.float64], seed: int) -> None:
    first, second = (Sampler(Sampling(seed=seed)) for _ in range(2))
    assert [first.draw(logits) for _ in range(5)] == [second.draw(logits) for _ in range(5)]
    assert Sampler(Sampling(temperature=0)).draw(logits) == int(logits.argmax())


def test_choices_of_one_seed_differ() -> None:
    logits = np.zeros(1000)
    drawn = {tuple(Sampler(Sampling(seed=1), choice=c).draw(logits) for _ in range(3)) for c in range(4)}
    assert len(drawn) == 4


def test_draws_follow_the_chances() -> None:
    sampler = Sampler(Sampling(seed=7))
    logits = np.log(np.array([0.7, 0.2, 0.1], dtype=np.float32))
    counts = np.bincount([sampler.draw(logits) for _ in range(4000)], minlength=3) / 4000
    assert np.allclose(counts, [0.7, 0.2, 0.1], atol=0.03)


def test_penalties_and_biases_change_the_likeliest() -> None:
    logits = np.array([1.0, 0.9, 0.0])
    by_count = Sampler(Sampling(temperature=0, frequency_penalty=0.06))
    assert [by_count.draw(logits) for _ in range(4)] == [0, 0, 1, 0]
    once = Sampler(Sampling(temperature=0, presence_penalty=0.2))
    assert [once.draw(logits) for _ in range(4)] == [0, 1, 0, 0]
    assert Sampler(Sampling(temperature=0, bias={2: 5, 99: 5})).draw(logits) == 2
    assert logits.tolist() == [1.0, 0.9, 0.0], "the model's answer is not written to"


def test_a_row_without_a_possible_token_is_the_models_fault() -> None:
    with pytest.raises(ValueError):
        Sampler(Sampling()).draw(np.array([np.nan, -np.inf]))
    assert Sampler(Sampling(temperature=0)).draw(np.array([np.nan, 0.0])) == 1


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


@given(st.dictionaries(st.text(), st.text() | st.integers(0, 9)))
def test_an_event_is_one_line_of_json(value: dict[str, str | int]) -> None:
    data = event(value)
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2 and b"\r" not in data
    assert msgspec.json.decode(data[6:]) == value


def test_an_unknown_parameter_comes_back_cut() -> None:
    with pytest.raises(ParameterWrong) as wrong:
        parse(b'{"model": "m", "prompt": "p", "%b": 1}' % (b"x" * 100_000), CompletionRequest)
    assert wrong.value.param == "x" * MAX_MESSAGE and len(wrong.value.message) == MAX_MESSAGE
