"""`Server-Timing`: the header in which each server tells where the time of a request went (W3C Server Timing, 3.1)."""

import re
from collections.abc import Sequence
from typing import Final

MOST: Final = 8192  # characters that are read
_ENTRY: Final = re.compile(
    r'(?:^|,)\s*([A-Za-z0-9_.-]{1,64})\s*(?:;(?:[^,;"]|"[^"]*")*)*?;\s*dur=([0-9]{1,12}(?:\.[0-9]{1,9})?)'
)


def server_timing(stages: Sequence[tuple[str, float]]) -> str:
    """Return the header of (stage, seconds) pairs: `queue;dur=1.234, ...`, durations in milliseconds."""
    return ", ".join([f"{name};dur={seconds * 1000.0:.3f}" for name, seconds in stages])


def read_server_timing(text: str) -> dict[str, float]:
    """Return name -> seconds of the entries that have a duration; those of one name are summed.

    Text of more than 8,192 characters is not read: it gives no entry.
    """
    found: dict[str, float] = {}
    if len(text) <= MOST:
        for name, milliseconds in _ENTRY.findall(text):
            found[name] = found.get(name, 0.0) + float(milliseconds) / 1000.0
    return found
