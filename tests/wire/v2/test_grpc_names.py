"""The model-name rule under attack: whatever bytes a client sends, the model that runs is the one authorised.

The judge is a foreign protobuf parser with Triton's own descriptors (tritonclient's).
"""

from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc_names import (
    MAX_BEGINNING,
    MAX_FIELDS,
    MAX_PEEK,
    Beginning,
    append_model,
    peek_answer,
    peek_model,
    peek_parameters,
    schedule_fields,
)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int, pad: int = 0) -> bytes:
    out = bytearray()
    while True:
        byte = value & 127
        value >>= 7
        if value or pad:
            out.append(byte | 128)
            if not value:
                out += b"\x80" * (pad - 1) + b"\x00"
                return bytes(out)
        else:
            out.append(byte)
            return bytes(out)


def runs(message: bytes) -> tuple[str, str] | None:
    """What an upstream would run; None when it cannot parse the message."""
    request = service_pb2.ModelInferRequest()
    try:
        request.ParseFromString(message)
    except DecodeError:
        return None
    return request.model_name, request.model_version


def judge(message: bytes) -> None:
    """Either we refuse, or what would run is exactly what we read (or nothing runs)."""
    try:
        name, version = peek_model(message)
    except BadMessage:
        return
    assert runs(append_model(message, name, version)) in (None, (name, version))


PIECES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 8), st.binary(max_size=12)).map(lambda p: field(*p)),
        st.sampled_from(
            [
                field(1, b"allowed"),
                field(1, b"secret"),
                field(2, b"1"),
                field(2, b"2"),
                varint(1 << 3 | 2, pad=2) + varint(6) + b"secret",  # an overlong tag for field 1
                varint(1 << 3 | 2) + varint(6, pad=3) + b"secret",  # an overlong length
                varint((1 << 3 | 2) + (1 << 32)) + varint(6) + b"secret",  # a tag that is field 1 modulo 2^32
                varint(1 << 3 | 0) + varint(5),  # field 1 with another wire type
                varint(9 << 3 | 3),  # a group that is never closed
                varint(9 << 3 | 3) + varint(9 << 3 | 4),
                varint(9 << 3 | 1) + b"12345678",
                varint(9 << 3 | 5) + b"1234",
                varint(7 << 3 | 2) + varint(40),  # raw contents that claim more bytes than there are
                varint(7 << 3 | 2) + varint((1 << 64) + 3),  # a length that wraps
            ]
        ),
        st.binary(max_size=6),
    ),
    max_size=6,
).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(PIECES)
@example(field(1, b"allowed") + field(1, b"secret") + varint(7 << 3 | 2) + varint(20))
@example(field(1, b"allowed") + field(1, b"secret") + varint(9 << 3 | 3))
def test_no_message_runs_another_model_than_the_one_read(message: bytes) -> None:
    judge(message)


def test_the_first_name_is_read_and_put_in_force() -> None:
    message = field(1, b"allowed") + field(2, b"1") + field(1, b"secret") + field(2, b"2")
    assert runs(message) == ("secret", "2")  # what an upstream would run without the rule
    assert peek_model(message) == ("allowed", "1")
    assert runs(append_model(message, "allowed", "1")) == ("allowed", "1")


@pytest.mark.parametrize(
    "tail",
    [
        varint(7 << 3 | 2) + varint(20),  # the appended name would become the end of a tensor
        varint(9 << 3 | 3),  # ... or the inside of an unknown group
        varint(5 << 3 | 1) + b"123",
        b"\xff",
    ],
)
def test_a_message_that_would_swallow_what_is_appended_is_refused(tail: bytes) -> None:
    with pytest.raises(BadMessage):
        peek_model(field(1, b"allowed") + field(1, b"secret") + tail)


def test_a_name_that_comes_late_or_among_too_many_fields_is_refused() -> None:
    with pytest.raises(BadMessage, match="within the first"):
        peek_model(field(7, b"x" * (MAX_PEEK + 1)) + field(1, b"a"))
    with pytest.raises(BadMessage, match="more than"):
        peek_model(field(1, b"a") + field(7, b"") * MAX_FIELDS)


