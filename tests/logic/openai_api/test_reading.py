"""Reading of generated texts: thoughts, calls and text, however the text is split."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.openai.reading import Part, Reader

CALL = '{"name": "f", "arguments": {"x": 1}}'
CALLED = Part("call", '{"x":1}', "f")


def read(text: str, cuts: list[int] = [], **given: Any) -> list[Part]:  # noqa: B006
    """Read a text in pieces; neighbours of one kind are one part, and empty texts are none."""
    reader = Reader(**given)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found: list[Part] = []
    for index, piece in enumerate(pieces):
        for part in reader.feed(piece, last=index == len(pieces) - 1):
            if found and part.kind == found[-1].kind and part.kind != "call":
                part = Part(part.kind, found.pop().text + part.text)
            found.append(part)
    return found


TOLD: list[tuple[str, dict[str, Any], list[Part]]] = [
    ("a<b", {}, [Part("content", "a<b")]),
    ("<think>\nwhy</think>\n\nyes", {"thinks": True}, [Part("reasoning", "why"), Part("content", "yes")]),
    ("why</think>yes", {"in_thought": True, "thinks": True}, [Part("reasoning", "why"), Part("content", "yes")]),
    ("<think>", {}, [Part("content", "<think>")]),
    ("so <tool_call>\n" + CALL + "\n</tool_call>", {"tools": {"f"}}, [Part("content", "so "), CALLED]),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", {"tools": {"f"}}, [CALLED, CALLED]),
    (f"<tool_call>{CALL}", {"tools": {"f"}}, [CALLED]),
    ("<tool_call>no</tool_call>", {"tools": {"f"}}, [Part("content", "<tool_call>no</tool_call>")]),
    ('{"name": "f", "parameters": {"x": 1}}', {"tools": {"f"}}, [CALLED]),
    (f" [{CALL}, {CALL}]", {"tools": {"f"}}, [CALLED, CALLED]),
    (f"[TOOL_CALLS][{CALL}]", {"tools": {"f"}}, [CALLED]),
    (CALL, {"tools": {"g"}}, [Part("content", CALL)]),
    ('{"name": ["f"]}', {"tools": {"f"}}, [Part("content", '{"name": ["f"]}')]),
    ("[1, 2]", {"tools": {"f"}}, [Part("content", "[1, 2]")]),
    (CALL, {"tools": {"f"}, "forced": "*"}, [CALLED]),
    ('{"x": 1}', {"tools": {"f"}, "forced": "f"}, [Part("call", "", "f"), Part("arguments", '{"x": 1}')]),
]


@pytest.mark.parametrize(("text", "given", "parts"), TOLD)
def test_an_answer_is_read_however_it_is_split(text: str, given: dict[str, Any], parts: list[Part]) -> None:
    assert read(text, **given) == parts
    assert read(text, list(range(1, len(text))), **given) == parts


@given(st.sampled_from(TOLD), st.data())
def test_nothing_depends_on_the_split(told: tuple[str, dict[str, Any], list[Part]], data: st.DataObject) -> None:
    text, given_, parts = told
    assert read(text, sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6))), **given_) == parts


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "a", " "]), max_size=8))
def test_no_text_that_is_no_call_is_lost(pieces: list[str]) -> None:
    text = "a" + "".join(pieces)
    shown = "".join(part.text for part in read(text, thinks=True, tools={"f"}))
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", " ")
    for mark in marks:
        text, shown = text.replace(mark, ""), shown.replace(mark, "")
    assert shown == text
