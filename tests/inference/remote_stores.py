"""Remote stores for tests: a bucket in memory behind a cache in a folder."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from oriel_inference.stores.cache import Cache
from oriel_inference.stores.fetch_file import FetchSettings
from oriel_inference.stores.gate import Gate
from oriel_inference.stores.remote import RemoteStore, StoreLimits
from oriel_wire.objects.memory import MemoryObjects

BLOCK = 256 << 10
ONE_READER = FetchSettings(readers=1, block_bytes=BLOCK)


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
    fetch: FetchSettings = ONE_READER,
    limits: StoreLimits | None = None,
    clock: Callable[[], float] | None = None,
) -> Iterator[RemoteStore]:
    """A process of its own as far as the cache is concerned: it begins and ends with the block."""
    gate = Gate(clock) if clock else None
    cache = Cache(folder, max_bytes=max_bytes, in_use=in_use, **({"now": clock} if clock else {}))
    store = RemoteStore(objects, prefix, cache, shown="s3://bucket/repo", fetch=fetch, gate=gate, limits=limits)
    try:
        yield store
    finally:
        store.close()
