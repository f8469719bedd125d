"""Bounds what it takes to compile a guide: all sequences of a model wait for it, once for each new guide.

Measured with a vocabulary of 49,152 tokens on two cores: 16 to 30 ms for each character of a string of bounded length,
2.2 s for 400 optional properties, 10 s for 500 levels; thousands of levels crash the compiler
(docs/decisions/0251-guides-of-language-models.md).
"""

import re
from collections.abc import Iterator

import msgspec

from oriel_inference.errors import InvalidRequest
from oriel_inference.language.engine import Guide

MAX_BYTES = 16 << 10
MAX_DEPTH = 32
MAX_STATES = 48
MAX_PROPERTIES = 100
CLASSES = "classes of characters and bounded repetitions"
_COUNTED = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_PATTERNS = ("pattern", "regex", "grammar")
_QUANTIFIER = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def check_guide(guide: Guide) -> None:
    """Raise InvalidRequest if a guide is too large to be compiled while others wait, or is not the JSON it must be."""
    text = guide.text
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequest(f"the guide has more than {MAX_BYTES} bytes: send a smaller one")
    depth, properties, states = _brackets(text), 0, 0
    if guide.kind in ("json_schema", "structural_tag"):
        try:
            schema = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"the guide is no JSON: {str(error)[:200]}") from error
        values = list(_values(schema))
        properties, states = sum(map(_properties, values)), sum(map(_states, values))
    else:
        states = _pattern_states(text)
    most = {"levels of brackets": MAX_DEPTH, "properties": MAX_PROPERTIES, CLASSES: MAX_STATES}
    for (what, bound), found in zip(most.items(), (depth, properties, states), strict=True):
        if found > bound:
            reason = f"the guide has {found} {what}, at most {bound} are compiled while other calls wait"
            raise InvalidRequest(f"{reason}: leave some out, and check the answer instead")


def _brackets(text: str) -> int:
    """Return the most brackets that are open at a time; those inside of strings count as well."""
    deepest = level = 0
    for each in text:
        level += (each in "([{") - (each in ")]}" and level > 0)
        deepest = max(deepest, level)
    return deepest


def _values(value: object) -> Iterator[object]:
    """Return all values inside of a JSON value, and the value itself."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _values(each)


def _properties(value: object) -> int:
    found = value.get("properties") if isinstance(value, dict) else None
    return len(found) if isinstance(found, dict) else 0


def _states(value: object) -> int:
    """Return the repetitions that a part of a JSON schema asks for itself, and those of the patterns in it."""
    if not isinstance(value, dict):
        return 0
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
