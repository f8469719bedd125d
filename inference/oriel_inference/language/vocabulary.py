"""The bytes of each token of a tokenizer of openvino-genai."""

import re
from typing import Any

_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}".encode()  # SentencePiece writes it for a space


def token_bytes(tokenizer: Any) -> tuple[list[bytes], dict[bytes, int]]:
    """Return the bytes of each id, b"" for control tokens, and the control tokens: text -> id.

    A tokenizer of SentencePiece's kind is known by its tokens for single bytes, which are written in hexadecimal.
    """
    found: dict[bytes, int] = tokenizer.get_vocab()
    size = max(found.values()) + 1
    ids = [[number] for number in range(size)]
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = b"<0x0A>" in found
    vocabulary = [b""] * size
    control: dict[bytes, int] = {}
    for token, number in sorted(found.items(), key=lambda entry: entry[1]):
        if shown[number] != whole[number]:
            control[token] = number
        elif pieces:
            byte = _BYTE.fullmatch(token)
            vocabulary[number] = bytes.fromhex(byte[1].decode()) if byte else token.replace(_SPACE, b" ")
        else:
            vocabulary[number] = token
    return vocabulary, control
