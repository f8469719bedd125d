import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel

from oriel_logic import images as pictures
from oriel_logic.bodies import audio, npy, values
from oriel_logic.bodies.audio import Audio
from oriel_logic.bodies.decoding import MAX_QUERY_FIELDS, Reader
from oriel_logic.bodies.messages import Request
from oriel_logic.bodies.signature import read
from oriel_logic.bodies.tensors import Tensors
from oriel_logic.bodies.upload import Upload
from oriel_logic.errors import InputTooLarge, MediaUnsupported, Refused


def picture() -> bytes:
    file = BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    return file.getvalue()


PNG = picture()
WAV = audio.encode(Audio(np.zeros((4, 1), np.float32), 8000))
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@dataclass
class Item:
    price: float
    image: Image.Image | None = None


@dataclass
class Tags:
    tags: list[str]
    top: int = 3


class Person(BaseModel):
    name: str
    age: int = 1


SHORT = msgspec.Meta(max_length=2)


async def plain(text: str, top: int = 3, tags: list[str] = ["x"]) -> None: ...  # noqa: B006
async def whole(item: Item) -> None: ...
async def person(person: Person) -> None: ...
async def seen(image: Image.Image, threshold: float = 0.5) -> None: ...
async def heard(sound: Audio) -> None: ...
async def rows(rows: NDArray[np.float32], scale: float = 1.0) -> None: ...
async def named(tensors: Tensors) -> None: ...
async def data(data: bytes) -> None: ...
async def several(images: list[Image.Image], note: str = "") -> None: ...
async def none() -> None: ...
async def bounded(text: Annotated[str, msgspec.Meta(max_length=3)], ctx: Any, models: Any) -> None: ...
async def filed(file: Upload, note: str = "-") -> None: ...
async def listed(
    a: list[int] | None = None, b: Annotated[list[str], msgspec.Meta(max_length=2)] | None = None
) -> None: ...
async def tagged(tags: Tags) -> None: ...
async def streamed(items: AsyncIterator[Item], scale: int = 1) -> None: ...


def request(body: bytes | str = b"", kind: str = "", query: str = "", **headers: str) -> Request:
    media = kind.partition(";")[0].strip().lower()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    raw = body.encode() if isinstance(body, str) else body
    return Request(body=raw, content_type=media, query=query, headers={"content-type": kind, **named})


def form(data: Any = None, files: Any = None) -> Request:
    sent = httpx.Request("POST", "http://x", data=data, files=files)
    return request(sent.read(), sent.headers["content-type"])


def inputs(function: Any, *arguments: Any, **more: Any) -> tuple[Any, ...]:
    sent = arguments[0] if isinstance(arguments[0], Request) else request(*arguments, **more)
    return Reader(read(function)).inputs(sent)


JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
PNG64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("function", "body", "kind", "query", "wanted"),
    [
        (plain, '{"text": "hi"}', JSON, "", ("hi", 3, ["x"])),
        (plain, '{"text": "hi", "top": 5, "tags": []}', "application/vnd.x+json", "", ("hi", 5, [])),
        (plain, '{"text": "hi"}', FORM, "", ("hi", 3, ["x"])),  # curl --data
        (plain, '{"text": "hi"}', "", "", ("hi", 3, ["x"])),
        (plain, "text=hi+there&top=4&tags=a&tags=b", FORM, "", ("hi there", 4, ["a", "b"])),
        (plain, "text=hi&tags=a", FORM, "", ("hi", 3, ["a"])),
        (listed, "a=1&b=x", FORM, "", ([1], ["x"])),
        (listed, "a=1&a=2", FORM, "", ([1, 2], None)),
        (tagged, "tags=x", FORM, "", (Tags(["x"]),)),
        (plain, "größe", "text/plain", "top=7&tags=y", ("größe", 7, ["y"])),
        (plain, "hi", "", "", ("hi", 3, ["x"])),
        (whole, '{"price": 1}', JSON, "", (Item(1.0),)),
        (whole, "price=1.5", FORM, "", (Item(1.5),)),
        (person, '{"name": "Ada", "age": 36}', JSON, "", (Person(name="Ada", age=36),)),
        (data, b"\x00\xff", "application/octet-stream", "", (b"\x00\xff",)),
        (data, b"GIF8", "image/gif", "", (b"GIF8",)),
        (data, '{"data": "aGk="}', JSON, "", (b"hi",)),
        (bounded, '{"text": "abc"}', JSON, "", ("abc",)),
        (bounded, "abc", "text/plain; charset=utf-8", "", ("abc",)),
        (none, "", "", "", ()),
    ],
)
def test_values_by_media_type(function: Any, body: Any, kind: str, query: str, wanted: Any) -> None:
    assert inputs(function, body, kind, query) == wanted


