"""The batch plan: whether to run a batch now or to wait, and with how many rows. Pure; the batcher acts on it.

Theory. An instance that idles while calls wait loses capacity for ever, so the plan is *work-conserving*: with an
idle instance and a backlog it runs at once, and batches grow by themselves because calls gather while the previous
batch runs. Waiting for a fuller batch happens only when the model's owner asked for it (`max_delay_s`,
`preferred_rows`), and only inside the window in which waiting costs no deadline: the last moment is the tightest
deadline minus the time the batch needs (the "schedulable window" of Symphony, arXiv 2308.07470). Service times are
learned per row count, which works because inference is predictable (Clockwork, OSDI 2020).

How many rows: calls join in queue order while the batch stays within its bounds of rows and bytes and still ends
before the tightest deadline among its members. A member that would be late even alone is ignored here, because
a smaller batch would not help it. The first call is always taken, whatever its size.

Under overload these rules alone would collapse: the earliest deadlines are those that can only just not be met, and
each of them makes the batch small. Two further rules prevent that. A batch takes at most half of the time that callers
usually give (`rows_within`), so that a call that has just missed one batch still makes the next (Nexus, SOSP 2019). And
a call that a full batch would make late gives way (`Fill.endangers`) while other calls of its tier, or more urgent
ones, can fill the batch without it: it goes behind them, and runs if fewer of them come in time.

Times are absolute monotonic seconds, durations seconds.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from mypy_extensions import mypyc_attr

from oriel_policies.waiting.returns import pays


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """The bounds set by the model's owner. max_rows: rows of one execution; the others as in Triton's
    `dynamic_batching`.

    max_bytes: input bytes of one execution, so that many large calls do not make one huge copy.
    """

    max_rows: int
    max_bytes: float = inf
    preferred_rows: tuple[int, ...] = ()
    max_delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError("max_rows must be at least 1")
        if self.max_bytes <= 0:
            raise ValueError("max_bytes must be positive")
        if any(not 1 <= rows <= self.max_rows for rows in self.preferred_rows):
            raise ValueError("every preferred size must lie between 1 and max_rows")


@dataclass(frozen=True, slots=True)
class Backlog:
    """The calls that wait: their rows and bytes, the arrival of the oldest, and the tightest deadline among them.

    soon_rows: rows that are expected by soon_s as well, probably within lag_s from now, see `returns`.
    """

    rows: int
    oldest_s: float
    tightest_s: float
    size_bytes: int = 0
    soon_rows: int = 0
    soon_s: float = 0.0
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Fill a batch of at most `rows` rows and run it now. reason: why it was released (a metric label)."""

    rows: int
    reason: str


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Decide again at `at_s`, or when something arrives."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """The decision to do nothing: no call waits."""


Decision = Run | WaitUntil | Idle
_IDLE = Idle()


@mypyc_attr(allow_interpreted_subclasses=True)
class ServiceCurve:
    """Learned service time: rows of a batch -> seconds. Single writer.

    Per row count (exact up to 16, eight steps per octave above) an exponentially weighted mean; over them the closest
    non-decreasing curve (pool adjacent violators, weighted by samples), because one odd sample must not make every
    larger batch look slow. Between known sizes it interpolates; above the largest it follows the mean slope.
    """

    ALPHA = 0.1
    MAX_WEIGHT = 16
    REFIT_EVERY = 8

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._means: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._fit: list[float] = []
        self._stale = 0
        self._deviation = 0.0  # mean of |sample - mean| / mean, over all sizes

    def observe(self, rows: int, seconds: float) -> None:
        """Learn that a batch of `rows` took `seconds`."""
        key = size_class(rows)
        seen = self._seen.get(key, 0)
        if not seen:
            insort(self._keys, key)
            self._means[key] = seconds
            self._fit.clear()
        else:
            mean = self._means[key]
            if mean > 0.0:
                self._deviation += self.ALPHA * (min(abs(seconds - mean) / mean, 1.0) - self._deviation)
            self._means[key] = mean + max(self.ALPHA, 1.0 / (seen + 1)) * (seconds - mean)
            self._stale += 1
            if self._stale >= self.REFIT_EVERY or seen < self.REFIT_EVERY:
                self._fit.clear()
        self._seen[key] = seen + 1

    def samples(self, rows: int) -> int:
        """Return how many batches were seen in the size class of `rows`."""
        return self._seen.get(size_class(rows), 0)

    def predict(self, rows: int) -> float:
        """Return the expected seconds of a batch of `rows`; 0.0 while nothing is known. Non-decreasing in `rows`."""
        keys = self._keys
        if not keys:
            return 0.0
        if not self._fit:
            self._fit = non_decreasing([(self._means[k], min(self._seen[k], self.MAX_WEIGHT)) for k in keys])
            self._stale = 0
        fit = self._fit
        if rows <= keys[0]:
            return fit[0]
        if rows > keys[-1]:
            if len(keys) == 1:
                return fit[0] * rows / keys[0]
            return fit[-1] + (fit[-1] - fit[0]) / (keys[-1] - keys[0]) * (rows - keys[-1])
        high = bisect_left(keys, rows)
        if keys[high] == rows:
            return fit[high]
        low = high - 1
        return fit[low] + (fit[high] - fit[low]) * (rows - keys[low]) / (keys[high] - keys[low])

    def rows_within(self, seconds: float, most: int) -> int:
        """Return the largest batch of at most `most` rows that mostly ends within `seconds`; 0 if none does."""
        if self.bound(most) <= seconds:
            return most
        return bisect_right(range(1, most), seconds, key=self.bound)

    def bound(self, rows: int) -> float:
        """Return the seconds within which a batch of `rows` mostly ends: the prediction plus the mean deviation.

        Not plus twice the deviation: for a model whose times scatter by a fifth, batches would become too small to use
        its
        capacity.
        """
        return self.predict(rows) * (1.0 + self._deviation)


class RecentMinimum:
    """The recent minimum per size class: how long a batch takes when nothing else uses the processor.

    The mean of `ServiceCurve` includes waiting for a core or for the interpreter, which is right for deadlines but not
    for deciding whether a batch is short in itself. A slower observation raises the minimum by `CREEP` of the
    difference.
    """

    CREEP = 0.02

    def __init__(self) -> None:
        self._fastest: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Learn that a batch of `rows` took `seconds`."""
        key = size_class(rows)
        known = self._fastest.get(key)
        if known is None or seconds < known:
            self._fastest[key] = seconds
        else:
            self._fastest[key] = known + self.CREEP * (seconds - known)

    def seconds(self, rows: int) -> float:
        """The minimum for the size class of `rows`; infinite while it is unknown."""
        return self._fastest.get(size_class(rows), inf)


