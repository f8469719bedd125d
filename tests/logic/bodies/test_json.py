from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from oriel_logic.bodies.json import MAX_JSON_BYTES, decode
from oriel_logic.bodies.messages import Request
from oriel_logic.bodies.values import array_of, converted
from oriel_logic.errors import InputTooLarge, Refused
from oriel_wire.v2.depth import MAX_DEPTH


@dataclass
class Item:
    price: float
    tags: list[str] | None = None


class Box(msgspec.Struct):
    items: list[Item]
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    image: Image.Image | None = None
    rows: NDArray[np.int16] | None = None
    by_name: dict[str, int] = {}
    size: Literal["small", "large"] = "small"


class Line(pydantic.BaseModel):
    amount: float
    kinds: list[int] = []


class Order(msgspec.Struct):
    lines: list[Line]


def read(kind: Any, text: str | bytes) -> Any:
    body = text.encode() if isinstance(text, str) else text
    return decode(body, msgspec.json.Decoder(kind, dec_hook=converted))


@pytest.mark.parametrize(
    ("text", "field", "what"),
    [
        ('{"items": [{"price": 1}, {"price": 2}, {"price": "3"}]}', "$.items[2].price", "Expected `float`, got `str`"),
        ('{"items": [{}]}', "$.items[0].price", "missing required field"),
        ("{}", "$.items", "missing required field"),
        ('{"items": [], "size": "huge"}', "$.size", "Invalid enum value 'huge', it is one of 'large', 'small' at"),
        ('{"items": [], "count": 0}', "$.count", "Expected `int` >= 1"),
        ('{"items": [], "image": "***"}', "$.image", "not base64"),
        ('{"items": [], "image": "aGVsbG8="}', "$.image", "not an image"),
        ('{"items": [], "rows": [[1], [2, 3]]}', "$.rows", "not of one shape"),
        ('{"items": [], "rows": [1.5]}', "$.rows", "takes int16 values"),
        ('{"items": [], "rows": [70000]}', "$.rows", "takes int16 values"),
        ('{"items": [], "rows": "abc"}', "$.rows", "takes numbers"),
        ('{"items": [], "by_name": {"x": "y"}}', "$.by_name[...]", "Expected `int`"),
        ("[]", "$", "Expected `object`, got `array`"),
    ],
)
def test_a_bad_field_is_named_with_its_path(text: str, field: str, what: str) -> None:
    with pytest.raises(Refused, match=what) as refused:
        read(Box, text)
    assert refused.value.field == field
    where = field.rpartition(".")[0] if "missing" in what else field
    assert refused.value.message.endswith(f" at {where}")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"lines": [{"amount": 1}, {"amount": "x"}]}', "$.lines[1].amount"),
        ('{"lines": [{"amount": 1, "kinds": [1, "y"]}]}', "$.lines[0].kinds[1]"),
        ('{"lines": [{}]}', "$.lines[0].amount"),
    ],
)
def test_pydantic_models_say_the_same_path(text: str, field: str) -> None:
    with pytest.raises(Refused) as refused:
        read(Order, text)
    assert refused.value.field == field and "pydantic" not in refused.value.message


def test_values_arrive_in_the_types_that_are_declared() -> None:
    assert read(Order, '{"lines": [{"amount": 1}]}').lines == [Line(amount=1)]
    box = read(Box, '{"items": [{"price": 1, "tags": ["a"]}], "rows": [[1, 2], [3, 4]]}')
    assert box.items == [Item(1.0, ["a"])]
    assert box.rows.dtype == np.int16 and box.rows.tolist() == [[1, 2], [3, 4]]


def test_size_and_depth_are_bounded() -> None:
    with pytest.raises(InputTooLarge):
        read(Any, b" " * MAX_JSON_BYTES + b"1")
    assert read(Any, "[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(Refused, match="nested more than 100"):
            read(Any, "[" * levels + "]" * levels)


def test_a_request_is_text_or_any_json() -> None:
    assert Request(body="größe".encode()).text() == "größe"
    with pytest.raises(Refused):
        Request(body=b"\xff").text()
    shallow = b"[" + b",".join([b"[1]"] * 500) + b"]"
    assert Request(body=shallow).json() == [[1]] * 500


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"text":"\xff"}', "byte 0xff at position 9 is not UTF-8"),
        (b'{"text":"\\ud800"}', "ends with half of a surrogate pair"),
        (b'{"text":"\\ud83d\\ude00', "Input data was truncated"),
        (b'{"text":"\\ud800 and more text"}', "surrogate pair (byte 15)"),
        (b'{"text":', "Input data was truncated"),
        (b"", "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'"\xed\xa0\x80"', "not valid JSON"),
    ],
)
def test_broken_json_is_told_its_fault(body: bytes, fault: str) -> None:
    with pytest.raises(Refused) as caught:
        read(Any, body)
    assert fault in str(caught.value)
    with pytest.raises(Refused) as caught:
        Request(body=body).json()
    assert fault in str(caught.value)


@given(st.lists(st.integers(-(2**40), 2**40), max_size=5))
def test_integers_fit_or_are_refused(values: list[int]) -> None:
    fits = all(-(2**31) <= each < 2**31 for each in values)
    try:
        assert array_of(values, NDArray[np.int32]).tolist() == values and fits
    except Refused:
        assert not fits


def test_arrays_take_their_declared_dtype() -> None:
    assert array_of([1, 2], NDArray[np.float32]).dtype == np.float32
    assert array_of(np.zeros(2), NDArray[np.float32]).dtype == np.float32  # what np.save writes of Python floats
    assert array_of([1, 2], NDArray[Any]).dtype == np.int64
    assert array_of([], NDArray[np.int8]).dtype == np.int8
    assert array_of([True], np.ndarray).dtype == np.bool_
    for value, kind in (([True], np.float32), ([2], np.bool_), ([2**70], np.int64)):
        with pytest.raises(Refused):
            array_of(value, NDArray[kind])
