from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.bodies.multipart import MAX_FIELD_BYTES, MAX_PARTS, Part, Parts, fields_of, open_upload, parse
from oriel_logic.errors import InputTooLarge, Refused
from oriel_wire.v2.depth import MAX_DEPTH

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=20)


def form(data: Any = None, files: Any = None) -> tuple[bytes, str]:
    """A body as httpx writes it, a judge of our reading."""
    request = httpx.Request("POST", "http://x", data=data, files=files)
    return request.read(), request.headers["content-type"]


async def cut(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def test_fields_are_text_and_files_are_bytes() -> None:
    body, kind = form({"prompt": "größe", "tag": ["a", "b"]}, {"image": ("7.png", b"\x89PNG", "image/png")})
    parts = parse(body, kind)
    assert fields_of(parts) == {"prompt": "größe", "tag": ["a", "b"], "image": b"\x89PNG"}
    image = next(each for each in parts if each.name == "image")
    assert (image.filename, image.content_type, image.is_file) == ("7.png", "image/png", True)


def test_a_part_of_json_is_its_value() -> None:
    body, kind = form(files={"box": (None, b'{"x": 1}', "application/json"), "one": (None, b"1")})
    assert fields_of(parse(body, kind), lists=frozenset({"one"})) == {"box": {"x": 1}, "one": ["1"]}


def test_a_part_of_json_is_nested_as_deep_as_a_body_may_be() -> None:
    for levels in (MAX_DEPTH, MAX_DEPTH + 1):
        body, kind = form(files={"box": (None, b"[" * levels + b"]" * levels, "application/json")})
        if levels == MAX_DEPTH:
            assert fields_of(parse(body, kind))
        else:
            with pytest.raises(Refused, match="not valid application/json"):
                fields_of(parse(body, kind))


@given(st.dictionaries(NAMES, st.binary(max_size=60), min_size=1, max_size=5), st.integers(1, 40))
async def test_however_it_is_cut_the_parts_are_the_same(files: dict[str, bytes], size: int) -> None:
    body, kind = form(files={name: ("f", data, "application/octet-stream") for name, data in files.items()})
    parts = Parts(kind)
    async for piece in cut(body, size):
        parts.feed(piece)
    parts.end()
    assert [bytes(each.data) for each in parts.found] == list(files.values())


@given(st.binary(max_size=300))
def test_any_bytes_are_parts_or_a_refusal(body: bytes) -> None:
    for framed in (body, b"--x\r\n" + body, b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + body):
        try:
            assert all(isinstance(each, Part) for each in parse(framed, "multipart/form-data; boundary=x"))
        except Refused as refused:
            assert str(refused)


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (b"", "multipart/form-data", "names no boundary"),
        (b"", "multipart/form-data; boundary=" + "x" * 300, "Boundary"),
        (b"--x\r\n", "multipart/form-data; boundary=x", "ends too early"),
        (b"--x\r\n\r\nno head\r\n--x--", "multipart/form-data; boundary=x", "no name"),
        (
            b'--x\r\nContent-Disposition: form-data; name="' + b"n" * 200 + b'"\r\n\r\n\r\n--x--',
            "multipart/form-data; boundary=x",
            "longer than 128",
        ),
        (b"--x\r\n" + b"a: b\r\n" * 9 + b"\r\n\r\n--x--", "multipart/form-data; boundary=x", "[Hh]eader"),
        (b"--x\r\na: " + b"b" * 3000 + b"\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x", "[Hh]eader"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, kind: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        parse(body, kind)


def test_parts_and_fields_are_bounded() -> None:
    for data in ({"a": ["1"] * MAX_PARTS}, {"a": "x" * (MAX_FIELD_BYTES + 1)}):
        with pytest.raises(InputTooLarge):
            parse(*form(files={"f": ("f", b"")}, data=data))
    assert len(parse(*form({"a": "x" * MAX_FIELD_BYTES}, {"f": ("f", b"x" * (MAX_FIELD_BYTES + 1))}))) == 2


async def test_a_file_is_read_while_it_comes_after_the_fields_before_it() -> None:
    body, kind = form({"note": "hi"}, {"file": ("a.bin", b"0123456789" * 10, "application/octet-stream")})
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        async for piece in cut(body, 16):
            taken += len(piece)
            yield piece

    before, upload = await open_upload(pieces(), kind, "file", limit_bytes=1000)
    assert fields_of(before) == {"note": "hi"} and upload.filename == "a.bin"
    assert taken < body.index(b"0123456789") + 20  # the rest has not been asked for
    assert await anext(upload) and taken < len(body)
    await upload.read()
    assert taken == len(body) and upload.received_bytes == 100


async def test_a_field_after_the_file_is_too_late() -> None:
    body, kind = form(files=[("file", ("a", b"1")), ("note", (None, b"hi"))])
    _, upload = await open_upload(cut(body, 8), kind, "file", limit_bytes=1000)
    with pytest.raises(Refused, match="before the file, not after it: note"):
        await upload.read()


async def test_a_file_is_bounded_and_has_to_be_there() -> None:
    body, kind = form(files={"file": ("a", b"x" * 100)})
    _, upload = await open_upload(cut(body, 16), kind, "file", limit_bytes=50)
    with pytest.raises(InputTooLarge, match="larger than the 50 bytes"):
        await upload.read()
    with pytest.raises(Refused) as refused:
        await open_upload(cut(body, 16), kind, "other", limit_bytes=1000)
    assert refused.value.field == "$.other"
    _, broken = await open_upload(cut(body[:-30], 16), kind, "file", limit_bytes=1000)
    with pytest.raises(Refused, match="ends too early"):
        await broken.read()
