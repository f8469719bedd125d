"""Service-time statistics of one model's batcher, and the time that callers give it. Single writer: the loop."""

from oriel_policies.waiting.batch import BatchBounds, RecentMinimum, ServiceCurve
from oriel_policies.waiting.feasibility import LowQuantile, ServiceFloor
from oriel_policies.waiting.returns import Returns, pays

INLINE_S = 0.0003
INLINE_SAMPLES = 8
INLINE_OVERRUN_S = 0.005
INLINE_PENALTY = 32
USEFUL_EVERY = 16  # the useful size is computed again after this many batches
EXPLORE_EVERY = 256


class ServiceTimes:
    """Measured service times and the decisions that follow from them.

    curve: service times, for predictions.
    floor: service times of quick batches, for refusals.
    inline_s: a batch that takes less is short.
    returns: the learned share of callers that send the next call as soon as they are answered.
    useful_rows: the largest batch that takes at most half of the time that callers usually give.
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
        # Preferred batch sizes are the decision of the model's owner.
        self._most = 0 if bounds.preferred_rows else bounds.max_rows
        self._usual = LowQuantile(step=0.05)
        self._batches = 0
        self._fastest = RecentMinimum()
        self._inline_s = inline_s
        self._penalty = 0

    def queued(self, rows: int, left_s: float, now: float) -> None:
        """Record that a call of `rows` was queued `left_s` seconds before its deadline."""
        self._usual.observe(left_s)
        self.returns.queued(rows, now)

    def batch_finished(self, rows: int, now: float) -> None:
        """Record that a batch of `rows` has been answered."""
        self.returns.batch_finished(rows, self.curve.predict(rows), now)

    def gathers(self, waiting_rows: int, answered_rows: int) -> bool:
        """Return whether the waiting calls should wait for those that are about to be answered and to return."""
        soon = min(self.returns.expected(answered_rows), self.useful_rows - waiting_rows)
        return pays(waiting_rows, soon, self.returns.lag_s, self.curve.predict)

    def ran(self, rows: int, seconds: float) -> None:
        """Record that a batch of `rows` took `seconds`."""
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
        """Return whether a batch of `rows` is so short that handing it to a thread would cost more."""
        return (
            not self._penalty
            and self.curve.samples(rows) >= INLINE_SAMPLES
            and self._fastest.seconds(rows) < self._inline_s
        )

    def ran_inline(self, seconds: float) -> None:
        """Record that a batch on the loop took `seconds`."""
        if seconds > INLINE_OVERRUN_S:
            self._penalty = INLINE_PENALTY

    def went_to_a_thread(self) -> None:
        """Record a batch in a thread: after a number of them, short batches may run on the loop again."""
        self._penalty = max(0, self._penalty - 1)
