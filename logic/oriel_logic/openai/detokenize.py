"""Converts tokens to text one at a time; a character that spans several tokens is held back until it is complete."""

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
SPACE = "\u2581"


class DecoderUnknown(ValueError):
    """The decoder of the tokenizer file does not allow decoding one token at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of each token. pieces: the bytes of each token by its id, empty for control tokens. named: control
    tokens by their text.
    """

    pieces: Sequence[bytes]
    named: Mapping[str, int]


class Detokenizer:
    """The text of one sequence. Bytes that are not UTF-8 become U+FFFD."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        """Return the text that this token completes. A token outside the vocabulary has none."""
        return self._decode(self._pieces[token]) if 0 <= token < len(self._pieces) else ""

    def flush(self) -> str:
        """Return the rest of an ended sequence: an incomplete character becomes U+FFFD."""
        return self._decode(b"", True)


def pieces_of(decoder: Mapping[str, Any] | None, tokens: Sequence[str], added: Mapping[int, str | None]) -> list[bytes]:
    """Return the bytes of each token, by the `decoder` of a `tokenizer.json`.

    tokens: the tokens by their id.
    added: tokens that are text as they are, by id; None for control tokens, which have no text. A space that the
        decoder would remove from the very first token is kept: generated text continues a prompt.
    Raises DecoderUnknown.
    """
    kinds = kinds_of(decoder)
    if "ByteLevel" in kinds:
        table = byte_level_table()
        plain = [bytes(table[each] for each in token if each in table) for token in tokens]
    elif "Metaspace" in kinds or "ByteFallback" in kinds:
        plain = [sentence_piece(token, fallback="ByteFallback" in kinds) for token in tokens]
    elif "WordPiece" in kinds:
        prefix = str(kinds["WordPiece"].get("prefix", "##"))
        plain = [word_piece(token, prefix) for token in tokens]
    else:
        raise DecoderUnknown(
            f"the tokenizer's decoder {', '.join(kinds) or 'none'} is not one of ByteLevel, Metaspace, ByteFallback, "
            "WordPiece"
        )
    for token, text in added.items():
        plain[token] = b"" if text is None else text.encode()
    return plain


def kinds_of(decoder: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    if decoder is None:
        return {}
    if decoder.get("type") == "Sequence":
        return {str(each.get("type")): each for each in decoder.get("decoders", ())}
    return {str(decoder.get("type")): decoder}


def byte_level_table() -> dict[str, int]:
    """Return the 256 characters that stand for bytes in byte-level BPE (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return table | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def sentence_piece(token: str, *, fallback: bool) -> bytes:
    found = BYTE.match(token) if fallback else None
    return bytes([int(found[1], 16)]) if found else token.replace(SPACE, " ").encode()


def word_piece(token: str, prefix: str) -> bytes:
    return token[len(prefix) :].encode() if token.startswith(prefix) else b" " + token.encode()
