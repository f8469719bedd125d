"""The bounds of the OpenAI API's parameters: the least and the most are taken, one step beyond each is refused."""

import inspect
import json
import math
from typing import Any, cast

import msgspec
import pytest

from oriel_logic.errors import InputTooLarge, ParameterWrong
from oriel_logic.openai import schema
from oriel_logic.openai.embeddings import Embeddings
from oriel_logic.openai.language import LanguageModel
from oriel_logic.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Generation,
    Message,
    Part,
    StreamOptions,
    parse,
    stops_of,
    texts_or_tokens,
    wrong,
)

UP, DOWN = math.inf, -math.inf
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**more: Any) -> ChatRequest:
    return parse(json.dumps({**CHAT, **more}).encode(), ChatRequest)


def refused(param: str, **more: Any) -> str:
    """Return the reason for which this chat is refused; it names the parameter."""
    with pytest.raises(ParameterWrong) as caught:
        chat(**more)
    assert caught.value.param is not None and caught.value.param.startswith(param)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "least", "most", "below", "above"),
    [
        ("temperature", 0, 2, math.nextafter(0.0, DOWN), math.nextafter(2.0, UP)),
        ("top_p", 5e-324, 1, 0, math.nextafter(1.0, UP)),
        ("top_k", 0, 2**40, -1, None),
        ("n", 1, 8, 0, 9),
        ("max_tokens", 1, 2**40, 0, None),
        ("max_completion_tokens", 1, 2**40, 0, None),
        ("seed", -(2**63), 2**63 - 1, None, 2**63),
        ("frequency_penalty", -2, 2, math.nextafter(-2.0, DOWN), math.nextafter(2.0, UP)),
        ("presence_penalty", -2, 2, math.nextafter(-2.0, DOWN), math.nextafter(2.0, UP)),
    ],
)
def test_a_number_is_taken_to_its_ends(name: str, least: float, most: float, below: float, above: float) -> None:
    for number in (least, most):
        assert getattr(chat(**{name: number}), name) == number
    for number in (below, above):
        if number is not None:
            refused(name, **{name: number})


def test_four_stop_strings_of_256_characters_are_taken() -> None:
    longest = ["x" * 256] * 4
    assert stops_of(chat(stop=longest).stop) == longest and stops_of(chat(stop=longest[0]).stop) == longest[:1]
    assert stops_of(chat(stop=["x", "\n"]).stop) == ["x", "\n"] and stops_of(chat(stop="x").stop) == ["x"]
    refused("stop", stop=[*longest, "x"])
    refused("stop", stop=["x" * 257])
    refused("stop", stop="x" * 257)
    refused("stop", stop=["x", ""])
    assert stops_of("") == stops_of(None) == stops_of([]) == []


def test_a_chat_has_1_to_512_messages_of_at_most_512_parts() -> None:
    message, part = CHAT["messages"][0], {"type": "text", "text": "a"}
    assert len(chat(messages=[message] * 512).messages) == 512
    refused("messages", messages=[message] * 513)
    refused("messages", messages=[])
    (found,) = chat(messages=[{"role": "user", "content": [part] * 512}]).messages
    assert found.text == "a" * 512
    refused("messages", messages=[{"role": "user", "content": [part] * 513}])


def test_an_array_has_131072_entries_and_a_body_4_mib() -> None:
    def embedded(count: int) -> EmbeddingRequest:
        return parse(b'{"model": "m", "input": [%s]}' % b",".join([b"1"] * count), EmbeddingRequest)

    assert len(embedded(131_072).input) == 131_072
    for count in (0, 131_073):
        with pytest.raises(ParameterWrong, match="input"):
            embedded(count)
    body = json.dumps(CHAT).encode()
    parse(body.ljust(4 << 20), ChatRequest)
    with pytest.raises(InputTooLarge, match="4194305"):
        parse(body.ljust((4 << 20) + 1), ChatRequest)


