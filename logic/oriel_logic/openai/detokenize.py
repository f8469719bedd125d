"""Tokens back to text, one at a time: a character that lies across tokens comes out whole or not at all."""

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DecoderUnknown", "Detokenizer", "Vocabulary", "pieces_of"]

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
SPACE = "\u2581"


class DecoderUnknown(ValueError):
    """The tokenizer file has a decoder whose pieces cannot be put together one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """pieces: token id -> the bytes it stands for, empty for control tokens. named: control tokens by their text."""

    pieces: Sequence[bytes]
    named: Mapping[str, int]


class Detokenizer:
    """Text of one sequence. Bytes that are no UTF-8 come out as U+FFFD."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        """What this token completes. A token outside of the vocabulary stands for nothing."""
        return self._decode(self._pieces[token]) if 0 <= token < len(self._pieces) else ""

    def flush(self) -> str:
        """The sequence has ended: a character that is not whole is U+FFFD."""
        return self._decode(b"", True)


def pieces_of(decoder: Mapping[str, Any] | None, tokens: Sequence[str], added: Mapping[int, str | None]) -> list[bytes]:
    """What each token stands for, by the `decoder` of a `tokenizer.json`.

    tokens: by id. added: those that are text as they are, by id; None: control tokens, which stand for nothing.
    A space that the decoder would cut off the very first token is kept: what is generated continues a prompt.
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
    """The 256 characters that stand for bytes in byte-level BPE (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return table | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def sentence_piece(token: str, *, fallback: bool) -> bytes:
    found = BYTE.match(token) if fallback else None
    return bytes([int(found[1], 16)]) if found else token.replace(SPACE, " ").encode()


def word_piece(token: str, prefix: str) -> bytes:
    return token[len(prefix) :].encode() if token.startswith(prefix) else b" " + token.encode()
