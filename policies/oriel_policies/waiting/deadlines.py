"""A timing wheel for the deadlines of calls in flight (Varghese and Lauck 1987): adding and removing is O(1).

Nothing expires early. Items come out at most one `resolution_s` late, as long as `due` is called that often.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class DeadlineWheel(Generic[T]):
    """Hashable items by deadline. Single writer."""

    def __init__(self, resolution_s: float = 0.005) -> None:
        self._per_s = 1.0 / resolution_s
        self._buckets: dict[int, dict[T, None]] = {}
        self._count = 0
        self._swept = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """All watched items, in no order. The wheel must not change meanwhile."""
        for bucket in self._buckets.values():
            yield from bucket

    def add(self, item: T, deadline: float, now: float) -> int:
        """Watch `item`; returns the slot for `discard`. An item whose deadline has passed comes out at the next
        `due`.
        """
        if not self._count:
            self._swept = int(now * self._per_s)
        slot = int(deadline * self._per_s) + 1
        if slot <= self._swept:
            slot = self._swept + 1
        bucket = self._buckets.get(slot)
        if bucket is None:
            bucket = self._buckets[slot] = {}
        bucket[item] = None
        self._count += 1
        return slot

    def discard(self, item: T, slot: int) -> None:
        """Stop watching; without effect if the item has come out already."""
        bucket = self._buckets.get(slot)
        if bucket is not None and item in bucket:
            del bucket[item]
            self._count -= 1
            if not bucket:
                del self._buckets[slot]

    def due(self, now: float) -> list[T]:
        """Remove and return the items that have expired by `now`, earliest slot first."""
        reached = int(now * self._per_s)
        if reached <= self._swept or not self._count:
            return []
        if reached - self._swept > len(self._buckets):
            slots = sorted(slot for slot in self._buckets if slot <= reached)
        else:
            slots = [slot for slot in range(self._swept + 1, reached + 1) if slot in self._buckets]
        self._swept = reached
        out: list[T] = []
        for slot in slots:
            out.extend(self._buckets.pop(slot))
        self._count -= len(out)
        return out
