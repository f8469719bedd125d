"""Large messages are judged before they are parsed: by their fields, and by what their numbers unpack to."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.proto import v2_pb2
from oriel_wire.v2.proto_cost import FREE_BYTES, MAX_FIELDS, parse

Request = v2_pb2.ModelInferRequest


def big(**more: object) -> v2_pb2.ModelInferRequest:
    message = Request(model_name="m", id="i" * (FREE_BYTES + 1))
    for name, values in more.items():
        getattr(message.inputs.add(name="x", shape=[1, -1]).contents, name).extend(values)
    return message


def sized(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def test_an_honest_large_message_is_what_it_was() -> None:
    message = big(
        fp32_contents=[1.5, 2.5],
        int64_contents=[-1, 2**62],
        bool_contents=[True],
        bytes_contents=[b"", b"a"],
        uint64_contents=[2**64 - 1],
    )
    message.parameters["p"].string_param = "v"
    message.raw_input_contents.append(b"\0" * 100_000)
    assert parse(Request, message.SerializeToString()) == message


@pytest.mark.parametrize(
    "data",
    [
        b"\x2a\x00" * (MAX_FIELDS + 1),
        b"\x3a\x00" * 40_000,
        b"\x22\x00" * 40_000,
        sized(5, sized(5, b"\x42\x00" * 40_000)),
        sized(5, sized(5, b"\x18\x01" * 40_000)),
        b"\xf8\x07\x01" * 40_000,
        b"\x7b\x7c" * 40_000,
    ],
    ids=["inputs", "raw contents", "parameters", "BYTES", "unpacked numbers", "unknown", "groups"],
)
def test_too_many_fields_are_refused_without_being_made(data: bytes) -> None:
    padded = sized(3, b"i" * FREE_BYTES) + data
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=f"more than {MAX_FIELDS} fields"):
            parse(Request, padded)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_numbers_are_counted_as_they_unpack() -> None:
    data = big(int64_contents=[1] * 1000).SerializeToString()
    assert parse(Request, data, limit_bytes=8100).inputs[0].contents.int64_contents == [1] * 1000
    with pytest.raises(TooLarge, match="make up more than 7999 bytes"):
        parse(Request, data, limit_bytes=7999)
    shape = sized(5, sized(3, b"\x01" * 100_000))
    with pytest.raises(TooLarge, match="make up more than"):
        parse(Request, shape, limit_bytes=700_000)


@pytest.mark.parametrize(
    "tail", [b"\x2a\x05ab", b"\x2a\xff\xff\xff\xff\x0f", b"\xff" * 11, b"\x08", b"\x0d\x00", b"\x2a\x02\x2a\x05"]
)
def test_what_is_no_message_is_refused_large_or_small(tail: bytes) -> None:
    for head in (b"", sized(3, b"i" * FREE_BYTES)):
        with pytest.raises(BadMessage, match="the message is not what this method takes"):
            parse(Request, head + tail)


@given(tail=st.binary(max_size=60))
def test_the_walk_refuses_nothing_that_the_parser_takes(tail: bytes) -> None:
    """A small number of fields is never too much: large or small, the parser's word counts."""
    try:
        small = parse(Request, tail)
    except BadMessage:
        small = None
    head = sized(3, b"i" * FREE_BYTES)
    try:
        large = parse(Request, head + tail)
    except BadMessage:
        large = None
    assert (small is None) == (large is None)
