"""The Huffman code of HPACK, by the judgement of the `hpack` library's encoder and of RFC 7541."""

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.h2 import huffman

encode = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode


@given(st.binary(max_size=200))
def test_every_string_comes_back(text: bytes) -> None:
    assert huffman.decode(encode(text)) == text


def test_every_pair_of_symbols_comes_back() -> None:
    for first in range(256):
        text = bytes(each for second in range(256) for each in (first, second))
        assert huffman.decode(encode(text)) == text


@given(st.binary(max_size=12))
def test_no_string_has_two_codes(data: bytes) -> None:
    """What decodes is what the encoder makes of it: so padding is of ones, shorter than a byte, and no EOS is in it."""
    text = huffman.decode(data)
    assert text is None or encode(text) == data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes.fromhex("f1e3c2e5f23a6ba0ab90f4ff"), b"www.example.com"),
        (bytes.fromhex("a8eb10649cbf"), b"no-cache"),
        (b"", b""),
        (b"\x1f", b"a"),
        (b"\x18", None),  # zeros as padding
        (b"\x1f\xff", None),  # a whole byte of padding
        (b"\xff", None),
        (b"\xff\xff\xff\xff", None),  # EOS and two bits
        (b"\xff\xff\xff\xfc\x1f", None),  # EOS, then a symbol
        (b"\xff\xff\xff\xf0", None),  # LF, cut short
    ],
)
def test_padding_and_eos(data: bytes, text: bytes | None) -> None:
    assert huffman.decode(data) == text
