"""Limits how many models load at once, and separately how many fetch their files.

Each load runs in a thread. It takes a slot once its files are on this machine. A store that fetches has threads of its
own, FETCHES at most, so that a slow store delays no model of another store, and none whose files have arrived.

A load that takes longer than SLOW_S no longer counts among those for which there are slots, as long as no more loads
than there are slots have done so: files whose check hangs, and Python models that sleep, do not hold up every other
model. Nor does a Python model count while it waits for another one that it loads.
"""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from weakref import WeakKeyDictionary

from oriel_inference.errors import InvalidRequest, LoadFailed
from oriel_inference.stores import ModelStore

FETCHES = 16
SLOW_S = 3.0
MAX_LENT = 32


class LoadSlots:
    """The slots and threads of all loads. count: models that load at once. slow_s: see SLOW_S."""

    def __init__(self, count: int, *, slow_s: float = SLOW_S) -> None:
        self._count = count
        self._slow_s = slow_s
        self._began_s: list[float] = []  # begin of each load that holds a slot
        self._lent: Counter[str] = Counter()  # models that wait -> their instances that do so
        self._changed = Condition()
        self._closed = False
        self._threads = ThreadPoolExecutor(2 * count + MAX_LENT, thread_name_prefix="oriel-load")
        self._fetching: WeakKeyDictionary[ModelStore, ThreadPoolExecutor] = WeakKeyDictionary()

    def threads(self, store: ModelStore) -> ThreadPoolExecutor:
        """Return the threads in which models of a store are loaded."""
        if not store.fetches:
            return self._threads
        if store not in self._fetching:
            self._fetching[store] = ThreadPoolExecutor(FETCHES, thread_name_prefix="oriel-fetch")
        return self._fetching[store]

    @contextmanager
    def taken(self) -> Iterator[float]:
        """Hold a slot, and give the seconds that the thread waited for it. Blocks. Raises LoadFailed."""
        since_s = time.monotonic()
        with self._changed:
            while not self._closed and not self._is_free(now := time.monotonic()):
                slow_from_s = [began_s + self._slow_s for began_s in self._began_s]
                self._changed.wait(min((each - now for each in slow_from_s if each > now), default=self._slow_s))
            if self._closed:
                raise LoadFailed("the server is stopping")
            began_s = time.monotonic()
            self._began_s.append(began_s)
        try:
            yield began_s - since_s
        finally:
            with self._changed:
                self._began_s.remove(began_s)
                self._changed.notify()  # one slot is free; waking all that wait costs more than a small load

    @contextmanager
    def lent(self, model: str) -> Iterator[None]:
        """Give the slot of a model's load to others while an instance of the model waits for one of them. Raises
        InvalidRequest if MAX_LENT models do so.
        """
        with self._changed:
            if model not in self._lent and len(self._lent) >= MAX_LENT:
                raise InvalidRequest(f"{MAX_LENT} models wait already for models that they load: try again later")
            self._lent[model] += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._lent -= Counter([model])  # forgets those with none left

    def close(self) -> None:
        """Make threads that wait for a slot, now or later, raise LoadFailed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for threads in (self._threads, *self._fetching.values()):
            threads.shutdown(wait=False, cancel_futures=True)

    def _is_free(self, now: float) -> bool:
        quick = sum(now - began_s < self._slow_s for began_s in self._began_s)
        lent = len(self._lent)
        return quick - lent < self._count and len(self._began_s) - lent < 2 * self._count