@settings(max_examples=300, deadline=None)
@given(PIECES, st.lists(st.integers(1, 40), max_size=30))
@example(field(1, b"allowed") + field(2, b"1") + field(1, b"secret"), [1] * 20)
@example(field(7, b"x" * 300) + field(1, b"late"), [1, 1, 1, 290])
def test_a_beginning_says_what_the_whole_message_says(message: bytes, sizes: list[int]) -> None:
    """It is read on where it stopped, and says the first name as soon as this has come."""
    names, came, known = Beginning(), 0, ("", "")
    try:
        for size in sizes:
            came += size
            before, known = known, names.read(b"12345" + message[:came], 5)
            assert not before[0] or known[0] == before[0], "a name that is known does not change"
        if came < len(message):
            return
        whole = peek_model(message)
    except BadMessage:
        return
    # a first name without a letter names no model: the next one is guessed
    assert whole[0] in ("", known[0]) and (known[1] in ("", whole[1]) or not whole[1])


class Looked(bytes):
    """Bytes that count how many of them are looked at."""

    count = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Looked.count += len(found) if isinstance(found, bytes) else 1
        return found


@pytest.mark.parametrize(
    "unit", [b"\x18\x00", varint(3 << 3 | 2) + b"\x00", b"\x80", field(3, b"x" * 900), b"\x1d1234"]
)
@pytest.mark.parametrize("prefix", [b"", varint(1 << 3 | 2) + varint(60_000), varint(7 << 3 | 2) + varint(60_000)])
def test_each_byte_of_a_beginning_is_looked_at_a_few_times_only(unit: bytes, prefix: bytes) -> None:
    """It was read from its start again for every byte that came: with the square of its length."""
    counts = []
    for size in (2_000, 4_000):
        names, whole = Beginning(), prefix + unit * (size // len(unit))
        Looked.count = 0
        try:
            for came in range(len(whole)):
                names.read(Looked(whole[: came + 1]))
        except BadMessage:
            pass
        counts.append(Looked.count)
        assert Looked.count <= 20 * len(whole)
    assert counts[1] <= 2 * counts[0] + 100


@pytest.mark.parametrize(
    "beginning",
    [
        field(1, b"m" * 65_530)[:10],
        varint(2 << 3 | 2) + varint(MAX_BEGINNING),
        varint(7 << 3 | 2) + varint(MAX_BEGINNING - 4),
        b"\x18\x00" * (MAX_FIELDS + 1),
        varint(9 << 3 | 3) + bytes(20),
        b"\x80" * 20,
    ],
)
def test_a_beginning_that_cannot_have_a_name_is_refused_at_once(beginning: bytes) -> None:
    """It waited for more bytes than the window of a stream lets through, so until the deadline."""
    with pytest.raises(BadMessage):
        Beginning().read(beginning)


def test_an_ordinary_request_keeps_everything_else() -> None:
    request = service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"abc"])
    parsed = service_pb2.ModelInferRequest.FromString(append_model(request.SerializeToString(), "m", ""))
    assert parsed == request


def parameter(name: bytes, value: bytes) -> bytes:
    """One entry of `parameters`, field 4."""
    return field(4, field(1, name) + field(2, value))


HOSTILE_PARAMETERS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                parameter(b"priority", varint(2 << 3) + varint(9)),  # int64_param
                parameter(b"priority", varint(5 << 3) + varint(9)),  # uint64_param
                parameter(b"priority", field(3, b"9")),
                parameter(b"priority", b""),
                parameter(b"timeout", varint(2 << 3) + varint(10**12)),
                field(4, field(2, varint(5 << 3) + varint(9)) + field(1, b"priority")),  # value before key
                field(4, field(1, b"x") + field(1, b"priority") + field(2, varint(5 << 3) + varint(9))),  # two keys
                field(4, field(2, varint(5 << 3) + varint(9))),  # no key
                parameter(b"other", varint(5 << 3) + varint(3)),
                varint(4 << 3 | 0) + varint(1),  # parameters with another wire type
            ]
        ),
        st.tuples(st.integers(1, 8), st.binary(max_size=12)).map(lambda p: field(*p)),
        st.binary(max_size=4),
    ),
    max_size=6,
).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(HOSTILE_PARAMETERS, st.integers(1, 2**31 - 1), st.one_of(st.none(), st.floats(-1.0, 86400.0)))
def test_no_message_has_another_priority_than_its_tier(message: bytes, priority: int, left_s: float | None) -> None:
    """The last entry of a map wins, so a sender's own priority and timeout count for nothing."""
    try:
        name, version = peek_model(message)
    except BadMessage:
        return
    request = service_pb2.ModelInferRequest()
    try:
        request.ParseFromString(append_model(message, name, version) + schedule_fields(priority, left_s))
    except DecodeError:
        return
    assert (request.model_name, request.model_version) == (name, version)
    assert request.parameters["priority"].WhichOneof("parameter_choice") == "uint64_param"
    assert request.parameters["priority"].uint64_param == priority
    if left_s is not None:
        assert request.parameters["timeout"].int64_param == max(1, int(left_s * 1e6))


