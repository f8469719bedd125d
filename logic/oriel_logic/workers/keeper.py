"""Keeps a pool's worker processes running: starts the fork server and asks it for workers.

A worker that has ended is replaced at once; after failed starts the delay grows. If setup takes long, one worker more
than may work is kept ready as a spare. If the fork server has ended, so have its workers, and a new one is launched.
"""

import asyncio
import logging
import os
from collections.abc import Callable

from oriel_logic.workers.bootstrap import BROKEN, EXITED, STARTED
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.worker import KILLED, Worker

_log = logging.getLogger(__name__)
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
REPLACE_S = 60.0  # at most one worker in this time is replaced because it may be broken
SPARE_FROM_S = 0.5  # with a setup this long a spare worker is kept


class Keeper:
    """The workers of one pool.

    launch: makes a fork server; `server` is the first one.
    make: makes the loop's end of a worker from its token and the pipe with its output.
    on_news: called when a worker has failed to start, or when none can ever be started.
    workers: the worker processes by token, ready or not.
    failed_starts: workers in a row that ended before they were ready.
    problem: why no worker can be started, "" while that is not known.
    suspect: a worker that may be broken; it has to end once others are ready in its place.
    """

    def __init__(
        self,
        server: ForkServer,
        count: int,
        *,
        launch: Callable[[], ForkServer],
        make: Callable[[int, int], Worker],
        on_news: Callable[[], None],
    ) -> None:
        self.server: ForkServer | None = server
        self.workers: dict[int, Worker] = {}
        self.failed_starts = 0
        self.problem = ""
        self.suspect: Worker | None = None
        self._replace_from_s = 0.0
        self._processes: dict[int, Worker] = {}  # process id -> worker, until it has ended
        self._count = count
        self._launch = launch
        self._make = make
        self._on_news = on_news
        self._tokens = 0
        self._setup_s = 0.0  # setup time of the latest worker that became ready
        self._closing = False
        self._missing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Attach to the fork server and begin to start workers."""
        assert self.server is not None
        asyncio.get_running_loop().add_reader(self.server.fileno(), self._read_events)
        self._missing.set()
        self._task = asyncio.create_task(self._keep(), name="worker pool keeper")

    async def stop(self) -> None:
        """Start no more workers."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """End all workers, and the fork server."""
        for worker in list(self.workers.values()):
            worker.close()
        server, self.server = self.server, None
        if server is not None:
            asyncio.get_running_loop().remove_reader(server.fileno())
            await asyncio.to_thread(server.close)

    def ready(self, worker: Worker) -> None:
        """Record that a worker has been set up."""
        self.problem = ""
        self.failed_starts = 0
        self._setup_s = worker.setup_s
        self._missing.set()  # a spare one may be wanted now

    def replace(self, worker: Worker) -> None:
        """Start a successor of a worker that may be broken. Others are replaced later: callers can make services fail,
        and each set-up takes time.
        """
        now = asyncio.get_running_loop().time()
        if self.suspect is None and now >= self._replace_from_s:
            _log.error("worker process %d fails the jobs of several services: it is replaced", worker.pid)
            self.suspect, self._replace_from_s = worker, now + REPLACE_S
            self._missing.set()

    def gone(self, worker: Worker) -> None:
        """Replace a worker that has ended."""
        if worker is self.suspect:
            self.suspect = None
        del self.workers[worker.token]
        self._missing.set()
        if not worker.is_ready:
            self._failed()

    def _failed(self) -> None:
        self.failed_starts += 1
        self._on_news()

    def _read_events(self) -> None:
        """Handle the events of the fork server, whose control socket is readable."""
        assert self.server is not None
        events = self.server.events()
        if events is None:
            _log.error("the fork server ended; it is started again")
            asyncio.get_running_loop().remove_reader(self.server.fileno())
            self.server.close()
            self.server = None
            self._processes.clear()
            for worker in list(self.workers.values()):
                worker.close()
            self._missing.set()
            if not any(worker.is_ready for worker in self.workers.values()):
                self._failed()
            return
        for kind, first, second, problem in events:
            if kind == STARTED and first in self.workers:
                worker = self._processes[second] = self.workers[first]
                worker.pid = second
            elif kind == BROKEN:
                self.problem = problem
                self._on_news()
            elif kind == EXITED and not self._closing:
                ended = self._processes.pop(first, None)
                how = f"by this server: {KILLED[ended.killed_for]}" if ended and ended.killed_for else how_ended(second)
                _log.warning("worker process %d ended (%s); a new one is started", first, how)

    async def _keep(self) -> None:
        while True:
            await self._missing.wait()
            self._missing.clear()
            try:
                if self.server is None:
                    await self._back_off()
                    self.server = self._launch()
                    asyncio.get_running_loop().add_reader(self.server.fileno(), self._read_events)
                while self.server is not None and len(self.workers) < self._wanted():
                    await self._back_off()
                    self._tokens += 1
                    sock, output = self.server.spawn(self._tokens)
                    worker = self.workers[self._tokens] = self._make(self._tokens, output)
                    try:
                        await worker.open(sock)
                    except OSError:
                        self.gone(worker)
                        raise
            except OSError as error:
                _log.error("a worker process cannot be started: %s", error)
                self._missing.set()
                self._failed()

    def _wanted(self) -> int:
        return self._count + (self._setup_s >= SPARE_FROM_S) + (self.suspect is not None)

    async def _back_off(self) -> None:
        if self.failed_starts:
            await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self.failed_starts, 10)))


def how_ended(status: int) -> str:
    """Describe the end of a process. status: the exit status as from `os.waitpid`."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
