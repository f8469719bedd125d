"""A wall clock that tests can set to another year."""

import time

import pytest

YEAR_S = 365 * 86_400.0
JUMPS = pytest.mark.parametrize("jumps", [(YEAR_S, -YEAR_S), (-YEAR_S, YEAR_S)], ids=["forward", "back"])


class WallClock:
    """Replaces the functions of `time` that return the time of day."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        seconds, nanoseconds = time.time, time.time_ns
        patch.setattr(time, "time", lambda: seconds() + self.ahead_s)
        patch.setattr(time, "time_ns", lambda: nanoseconds() + int(self.ahead_s * 1e9))