@pytest.mark.parametrize(
    "sent",
    [
        request(PNG, "image/png", "threshold=0.25"),
        request(PNG, "", "threshold=0.25"),
        request(PNG, "application/octet-stream", "threshold=0.25"),
        request(json.dumps({"image": PNG64, "threshold": 0.25}), JSON),
        request(json.dumps({"image": "data:image/png;base64," + PNG64, "threshold": 0.25}), JSON),
        form({"threshold": "0.25"}, {"image": ("a.png", PNG, "image/png")}),
    ],
)
def test_a_picture_comes_as_body_as_part_or_in_base64(sent: Request) -> None:
    image, threshold = inputs(seen, sent)
    assert (image.size, image.getpixel((0, 0)), threshold) == ((3, 2), (255, 0, 0), 0.25)


def test_pictures_may_be_several_or_within_an_object() -> None:
    images, note = inputs(several, form({"note": "hi"}, [("images", ("a", PNG)), ("images", ("b", PNG))]))
    assert [each.size for each in images] == [(3, 2), (3, 2)] and note == "hi"
    (images, _) = inputs(several, form(files={"images": ("a", PNG)}))
    assert len(images) == 1
    (item,) = inputs(whole, form({"price": "2"}, {"image": ("a", PNG)}))
    assert item.price == 2 and item.image.size == (3, 2)
    (item,) = inputs(whole, json.dumps({"price": 2, "image": PNG64}), JSON)
    assert item.image.size == (3, 2)


def test_a_part_of_json_may_be_the_whole_list() -> None:
    sent = form(files={"text": (None, "hi"), "tags": (None, '["a", "b"]', "application/json")})
    assert inputs(plain, sent) == ("hi", 3, ["a", "b"])


