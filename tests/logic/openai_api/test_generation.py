"""The decode loop by itself, against a model that is a few lines of numpy."""

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_logic.client.models import Outputs
from oriel_logic.client.tensors import ModelSpec, TensorSpec
from oriel_logic.errors import HandlerFailed, LogicError, ModelFailed, ParameterWrong, Refused
from oriel_logic.observe.stages import Ledger
from oriel_logic.openai.decoder import TokenModel, generate, token_model
from oriel_logic.openai.detokenize import Vocabulary
from oriel_logic.openai.language import Run
from oriel_logic.openai.sampling import Sampling
from oriel_logic.openai.schema import (
    MAX_MARKS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    parse,
    stops_of,
    texts_or_tokens,
)
from oriel_logic.openai.sequence import Delta
from oriel_logic.openai.sequence import Sequence as Generated
from oriel_wire.observe.trace import new_trace

SIZE = 12
END = 0
VOCABULARY = Vocabulary(pieces=[b"", *(bytes([97 + index]) for index in range(SIZE - 1))], named={"<end>": END})


def spec(**changes: Any) -> ModelSpec:
    inputs = {
        "input_ids": TensorSpec("input_ids", "INT64", (-1, -1)),
        "past_key_values.0.key": TensorSpec("past_key_values.0.key", "FP32", (-1, 1, -1, 1)),
    }
    outputs = {
        "logits": TensorSpec("logits", "FP32", (-1, -1, SIZE)),
        "present.0.key": TensorSpec("present.0.key", "FP32", (-1, 1, -1, 1)),
    }
    return ModelSpec(**{"name": "toy", "inputs": inputs, "outputs": outputs, **changes})


