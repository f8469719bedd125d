"""Rules for what an event loop reads, and what it refuses at once, while more arrives than it can handle.

Requests that nobody has read yet wait in their sockets, in the order in which they came. While the loop is behind, its
turns are therefore kept short: in each of them it reads everything of the most urgent tiers (rank 0), and of the others
as much as fits. Work that does not fit waits, by rank; when that takes long, it is too much, and is refused.

The loop is behind when its timer is late twice in a row by the 20 ms from which DAGOR takes a server as overloaded
(Zhou et al., "Overload Control for Scaling WeChat Microservices", SoCC 2018), or once by far, and many requests ended
meanwhile: a pause of the process, or a machine that has no time for it, is no flood. The time that work has
waited when it goes on says if too much waits, as in CoDel (RFC 8289). The size of a turn is found by trying: a little
more after each short turn, half as much after a long one.
"""

from collections.abc import Mapping
from typing import Final

__all__ = ["LEAST", "MOST", "QUIET_BEATS", "TURN_S", "WAIT_S", "LoopOverload", "shares"]

LATE_S: Final = 0.02
VERY_LATE_S: Final = 0.1  # being this late once is enough
LATE_BEATS: Final = 2
QUIET_BEATS: Final = 20
BUSY_PER_S: Final = 2000.0  # requests per second below which nothing is taken for a flood
BEAT_S: Final = 0.05
TURN_S: Final = 0.005
FIRST: Final = 32
LEAST: Final = 8
MOST: Final = 1024
WAIT_S: Final = 0.05
LAST_SHARE: Final = 8  # one in eight of the requests that go on has the least urgent rank
_NARROWEST: Final = 10


class LoopOverload:
    """The state of one loop. Rank 0 is never held back and never refused.

    behind: True if the loop is overloaded. most: the number of all other ranks that may go on in one turn.
    """

    def __init__(self) -> None:
        self.behind = False
        self.most = FIRST
        self._late_beats = self._quiet_beats = 0
        self._begun = self._went_on = 0  # counts of this turn
        self._pressed = False  # True if a request was refused or has waited since the latest beat
        self._waited_s: dict[int, float] = {}

    def beat(self, late_s: float, requests: int) -> bool:
        """Judge a beat of the loop's timer. Returns `behind`.

        late_s: seconds by which the timer was late, or the longest turn of the loop, whichever is more.
        requests: the number that ended since the beat before.
        """
        late = late_s >= LATE_S and requests >= BUSY_PER_S * (late_s + BEAT_S)
        if not self.behind:
            self._late_beats = self._late_beats + 1 if late else 0
            if self._late_beats >= LATE_BEATS or (late and late_s >= VERY_LATE_S):
                self.behind = True
                self.most = FIRST
                self._quiet_beats = self._begun = 0
        else:
            self._quiet_beats = 0 if late or self._pressed else self._quiet_beats + 1
            if self._quiet_beats >= QUIET_BEATS:
                self.resume_all()
        self._pressed = False
        return self.behind

    def resume_all(self) -> None:
        """End the overload: all connections are read again without an order."""
        self.behind = False
        self._late_beats = 0
        self._waited_s.clear()

    def turn(self, took_s: float) -> int:
        """Begin a turn of the loop; the one before took `took_s`. Returns how many of those that wait may go on.

        Room that was not needed does not grow: nobody knows how long a turn that needs it would take.
        """
        if took_s > 2.0 * TURN_S:
            self.most = max(LEAST, self.most // 2)
        elif took_s < TURN_S and max(self._begun, self._went_on) >= self.most:
            self.most = min(MOST, self.most + LEAST)
        self._begun = self._went_on = 0
        return self.most

    def went_on(self, rank: int, count: int, wait_s: float) -> None:
        """Note what went on in this turn, and how long the latest has waited; 0.0 if no other of its rank waits."""
        self._went_on += count
        self._waited_s[rank] = wait_s
        if wait_s > TURN_S:
            self._pressed = True

    def refuses(self, rank: int) -> bool:
        """Return whether a request of this rank is refused: its rank, or a more urgent one, waits for too long."""
        for other, wait_s in self._waited_s.items():
            if other <= rank and wait_s > WAIT_S:
                self._pressed = True
                return rank > 0
        return False

    def crowds(self, rank: int) -> bool:
        """Return whether one more request of this rank is too many for this turn.

        Call it once for each request of a connection that carries many, of which one cannot be left unread. Each rank
        has half the room of the one that is more urgent.
        """
        if not rank:
            return False
        self._begun += 1
        if self._begun <= self.most >> min(rank - 1, _NARROWEST):
            return False
        self._pressed = True
        return True


def shares(waiting: Mapping[int, int], most: int) -> dict[int, int]:
    """Return how many of each rank go on. waiting: rank -> how many wait. most: the bound on all ranks together, at
    least 2.

    The more urgent go first, but for a share of the least urgent, so that these hear that they are refused.
    """
    found: dict[int, int] = {}
    ranks = sorted(rank for rank, count in waiting.items() if count)
    if not ranks:
        return found
    last = ranks[-1]
    kept = min(waiting[last], max(1, most // LAST_SHARE))
    left = most - kept
    for rank in ranks[:-1]:
        count = min(waiting[rank], left)
        left -= count
        if count:
            found[rank] = count
    found[last] = min(waiting[last], kept + left)
    return found