@settings(max_examples=300, deadline=None)
@given(HOSTILE_PARAMETERS)
def test_the_parameters_are_those_that_an_upstream_reads(message: bytes) -> None:
    request = service_pb2.ModelInferRequest()
    try:
        peek_model(message)
        request.ParseFromString(message)
    except (BadMessage, DecodeError):
        return
    found = service_pb2.ModelInferRequest.FromString(peek_parameters(message))
    assert dict(found.parameters) == dict(request.parameters) and not found.inputs


def test_too_many_bytes_of_parameters_are_refused() -> None:
    with pytest.raises(BadMessage, match="parameters have more than"):
        peek_parameters(field(4, field(1, b"k" * MAX_PEEK)) + field(7, b"x"))
    assert peek_parameters(field(7, bytes(2 * MAX_PEEK))) == b""


@given(PIECES, st.lists(st.integers(0, 12_000), max_size=8), st.integers(0, 400))
@example(field(7, bytes(9000)) + field(1, b"allowed") + field(2, b"1"), [4000, 9005, 9006], 0)
@example(field(1, b"n" * 9000) + field(2, b"1" * 5000), [1, 3, 4100], 0)
@example(field(7, bytes(70_000)) + field(1, b"late"), [9], 0)
def test_a_message_in_pieces_says_what_it_says_as_a_whole(message: bytes, cuts: list[int], large: int) -> None:
    message = field(9, bytes(large * 20)) + message
    ends = [0, *sorted(cut for cut in cuts if cut < len(message)), len(message)]
    pieces = [memoryview(message)[start:end] for start, end in pairwise(ends)]

    def said(given: bytes | list[bytes | memoryview]) -> tuple[str, str] | str:
        try:
            return peek_model(given)
        except BadMessage as error:
            return error.message

    assert said([*pieces]) == said(message)


@settings(max_examples=120, deadline=None)
@given(PIECES)
def test_every_kind_of_request_that_names_a_model_is_held_to_it(message: bytes) -> None:
    """The rule stands on `model_name` and version being fields 1 and 2 of all of them."""
    try:
        name, version = peek_model(message)
    except BadMessage:
        return
    whole = append_model(message, name, version)
    for kind in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        request = getattr(service_pb2, f"{kind}Request")()
        try:
            request.ParseFromString(whole)
        except DecodeError:
            continue
        assert (request.name, request.version) == (name, version)


def answer(error: str = "", final: bool | None = None, **fields: Any) -> bytes:
    response = service_pb2.ModelInferResponse(**fields)
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    return service_pb2.ModelStreamInferResponse(error_message=error, infer_response=response).SerializeToString()


@pytest.mark.parametrize("final", [None, True, False])
@pytest.mark.parametrize("size", [0, 1, 100, 100_000])
def test_an_answer_says_its_model_and_whether_it_is_the_last(final: bool | None, size: int) -> None:
    fields: dict[str, Any] = {"model_version": "1", "id": "x" * min(size, 200), "raw_output_contents": [bytes(size)]}
    assert peek_answer(answer(final=final, model_name="digits", **fields)) == ("digits", final)
    assert peek_answer(answer(final=final, **fields)) == ("", final)
    assert peek_answer(answer("broken", final=final, id="7")) == ("", True)
    assert peek_answer(answer("broken", model_name="digits")) == ("digits", True)


def test_other_parameters_of_an_answer_say_nothing() -> None:
    response = service_pb2.ModelInferResponse(model_name="digits")
    response.parameters["sequence_id"].int64_param = 7
    response.parameters["triton_final_responses"].bool_param = True
    response.parameters["a"].string_param = "triton_final_response"
    message = service_pb2.ModelStreamInferResponse(infer_response=response)
    assert peek_answer(message.SerializeToString()) == ("digits", None)
    message.infer_response.parameters["triton_final_response"].bool_param = False
    assert peek_answer(message.SerializeToString()) == ("digits", False)


@given(st.binary(max_size=60))
def test_no_answer_breaks_the_stream(data: bytes) -> None:
    for beginning in (b"", b"\x0a", b"\x12\x20", b"\x12\x7f\x22\x19", answer(model_name="digits", final=True)[:-9]):
        model, final = peek_answer(beginning + data)
        assert isinstance(model, str) and final in (None, True, False)