def size_class(rows: int) -> int:
    """The size class of `rows`, named by its largest member."""
    if rows <= 16:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return -(-rows // step) * step


def non_decreasing(points: Sequence[tuple[float, float]]) -> list[float]:
    """The non-decreasing sequence closest to the weighted points (least squares): pool adjacent violators."""
    blocks: list[list[float]] = []  # each block: mean, weight, number of members
    for mean, weight in points:
        blocks.append([mean, float(weight), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            last_mean, last_weight, last_members = blocks.pop()
            block = blocks[-1]
            total = block[1] + last_weight
            block[0] = (block[0] * block[1] + last_mean * last_weight) / total
            block[1] = total
            block[2] += last_members
    return [mean for mean, _, members in blocks for _ in range(int(members))]


def best_rate(predict: Callable[[int], float], max_rows: int, *, smaller: bool = True) -> float:
    """Rows per second of one instance at its best batch size; 0.0 while nothing is known.

    predict: rows of a batch -> seconds, as `ServiceCurve.predict`.
    smaller: try all powers of two up to `max_rows`; if False, only `max_rows` itself.
    """
    best = 0.0
    rows = 1 if smaller else max_rows
    while True:
        seconds = predict(rows)
        if seconds > 0.0:
            best = max(best, rows / seconds)
        if rows >= max_rows:
            return best
        rows = min(rows * 2, max_rows)


def expected_wait_s(ahead_rows: float, rows_per_s: float) -> float | None:
    """Seconds until work of `ahead_rows` is done at `rows_per_s`; None if there is work and the rate is not known.

    The work ahead are the rows that wait in its own band and in more urgent ones, and what is left of the running
    batches. This is no guarantee: it does not foresee more urgent arrivals, the guaranteed share of lower bands,
    expiring deadlines, or other models that use the cores.
    """
    if ahead_rows <= 0.0:
        return 0.0
    return ahead_rows / rows_per_s if rows_per_s > 0.0 else None


def decide(backlog: Backlog, bounds: BatchBounds, curve: ServiceCurve, now: float) -> Decision:
    """Decide for an idle instance with this backlog."""
    rows = backlog.rows
    if rows <= 0:
        return _IDLE
    if rows >= bounds.max_rows:
        return Run(bounds.max_rows, "full")
    reached = max((size for size in bounds.preferred_rows if size <= rows), default=0)
    if reached:
        return Run(reached, "preferred")
    if bounds.max_delay_s <= 0.0:
        if backlog.soon_rows and _gathers(backlog, bounds, curve, now):
            return WaitUntil(backlog.soon_s)
        return Run(rows, "idle_instance")
    if backlog.size_bytes >= bounds.max_bytes:
        return Run(rows, "bytes")
    patience = backlog.oldest_s + bounds.max_delay_s
    last_moment = backlog.tightest_s - curve.bound(rows)
    if min(patience, last_moment) > now:
        return WaitUntil(min(patience, last_moment))
    return Run(rows, "delay" if patience <= now else "deadline")


def _gathers(backlog: Backlog, bounds: BatchBounds, curve: ServiceCurve, now: float) -> bool:
    """Return whether to wait for callers that are about to return: only if that pays and endangers no deadline."""
    soon = min(backlog.soon_rows, bounds.max_rows - backlog.rows)
    together_s = curve.bound(backlog.rows + soon)
    in_time = backlog.soon_s + together_s <= backlog.tightest_s and backlog.size_bytes < bounds.max_bytes
    return in_time and pays(backlog.rows, soon, min(backlog.lag_s, backlog.soon_s - now), curve.predict)


class Fill:
    """One batch being filled in queue order, at one moment.

    limit_rows: bound on rows, see `Run.rows`; limit_bytes: bound on input bytes. `admit` decides about the next
    call in the order and adds it if it fits. After the first call that does not fit the batch is complete.
    """

    def __init__(self, limit_rows: int, curve: ServiceCurve, now: float, limit_bytes: float = inf) -> None:
        self.rows = 0
        self.size_bytes = 0
        self._limit = limit_rows
        self._limit_bytes = limit_bytes
        self._curve = curve
        self._now = now
        self._tightest = inf
        self._whole_ends_s = 0.0

    def endangers(self, deadline: float) -> bool:
        """Return whether a call of `deadline` might be late in a batch of all the rows that the limit allows."""
        if not self._whole_ends_s:
            self._whole_ends_s = self._now + self._curve.bound(self._limit)
        return deadline < self._whole_ends_s

    def admit(self, rows: int, deadline: float, size_bytes: int = 0) -> bool:
        """Return whether a call joins; if so, count its `rows`, `deadline` and `size_bytes`."""
        total, total_bytes = self.rows + rows, self.size_bytes + size_bytes
        curve, now, tightest = self._curve, self._now, self._tightest
        if deadline < tightest and now + curve.bound(rows) <= deadline:
            tightest = deadline
        if self.rows and (
            total > self._limit or total_bytes > self._limit_bytes or now + curve.bound(total) > tightest
        ):
            return False
        self.rows = total
        self.size_bytes = total_bytes
        self._tightest = tightest
        return True
