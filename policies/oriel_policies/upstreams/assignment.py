"""Stable assignment by hash: of calls to the sides of a canary by weight, and of keys to endpoints by name.

Both are rendezvous hashing (Thaler and Ravishankar 1996): every candidate draws a number from (key, candidate) and the
highest wins, so a candidate that comes or goes moves only what it wins or had won. With weights (Schindelhauer and
Schomaker 2005) the draw is -weight / ln(u), which gives each candidate its share: when one weight changes, keys move
only to that side, or only away from it. The numbers depend on nothing but the texts: every process and every start
agrees.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import log
from typing import Generic, TypeVar

E = TypeVar("E")

_HALF = 1 << 52
_MASK = (1 << 64) - 1


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def unit(text: str) -> float:
    """A number 0 < u < 1 that depends on `text` alone and is uniformly distributed over texts."""
    return ((_number(text) >> 12) + 0.5) / _HALF


class Sides:
    """The sides of one traffic split. salt: makes the splits of two routes independent. names: the names of the sides,
    all different.
    """

    def __init__(self, salt: str, names: Sequence[str], shares: Sequence[float]) -> None:
        self._salt = salt
        self._sides = [(index, name, share) for index, (name, share) in enumerate(zip(names, shares, strict=True))]

    def of(self, key: str) -> int:
        """The index of the side of `key`; it stays the same as long as the weights do."""
        best, best_draw = 0, -1.0
        for index, name, share in self._sides:
            if share > 0.0:
                draw = -share / log(unit(f"{self._salt}\0{name}\0{key}"))
                if draw > best_draw:
                    best, best_draw = index, draw
        return best


class Rendezvous:
    """Candidates by name. A name is hashed once, a key once per look-up, and neither again for each pair."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._numbers = [_number(name) for name in names]

    def first(self, key: str, barred: Sequence[int] = ()) -> int | None:
        """The index of the winning name for `key` among those that are not barred; None if all are barred."""
        number = _number(key)
        best: int | None = None
        best_draw = -1
        for index, own in enumerate(self._numbers):
            # The finaliser of SplitMix64: neighbouring inputs end up far apart.
            draw = number ^ own
            draw = (draw ^ draw >> 30) * 0xBF58476D1CE4E5B9 & _MASK
            draw = (draw ^ draw >> 27) * 0x94D049BB133111EB & _MASK
            draw ^= draw >> 31
            if draw > best_draw and index not in barred:
                best, best_draw = index, draw
        return best


class StickyChoice(Generic[E]):
    """The choice of an endpoint of one pool by a key: calls with the same key go to the same one, as long as it can be
    asked; meanwhile all its keys meet their next one.

    name: returns the name of an endpoint, the same in every process and after every start.
    """

    def __init__(self, name: Callable[[E], str]) -> None:
        self._name = name
        self._ring = Rendezvous(())
        self._source: Sequence[E] = ()

    def pick(self, usable: Sequence[E], key: str, tried: Sequence[E] = ()) -> E | None:
        """Return the endpoint of `key` among `usable` without `tried`; None when none is left.

        usable: the endpoints; has to be another object whenever they change, since they are hashed once per object.
        """
        if usable is not self._source or len(usable) != len(self._ring.names):
            self._source = usable
            self._ring = Rendezvous([self._name(endpoint) for endpoint in usable])
        barred = [index for index, endpoint in enumerate(usable) if endpoint in tried] if tried else ()
        found = self._ring.first(key, barred)
        return None if found is None else usable[found]
