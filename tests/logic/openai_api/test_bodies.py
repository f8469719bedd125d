"""Bodies of requests: what counts as absent, and that none is more than refused."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_logic.errors import LogicError, ParameterWrong, Refused
from oriel_logic.openai.language import as_given
from oriel_logic.openai.responses import chat_of
from oriel_logic.openai.schema import (
    MAX_MARKS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseRequest,
    parse,
    stops_of,
    texts_or_tokens,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
FIELDS = [
    "text",
    "reasoning",
    "tool_choice",
    "input",
    "prompt",
    "messages",
    "stop",
    "n",
    "logit_bias",
    "stream_options",
    "temperature",
    "tools",
    "seed",
]


@given(st.dictionaries(st.sampled_from(["model", *FIELDS]) | st.text(max_size=4), JSON, max_size=6) | JSON)
def test_no_body_is_more_than_refused(value: Any) -> None:
    body = json.dumps({"model": "m", "prompt": "a", **value} if isinstance(value, dict) else value).encode()
    for kind in (EmbeddingRequest, CompletionRequest, ChatRequest, ResponseRequest):
        try:
            request: Any = parse(body, kind)
            if isinstance(request, ResponseRequest):
                chat_of(request)
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


def test_schemas_and_arguments_are_bounded_in_depth() -> None:
    deep: Any = {}
    for _ in range(600):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for more in ({"tools": [tool]}, {"chat_template_kwargs": deep}, {"metadata": deep}):
        assert "more than 100 levels deep" in refused(**more)[1]
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps(deep)}}
    (given,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert isinstance(as_given(given)["tool_calls"][0]["function"]["arguments"], str), "workers get no such object"


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(ParameterWrong, match="^the body is empty$"):
        parse(b"", ChatRequest)


ITEMS = st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "role", "content", "output", "arguments"), JSON))


@example([{"content": [{"type": []}]}], {})
@example([{"content": "a"}], {"format": 5})
@given(st.lists(ITEMS, min_size=1, max_size=3), st.dictionaries(st.sampled_from(["format", "effort", "type"]), JSON))
def test_no_response_is_more_than_refused(items: list[Any], more: dict[str, Any]) -> None:
    body = {"model": "m", "input": items, "text": more, "reasoning": more, "tool_choice": more, "tools": [more]}
    try:
        chat_of(parse(json.dumps(body).encode(), ResponseRequest))
    except LogicError as error:
        assert isinstance(error, Refused)
