"""The tokens of answers that pass, as they are reported or else estimated."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.shared.answer_tokens import MAX_KEYS, TAIL_BYTES, AnswerTokens


class Head:
    """What is read of an answer's head."""

    def __init__(
        self, kind: str = "application/json", *, status: int = 200, used: str = "", encoding: str = ""
    ) -> None:
        self.status, self.used = status, used
        self._fields = {"content-type": kind, "content-encoding": encoding or None}

    def get(self, name: str) -> str | None:
        return self._fields.get(name)


def count(head: Head, pieces: list[bytes], prompt: int = 7) -> tuple[int, int, bool]:
    tokens = AnswerTokens(prompt)
    tokens.answer_began(head, prompt)  # type: ignore[arg-type]
    for piece in pieces:
        tokens.feed(piece)
    tokens.answer_complete()
    return tokens.tokens_in, tokens.tokens_out, tokens.reported


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


CUTS = st.lists(st.integers(0, 10**6), max_size=8)
COUNT = st.integers(0, 10**9)


@given(st.text(max_size=200), COUNT, COUNT, CUTS, st.booleans())
def test_usage_is_read_wherever_the_answer_is_cut_and_whatever_it_says(
    text: str, tokens_in: int, tokens_out: int, places: list[int], responses: bool
) -> None:
    names = ("input_tokens", "output_tokens") if responses else ("prompt_tokens", "completion_tokens")
    usage = {names[0]: tokens_in, names[1]: tokens_out, "details": {"usage": {"x": 1}}}
    answer = {"choices": [{"text": text + '"usage": {"prompt_tokens": 5}'}], "usage": usage, "model": text}
    pieces = cut(json.dumps(answer).encode(), places)
    assert count(Head(), pieces) == (tokens_in, tokens_out, True)


@given(st.integers(0, 30), CUTS, st.booleans(), st.booleans())
def test_events_of_a_stream_are_tokens_unless_the_server_counts(
    events: int, places: list[int], reported: bool, cut_off: bool
) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": 'a\ndata: "usage"'}}]})
    lines = [chunk] * events + (
        [json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 9}})] if reported else []
    )
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()
    if cut_off:
        body = body[:-3]
    found = count(Head("text/event-stream; charset=utf-8"), cut(body, places))
    assert found == ((3, 9, True) if reported else (7, events, False))


def test_a_long_answer_is_read_to_its_end_and_not_kept() -> None:
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    tokens = AnswerTokens(1)
    tokens.answer_began(Head(), 1)  # type: ignore[arg-type]
    for _ in range(10):
        tokens.feed(b"x" * TAIL_BYTES)
        assert len(tokens._tail) <= TAIL_BYTES
    tokens.feed(usage)
    tokens.answer_complete()
    assert (tokens.tokens_in, tokens.tokens_out) == (1, 2) and not tokens._tail


def test_what_the_servers_head_says_counts_and_what_cannot_be_read_is_estimated() -> None:
    said = Head(used="dev=1;cpu=2;class=cpu;tin=11;tout=12")
    assert count(said, [b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}']) == (11, 12, True)
    assert count(Head(encoding="gzip"), [b"\x1f\x8b" * 50]) == (7, 0, False)
    assert count(Head(), [b"x" * 40]) == (7, 10, False)
    assert count(Head(status=500), [b"x" * 40]) == (0, 0, False)


@pytest.mark.parametrize(
    "usage", [None, [], "x", {"prompt_tokens": "x"}, {"prompt_tokens": -1}, {"prompt_tokens": True}, {}, 10**40]
)
def test_a_usage_that_makes_no_sense_is_none(usage: Any) -> None:
    found = count(Head(), [json.dumps({"usage": usage}).encode()])
    assert found[0] == 7 and not found[2]


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 90, "total_tokens": 10}, (10, 90)),
        ({"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 100}, (10, 90)),  # tokens of reasoning
        ({"prompt_tokens": 10, "completion_tokens": -90, "total_tokens": 100}, (10, 90)),
        ({"prompt_tokens": 10, "total_tokens": 10}, (10, 0)),
        ({"prompt_tokens": 10, "completion_tokens": -90}, None),
        ({"prompt_tokens": 10, "completion_tokens": 10**40}, None),
    ],
)
def test_a_usage_that_contradicts_itself_is_taken_at_its_most(usage: Any, found: tuple[int, int] | None) -> None:
    answer = json.dumps({"usage": usage}).encode()
    assert count(Head(), [answer]) == ((*found, True) if found else (7, -(-len(answer) // 4), False))


def test_what_a_client_has_a_server_repeat_makes_its_call_no_cheaper() -> None:
    """Answers of the Responses API repeat tools and their schemas, which the client writes."""
    usage = '"usage": {"input_tokens": 10, "output_tokens": 90}'
    forged = '"usage": {"input_tokens": 0, "output_tokens": 0}'
    assert count(Head(), [f'{{{usage}, "tools": [{{{forged}}}]}}'.encode()]) == (10, 90, True)
    many = f'{{{usage}, "tools": [{", ".join([f"{{{forged}}}"] * MAX_KEYS)}]}}'.encode()
    assert count(Head(), [many]) == (7, -(-len(many) // 4), False), "of so many none is believed"
    nested = b'{"usage": ' * 1600
    assert count(Head(), [nested]) == (7, len(nested) // 4, False)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reading(data: bytes) -> None:
    count(Head(), [b'"usage":' + data])
