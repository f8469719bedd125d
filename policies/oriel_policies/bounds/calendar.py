"""Calendar windows in UTC, on a clock that is robust against jumps of the wall clock.

Daily and monthly quotas follow the calendar, so they need the wall clock, and a wall clock may be set: by hand, by a
broken time source, by a virtual machine that was moved. `CalendarClock` goes on from the monotonic clock and takes
over a step of the wall clock only when it has stayed for `patience_s`; until then no quota is forgiven or lost.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

DAY_S = 86_400
_STEP_S = 2.0  # a larger difference from the monotonic clock is a step, not a correction
_SLEW = 1e-3  # seconds per second by which a clock may be corrected without stepping


class Period(StrEnum):
    """Length of a calendar window."""

    DAY = "day"
    MONTH = "month"


def window_number(period: Period, epoch_s: float) -> int:
    """Return the number of the window in which a moment lies: days since 1970, or months since year 0."""
    if period is Period.DAY:
        return int(epoch_s // DAY_S)
    moment = datetime.fromtimestamp(epoch_s, UTC)
    return moment.year * 12 + moment.month - 1


def window_end(period: Period, number: int) -> float:
    """Epoch seconds at which a window ends."""
    if period is Period.DAY:
        return float((number + 1) * DAY_S)
    year, month = divmod(number + 1, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


class CalendarClock:
    """A wall clock for quotas. wall: reads epoch seconds, like `time.time`. `now` is monotonic seconds everywhere."""

    def __init__(self, wall: Callable[[], float], *, patience_s: float = 300.0) -> None:
        self._wall = wall
        self._patience_s = patience_s
        self._offset: float | None = None
        self._read_s = 0.0
        self._step = 0.0  # a difference that has not been adopted yet
        self._step_since: float | None = None
        self._day = self._month = 0
        self._until = -1.0  # the cached pair is valid until then

    def epoch(self, now: float) -> float:
        """Epoch seconds at monotonic `now`."""
        wall = self._wall()
        if self._offset is None:
            self._offset = wall - now
        step = wall - now - self._offset
        if abs(step) <= _STEP_S + _SLEW * (now - self._read_s):
            self._offset += step
            self._step_since = None
        elif self._step_since is None or abs(step - self._step) > _STEP_S:
            self._step, self._step_since = step, now
        elif now - self._step_since >= self._patience_s:
            self._offset += step
            self._step_since = None
        self._read_s = now
        return now + self._offset

    def window(self, period: Period, now: float) -> int:
        """Number of the current window; at most a second behind a change."""
        if now >= self._until:
            epoch_s = self.epoch(now)
            self._day = window_number(Period.DAY, epoch_s)
            self._month = window_number(Period.MONTH, epoch_s)
            self._until = min(now + 1.0, now + window_end(Period.DAY, self._day) - epoch_s)
        return self._day if period is Period.DAY else self._month

    def ends_in(self, period: Period, now: float) -> float:
        """Seconds until the current window ends, > 0."""
        return max(1e-3, window_end(period, self.window(period, now)) - self.epoch(now))

    def length(self, period: Period, now: float) -> float:
        """Total length of the current window in seconds."""
        number = self.window(period, now)
        return window_end(period, number) - window_end(period, number - 1)
