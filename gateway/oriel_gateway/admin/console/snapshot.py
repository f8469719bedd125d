"""Builds the snapshot that viewers get: at most `MAX_BYTES` of JSON, however many tenants, pools and models there are.

Pure. Each section has rows in the order of their importance and a share of the bytes; what a section leaves goes to
those after it. Rows that find no room are left out from the end and counted in `more`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

MAX_BYTES: Final = 32 * 1024
MAX_TEXT: Final = 160  # characters of a name or a sentence
# section -> (its share of the bytes, the most rows)
SECTIONS: Final = {
    "tiers": (5 * 1024, 16),
    "pools": (8 * 1024, 32),
    "targets": (6 * 1024, 48),
    "tenants": (5 * 1024, 48),
    "calls": (6 * 1024, 48),
}
HEAD_BYTES: Final = 1900  # for all that is no row
_NUMBERS: Final = frozenset({int, float, bool, type(None)})  # most values are
_encode = msgspec.json.Encoder().encode

Row = Mapping[str, Any]


def snapshot(head: Row, sections: Mapping[str, Iterable[Row]], totals: Mapping[str, int]) -> bytes:
    """Return the JSON object: the members of `head`, a list of rows for each section, and `more`.

    head: numbers and short text; texts are cut so that it stays within `HEAD_BYTES`.
    sections: rows by the names of `SECTIONS`; no more rows are read than can be shown.
    totals: number of rows that each section would have without its bound.
    """
    first = _encode(_short(head, MAX_TEXT))
    for length in (64, 16, 0):
        if len(first) <= HEAD_BYTES:
            break
        first = _encode(_short(head, length))
    if len(first) > HEAD_BYTES:
        first = b"{}"
    parts: list[bytes] = []
    more: dict[str, int] = {}
    spare = 0
    for name, (share, most) in SECTIONS.items():
        rows, used = _rows(sections.get(name, ()), share + spare, most)
        spare += share - used
        more[name] = max(0, totals.get(name, len(rows)) - len(rows))
        parts.append(b'"%b":[%b]' % (name.encode(), b",".join(rows)))
    members = [first[1:-1]] if len(first) > 2 else []
    return b"{%b}" % b",".join([*members, *parts, b'"more":%b' % _encode(more)])


def _rows(rows: Iterable[Row], most_bytes: int, most: int) -> tuple[Sequence[bytes], int]:
    """Return encoded rows, and the bytes that they take with their commas."""
    found: list[bytes] = []
    used = 0
    for row in rows:
        if len(found) >= most:
            break
        encoded = _encode(_short(row, MAX_TEXT))
        if used + len(encoded) + 1 > most_bytes:
            break
        used += len(encoded) + 1
        found.append(encoded)
    return found, used


def _short(value: Any, length: int) -> Any:
    """Return the value with every text in it cut to `length` characters."""
    if isinstance(value, str):
        return value if len(value) <= length else value[: max(0, length - 1)] + "…"
    if isinstance(value, Mapping):
        return {
            _short(key, length): each if type(each) in _NUMBERS else _short(each, length) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_short(each, length) for each in value]
    return value
