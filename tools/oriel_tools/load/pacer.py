"""Wakes at an exact moment: event loops round their timers to milliseconds, the kernel's timerfd does not."""

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from time import monotonic

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Pacer:
    """Calls `wake` on the running loop at the moments asked for; without timerfd on the loop's own timers."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
            if self._fd >= 0:
                self._timer = _Timer()
                self._loop.add_reader(self._fd, self._fired)

    def at(self, moment_s: float) -> None:
        """Wake once at this moment of `time.monotonic()`; a later call replaces an earlier one. Past moments: soon."""
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(moment_s - monotonic(), self._wake)
            return
        seconds, fraction = divmod(max(moment_s, 1e-9), 1)
        # All zero would switch the timer off.
        self._timer.first.seconds, self._timer.first.nanoseconds = int(seconds), int(fraction * 1e9)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._timer), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._handle is not None:
            self._handle.cancel()

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._wake()
