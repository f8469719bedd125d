"""Decides which artefacts of a folder are removed: those that nobody has used for long, and then the least recently
used ones until the rest fits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_AGE_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArtefact:
    """An artefact in the folder. used_s: time at which a server last loaded it or had it in use."""

    fingerprint: str
    size_bytes: int
    used_s: float
    in_use: bool = False


def retired(
    stored: Iterable[StoredArtefact], now_s: float, *, max_bytes: int, max_age_s: float = MAX_AGE_S
) -> list[str]:
    """Return the fingerprints to remove, in the order of their removal. An artefact in use stays, whatever the bounds.

    now_s: present time, on the clock of `used_s`.
    """
    by_age = sorted(stored, key=lambda each: (each.used_s, each.fingerprint))
    size_bytes = sum(each.size_bytes for each in by_age)
    gone = []
    for each in by_age:
        if each.in_use or (now_s - each.used_s <= max_age_s and size_bytes <= max_bytes):
            continue
        gone.append(each.fingerprint)
        size_bytes -= each.size_bytes
    return gone
