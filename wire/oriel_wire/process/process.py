"""The process of a unit: signals, listening sockets, exit codes.

Stop order, the same for every unit:
1. SIGTERM, SIGINT, or end-of-file on the supervisor's lifeline pipe sets the stop event; `main` drains and returns.
2. A second signal, or the grace running out, cancels `main`.
3. `HARD_EXIT_S` after that a watchdog thread ends the process, whatever the loop is doing.
Exit codes: 0 stopped as asked, 1 crashed or was cut short, 2 could not start (one line on stderr says why).
"""

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import uvloop

from oriel_wire.errors import StartFailed
from oriel_wire.process.logs import one_line, write_refusal

LIFELINE_VARIABLE = "ORIEL_LIFELINE_FD"
GRACE_S = 30.0
ORPHAN_GRACE_S = 5.0
HARD_EXIT_S = 1.5
BACKLOG = 1024

_log = logging.getLogger(__name__)


def run_unit(main: Callable[[asyncio.Event], Awaitable[None]], *, unit: str = "", grace_s: float = GRACE_S) -> int:
    """Run `main(stop)` on uvloop until it returns; the exit code for `sys.exit`.

    `main` must return soon after `stop` is set. It is cancelled when a second signal comes or `grace_s` passes, and
    the process ends at most `HARD_EXIT_S` later. StartFailed (also inside an exception group) becomes one line on
    stderr, `oriel <unit>: <message>`, and code 2; anything else is logged with its traceback and becomes 1.

    The process and its children dump no core, because their memory holds keys and bodies; `prlimit --core` allows it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_supervised(main, grace_s))
        except Exception as crash:
            refusal = _start_failure(crash)
            if refusal is not None:
                name = f"oriel {unit}" if unit else "oriel"
                write_refusal(f"{name}: {one_line(str(refusal))}")
                return 2
            _log.critical("the process crashed", exc_info=crash)
            return 1
        finally:
            gc.freeze()  # or the interpreter looks for garbage in all of the memory before the process ends


async def _supervised(main: Callable[[asyncio.Event], Awaitable[None]], grace_s: float) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stopping = _Stopping(asyncio.current_task(), stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.ask, grace_s)
    lifeline = _lifeline()
    if lifeline is not None:

        def supervisor_gone() -> None:
            loop.remove_reader(lifeline)
            stopping.begin(min(grace_s, ORPHAN_GRACE_S))

        loop.add_reader(lifeline, supervisor_gone)
    try:
        await main(stop)
        return 0
    except asyncio.CancelledError:
        if not stopping.forced:
            raise
        return 1
    finally:
        stopping.done()
        if lifeline is not None:
            loop.remove_reader(lifeline)


class _Stopping:
    """The shutdown from the first signal to the end. Single writer: the loop."""

    def __init__(self, task: asyncio.Task[int] | None, stop: asyncio.Event) -> None:
        self._task = task
        self._stop = stop
        self._grace: asyncio.TimerHandle | None = None
        self._watchdog: threading.Timer | None = None
        self.forced = False

    def ask(self, grace_s: float) -> None:
        if self._stop.is_set():
            self.force()
        else:
            self.begin(grace_s)

    def begin(self, grace_s: float) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._grace = asyncio.get_running_loop().call_later(grace_s, self.force)
        # The loop's own timer cannot fire while user code blocks the loop.
        self._watch(grace_s + HARD_EXIT_S)

    def force(self) -> None:
        if self.forced:
            return
        self.forced = True
        self._watch(HARD_EXIT_S)
        if self._task is not None:
            self._task.cancel()

    def done(self) -> None:
        """`main` has ended; what is left (executor threads, other tasks) gets `HARD_EXIT_S`."""
        if self._grace is not None:
            self._grace.cancel()
        self._watch(HARD_EXIT_S)

    def _watch(self, delay_s: float) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = threading.Timer(delay_s, os._exit, (1,))
        self._watchdog.daemon = True
        self._watchdog.start()


def _lifeline() -> int | None:
    value = os.environ.get(LIFELINE_VARIABLE, "")
    if not value.isdecimal():
        return None
    descriptor = int(value)
    try:
        os.set_inheritable(descriptor, False)
    except OSError:
        return None
    return descriptor


def _start_failure(crash: BaseException) -> StartFailed | None:
    if isinstance(crash, StartFailed):
        return crash
    if isinstance(crash, BaseExceptionGroup):
        found = (_start_failure(inner) for inner in crash.exceptions)
        return next((failure for failure in found if failure is not None), None)
    return None


def listen(
    host: str, port: int, what: str, flag: str = "", *, shared: bool = False, opened: bool = True
) -> socket.socket:
    """A listening TCP socket on `host`:`port`; port 0 takes any free one (read it from `getsockname()`).

    what: the name of the owner. flag: the flag that moves it; "" for the one of the last word of its name: "gateway
    HTTP" is moved by `--http-port`. shared: other processes of this user may listen there as well, and the kernel
    spreads connections over them. opened: False for a socket that gets no connections until its owner lets it listen.
    Raises StartFailed with the fix. The caller owns and closes the socket.
    """
    flag = flag or f"--{what.split()[-1].lower()}-port"
    if not 0 <= port <= 65535:
        raise StartFailed(f"{port} is not a port ({what}): pass {flag} N with N from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as unresolved:
        raise StartFailed(f"{host!r} is not an address ({what}): pass another --host") from unresolved
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if opened:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as refused:
        sock.close()
        raise StartFailed(_bind_refusal(refused, host, port, what, flag)) from refused
    return sock


def connection_limit(wanted: int) -> int:
    """Raise this process's limit of open files as far as allowed, and return how many clients fit, at most `wanted`.

    A client may need a second file, for its upstream, and 64 are for everything else: with no file left nothing could
    be accepted, closed connections excepted, and an idle one could not make room for a new one.
    """
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2 * wanted + 64
    if soft == unlimited or soft >= enough:
        return wanted
    raised = enough if hard == unlimited else min(hard, enough)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return max(8, min(wanted, (soft - 64) // 2))


def _bind_refusal(refused: OSError, host: str, port: int, what: str, flag: str) -> str:
    match refused.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use ({what}): free it or pass {flag} N"
        case errno.EACCES | errno.EPERM:
            return f"port {port} on {host} needs privileges ({what}): pass {flag} N with N above 1023"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine ({what}): pass another --host"
    return f"port {port} on {host} cannot be opened ({what}): {refused.strerror}"
