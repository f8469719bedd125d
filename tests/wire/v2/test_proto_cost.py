"""Large messages are judged before they are parsed: by their fields, and by what their numbers unpack to."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.grpc_names import write_varint
from oriel_wire.v2.proto import v2_pb2
from oriel_wire.v2.proto_cost import FREE_BYTES, MAX_FIELDS, MAX_INTEGERS, MAX_MESSAGES, MAX_TEXT_BYTES, parse

Request = v2_pb2.ModelInferRequest


def big(**more: object) -> v2_pb2.ModelInferRequest:
    message = Request(model_name="m", id="i" * (FREE_BYTES + 1))
    for name, values in more.items():
        getattr(message.inputs.add(name="x", shape=[1, -1]).contents, name).extend(values)
    return message


def sized(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + write_varint(len(data)) + data


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
        b"\x3a\x00" * 40_000,
        sized(5, sized(5, b"\x42\x00" * 40_000)),
        sized(5, sized(5, b"\x18\x01" * 40_000)),
        b"\xf8\x07\x01" * 40_000,
    ],
    ids=["raw contents", "BYTES", "unpacked numbers", "unknown"],
)
def test_too_many_fields_are_refused_without_being_made(data: bytes) -> None:
    assert refused_at(data, f"more than {MAX_FIELDS} fields") < 4 << 20


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x2a\x00" * (MAX_MESSAGES + 1), "inputs"),
        (b"\x32\x00" * (MAX_MESSAGES + 1), "outputs"),
        (b"\x22\x00" * (MAX_MESSAGES + 1), "parameters"),
        (b"".join(sized(4, sized(1, b"%d" % n)) for n in range(MAX_MESSAGES + 1)), "parameters"),
        (sized(5, b"\x22\x00" * (MAX_MESSAGES + 1)), "parameters"),
    ],
    ids=["inputs", "outputs", "empty parameters", "parameters", "parameters of an input"],
)
def test_inputs_outputs_and_parameters_are_counted_as_bytes(data: bytes, name: str) -> None:
    assert refused_at(data, f"{name}: more than {MAX_MESSAGES} are given") < 1 << 20


def test_as_many_as_are_accepted() -> None:
    message = big()
    for n in range(MAX_MESSAGES):
        message.parameters[f"p{n}"].int64_param = n
        message.inputs.add(name=f"x{n}").parameters["p"].bool_param = True
        message.outputs.add(name=f"y{n}")
    assert parse(Request, message.SerializeToString()) == message


def test_too_many_are_counted_no_further() -> None:
    """The top level is judged before what is in it, and up to the one that is too many: junk elsewhere is not seen."""
    parameters = b"".join(sized(4, sized(1, b"%d" % n)) for n in range(MAX_MESSAGES + 1))
    refused_at(sized(5, b"\xff" * 12) + parameters + b"\xff" * 12, "parameters: more than")


def refused_at(data: bytes, said: str) -> int:
    """The most memory it took, in bytes."""
    padded = sized(3, b"i" * FREE_BYTES) + data
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=said):
            parse(Request, padded)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_integers_and_booleans_are_counted_together() -> None:
    half = MAX_INTEGERS // 2
    assert parse(Request, big(int64_contents=[1] * (half - 4), bool_contents=[True] * half).SerializeToString())
    for name in ("int64_contents", "uint_contents", "bool_contents"):
        data = big(**{name: [1] * MAX_INTEGERS}).SerializeToString()
        assert refused_at(data, f"{name}: the message has more than {MAX_INTEGERS} integers") < 4 << 20
    assert refused_at(sized(5, sized(3, b"\xff\xff\x01" * 8_000_000)), "shape: the message has more than") < 60 << 20


def test_numbers_of_fixed_width_are_not_counted() -> None:
    message = big(fp32_contents=[0.5] * (MAX_INTEGERS + 1))
    assert parse(Request, message.SerializeToString()) == message


def test_names_and_text_are_counted_together() -> None:
    """One character that is not Latin makes four bytes of each other character."""
    wide = b"x" * (MAX_TEXT_BYTES // 2) + "\U0001f600".encode()
    for data in (
        sized(1, wide) + sized(3, wide),
        sized(5, sized(1, wide) + sized(2, wide)),
        sized(4, sized(1, wide)) * 2,
    ):
        with pytest.raises(TooLarge, match=f"names and text of the message are more than {MAX_TEXT_BYTES} bytes"):
            parse(Request, data)
    assert parse(Request, sized(1, wide)).model_name.startswith("xxx")


@pytest.mark.parametrize(
    "tail", [b"\x2a\x05ab", b"\x2a\xff\xff\xff\xff\x0f", b"\xff" * 11, b"\x08", b"\x0d\x00", b"\x2a\x02\x2a\x05"]
)
def test_what_is_no_message_is_refused_large_or_small(tail: bytes) -> None:
    for head in (b"", sized(3, b"i" * FREE_BYTES)):
        with pytest.raises(BadMessage, match="the message is not what this method takes"):
            parse(Request, head + tail)


@pytest.mark.parametrize(("data", "said"), [(b"\x7b\x7c", "no groups"), (b"\xba\x00\x00", "shortest form")])
def test_what_cannot_be_cut_without_reading_all_of_it_is_not_taken_when_large(data: bytes, said: str) -> None:
    assert parse(Request, data) is not None
    refused_at(data, said)


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
    except TooLarge as refusal:
        assert "groups" in refusal.message or "shortest form" in refusal.message
        return
    except BadMessage:
        large = None
    assert (small is None) == (large is None)
