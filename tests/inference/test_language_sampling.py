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
    ("kind", "text", "problem"),
    [
        ("json_schema", "{", "is no JSON"),
        ("json_schema", '{"a":' * 33 + "{}" + "}" * 33, "levels of brackets"),
        ("json_schema", '{"type": "string", "maxLength": 49}', "bounded repetitions"),
        ("json_schema", '{"type": "string", "pattern": "^.{0,200}$"}', "bounded repetitions"),
        ("json_schema", json.dumps({"properties": {f"p{n}": {} for n in range(101)}}), "properties"),
        ("regex", ".{30}x.{30}", "bounded repetitions"),
        ("json_schema", '{"type": "array", "}": 0, "items":' * 33 + "{}" + "}" * 33, "levels of brackets"),
        ("regex", "(.{0,50}){0,50}", "bounded repetitions"),
        ("regex", "[^a]" * 101, "bounded repetitions"),
        ("regex", "a{1,99999999999}", "bounded repetitions"),
        ("structural_tag", '{"format": {"type": "regex", "pattern": ".{0,200}"}}', "bounded repetitions"),
        ("regex", "a" * 20_000, "bytes"),
    ],
)
def test_a_guide_that_would_hold_up_all_calls_is_refused(kind: str, text: str, problem: str) -> None:
    guide = {"guide": {"kind": kind, "text": text}}
    with pytest.raises(InvalidRequest, match=problem):
        read_sampling(json.dumps(guide).encode())


def test_a_usual_guide_is_accepted() -> None:
    address = {"type": "string", "pattern": "^([0-9]{1,3}[.]){3}[0-9]{1,3}$", "description": "..." * 100}
    name = {"type": "string", "maxLength": 16}
    schema = {"type": "object", "properties": {"name": name, "address": address}, "required": ["name"]}
    guide = Guide("json_schema", json.dumps(schema))
    assert read_sampling(json.dumps({"guide": {"kind": guide.kind, "text": guide.text}}).encode()).guide == guide
