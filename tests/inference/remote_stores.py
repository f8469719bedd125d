"""Remote model stores: a bucket in memory behind a cache in a folder."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from memory_objects import MemoryObjects

from oriel_inference.stores.cache import HANDED_S, Cache
from oriel_inference.stores.remote import RemoteStore, StoreLimits
from oriel_inference.stores.retries import PAUSE_S, Retries
from oriel_inference.stores.source import STALL_S, Source


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def remote(
    objects: MemoryObjects,
    folder: Path,
    *,
    prefix: str = "repo/",
    max_bytes: int = 1 << 30,
    in_use: Callable[[], Collection[str]] = tuple,
    limits: StoreLimits | None = None,
    pause_s: float = PAUSE_S,
    handed_s: float = HANDED_S,
    stall_s: float = STALL_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RemoteStore]:
    """Open a store. For the cache, each `with` is a process of its own."""
    cache = Cache(folder, max_bytes=max_bytes, in_use=in_use, handed_s=handed_s, now=clock)
    retries = Retries()
    retries.pause_s = pause_s
    source = Source(objects, now=clock, stall_s=stall_s)
    store = RemoteStore(source, prefix, cache, shown="s3://bucket/repo", limits=limits, retries=retries)
    try:
        yield store
    finally:
        store.close()
