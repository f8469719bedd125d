"""Limits how many models load at once, and separately how many fetch their files.

A load from a folder holds a slot from its beginning to its end. A load from an object store first fetches its files,
which may take long: it gets a thread of its own for that, at most FETCHES per store, and a slot only once its files are
here. So a slow store delays no model of another store, and none whose files have arrived.

A load that takes longer than SLOW_S leaves its slot to the next one and goes on, as long as no more loads than there
are slots have done so: files whose check hangs, and Python models that sleep, do not hold up every other model.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from threading import Lock
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import ModelStore

FETCHES = 16
SLOW_S = 3.0

P = ParamSpec("P")
T = TypeVar("T")


class _Place:
    """The slot of a load. timer: until it leaves the slot to another one. slow: whether it has left it."""

    def __init__(self) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self.slow = False


class LoadSlots:
    """The slots. Created and used on the loop. count: models that load at once; slow_s: see SLOW_S."""

    def __init__(self, count: int, *, slow_s: float = SLOW_S) -> None:
        self._slots = asyncio.Semaphore(count)
        self._slow_left = count
        self._slow_s = slow_s
        self._threads = ThreadPoolExecutor(2 * count, thread_name_prefix="oriel-load")
        self._fetches: WeakKeyDictionary[ModelStore, tuple[asyncio.Semaphore, ThreadPoolExecutor]] = WeakKeyDictionary()
        self._lock = Lock()
        self._waiting: set[Future[_Place]] = set()
        self._closed = False

    @asynccontextmanager
    async def turn(self, store: ModelStore, model: str) -> AsyncIterator["Slot"]:
        """Wait for a turn. Inside the block, `run` the load and publish its result; then the store is told that the
        load is over.
        """
        if not store.fetches:
            place = await self._enter()
            try:
                yield Slot(None, self._threads)
            finally:
                self._leave(place)
            return
        if store not in self._fetches:
            threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="oriel-fetch")
            self._fetches[store] = asyncio.Semaphore(FETCHES), threads
        fetches, threads = self._fetches[store]
        async with fetches:
            try:
                yield Slot(self, threads)
            finally:
                store.loaded(model)

    def close(self) -> None:
        """Make threads that wait for a slot, now or later, raise LoadFailed."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for each in waiting:
            each.cancel()
        for threads in (self._threads, *(threads for _, threads in self._fetches.values())):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _enter(self) -> _Place:
        await self._slots.acquire()
        place = _Place()
        place.timer = asyncio.get_running_loop().call_later(self._slow_s, self._make_way, place)
        return place

    def _make_way(self, place: _Place) -> None:
        place.timer = None
        if self._slow_left:
            self._slow_left -= 1
            place.slow = True
            self._slots.release()

    def _leave(self, place: _Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
        if place.slow:
            self._slow_left += 1
        else:
            self._slots.release()

    @contextmanager
    def taken(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Hold a slot, for a thread. Blocks. Raises LoadFailed."""
        with self._lock:
            if self._closed:
                raise LoadFailed("the server is stopping")
            future: Future[_Place] = asyncio.run_coroutine_threadsafe(self._enter(), loop)
            self._waiting.add(future)
        try:
            place = future.result()
        except CancelledError as error:
            raise LoadFailed("the server is stopping") from error
        finally:
            with self._lock:
                self._waiting.discard(future)
        try:
            yield
        finally:
            if not self._closed:
                loop.call_soon_threadsafe(self._leave, place)


class Slot:
    """The slot of one load. slots: where it has to take its slot; None if it holds one already."""

    def __init__(self, slots: LoadSlots | None, threads: ThreadPoolExecutor) -> None:
        self._slots = slots
        self._threads = threads
        self._loop = asyncio.get_running_loop()

    async def run(self, load: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a load in a thread."""
        return await self._loop.run_in_executor(self._threads, lambda: load(*args, **kwargs))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a slot while the load does what follows the fetch; called by the load. Blocks. Raises LoadFailed."""
        if self._slots is None:
            yield
            return
        with self._slots.taken(self._loop):
            yield
