"""The curl line: what the shell hands to curl is what the service takes."""

import base64
import io
import json
import shlex
import wave
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

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
    optional: int = 3
    more: list[int] = field(default_factory=list)


def schema_of(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    (schema,), components = msgspec.json.schema_components([found], ref_template="#/components/schemas/{name}")
    return schema, components


@pytest.mark.parametrize("found", [Everything, Point, list[Point], dict[str, Point], str, int | None, bool])
def test_a_made_up_value_is_one_that_the_type_takes(found: Any) -> None:
    value = example(*schema_of(found))
    msgspec.convert(value, type=found)


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
