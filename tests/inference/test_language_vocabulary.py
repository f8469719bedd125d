"""The bytes of tokens, for the tokenizers that the engine reads."""

from collections.abc import Sequence

import pytest

from oriel_inference.language.vocabulary import token_bytes

BYTE_PAIRS = [b"<|end|>", b" the", "é".encode(), b"\xc3", b"<0x4A>"]
SENTENCE_PIECES = [b"</s>", b"<0x0A>", b"<0xC3>", "\u2581the".encode(), "\u2581\u2581".encode(), b"<0x1>"]


class Tokenizer:
    """A stand-in for openvino-genai's, whose first token is a control token."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[bytes, int]:
        return {token: number for number, token in reversed(list(enumerate(self._tokens)))}

    def decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        shown = [self._tokens[number].decode(errors="replace") for (number,) in ids]
        return ["", *shown[1:]] if skip_special_tokens else shown


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (BYTE_PAIRS, [b"", *BYTE_PAIRS[1:]]),
        (SENTENCE_PIECES, [b"", b"\n", b"\xc3", b" the", b"  ", b"<0x1>"]),
    ],
)
def test_the_bytes_of_tokens_are_those_of_their_text(tokens: list[bytes], expected: list[bytes]) -> None:
    assert token_bytes(Tokenizer(tokens)) == (expected, {tokens[0]: 0})
