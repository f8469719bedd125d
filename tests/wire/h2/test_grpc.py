"""gRPC over HTTP/2: timeouts, texts, the status of an answer, and heads that give a field twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import LineMemo
from oriel_wire.h2.grpc import (
    CODES,
    HEAD,
    OK,
    PREFIX_BYTES,
    UNAVAILABLE,
    UNIMPLEMENTED,
    UNKNOWN,
    decode_text,
    encode_text,
    encode_timeout,
    parse_timeout_s,
    prefix,
    read_head,
    status_of,
)
from oriel_wire.h2.hpack import Decoder, Field
from oriel_wire.h2.known_fields import malformed

CALL: list[Field] = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"x"),
    (b"content-type", b"application/grpc+proto"),
    (b"te", b"trailers"),
]


# Timeouts ------------------------------------------------------------------------------------------------------------


@given(st.floats(min_value=0.001, max_value=99_999_999.0))
def test_a_timeout_is_never_longer_than_what_is_left(seconds: float) -> None:
    read = parse_timeout_s(encode_timeout(seconds))
    assert read is not None and read <= seconds + 1e-9 and seconds - read <= (0.001 if seconds < 1e5 else 1.0) + 1e-9


@given(st.floats(min_value=-1e9, max_value=0.001))
def test_no_time_left_is_a_millisecond(seconds: float) -> None:
    assert encode_timeout(seconds) == b"1m"


@given(st.floats(min_value=0.0, max_value=1e12))
def test_a_timeout_has_at_most_eight_digits(seconds: float) -> None:
    value = encode_timeout(seconds)
    assert value[:-1].isdigit() and len(value) <= 9 and not malformed(b"grpc-timeout", value)


@given(st.integers(min_value=0, max_value=99_999_999), st.sampled_from("HMSmun"))
def test_each_unit_is_read(count: int, unit: str) -> None:
    of = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
    assert parse_timeout_s(b"%d%c" % (count, ord(unit))) == pytest.approx(count * of[unit])


@pytest.mark.parametrize(
    "value", [b"", b"1", b"S", b"-1S", b"+1S", b" 1S", b"1.5S", b"1s", b"123456789S", b"1SS", b"\xb2S"]
)
def test_what_is_no_timeout(value: bytes) -> None:
    assert parse_timeout_s(value) is None
    with pytest.raises(BadMessage, match="grpc-timeout"):
        read_head([*CALL, (b"grpc-timeout", value)], LineMemo())


# Texts ---------------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_and_is_a_valid_field(text: str) -> None:
    value = encode_text(text)
    assert decode_text(value) == text
    assert malformed(b"grpc-message", value) == "" and value.isascii()


@given(st.binary())
def test_what_cannot_be_decoded_is_replaced(value: bytes) -> None:
    decode_text(value)
    decode_text(value.replace(b"a", b"%f"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain text, as it is: ~!", b"plain text, as it is: ~!"),
        ("100 %", b"100 %25"),
        ("a\r\nb", b"a%0D%0Ab"),
        ("é", b"%C3%A9"),
        (" ", b"%20"),
        ("  in  ", b"%20 in %20"),
    ],
)
def test_texts_as_they_are_sent(text: str, value: bytes) -> None:
    assert encode_text(text) == value


@pytest.mark.parametrize(("value", "text"), [(b"%zz%", "%zz%"), (b"%c3%a9", "é"), (b"%FF", "\ufffd")])
def test_texts_as_others_send_them(value: bytes, text: str) -> None:
    assert decode_text(value) == text


# The status of an answer ---------------------------------------------------------------------------------------------


def status(http: bytes, *trailers: Field) -> tuple[int, bytes]:
    return status_of([(b":status", http)], list(trailers))


@given(st.binary(max_size=6))
def test_a_status_is_one_of_grpcs(value: bytes) -> None:
    code, _ = status(b"200", (b"grpc-status", value))
    wanted = int(value) if value.isdigit() and len(value) < 4 and int(value) < len(CODES) else UNKNOWN
    assert code == wanted


def test_the_status_of_the_trailers_is_the_calls() -> None:
    assert status(b"200", (b"grpc-status", b"0")) == (OK, b"")
    assert status(b"200", (b"grpc-message", b"why"), (b"grpc-status", b"14")) == (UNAVAILABLE, b"why")
    assert status(b"503", (b"grpc-status", b"12")) == (UNIMPLEMENTED, b"")


@pytest.mark.parametrize(
    ("http", "name"),
    [
        (b"400", "INTERNAL"),
        (b"401", "UNAUTHENTICATED"),
        (b"403", "PERMISSION_DENIED"),
        (b"404", "UNIMPLEMENTED"),
        (b"429", "UNAVAILABLE"),
        (b"502", "UNAVAILABLE"),
        (b"503", "UNAVAILABLE"),
        (b"504", "UNAVAILABLE"),
        (b"500", "UNKNOWN"),
        (b"200", "UNKNOWN"),
    ],
)
def test_an_answer_without_a_status_of_grpc(http: bytes, name: str) -> None:
    code, text = status(http, (b"content-type", b"text/html"))
    assert CODES[code] == name and text
    assert status_of([], []) == (UNKNOWN, b"the server answered HTTP status ")


# Heads ---------------------------------------------------------------------------------------------------------------


def test_what_is_read_of_a_head() -> None:
    more: list[Field] = [
        (b"authorization", b"Bearer one"),
        (b"x-api-key", b"two"),
        (b"traceparent", b"00-0-0-01"),
        (b"tracestate", b"a=1"),
        (b"tracestate", b"b=2"),
        (b"x-request-id", b"first"),
        (b"x-request-id", b"second"),
        (b"x-request-timeout-ms", b"50"),
        (b"x-request-tier", b"gold"),
        (b"grpc-timeout", b"100m"),
        (b"grpc-encoding", b"gzip"),
        (b"x-own", b"\xff"),
    ]
    head = read_head([*CALL, *more], LineMemo())
    assert head.path == b"/a.B/C" and head.content_type == b"application/grpc+proto"
    assert [(field.name, field.value) for field in head.credentials or []] == [
        ("authorization", "Bearer one"),
        ("x-api-key", "two"),
    ]
    assert (head.traceparent, head.tracestate) == ("00-0-0-01", "a=1,b=2")
    assert (head.request_id, head.requested_ms, head.tier) == ("first", "50", "gold")
    assert head.timeout_s == pytest.approx(0.1) and head.encoding == b"gzip"
    assert head.get("x-own") == "\xff" and head.get("x-other") is None and head.get("x-\u0142") is None
    assert head.list_bytes == sum(len(name) + len(value) + 32 for name, value in [*CALL, *more])


def test_two_trace_contexts_are_none() -> None:
    assert read_head([*CALL, *[(b"traceparent", b"00-0-0-01")] * 2], LineMemo()).traceparent == ""


@pytest.mark.parametrize("encoding", [b"identity", b""])
def test_no_compression(encoding: bytes) -> None:
    assert read_head([*CALL, (b"grpc-encoding", encoding)], LineMemo()).encoding == b""
    assert read_head(CALL, LineMemo()).encoding == b""


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        (b"grpc-timeout", b"1S", b"2S"),
        (b"grpc-encoding", b"gzip", b"identity"),
        (b"grpc-encoding", b"identity", b"gzip"),
        (b"content-type", b"application/grpc", b"text/plain"),
        (b"x-request-timeout-ms", b"1", b"2"),
        (b"x-request-tier", b"gold", b"bronze"),
    ],
)
def test_a_field_with_two_values_is_refused(name: bytes, one: bytes, other: bytes) -> None:
    fields = [field for field in CALL if field[0] != name]
    with pytest.raises(BadMessage, match=f"{name.decode()} is given twice"):
        read_head([*fields, (name, one), (name, other)], LineMemo())


def test_the_head_of_an_answer_and_the_prefix_of_a_message() -> None:
    decoder = Decoder(max_list_bytes=1024, max_fields=10, memo=None)
    assert decoder.decode(HEAD) == [(b":status", b"200"), (b"content-type", b"application/grpc")]
    assert prefix(0x01020304) == b"\0\x01\x02\x03\x04" and len(prefix(0)) == PREFIX_BYTES
