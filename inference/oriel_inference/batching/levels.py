"""How many calls of each priority level may wait: `max_queue_size` of its queue policy.

A level is counted per tier, so that one tier's flood leaves another its places. Single writer: the loop.
"""

from collections import Counter

from oriel_inference.batching.call import Call
from oriel_inference.model import QueueRules

__all__ = ["LevelBounds"]


class LevelBounds:
    """Every call that `enter` let in has to be taken out by `leave`, once."""

    def __init__(self, rules: QueueRules) -> None:
        self._sizes = {level: rules.of(level).max_items for level in rules.levels}
        self._waiting: Counter[tuple[int, int]] = Counter()

    def enter(self, call: Call) -> bool:
        """Take a place of the call's level; False if it has none left."""
        if call.ticket.admitted:
            return True
        key = (call.ticket.band, call.level)
        size = self._sizes.get(call.level, 0)
        if size and self._waiting[key] >= size:
            return False
        self._waiting[key] += 1
        return True

    def leave(self, call: Call) -> None:
        """The call waits no longer."""
        if not call.ticket.admitted:
            self._waiting[call.ticket.band, call.level] -= 1
