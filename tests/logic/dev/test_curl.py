"""The curl line: what the shell hands to curl is what the service takes."""

import base64
import io
import json
import shlex
import wave
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from oriel_logic.bodies.decoding import Reader
from oriel_logic.bodies.messages import Request
from oriel_logic.bodies.schemas import Writer, schemas_of
from oriel_logic.bodies.signature import read
from oriel_logic.bodies.tensors import Tensors
from oriel_logic.dev.curl import curl_line, example

URL = "http://127.0.0.1:8090/v1/services/x"


@dataclass
class Point:
    x: float
    y: int


@dataclass
class Everything:
    text: str
    kind: Literal["a", "b"]
    points: list[Point]
    pair: tuple[int, str]
    maybe: str | None
    few: Annotated[list[float], msgspec.Meta(min_length=3)]
    above: Annotated[int, msgspec.Meta(gt=4)]
    long: Annotated[str, msgspec.Meta(min_length=9)]
    yes: bool
    by_name: dict[str, int]
    at: datetime
    later: datetime | None
    zoned: Annotated[datetime, msgspec.Meta(tz=True)]
    all_of_them: list[time]
    on: date
    when: time
    within: timedelta
    ident: UUID
    cost: Decimal
    optional: int = 3
    more: list[int] = field(default_factory=list)


def schema_of(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    writer = Writer("x")
    return writer.schema(found), writer.components


@pytest.mark.parametrize("found", [Everything, Point, list[Point], dict[str, Point], str, int | None, bool])
def test_a_made_up_value_is_one_that_the_type_takes(found: Any) -> None:
    value = example(*schema_of(found))
    msgspec.convert(value, type=found)


async def named(tensors: Tensors) -> None: ...


def test_made_up_tensors_are_ones_that_the_service_takes() -> None:
    signature = read(named)
    schemas = schemas_of(signature, "named")
    body = words(curl_line(URL, schemas.input, schemas.components))[4]
    (tensors,) = Reader(signature).inputs(Request(body=body.encode(), content_type="application/json"))
    assert [each.shape for each in tensors.values()] == [(1, 2)]


def test_a_type_that_contains_itself_ends() -> None:
    schema = {"$ref": "#/components/schemas/Node"}
    components = {"Node": {"type": "object", "required": ["next"], "properties": {"next": schema}}}
    assert json.dumps(example(schema, components)).count("next") <= 8


def words(line: str) -> list[str]:
    return shlex.split(line)


def test_a_sample_file_goes_first() -> None:
    line = curl_line(URL, {"application/json": {"schema": {}}}, {}, sample={"a": 1}, file="my service/sample.json")
    assert words(line) == ["curl", "-H", "content-type: application/json", "-d", "@my service/sample.json", URL]
    assert "--data-binary @7.png" in curl_line(URL, {}, {}, file="7.png")


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4))
def test_a_sample_survives_the_shell(sample: dict[str, str]) -> None:
    line = curl_line(URL, {"application/json": {"schema": {}}}, {}, sample=sample)
    body = words(line)[4]
    assert json.loads(body) == sample and "\n" not in line


def test_without_a_sample_the_body_is_made_up() -> None:
    schema, components = schema_of(Point)
    assert words(curl_line(URL, {"application/json": {"schema": schema}}, components))[4] == '{"x": 0, "y": 0}'


@pytest.mark.parametrize(
    ("takes", "words_in_it"),
    [
        ({"image/png": {}, "image/jpeg": {}}, "'content-type: image/png' --data-binary @YOUR-FILE.png"),
        ({"text/plain": {}}, "'content-type: text/plain' -d 'some text'"),
        ({"*/*": {}}, "-d 'some text'"),
        ({"application/octet-stream": {}}, "--data-binary @YOUR-FILE"),
        ({}, "-X POST"),
    ],
)
def test_what_is_no_json_shows_where_its_body_goes(takes: dict[str, Any], words_in_it: str) -> None:
    assert words_in_it in curl_line(URL, takes, {})


@pytest.mark.parametrize("media", ["image/png", "audio/wav"])
def test_a_picture_or_sound_in_json_is_the_smallest_there_is(media: str) -> None:
    value = example({"type": "string", "contentEncoding": "base64", "contentMediaType": media}, {})
    data = io.BytesIO(base64.b64decode(value, validate=True))
    if media == "image/png":
        assert Image.open(data).size == (1, 1)
    else:
        with wave.open(data) as sound:
            assert sound.getnframes() == 8
