"""Finds the handler that blocks the event loop.

A thread sends the loop a callback every `ASK_EVERY_S` and times its execution: that is the loop's lag, as anything that
waits for the loop sees it. If it has not run after `SUSPECT_S`, the thread reads the stack of the loop's thread once,
waits for the loop to continue, and if that took long enough it logs the service and the line; at once if the loop has
not continued after `STILL_S`. So a request costs nothing, and the loop about 20 us per callback.

Code that holds the interpreter lock (a regular expression, `json.loads` of a large text) cannot be inspected while it
runs. The thread then waits for the lock, and gets it when that call returns: still in the handler, at the calling line.

A block counts from `BLOCKED_S`, plus or minus half of `ASK_EVERY_S`: the callback may come a little after its
beginning.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_log = logging.getLogger(__name__)
LOG_EVERY_S = 60.0
MAX_NAMES = 1000
Handler = tuple[str, object]


@dataclass(frozen=True, slots=True)
class Place:
    """One line of a stack. function: its qualified name."""

    module: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


class Watchdog:
    """Watches one loop.

    handlers: called when it was blocked; returns the name of each service with its function or class.
    on_lag: called in the watchdog's thread with the seconds of each answer of the loop.
    on_block: called there with the service that blocked the loop, "" if no service's code was running.
    ask_every_s, blocked_s, still_s: seconds between two questions to the loop, after which it counts as blocked, and
        until it is said to be so while it still is.
    """

    def __init__(
        self,
        handlers: Callable[[], Iterable[Handler]],
        *,
        on_lag: Callable[[float], object],
        on_block: Callable[[str], object],
        ask_every_s: float = 0.02,
        blocked_s: float = 0.05,
        still_s: float = 2.0,
    ) -> None:
        self._handlers = handlers
        self._on_lag = on_lag
        self._on_block = on_block
        self._ask_every_s = ask_every_s
        self._blocked_s = blocked_s - ask_every_s / 2
        self._still_s = still_s
        self._answered = threading.Event()
        self._answered_s = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged: dict[str, float] = {}
        self.stack_reads = 0

    def start(self) -> None:
        """Watch the running loop from a new thread."""
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        self._thread = threading.Thread(target=self._watch, args=arguments, name="loop watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._answered.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._stopping.wait(self._ask_every_s):
            self._answered.clear()
            pinged_s = time.monotonic()
            try:
                loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                return
            stack: list[Place] | None = None
            if not self._answered.wait(self._blocked_s - self._ask_every_s / 2):
                stack = stack_of(thread)
                self.stack_reads += 1
                if not self._answered.wait(self._still_s):
                    self._say(time.monotonic() - pinged_s, *named(stack_of(thread), self._handlers()), still=True)
                    self._answered.wait()
            if self._stopping.is_set():
                return
            lag_s = self._answered_s - pinged_s
            self._on_lag(lag_s)
            if stack is not None and lag_s >= self._blocked_s:
                service, place = named(stack, self._handlers())
                self._on_block(service)
                self._say(lag_s, service, place)

    def _answer(self) -> None:
        self._answered_s = time.monotonic()
        self._answered.set()

    def _say(self, seconds: float, service: str, place: Place | None, *, still: bool = False) -> None:
        now = time.monotonic()
        if now - self._logged.get(service, -LOG_EVERY_S) < LOG_EVERY_S or len(self._logged) > MAX_NAMES:
            return
        self._logged[service] = now
        if not service:  # a busy machine that does not schedule us looks the same
            _log.info("the event loop was blocked for %.0f ms (%s)", seconds * 1000, place)
            return
        held = "has been blocking the event loop, and every other request" if still else "held the event loop"
        hint = "do that in a plain `def`, or with `await ctx.run(function, ...)`"
        _log.warning("service '%s' %s for %.0f ms (%s): %s", service, held, seconds * 1000, place, hint)


def stack_of(thread: int) -> list[Place]:
    """Return the current stack of a thread, outermost frame first."""
    frame: FrameType | None = sys._current_frames().get(thread)
    frames: list[Place] = []
    while frame is not None:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        frames.append(Place(module, code.co_qualname, code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def named(stack: list[Place], handlers: Iterable[Handler]) -> tuple[str, Place | None]:
    """Return the service whose code a stack shows: the one called first, and the innermost line of its file.

    A function of a service's file that is not the handler itself belongs to the only service of that file.
    """
    by_module: dict[str, list[tuple[str, str]]] = {}
    for service, target in handlers:
        own = (str(getattr(target, "__qualname__", "")), service)
        by_module.setdefault(str(getattr(target, "__module__", "")), []).append(own)
    for at, place in enumerate(stack):
        known = by_module.get(place.module)
        if not known:
            continue
        names = [name for own, name in known if place.function == own or place.function.startswith(f"{own}.")]
        if not names and len(known) == 1:
            names = [known[0][1]]
        if names:
            inner = [each for each in stack[at:] if each.module == place.module]
            return names[0], inner[-1]
    return "", stack[-1] if stack else None
