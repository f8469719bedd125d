"""Bounds what it takes to compile a guide: all sequences of a model wait for it, once for each new guide.

Measured with a vocabulary of 49,152 tokens on two cores: 16 to 30 ms for each character of a string of bounded length,
2.2 s for 400 optional properties, 10 s for 500 levels (docs/decisions/0251-guides-of-language-models.md).
"""

import re
from collections.abc import Iterator

import msgspec

from oriel_inference.errors import InvalidRequest
from oriel_inference.language.engine import Guide

MAX_BYTES = 16 << 10
MAX_LEVELS = 32
MAX_STATES = 48
MAX_PROPERTIES = 100
_COUNTED = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_PATTERNS = ("pattern", "regex", "grammar")
_QUANTIFIER = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def check_guide(guide: Guide) -> None:
    """Raise InvalidRequest if a guide is too large to be compiled while others wait, or is not the JSON it must be."""
    levels = properties = 0
    if (size_bytes := len(guide.text.encode())) > MAX_BYTES or guide.kind in ("regex", "grammar"):
        states = _pattern_states(guide.text[:MAX_BYTES])
    else:
        try:
            found = list(_containers(msgspec.json.decode(guide.text)))
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"the guide is no JSON: {str(error)[:200]}") from error
        levels = max((level for level, _ in found), default=0)
        objects = [each for _, each in found if isinstance(each, dict)]
        properties = sum(len(named) for each in objects if isinstance(named := each.get("properties"), dict))
        states = sum(map(_states, objects))
    for what, count, most in (
        ("bytes", size_bytes, MAX_BYTES),
        ("levels of brackets", levels, MAX_LEVELS),
        ("properties", properties, MAX_PROPERTIES),
        ("classes of characters and bounded repetitions", states, MAX_STATES),
    ):
        if count > most:
            reason = f"the guide has {count} {what}, at most {most} are compiled while other calls wait"
            raise InvalidRequest(f"{reason}: leave some out, and check the answer instead")


def _containers(value: object, level: int = 1) -> Iterator[tuple[int, object]]:
    """Return all objects and arrays of a JSON value, and how deep they lie."""
    if isinstance(value, dict | list):
        yield level, value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each, level + 1)


def _states(value: dict[str, object]) -> int:
    """Return the repetitions that a part of a JSON schema asks for itself, and those of the patterns in it."""
    counts = [count for key in _COUNTED if isinstance(count := value.get(key), int | float)]
    patterns = [text for key in _PATTERNS if isinstance(text := value.get(key), str)]
    if isinstance(named := value.get("patternProperties"), dict):
        patterns += named
    return int(max(counts, default=0)) + sum(map(_pattern_states, patterns))


def _pattern_states(text: str) -> int:
    """Return how often a regular expression or a grammar matches one of many characters, which is what takes time: each
    class of characters counts as often as it is repeated.
    """
    text = "".join(text.split())
    repeated, times = sum(map(text.count, ".[\\")), 1
    for found in _QUANTIFIER.finditer(text):
        count = max(int(number[:9] or 0) for number in (found[1], found[2] or ""))
        if text[found.start() - 1 : found.start()] == ")":
            times *= max(1, count)
        else:
            repeated += count
    return max(1, repeated) * times
