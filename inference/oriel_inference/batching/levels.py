"""Bounds the waiting calls of each priority level: `max_queue_size` of its queue policy.

A level is counted per tier, so that a flood in one tier leaves another tier its places. Single writer: the loop.
"""

from collections import Counter

from oriel_inference.batching.call import Call
from oriel_inference.model import QueueRules


class LevelBounds:
    """Bounds how many calls wait on each priority level of a model.

    Every call that joined with `enter` has to be removed with `leave`, once.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._sizes = {level: rules.of(level).max_items for level in rules.levels}
        self._waiting: Counter[tuple[int, int]] = Counter()

    def enter(self, call: Call) -> bool:
        """Take a place of the call's level; return False if none is left."""
        if call.ticket.admitted:
            return True
        key = (call.ticket.band, call.level)
        size = self._sizes.get(call.level, 0)
        if size and self._waiting[key] >= size:
            return False
        self._waiting[key] += 1
        return True

    def leave(self, call: Call) -> None:
        """Free the place of a call."""
        if not call.ticket.admitted:
            self._waiting[call.ticket.band, call.level] -= 1
