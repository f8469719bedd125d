"""gRPC-Web's bodies: the text form, however it is cut, and the frame of the trailers."""

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.h2.grpc_web import TextReader, encode_piece, is_grpc_web, metadata, trailer_frame


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.integers(0, 120), max_size=8))
def test_a_text_is_read_however_it_is_padded_and_cut(pieces: list[bytes], cuts: list[int]) -> None:
    text = b"".join([encode_piece(piece) for piece in pieces])
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    reader, read, start = TextReader(), b"", 0
    for end in ends:
        read += reader.feed(memoryview(text)[start:end], end == len(text))
        start = end
    assert read == b"".join(pieces)


@given(st.binary(min_size=1, max_size=30), st.data())
def test_what_is_not_base64_is_refused(data: bytes, draw: st.DataObject) -> None:
    text = b64encode(data)
    at = draw.draw(st.integers(0, len(text) - 1))
    if text[at : at + 1] == b"=":
        return
    wrong = draw.draw(st.sampled_from(b"\n -_%\x00\xff"))
    for broken in (text[:at] + bytes((wrong,)) + text[at + 1 :], text[:-1], b"=" + text[1:]):
        with pytest.raises(BadMessage):
            TextReader().feed(broken, True)


def test_the_trailers_are_lines_behind_a_marked_prefix() -> None:
    assert trailer_frame([(b"grpc-status", b"0"), (b"a", b"b")]) == b"\x80\0\0\0\x16grpc-status: 0\r\na: b\r\n"


@pytest.mark.parametrize("kind", ["", "+proto", "-text", "-text+proto", "; charset=utf-8", "+PROTO ; a"])
def test_protobuf_in_either_form_is_taken(kind: str) -> None:
    assert is_grpc_web(f"application/grpc-web{kind}".encode())


@pytest.mark.parametrize("kind", ["+json", "+thrift", "-texts", "x", "-text-base64", "+proto+proto"])
def test_other_types_are_not(kind: str) -> None:
    assert not is_grpc_web(f"application/grpc-web{kind}".encode())


def test_what_a_browser_adds_is_no_metadata() -> None:
    own = [(b"x-mine", b"1"), (b"original", b"2"), (b"security", b"3"), (b"grpc-timeout", b"1S")]
    added = [(b"origin", b"o"), (b"sec-fetch-site", b"s"), (b"accept-language", b"a"), (b"x-grpc-web", b"1")]
    assert metadata([*added, *own]) == own
