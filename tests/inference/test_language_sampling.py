"""Sampling parameters and guides of language models: the accepted forms, and refusals that name the parameter."""

import json

import pytest

from oriel_inference.errors import InvalidRequest
from oriel_inference.language.engine import Guide, Sampling
from oriel_inference.language.sampling import read_sampling


def test_numbers_may_be_texts_and_null_is_left_out() -> None:
    text = b'{"temperature": "0.5", "top_k": 3, "stop": "x", "ignore_eos": "true", "seed": null, "n": 1}'
    assert read_sampling(text) == Sampling(temperature=0.5, top_k=3, stop=("x",), ignore_eos=True)


def test_request_parameters_with_other_names_are_ignored() -> None:
    assert read_sampling({"max_tokens": 5, "priority": 1, "traceparent": "x"}) == Sampling(max_tokens=5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"temperature": -1}, "'temperature'"),
        ({"temperature": "nan"}, "'temperature'"),
        ({"temperature": True}, "'temperature'"),
        ({"top_p": 0}, "'top_p'"),
        ({"max_tokens": 1 << 40}, "'max_tokens'"),
        ({"seed": 1 << 90}, "'seed'"),
        ({"stop": ["x"] * 17}, "'stop'"),
        ({"stop_token_ids": [1 << 70]}, r"'stop_token_ids\[0\]'"),
        ({"stop": [""]}, r"'stop\[0\]'"),
        ({"logprobs": 5}, "'logprobs'"),
        ({"n": 2}, "'n' is not served"),
        ({"best_of": 2}, "'best_of' is not served"),
        ({"logit_bias": {"5": 1}}, "'logit_bias' is not served"),
        ({"unheard": 1}, "unheard"),
        ({"guide": {"kind": "poem", "text": "x"}}, "'guide.kind'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        read_sampling(json.dumps(given).encode())


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"[" * 100_000, b"{}" + b" " * (1 << 20)])
def test_parameters_that_are_no_small_object_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="sampling_parameters"):
        read_sampling(text)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("{", "is no JSON"),
        ('{"type": "array", "}": 0, "items":' * 33 + "{}" + "}" * 33, "is not served for the type array"),
        ('{"anyOf": [' * 33 + '{"type": "null"}' + "]}" * 33, "more than 32 levels"),
        ('{"type": "string", "maxLength": 49}', "bounded repetitions"),
        ('{"type": "array", "items": {"type": "null"}, "maxItems": 49}', "bounded repetitions"),
        (json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(101)}}), "properties"),
        (json.dumps({"type": "string", "description": "a" * 20_000}), "bytes"),
        # The engine's compiler fails on each of these, and then on the step of all others.
        ('{"type": "string", "pattern": "((("}', "'pattern', which is not served"),
        ('{"type": "array", "minItems": 1}', "minItems without items"),
        ('{"type": "object", "properties": {"a\\"": {}}}', "names a property"),
        ('{"type": "object", "required": ["a"]}', "not among its properties"),
        ('{"type": "integer", "minimum": 1e30}', "no whole number"),
        ('{"type": "integer", "minimum": 3, "exclusiveMaximum": 3}', "above the maximum"),
        ('{"type": "string", "minLength": 3, "maxLength": 2}', "least number that is above"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "refers on"),
        ('{"$ref": "#"}', "names a part"),
        ('{"enum": []}', "an enum or a const"),
        ('{"type": "text"}', "needs a type"),
    ],
)
def test_a_guide_that_would_hold_up_or_break_all_calls_is_refused(schema: str, problem: str) -> None:
    guide = {"guide": {"kind": "json_schema", "text": schema}}
    with pytest.raises(InvalidRequest, match=problem):
        read_sampling(json.dumps(guide).encode())


def test_only_json_schemas_are_taken_as_guides() -> None:
    with pytest.raises(InvalidRequest, match="only 'json_schema'"):
        read_sampling(b'{"guide": {"kind": "regex", "text": "a"}}')


def test_a_usual_guide_is_accepted() -> None:
    address = {"type": "string", "format": "ipv4", "description": "..." * 100}
    parts = {"type": "array", "items": {"$ref": "#/$defs/Part"}, "maxItems": 9}
    age = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2}, {"type": "null"}], "default": None}
    named = {"name": {"type": "string", "maxLength": 16}, "kind": {"enum": ["a", "b"], "type": "string"}}
    named |= {"address": address, "parts": parts, "age": age, "note": {"type": ["string", "null"]}}
    schema = {"type": "object", "properties": named, "required": ["name"], "additionalProperties": False}
    schema["$defs"] = {"Part": {"type": "object", "properties": {"part": {"$ref": "#/$defs/Part"}}, "title": "Part"}}
    guide = Guide("json_schema", json.dumps(schema))
    assert read_sampling(json.dumps({"guide": {"kind": guide.kind, "text": guide.text}}).encode()).guide == guide
