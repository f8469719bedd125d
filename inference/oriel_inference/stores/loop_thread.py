"""Runs an event loop in a thread of its own, for callers that block."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from oriel_inference.errors import StoreUnavailable

T = TypeVar("T")


class LoopThread:
    """Starts with the first call and ends with `close`; calls after that, or cut off by it, raise StoreUnavailable."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[Future[Any]] = set()
        self._closed = False

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result, or raise its error. Blocks; not for the loop's own thread."""
        try:
            return self.submit(work).result()
        except CancelledError as error:
            raise StoreUnavailable("the server is stopping") from error

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the loop; return its future, which `close` cancels. Does not block."""
        with self._lock:
            if self._closed:
                work.close()
                raise StoreUnavailable("the server is stopping")
            future = asyncio.run_coroutine_threadsafe(work, self._loop or self._start())
            self._calls.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(call)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cut off calls in progress, run `last`, and end the thread. May be called twice."""
        with self._lock:
            first, self._closed = not self._closed, True
            calls, loop, thread = list(self._calls), self._loop, self._thread
        if not first or loop is None or thread is None:
            last.close()
            return
        for call in calls:
            call.cancel()
        asyncio.run_coroutine_threadsafe(last, loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _start(self) -> asyncio.AbstractEventLoop:
        ready = Event()
        loop = asyncio.new_event_loop()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.get_loop().call_soon(ready.set)
                loop.run_forever()

        self._thread = Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        ready.wait()
        self._loop = loop
        return loop