class Toy:
    """Its cache is the tokens themselves; its logits follow from all of them."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.logits = self.of_history

    async def infer(
        self, model: str, inputs: Mapping[str, Any], *, outputs: Sequence[str] | None = None, version: str = ""
    ) -> Outputs:
        ids, past = inputs["input_ids"], inputs["past_key_values.0.key"]
        self.rows.append(len(ids))
        present = np.concatenate([past, ids[:, np.newaxis, :, np.newaxis].astype(np.float32)], axis=2)
        logits = np.stack([self.logits(row[0, :, 0].astype(int)) for row in present])[:, np.newaxis]
        return Outputs({"logits": logits, "present.0.key": present}, model=model, model_version="1")

    def of_history(self, tokens: Any) -> Any:
        return np.random.default_rng(tokens.tolist()).standard_normal(SIZE).astype(np.float32) * 2


async def run(toy: Toy, prompt: list[int], choices: list[Generated]) -> list[Delta]:
    model: TokenModel = token_model(spec())
    steps = generate(model, np.array(prompt, np.int32), choices, first=toy.infer, steps=toy.infer)
    return [delta async for deltas in steps for delta in deltas]


def choice(index: int, *, seed: int = 1, most: int = 30, stops: Sequence[str] = ()) -> Generated:
    sampling = Sampling(seed=seed)
    return Generated(index, VOCABULARY, sampling, stops=stops, ends={END}, most=most, choice=index)


def text(deltas: list[Delta], index: int) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


@settings(max_examples=30)
@given(st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=5), st.integers(0, 99), st.integers(1, 5))
async def test_choices_together_are_what_each_is_alone(prompt: list[int], seed: int, count: int) -> None:
    toy = Toy()
    together = await run(toy, prompt, [choice(index, seed=seed) for index in range(count)])
    assert toy.rows[0] == 1, "the prompt is read once for all"
    assert all(before >= after for before, after in zip(toy.rows[1:], toy.rows[2:], strict=False)), "ended rows leave"
    for index in range(count):
        alone = await run(Toy(), prompt, [choice(index, seed=seed)])
        assert text(alone, index) == text(together, index)
        ends = [delta.finish for delta in together if delta.index == index]
        assert ends[-1] is not None and set(ends[:-1]) <= {None}, "each ends once, at its last token"


async def test_a_stop_string_and_a_bound_end_only_their_choice() -> None:
    texts = {seed: text(await run(Toy(), [3], [choice(0, seed=seed)]), 0) for seed in range(20)}
    seed, whole = next(each for each in texts.items() if len(each[1]) > 8)
    others = [Generated(1, VOCABULARY, Sampling(bias={END: -100}), stops=(), ends={END}, most=3)]
    cut = await run(Toy(), [3], [choice(0, seed=seed, stops=[whole[4:6]]), *others])
    assert text(cut, 0) == whole[: whole.find(whole[4:6])]
    assert [delta.finish for delta in cut if delta.index == 1] == [None, None, "length"]


async def test_logits_that_no_token_can_be_drawn_from_are_the_models_fault() -> None:
    toy = Toy()
    toy.logits = lambda tokens: np.full(SIZE, np.nan, np.float32)
    with pytest.raises(ModelFailed, match="finite logit"):
        await run(toy, [1], [choice(0)])


async def test_a_cache_of_the_wrong_shape_is_the_models_fault() -> None:
    class Forgetful(Toy):
        async def infer(self, *given: Any, **named: Any) -> Outputs:
            outputs = await super().infer(*given, **named)
            outputs["present.0.key"] = outputs["present.0.key"][:, :, 1:]
            return outputs

    with pytest.raises(ModelFailed, match=r"'present.0.key' of shape \[1, 1, 0, 1\], not \[1, 1, 1, 1\]"):
        await run(Forgetful(), [1], [choice(0)])


def test_metadata_without_a_cache_says_what_is_missing() -> None:
    inputs = {"input_ids": TensorSpec("input_ids", "INT64", (-1, -1))}
    with pytest.raises(HandlerFailed, match="past_key_values"):
        token_model(spec(inputs=inputs))
    loose = {**inputs, "past_key_values.0.key": TensorSpec("past_key_values.0.key", "FP32", (-1, -1, -1, -1))}
    with pytest.raises(HandlerFailed, match="fixed heads and width"):
        token_model(spec(inputs=loose))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
FIELDS = ["input", "prompt", "messages", "stop", "n", "logit_bias", "stream_options", "temperature", "tools", "seed"]


@given(st.dictionaries(st.sampled_from(["model", *FIELDS]) | st.text(max_size=4), JSON, max_size=6) | JSON)
def test_no_body_is_more_than_refused(value: Any) -> None:
    body = json.dumps({"model": "m", "prompt": "a", **value} if isinstance(value, dict) else value).encode()
    for kind in (EmbeddingRequest, CompletionRequest, ChatRequest):
        try:
            request: Any = parse(body, kind)
            texts_or_tokens(getattr(request, "input", getattr(request, "prompt", "a")), "input", most=3)
        except LogicError as error:
            assert isinstance(error, Refused) and 0 < len(error.message) <= 500


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**more: Any) -> ChatRequest:
    return parse(json.dumps({**CHAT, **more}).encode(), ChatRequest)


def refused(**more: Any) -> tuple[str | None, str]:
    with pytest.raises(ParameterWrong) as error:
        chat(**more)
    return error.value.param, error.value.message


@pytest.mark.parametrize("empty", [None, [], {}, ""])
def test_what_is_null_or_empty_counts_as_absent_whether_this_server_knows_it_or_not(empty: Any) -> None:
    optional = (
        "tools",
        "tool_choice",
        "functions",
        "logprobs",
        "seed",
        "stop",
        "user",
        "metadata",
        "web_search_options",
    )
    assert chat(**dict.fromkeys(optional, empty)) == chat()
    assert [stops_of(chat(**{name: empty}).stop) for name in optional] == [[]] * len(optional)
    embedding = {"model": "m", "input": "a", "encoding_format": empty}
    assert parse(json.dumps(embedding).encode(), EmbeddingRequest).encoding_format == "float"
    assert refused(messages=empty)[0] == "messages" and refused(web_search_options=empty, x=1)[0] == "x"


def test_a_whole_number_may_be_written_with_a_point() -> None:
    found = chat(max_tokens=2.0, n=1.0, seed=-3.0, temperature=1.0)
    assert (found.max_tokens, found.n, found.seed) == (2, 1, -3)
    assert refused(max_tokens=2.5)[0] == "max_tokens"


def test_a_message_of_the_assistant_is_taken_back_with_what_clients_added_to_it() -> None:
    added = {"reasoning_content": "because", "images": [], "finish_reason": "stop", "id": "msg-1", "parsed": None}
    echoed = {"role": "assistant", "content": "yes", "tool_calls": [], "annotations": [], "audio": None, **added}
    found = chat(messages=[*CHAT["messages"], echoed, {"role": "assistant", "content": None}])
    assert [each.text for each in found.messages] == ["hi", "yes", ""]
    for name in ("tool_calls", "function_call", "audio"):
        assert refused(messages=[{**echoed, name: {"id": "1"}}])[0] == f"messages[0].{name}"
    assert refused(messages=[{"role": "user", "content": "a", "images": ["x"]}])[0] == "messages[0].images"
    assert refused(messages=[{"role": "user", "content": None}]) == (
        "messages[0].content",
        "the parameter 'messages[0].content' is missing",
    )
    assert refused(messages=[1])[0] == "messages[0]" and refused(messages="x")[0] == "messages"


def test_a_body_of_very_many_fields_gets_no_second_try() -> None:
    many = {f"a{n}": None for n in range(MAX_MARKS // 2)}
    assert refused(**many)[0] == "a0" and chat(**dict(list(many.items())[:-10])) == chat()


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(ParameterWrong, match="^the body is empty$"):
        parse(b"", ChatRequest)


async def test_an_error_before_the_first_event_is_raised_and_is_no_cause_of_itself() -> None:
    async def broken(*_: Any, **__: Any) -> Outputs:
        raise ModelFailed("no")

    visit = SimpleNamespace(ledger=Ledger(new_trace(False)), target="toy", tokens=None)
    tools: Any = SimpleNamespace(visit=visit, models=SimpleNamespace(infer=broken), steps=broken)
    run = Run(model=token_model(spec()), prompts=[np.array([1])], choices=[[]], tools=tools)
    with pytest.raises(ModelFailed) as raised:
        await anext(run.events(SimpleNamespace()))  # type: ignore[arg-type]
    assert raised.value.__cause__ is None
