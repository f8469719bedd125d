"""Decides whether one more call of a waiting flow could still be answered in time, from the times of the flow's turns.

A flow holds the waiting calls of one tenant in one band, and has a turn when one of them gets a permit. How often that
happens depends on everything at once (the pool's speed, bands, shares, weights). So it is measured: as the mean time
between two turns while the flow was waiting.

A burst may wait until its deadlines, a standing queue may not: if all admitted calls wait for longer than their target,
waiting only makes every answer late (the observation behind CoDel: Nichols, Jacobson 2012). So once calls have been
late for as long as their deadline allows, new calls are judged by their target instead of their deadline. This ends
when no call had to be refused for the length of a target. In this way admitted calls are answered in time and all
others are refused at once. Waiting calls that are late already are served after a new call. While hardly any others
wait, a new call is therefore not refused for its deadline: otherwise no call at all would be answered in time.
"""

TURNS = 20
PROBE = 20
WEIGHT = 0.05
FEW = 0.25  # share of the target that a wait behind few calls takes


class Backlog:
    """Measures the turns of one flow. turn_s: mean seconds between two turns; turns: their number. Single writer."""

    __slots__ = ("_late_from", "_late_s", "_last_s", "_refused", "_strict_s", "turn_s", "turns")

    def __init__(self) -> None:
        self.turn_s = 0.0
        self.turns = 0
        self._last_s = 0.0
        self._late_from = self._late_s = 0.0
        self._strict_s = 0.0
        self._refused = 0

    def turn(self, now: float, waits: bool) -> None:
        """Record a turn of the flow at `now`. waits: True if further calls of it wait."""
        if self._last_s:
            self.turns += 1
            self.turn_s += max(WEIGHT, 1.0 / self.turns) * (now - self._last_s - self.turn_s)
        self._last_s = now if waits else 0.0

    def emptied(self) -> None:
        """Record that the flow no longer waits, so that the time until its next turn is not measured."""
        self._last_s = 0.0

    def late(self, now: float, target_s: float) -> None:
        """Record that a call was late. target_s: the longest a call may take to be in time."""
        if now - self._late_s > target_s:
            self._late_from = now
        self._late_s = now

    def wait_s(self, waiting: int, now: float) -> float:
        """Seconds until `waiting` others have had their turns; 0.0 while there are too few measurements."""
        if self.turns < TURNS:
            return 0.0
        turned_s = waiting * self.turn_s
        since_s = now - self._last_s if self._last_s else 0.0
        return turned_s if turned_s > since_s else since_s

    def refuses(
        self, waiting: int, now: float, *, behind: int = 0, target_s: float, left_s: float, quick_s: float
    ) -> float:
        """Seconds until `waiting` others have had their turns if a new call should be refused for that, else 0.0.

        behind: number of the others that are late already.
        target_s, left_s: seconds from now to the new call's target and to its deadline.
        quick_s: the least seconds that the call takes once it has its turn.
        One in PROBE of the calls that should be refused is admitted as a probe.
        """
        if self.turns < TURNS or not waiting:
            return 0.0
        wait_s = self.wait_s(waiting, now)
        ahead_s = wait_s * (waiting - behind) / waiting
        over = wait_s + quick_s > left_s and (not behind or ahead_s > FEW * target_s)
        if not over and ahead_s + quick_s > target_s:
            standing = now - self._late_s <= target_s and now - self._late_from >= left_s
            over = standing or now - self._strict_s <= target_s
            if over:
                self._strict_s = now
        if not over:
            return 0.0
        self._refused += 1
        return wait_s if self._refused % PROBE else 0.0