MEGABYTES = 1 << 20
HOSTILE = {
    "token ids": b'"prompt":[' + b"1," * MEGABYTES + b"1]",
    "lists of token ids": b'"prompt":[' + b"[1,1]," * (MEGABYTES // 2) + b"[1]]",
    "lists": b'"prompt":[' + b"[1]," * (MEGABYTES // 2) + b"[1]]",
    "texts": b'"prompt":[' + b'"",' * (MEGABYTES // 2) + b'""]',
    "texts that end with a backslash": b'"prompt":[' + b'"\\\\",' * (MEGABYTES // 2) + b'""]',
    "a text, then numbers": b'"prompt":["a,[\\"",' + b"1," * MEGABYTES + b"1]",
    "fields": b'"metadata":{' + b",".join(b'"%x":1' % number for number in range(MEGABYTES // 4)) + b"}",
    "without an end": b'"prompt":["' + b'",' * MEGABYTES,
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    fields: bytes, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four megabytes of lists took half a second of the loop before they were refused."""
    monkeypatch.setitem(schema._decoders, kind, None)
    with pytest.raises(InputTooLarge, match="send several requests"):
        parse(b'{"model":"m",%b}' % fields, kind)


@pytest.mark.parametrize("text", [",[{" * MEGABYTES, '\\"' * (MEGABYTES // 2), ',\\"[' * (MEGABYTES // 2)])
def test_what_is_in_a_text_is_no_value(text: str) -> None:
    body = b'{"model":"m","prompt":%b}' % json.dumps(text).encode()
    assert parse(body, CompletionRequest).prompt == text


def test_as_many_values_as_are_taken_fit() -> None:
    one, other = [1] * 131_072, [1] * 65_000
    assert parse(json.dumps({"model": "m", "prompt": [one, one, other]}).encode(), CompletionRequest).prompt[1] == one
    lists = b'{"model":"m","prompt":[%b]}' % b",".join([b"[1]"] * (schema.MAX_LISTS - 2))
    assert len(parse(lists, CompletionRequest).prompt) == schema.MAX_LISTS - 2
    with pytest.raises(InputTooLarge):
        parse(lists.replace(b"[1]", b"[1],[1]", 1), CompletionRequest)


@pytest.mark.parametrize(("marks", "taken"), [(32_767, True), (32_768, True), (32_769, False)])
def test_a_body_of_at_most_32768_marks_gets_a_second_try(marks: int, taken: bool) -> None:
    """An empty text for a number is absent; it is found by the second try. An escaped quote is no mark."""
    head = b'{"model":"m","n":"","prompt":[['
    ends = marks - head.count(b'"') - head.count(b"{") - head.count(b"[")
    body = head + b"1]" + b",[2]" * ends + b"]}"
    if taken:
        assert len(parse(body, CompletionRequest).prompt) == ends + 1
        return
    with pytest.raises(ParameterWrong, match="'n' is wrong"):
        parse(body, CompletionRequest)


def test_an_escaped_quote_does_not_count_against_the_second_try() -> None:
    text = rb"\"" * 40_000
    found = parse(b'{"model":"m","n":"","prompt":"%s"}' % text, CompletionRequest)
    assert found.prompt == '"' * 40_000 and found.n is None


@pytest.mark.parametrize(
    ("value", "most", "found"),
    [
        ("a", 1, ["a"]),
        (["a", "b"], 2, ["a", "b"]),
        ([1, 2, 3], 1, [[1, 2, 3]]),
        ([[1, 2], [3]], 2, [[1, 2], [3]]),
        (["a", "b"], 1, None),
        ([[1], [2]], 1, None),
        (["a", 1], 2, None),
        (["a", ""], 2, None),
        ([[1], []], 2, None),
        ("", 1, None),
        ([], 1, None),
    ],
)
def test_texts_or_tokens_are_all_of_one_kind_and_not_more_than_allowed(value: Any, most: int, found: Any) -> None:
    if found is not None:
        assert texts_or_tokens(value, "input", most=most) == found
        return
    with pytest.raises(ParameterWrong) as caught:
        texts_or_tokens(value, "input", most=most)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"best_of": 1}, None),
        ({"best_of": 3, "n": 3}, None),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"echo": False}, None),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, None),
        ({"logprobs": 1}, "logprobs"),
        ({"logit_bias": {"1": 0, "2": 0.0}}, None),
        ({"logit_bias": {"1": 0, "2": 1}}, "logit_bias"),
        ({"suffix": ""}, None),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "stream_options": {}}, None),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_unless_it_is_off(given: Any, param: str | None) -> None:
    body = json.dumps({"model": "m", "prompt": "p", **given}).encode()
    if param is None:
        parse(body, CompletionRequest)
        return
    with pytest.raises(ParameterWrong) as caught:
        parse(body, CompletionRequest)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"logprobs": False, "modalities": ["text"], "response_format": {"type": "text"}, "tools": []}, None),
        ({"modalities": [], "response_format": {}}, None),
        ({"logprobs": True, "top_logprobs": 0, "function_call": "none", "prediction": None}, None),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": [{}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ],
)
def test_a_chat_is_refused_for_what_this_server_cannot_do(given: Any, param: str | None) -> None:
    if param is None:
        chat(**given)
    else:
        refused(param, **given)


def test_only_the_assistant_may_leave_its_content_out() -> None:
    answered = {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "tool_calls": [],
        "annotations": [],
        "audio": None,
    }
    assert [each.text for each in chat(messages=[answered, CHAT["messages"][0]]).messages] == ["", "hi"]
    refused("messages[1].content", messages=[answered, {"role": "user"}])
    refused("messages[0].annotations", messages=[{"role": "user", "content": "hi", "annotations": [1]}])


@pytest.mark.parametrize(
    "kind", [EmbeddingRequest, StreamOptions, Generation, CompletionRequest, ChatRequest, Message, Part]
)
def test_what_was_parsed_cannot_be_changed_and_is_written_by_name(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert {each.kind.name for each in inspect.signature(kind).parameters.values()} == {"KEYWORD_ONLY"}
    assert config.forbid_unknown_fields == (kind is not Part), "a part of a message may have marks of its own"


@pytest.mark.parametrize(
    ("text", "param", "code"),
    [
        ("Object contains unknown field `x`", "x", "unknown_parameter"),
        ("Object contains unknown field `x` - at `$.a[0]`", "a[0].x", "unknown_parameter"),
        ("Object missing required field `x`", "x", "missing_required_parameter"),
        ("Object missing required field `x` - at `$.a`", "a.x", "missing_required_parameter"),
        ("Expected `int`, got `str` - at `$.n`", "n", None),
        ("Expected `object`, got `array`", None, None),
    ],
)
def test_a_refusal_names_the_parameter_by_its_path(text: str, param: str | None, code: str | None) -> None:
    found = wrong(text)
    assert (found.param, found.code) == (param, code)
    assert param is None or f"'{param}'" in str(found)


class Taken(Exception):
    """The bounds were kept; the next step begins."""


class Stub:
    max_tokens, truncate, served_as = 1, False, "m"

    async def encode(self, *words: Any, **more: Any) -> Any:
        raise Taken


@pytest.mark.parametrize(("count", "bound"), [(1, Taken), (16, Taken), (17, ParameterWrong)])
async def test_a_completion_has_at_most_16_prompts(
    count: int, bound: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: Any) -> None:
        raise Taken

    monkeypatch.setattr("oriel_logic.openai.language.Run", taken)
    request = parse(json.dumps({"model": "m", "prompt": ["a"] * count}).encode(), CompletionRequest)
    with pytest.raises(bound):
        await LanguageModel.complete(cast(Any, Stub()), request, cast(Any, None))


@pytest.mark.parametrize(("count", "bound"), [(1, Taken), (2048, Taken), (2049, ParameterWrong)])
async def test_an_embedding_has_at_most_2048_inputs(count: int, bound: type[Exception]) -> None:
    request = parse(json.dumps({"model": "m", "input": ["a"] * count}).encode(), EmbeddingRequest)
    with pytest.raises(bound):
        await Embeddings.answer(cast(Any, Stub()), request, cast(Any, None))
