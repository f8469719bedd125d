"""What one model's batcher has learned: service times, and how much time callers give. Single writer: the loop."""

from oriel_policies.batch import BatchBounds, RecentMinimum, ServiceCurve
from oriel_policies.feasibility import LowQuantile, ServiceFloor
from oriel_policies.returns import Returns, pays

__all__ = ["INLINE_S", "Experience"]

INLINE_S = 0.0003
INLINE_SAMPLES = 8
INLINE_OVERRUN_S = 0.005
INLINE_PENALTY = 32
USEFUL_EVERY = 16  # batches after which the useful size is worked out again
EXPLORE_EVERY = 256


class Experience:
    """curve: service times, for predictions. floor: those of quick batches, for refusals. inline_s: "short".

    returns: how many callers come back as soon as they are answered.

    useful_rows: what a batch should not exceed, so that it takes at most half of the time callers usually give.
    """

    __slots__ = (
        "_batches",
        "_fastest",
        "_inline_s",
        "_most",
        "_penalty",
        "_usual",
        "curve",
        "floor",
        "returns",
        "useful_rows",
    )

    def __init__(self, bounds: BatchBounds, curve: ServiceCurve, inline_s: float) -> None:
        self.curve = curve
        self.floor = ServiceFloor()
        self.returns = Returns()
        self.useful_rows = bounds.max_rows
        # An owner who prefers sizes has decided.
        self._most = 0 if bounds.preferred_rows else bounds.max_rows
        self._usual = LowQuantile(step=0.05)
        self._batches = 0
        self._fastest = RecentMinimum()
        self._inline_s = inline_s
        self._penalty = 0

    def came(self, rows: int, left_s: float, now: float) -> None:
        """A call of `rows` was queued with `left_s` seconds until its deadline."""
        self._usual.observe(left_s)
        self.returns.came(rows, now)

    def answered(self, rows: int, now: float) -> None:
        """A batch of `rows` has been answered."""
        self.returns.answered(rows, self.curve.predict(rows), now)

    def gathers(self, waiting_rows: int, answered_rows: int) -> bool:
        """Whether those who wait had better run with those who are about to be answered and to return."""
        soon = min(self.returns.expected(answered_rows), self.useful_rows - waiting_rows)
        return pays(waiting_rows, soon, self.returns.lag_s, self.curve)

    def ran(self, rows: int, seconds: float) -> None:
        """A batch of `rows` took `seconds`."""
        self.curve.observe(rows, seconds)
        self._fastest.observe(rows, seconds)
        self.floor.observe(rows, seconds)
        self._batches += 1
        if self._batches % USEFUL_EVERY <= 1 < self._batches and self._most:
            useful = 0
            if self._batches % EXPLORE_EVERY:  # else one batch of any size: large ones may have become quicker
                useful = self.curve.rows_within(self._usual.value / 2, self._most)
            self.useful_rows = useful or self._most

    def is_short(self, rows: int) -> bool:
        """Whether a batch of `rows` takes so little that handing it to a thread would cost more."""
        return (
            not self._penalty
            and self.curve.samples(rows) >= INLINE_SAMPLES
            and self._fastest.seconds(rows) < self._inline_s
        )

    def ran_inline(self, seconds: float) -> None:
        """What was held to be short took `seconds` of the loop."""
        if seconds > INLINE_OVERRUN_S:
            self._penalty = INLINE_PENALTY

    def went_to_a_thread(self) -> None:
        """One batch fewer until short ones may run on the loop again."""
        self._penalty = max(0, self._penalty - 1)
