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


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answers that a body asks for. most: the most tokens of each, None if it does not say. answers: how many.

    model: the name that it gives to the model, its first MAX_NAME characters; "" if it gives none.
    """

    most: int | None = None
    answers: int = 1
    model: str = ""


class _Body(msgspec.Struct):
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    model: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Body).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def wanted(body: bytes) -> Wanted:
    """Read the answers that a body asks for. A body that is larger than READ_BYTES, or no such JSON, asks for one.

    Of several fields for the length of an answer the largest counts, because servers differ in which one they read.
    """
    if len(body) > READ_BYTES:
        return Wanted()
    try:
        encoding = detect_encoding(body)  # as Python's servers read JSON
        fields = _decode(body if encoding == "utf-8" else body.decode(encoding).encode())
        prompts = _prompts(bytes(fields.prompt))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Wanted()
    most = [_count(each) for each in (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens)]
    each = max(_count(fields.n) or 1, _count(fields.best_of) or 1)
    model = fields.model[:MAX_NAME] if isinstance(fields.model, str) else ""
    return Wanted(max((found for found in most if found), default=None), min(each * prompts, MAX_TOKENS), model)


def prompt_tokens(size_bytes: int) -> int:
    """Estimate the tokens of a body: four bytes are about one."""
    return -(-size_bytes // _BYTES_PER_TOKEN)


def reserved(service: str, prompt: int, wants: Wanted, usual: float) -> int:
    """Return the tokens that a call reserves. usual: those of an answer of this tenant and route."""
    if service == "embeddings":
        return min(prompt, MAX_TOKENS)
    most = usual if wants.most is None else wants.most
    return min(prompt + int(min(most, MAX_TOKENS)) * wants.answers, MAX_TOKENS)


def _count(value: Any) -> int | None:
    """Return a count of tokens or answers, None if it is none. Servers also take `16.0` and `"16"` for one."""
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return min(value, MAX_TOKENS) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _prompts(raw: bytes) -> int:
    """Return how many prompts a `prompt` has: it may be a text, texts, the numbers of tokens, or lists of these."""
    if raw[:1] != b"[":
        return 1
    members = _decode_list(raw)
    first = bytes(members[0])[:1] if members else b""
    return len(members) if first in (b'"', b"[") else 1
