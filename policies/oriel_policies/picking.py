"""Which endpoint next."""

from collections.abc import Sequence

__all__ = ["least_outstanding"]


def least_outstanding(outstanding: Sequence[int], turn: int) -> int:
    """The index of the smallest number; `turn` (any growing number) rotates among equals."""
    count = len(outstanding)
    if count == 1:
        return 0
    best = turn % count
    for step in range(1, count):
        index = (turn + step) % count
        if outstanding[index] < outstanding[best]:
            best = index
    return best
