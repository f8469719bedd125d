"""The threads that execute batches: one bounded pool for all models, with threads started on first use."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Job = Callable[[], None]
BEGIN_S = 0.0005  # a thread that has a core begins within 0.1 ms


class Workers(Protocol):
    """Runs jobs, each exactly once. Jobs do not raise."""

    def submit(self, job: Job) -> None: ...

    def let_begin(self) -> None:
        """Wait until the job that was submitted last has begun: for at most BEGIN_S, and then for the interpreter.

        For a caller that goes on computing: a thread that wakes up can only begin when it gets the interpreter's lock,
        and the caller would keep that lock for up to 5 ms.
        """
        ...


class WorkerThreads:
    """A pool of at most `limit` daemon threads. `submit` and `let_begin` are called by one thread, the loop's."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._jobs: SimpleQueue[tuple[Job, threading.Lock] | None] = SimpleQueue()
        self._begun: threading.Lock | None = None  # lock of the newest job, released when the job begins
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._busy = 0

    def submit(self, job: Job) -> None:
        with self._lock:
            self._busy += 1
            needed = self._busy > len(self._threads) and len(self._threads) < self._limit
        if needed:
            thread = threading.Thread(target=self._work, name=f"oriel-batch-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._begun = begun = threading.Lock()
        begun.acquire()
        self._jobs.put((job, begun))

    def let_begin(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.acquire(timeout=BEGIN_S)

    def close(self, timeout_s: float) -> bool:
        """Let running jobs end and stop the threads; return False if some still run after `timeout_s` each."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, begun = given
            begun.release()
            job()
            with self._lock:
                self._busy -= 1
            del given, job  # the arrays of a finished batch must not live until the next one
