"""From what lay on the disk to what has to be done. Pure.

A thing (a handler, the weights of a service) is known by a key and told from its former self by a stamp: any value
that changes when it does. What has just changed may be half written, so it is left alone until two listings in a row
show it the same: an upload that is still growing, and an editor that removes a file before it writes it anew, cause
nothing. What was done with a stamp is not done again, whatever came of it: a broken upload is tried once, and again
when it changes.
"""

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass

__all__ = ["Changes", "plan"]

Listing = Mapping[str, Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Keys, in order: new ones or ones with another stamp, and ones that are gone."""

    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def plan(done: Listing, before: Listing, now: Listing, *, busy: Set[str] = frozenset()) -> Changes:
    """What to do about `now`.

    done: key -> the stamp that was acted upon last. before: the listing before `now`. busy: keys that are still
    being acted upon; they are left for a later turn.
    """
    still = [key for key in now if key in before and before[key] == now[key] and key not in busy]
    return Changes(
        changed=tuple(sorted(key for key in still if key not in done or done[key] != now[key])),
        removed=tuple(sorted(key for key in done if key not in now and key not in before and key not in busy)),
    )
