"""A thread that belongs to one session, for runtimes that keep state for each thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """A thread that does one thing after the other for whoever waits for it. Any thread may call `do`."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], T]) -> T:
        """Return what `job` returns in that thread, or raise what it raises; blocks."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        try:
            return future.result()
        finally:
            del future  # else an error keeps itself by its traceback, and with it the arrays of its batch

    def end(self) -> None:
        """End the thread after the jobs before this call, and wait for that."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del entry, future, job  # the arrays of a batch must not live until the next one