def test_many_small_files_may_not_unpack_to_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 16 MiB has room for hundreds of pictures of 24 megapixels each."""
    monkeypatch.setattr(values, "MAX_PIXELS", 20)  # PNG has 6
    monkeypatch.setattr(pictures, "MAX_PIXELS", 8)
    reader = Reader(read(several))
    three = form(files=[("images", ("a", PNG))] * 3)
    for _ in range(2):  # of each request, not of the process
        assert len(reader.inputs(three)[0]) == 3
    with pytest.raises(Refused, match="megapixels together") as refused:
        reader.inputs(form(files=[("images", ("a", PNG))] * 4))
    assert refused.value.field == "$.images[3]"


def test_sounds_and_arrays() -> None:
    for kind in ("audio/wav", "audio/x-wav", "application/octet-stream", ""):
        assert inputs(heard, WAV, kind)[0].samples.shape == (4, 1)
    for sent in (
        request(npy.encode(ROWS), "application/x-npy", "scale=2"),
        request(npy.encode(ROWS.astype(np.float64)), "", "scale=2"),
        request('{"rows": [[0, 1, 2], [3, 4, 5]], "scale": 2}', JSON),
        form({"scale": "2"}, {"rows": ("a.npy", npy.encode(ROWS))}),
    ):
        array, scale = inputs(rows, sent)
        assert array.dtype == np.float32 and array.tolist() == ROWS.tolist() and scale == 2


def test_v2_tensors_as_json_and_binary() -> None:
    head = {"name": "x", "datatype": "FP32", "shape": [2, 3]}
    text = json.dumps({"inputs": [{**head, "data": [0, 1, 2, 3, 4, 5]}]})
    (tensors,) = inputs(named, text, JSON)
    assert tensors["x"].tolist() == ROWS.tolist() and isinstance(tensors, Tensors)
    text = json.dumps({"inputs": [{**head, "parameters": {"binary_data_size": 24}}]})
    sent = request(
        text.encode() + ROWS.tobytes(), "application/octet-stream", inference_header_content_length=str(len(text))
    )
    assert inputs(named, sent)[0]["x"].tolist() == ROWS.tolist()
    for bad in ('{"inputs": [{"name": "x"}]}', "{", json.dumps({"inputs": [{**head, "data": [1]}]})):
        with pytest.raises(Refused):
            inputs(named, bad, JSON)
    with pytest.raises(Refused, match="JSON part that names them"):
        inputs(named, request(b"123", "application/octet-stream", inference_header_content_length="0"))


@pytest.mark.parametrize(
    ("function", "sent", "field"),
    [
        (plain, request('{"text": 1}', JSON), "$.text"),
        (plain, request('{"txt": "a", "text": "b"}', JSON), "$.txt"),
        (plain, request("hi", "text/plain", "top=many"), "$.top"),
        (plain, form({"text": "a", "top": "x"}), "$.top"),
        (plain, request("top=1", FORM), "$.text"),
        (whole, request("", JSON), ""),
        (person, request('{"name": 1}', JSON), "$.name"),
        (seen, request('{"image": 7}', JSON), "$.image"),
        (seen, form(files={"image": ("a", b"GIF")}), "$.image"),
        (seen, form({"threshold": "1"}, {"other": ("a", PNG)}), "$.other"),
        (bounded, request("abcd", "text/plain"), "$.text"),
        (rows, request('{"rows": [[1], [2, 3]]}', JSON), "$.rows"),
    ],
)
def test_a_bad_field_is_named_wherever_it_stood(function: Any, sent: Request, field: str) -> None:
    with pytest.raises(Refused) as refused:
        inputs(function, sent)
    assert refused.value.field == field, refused.value


@pytest.mark.parametrize(
    ("function", "kind", "listed"),
    [
        (seen, "text/html", "send application/json, image/png, image/jpeg or multipart/form-data, not text/html"),
        (seen, "", "and say so in Content-Type"),
        (plain, "image/png", "application/json, text/plain or multipart/form-data"),
        (named, "multipart/form-data", "send application/json or application/octet-stream, not multipart/form-data"),
        (whole, "text/plain", "send application/json or multipart/form-data"),
    ],
)
def test_other_kinds_of_bodies_are_told_what_is_read(function: Any, kind: str, listed: str) -> None:
    with pytest.raises(MediaUnsupported, match=listed):
        inputs(function, b"\x01", kind)


def test_fields_of_a_query_are_bounded() -> None:
    with pytest.raises(Refused, match="64 fields"):
        inputs(plain, "hi", "text/plain", "&".join(["tags=x"] * (MAX_QUERY_FIELDS + 1)))


def test_defaults_are_not_shared() -> None:
    reader = Reader(read(plain))
    first = reader.inputs(request('{"text": "a"}', JSON))
    first[2].append("y")
    assert reader.inputs(request('{"text": "a"}', JSON))[2] == ["x"]


async def pieces(*found: bytes) -> AsyncIterator[bytes]:
    for each in found:
        yield each


async def test_an_upload_is_the_body_or_a_part() -> None:
    reader = Reader(read(filed))
    sent = request(b"", "video/mp4", "note=hi", content_length="4")
    upload, note = await reader.open(sent, pieces(b"ab", b"cd"), 100)
    assert (note, upload.content_type, upload.size_bytes) == ("hi", "video/mp4", 4)
    assert [piece async for piece in upload] == [b"ab", b"cd"]
    multi = form({"note": "hi"}, {"file": ("a.mp4", b"abcd", "video/mp4")})
    upload, note = await reader.open(multi, pieces(multi.body), 100)
    assert (note, upload.filename, await upload.read()) == ("hi", "a.mp4", b"abcd")
    upload, note = await reader.open(request(), pieces(b"x" * 101), 100)
    assert note == "-"
    with pytest.raises(InputTooLarge, match="larger than the 100 bytes"):
        await upload.read()


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/jsonl", "text/event-stream", ""])
async def test_a_stream_of_items_comes_in(kind: str) -> None:
    lines = b'{"price": 1}\n{"price": 2}\n{"price": "x"}\n'
    if kind == "text/event-stream":
        lines = b"".join(b"data: " + line + b"\n\n" for line in lines.splitlines())
    items, scale = await Reader(read(streamed)).open(request(b"", kind, "scale=3"), pieces(lines[:9], lines[9:]), 1000)
    assert scale == 3
    assert [(await anext(items)).price, (await anext(items)).price] == [1, 2]
    with pytest.raises(Refused) as refused:
        await anext(items)
    assert refused.value.field == "$[2].price"


async def test_a_stream_of_another_kind_is_refused() -> None:
    with pytest.raises(MediaUnsupported, match="application/x-ndjson or text/event-stream, not image/png"):
        await Reader(read(streamed)).open(request(b"", "image/png"), pieces(), 1000)


KINDS = st.sampled_from(
    ["", JSON, FORM, "multipart/form-data; boundary=x", "multipart/form-data", "text/plain", "image/png", "audio/wav"]
    + ["application/x-npy", "application/octet-stream", "application/x-ndjson", "a/b", "\x00", "application/+json"]
)
NAMES = st.sampled_from(
    ["text", "top", "tags", "price", "image", "images", "rows", "name", "inputs", "other", "threshold"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just(PNG64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
PART = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n--x--\r\n'
BODIES = (
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(NAMES, VALUES, max_size=4).map(lambda value: json.dumps(value).encode())
    | st.tuples(NAMES, st.binary(max_size=30)).map(lambda part: PART % (part[0].encode(), part[1]))
    | st.sampled_from([PNG, WAV, npy.encode(ROWS), b"text=a&text=b&top=1", PNG[:40], WAV[:30], npy.encode(ROWS)[:50]])
)
EVERY = {each: Reader(read(each)) for each in (plain, whole, person, seen, heard, rows, named, data, several, bounded)}


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(list(EVERY)),
    BODIES,
    KINDS,
    st.text("atp=&%1\xe9", max_size=12),
    st.none() | st.text("059x", max_size=4),
)
def test_whatever_comes_is_read_or_refused(
    function: Any, body: bytes, kind: str, query: str, length: str | None
) -> None:
    more = {} if length is None else {"inference_header_content_length": length}
    try:
        found = EVERY[function].inputs(request(body, kind, query, **more))
    except Refused as refused:
        assert refused.message and (refused.field == "" or refused.field.startswith("$"))
    else:
        assert len(found) == len(read(function).inputs)


@pytest.mark.parametrize(
    ("function", "sent", "sentence"),
    [
        (plain, request("text=%ff", FORM), "percent-encoded UTF-8"),
        (plain, request('{"text": "a"}', JSON, "top=4"), "'top' stands in the URL beside a JSON body"),
        (seen, request(b""), "the body is empty: send application/json, image/png, image/jpeg or multipart/form-data"),
        (seen, request(b"", "image/png"), "the body is empty: send application/json, image/png"),
        (whole, request(b"", JSON), "the body is empty: send application/json"),
        (rows, request('{"rows": [[1e39]]}', JSON), "takes float32 values, a given value is larger than"),
        (rows, request('{"rows": [[1, null]]}', JSON), "takes numbers or booleans"),
    ],
)
def test_a_refusal_says_what_is_wrong(function: Any, sent: Request, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        inputs(function, sent)


def test_what_the_url_says_beside_json_is_nobodys_business_unless_it_is_an_input() -> None:
    assert inputs(plain, '{"text": "a"}', JSON, "utm=1") == ("a", 3, ["x"])
