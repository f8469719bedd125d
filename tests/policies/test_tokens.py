"""What calls of the OpenAI API reserve of a token limit."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.bounds.tokens import MAX_TOKENS, READ_BYTES, Wanted, prompt_tokens, reserved, wanted
from oriel_policies.documents import compile_documents


@pytest.mark.parametrize(
    ("body", "most", "answers"),
    [
        ({}, None, 1),
        ({"max_tokens": 5}, 5, 1),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7, 1),
        ({"max_output_tokens": 9, "n": 3}, 9, 3),
        ({"max_tokens": 5, "n": 2, "best_of": 4}, 5, 4),
        ({"max_tokens": 5, "prompt": "one"}, 5, 1),
        ({"max_tokens": 5, "prompt": ["one", "two"], "n": 2}, 5, 4),
        ({"max_tokens": 5, "prompt": [1, 2, 3]}, 5, 1),
        ({"max_tokens": 5, "prompt": [[1, 2], [3]]}, 5, 2),
        ({"prompt": [], "max_tokens": [[1], [2]], "n": {"n": 3}, "model": {"a": 1}}, None, 1),
        ({"prompt": ['a "quoted" [1]', "b\\\\", '\\\\"', ""]}, None, 4),
        ({"max_tokens": True, "n": -1, "prompt": []}, None, 1),
        ({"max_tokens": "many", "n": 1.5}, None, 1),
        ({"max_tokens": 10**30, "n": 10**30}, MAX_TOKENS, MAX_TOKENS),
        # A server may read another field than we do, and Python's take a text or a whole fraction for a number.
        ({"max_tokens": 500, "max_completion_tokens": 1}, 500, 1),
        ({"max_tokens": "500", "n": "16"}, 500, 16),
        ({"max_tokens": 500.0, "n": 1e1}, 500, 10),
        ({"max_tokens": "nan", "n": "inf", "best_of": "1" * 40}, None, 1),
    ],
)
def test_a_body_says_how_long_its_answers_may_be(body: dict[str, Any], most: int | None, answers: int) -> None:
    assert wanted(json.dumps(body).encode()) == Wanted(most, answers)
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"):
        assert wanted(json.dumps(body).encode(encoding)) == Wanted(most, answers), "Python's servers read these too"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"\xff", b'{"max_tokens":' + b"[" * 5000, b'{"max_tokens": 5}' + b" " * READ_BYTES],
    ids=["empty", "list", "cut", "bytes", "deep", "large"],
)
def test_what_cannot_be_read_asks_for_one_answer_of_the_usual_length(body: bytes) -> None:
    assert wanted(body) == Wanted()


@pytest.mark.parametrize(
    "odd",
    [
        rb'"max_output_tokens": "\ud800"', rb'"best_of": "\uDfff"', rb'"n": 1e400', rb'"x": "\ud800"', rb'"\ud83d": 1',
        b'"x": [NaN, Infinity, -Infinity]', b'"n": NaN', b'"n": "\xff"', b'"x": {"y": "\xff"}', b'"n": "\xff\xfe"',
    ],
)  # fmt: skip
def test_an_odd_field_does_not_void_the_others(odd: bytes) -> None:
    """Half a surrogate pair in any field gave the reservation up, although Python's servers take it."""
    assert wanted(b'{"max_tokens": 100000, "prompt": ["a", "b"], %b}' % odd) == Wanted(100_000, 2)
    assert wanted(b'{%b, "model": "m\xff", "max_tokens": 7}' % odd) == Wanted(7, 1)


@given(st.binary(max_size=300) | st.from_regex(rb'\{"(max_tokens|n|prompt)":.{0,40}\}', fullmatch=True))
def test_no_body_breaks_the_reading(body: bytes) -> None:
    found = wanted(body)
    assert found.answers >= 1 and (found.most is None or 1 <= found.most <= MAX_TOKENS)


@given(
    st.sampled_from(["embeddings", "chat.completions"]),
    st.integers(0, 2**40),
    st.none() | st.integers(1, MAX_TOKENS),
    st.integers(1, MAX_TOKENS),
    st.floats(0, 1e12),
)
def test_a_reservation_holds_the_prompt_and_the_longest_answer_within_its_bound(
    service: str, size: int, most: int | None, answers: int, usual: float
) -> None:
    prompt = prompt_tokens(size)
    assert prompt * 4 >= size > (prompt - 1) * 4 or size == prompt == 0
    found = reserved(service, prompt, Wanted(most, answers), usual)
    assert min(prompt, MAX_TOKENS) <= found <= MAX_TOKENS
    if service == "embeddings":
        assert found == min(prompt, MAX_TOKENS), "it has no answer of tokens"
    elif most is not None:
        assert found == min(prompt + most * answers, MAX_TOKENS)


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        ("tokens_per_minute = 5", False),
        ("concurrency = 5", True),
        ("tokens_per_minute = 5, concurrency = 5", True),
        ("tokens_per_minute = 5, requests_per_s = 1.0", True),
        ("tokens_per_minute = 5, bytes_per_s = 5", True),
        ("tokens_per_minute = 5, requests_per_day = 5", True),
        ("tokens_per_minute = 5, requests_per_month = 5", True),
        ("tokens_per_minute = 5, compute_ms_per_day = 5", True),
        ("tokens_per_minute = 5, compute_ms_per_month = 5", True),
    ],
)
def test_a_limit_of_tokens_alone_admits_only_calls_that_take_tokens(limit: str, counts: bool) -> None:
    text = f"[tiers.gold]\nband = 0\ntarget_ms = 5\n[tenants.t]\ntier = 'gold'\nlimit = {{ {limit} }}\n"
    (allowance,) = compile_documents({"a.toml": text.encode()}).tenants["t"].allowances
    assert allowance.counts(tokens=False) is counts and allowance.counts(tokens=True)
