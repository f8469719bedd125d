import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.bodies.messages import MAX_JSON_BYTES, MAX_JSON_DEPTH, Request, depth
from oriel_logic.errors import InputTooLarge, Refused

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def measured(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((measured(each) for each in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((measured(each) for each in value), default=0)
    return 0


@given(JSON)
def test_json_bodies_come_back_as_values(value: Any) -> None:
    assert Request(body=json.dumps(value).encode()).json() == value
    assert depth(value) == measured(value)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_nesting_is_bounded() -> None:
    assert depth(Request(body=nested(MAX_JSON_DEPTH)).json()) == MAX_JSON_DEPTH
    for levels in (MAX_JSON_DEPTH + 1, 100_000):
        with pytest.raises(Refused, match="nested more than 64"):
            Request(body=nested(levels)).json()


def test_many_shallow_lists_are_fine() -> None:
    assert len(Request(body=b"[" + b",".join([b"[1]"] * 500) + b"]").json()) == 500


def test_size_is_bounded() -> None:
    with pytest.raises(InputTooLarge):
        Request(body=b" " * MAX_JSON_BYTES + b"1").json()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a": NaN}', b'"\xed\xa0\x80"'])
def test_broken_json_is_refused_with_a_sentence(body: bytes) -> None:
    with pytest.raises(Refused, match="not valid JSON"):
        Request(body=body).json()


def test_text_is_utf8() -> None:
    assert Request(body="größe".encode()).text() == "größe"
    with pytest.raises(Refused):
        Request(body=b"\xff").text()
