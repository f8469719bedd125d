"""`Server-Timing`: the header in which each server tells where the time of a request went (W3C Server Timing, 3.1)."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

MOST: Final = 8192  # characters that are read
WRITTEN: Final = 1536  # characters that one server writes: with those of a gateway before it, less than 2 KiB
_OTHER: Final = "other"  # the sum of the stages that have no room
NAME: Final = 48  # characters of a name that comes from outside this project
_ODD: Final = re.compile(r"[^A-Za-z0-9_.-]")
_ENTRY: Final = re.compile(
    r'(?:^|,)\s*([A-Za-z0-9_.-]{1,64})\s*(?:;(?:[^,;"]|"[^"]*")*)*?;\s*dur=([0-9]{1,12}(?:\.[0-9]{1,9})?)'
)


def entry_name(text: str) -> str:
    """Return the name of an entry for any text: at most 48 characters, with "_" for those that do not fit a header."""
    return _entry_name(text[:NAME])


@lru_cache(1024)
def _entry_name(text: str) -> str:
    return _ODD.sub("_", text) or "_"


def server_timing(stages: Sequence[tuple[str, float]]) -> str:
    """Return the header of (stage, seconds) pairs: `queue;dur=1.234, ...`, durations in milliseconds.

    Stages that do not fit into 1,536 characters are summed as `other`.
    """
    text = ", ".join([f"{name};dur={seconds * 1000.0:.3f}" for name, seconds in stages])
    if len(text) <= WRITTEN:
        return text
    kept: list[tuple[str, float]] = []
    room, other_s = WRITTEN - 64, 0.0
    for name, seconds in stages:
        size = len(f"{name};dur={seconds * 1000.0:.3f}, ")
        if size <= room:
            room -= size
            kept.append((name, seconds))
        else:
            other_s += seconds
    return server_timing([*kept, (_OTHER, other_s)])


def bounded(text: str) -> str:
    """Return a header of at most 1,536 characters: a longer one has one sum for each of its stages."""
    return text if len(text) <= WRITTEN else server_timing(list(read_server_timing(text).items()))


def read_server_timing(text: str) -> dict[str, float]:
    """Return name -> seconds of the entries that have a duration; those of one name are summed.

    Text of more than 8,192 characters is not read: it gives no entry.
    """
    found: dict[str, float] = {}
    if len(text) <= MOST:
        for name, milliseconds in _ENTRY.findall(text):
            found[name] = found.get(name, 0.0) + float(milliseconds) / 1000.0
    return found
