"""How many tokens a call of the OpenAI API may use: what it reserves of a token limit before its answer is known. Pure.

A call reserves its prompt, by its size, and the longest answer that it asks for, or else the usual one. It is settled
by what its answer reports. The prompt is not tokenised: a gateway has no vocabulary, and servers differ in theirs.
"""

from dataclasses import dataclass
from json import detect_encoding
from typing import Any

import msgspec

READ_BYTES = 4 * 1024 * 1024  # the most bytes of a body that is read for the length of its answer
USUAL_TOKENS = 256.0  # an answer whose length is neither asked for nor known
MAX_TOKENS = 10**9
MAX_NAME = 128
_BYTES_PER_TOKEN = 4
_MAX_DIGITS = 32
# Texts that Python's servers take although they are no JSON, as halves of surrogate pairs -> JSON of the same length.
_TAKEN = ((b"\\ud", b"\\u0"), (b"\\uD", b"\\u0"), (b"NaN", b"0.0"), (b"Infinity", b"0.000000"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answers that a body asks for. most: the most tokens of each, None if it does not say. answers: their number.

    model: the name that it gives to the model, its first MAX_NAME characters; "" if it gives none.
    """

    most: int | None = None
    answers: int = 1
    model: str = ""


_NULL = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    max_tokens: msgspec.Raw = _NULL
    max_completion_tokens: msgspec.Raw = _NULL
    max_output_tokens: msgspec.Raw = _NULL
    n: msgspec.Raw = _NULL
    best_of: msgspec.Raw = _NULL
    model: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL


_decode = msgspec.json.Decoder(_Body).decode


def wanted(body: bytes) -> Wanted:
    """Read the answers that a body asks for. A body that is larger than READ_BYTES, or no such JSON, asks for one.

    If several fields name the length of an answer, the largest counts, because servers differ in which one they read.
    """
    if len(body) > READ_BYTES:
        return Wanted()
    try:
        encoding = detect_encoding(body)  # as Python's servers read JSON
        text = body if encoding == "utf-8" else body.decode(encoding).encode()
        try:
            fields = _decode(text)
        except msgspec.DecodeError:
            for taken, strict in _TAKEN:
                text = text.replace(taken, strict)
            fields = _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Wanted()
    model = _value(raw) or "" if bytes(raw := fields.model)[:1] == b'"' else ""
    most = [_count(each) for each in (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens)]
    each = max(_count(fields.n) or 1, _count(fields.best_of) or 1) * _prompts(bytes(fields.prompt))
    return Wanted(max((found for found in most if found), default=None), min(each, MAX_TOKENS), model[:MAX_NAME])


def prompt_tokens(size_bytes: int) -> int:
    """Estimate the tokens of a body: four bytes are about one."""
    return -(-size_bytes // _BYTES_PER_TOKEN)


def reserved(service: str, prompt: int, wants: Wanted, usual: float) -> int:
    """Return the tokens that a call reserves. usual: those of an answer of this tenant and route."""
    if service == "embeddings":
        return min(prompt, MAX_TOKENS)
    most = usual if wants.most is None else wants.most
    return min(prompt + int(min(most, MAX_TOKENS)) * wants.answers, MAX_TOKENS)


def _count(raw: msgspec.Raw) -> int | None:
    """Return a count of tokens or answers, None if it is none. Servers also take `16.0` and `"16"` for one."""
    if len(text := bytes(raw)) > _MAX_DIGITS:
        return MAX_TOKENS if text[:1].isdigit() else None
    value = _value(raw)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return min(value, MAX_TOKENS) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _value(raw: msgspec.Raw) -> Any:
    """Decode one field; None if it cannot be read, which says nothing of the others."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _prompts(raw: bytes) -> int:
    """Return how many prompts a `prompt` has: it may be a text, texts, the numbers of tokens, or lists of these.

    They are counted by their quotes and brackets, because a list of millions takes too long to decode.
    """
    first = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
    if first == b'"':
        return raw.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') // 2
    return max(raw.count(b"[") - 1, 1) if first == b"[" else 1
