"""Servers that share an object store for their artefacts, as far as the store sees them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memory_objects import MemoryObjects

from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore
from oriel_policies.artefacts.refusals import Circumstances, Refusal
from oriel_wire.objects.client import ObjectClient, ObjectWriter, Stored

UNDER = Circumstances(seconds=1.0, memory_bytes=0, artefact_bytes=1)
LONG_S = 1000.0
PREFIX = "engines/"


@contextmanager
def group(client: ObjectClient, writer: ObjectWriter, **more: float) -> Iterator[GroupStore]:
    """Give the store as one server uses it; times that a test does not give never pass in it."""
    times = {"beat_s": LONG_S, "expire_s": LONG_S, "poll_s": 0.01, "request_s": LONG_S} | more
    store = GroupStore(client, writer, prefix=PREFIX, shown="the store", **times)
    try:
        yield store
    finally:
        store.close()


async def wait(
    store: GroupStore,
    folder: ArtefactFolder,
    fingerprint: str,
    waits: Callable[[], None] = lambda: None,
    *,
    under: Circumstances = UNDER,
    left: Callable[[], bool] = lambda: False,
) -> int | Refusal | None:
    return await store.wait(folder, fingerprint, under, fetch_s=LONG_S, left=left, waits=waits)


class Silent(MemoryObjects):
    """A store that never answers a listing."""

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        self._receive("list", prefix)
        await asyncio.Event().wait()
        raise AssertionError


class Tasks:
    """The tasks of one server."""

    def __init__(self) -> None:
        self.all: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.all.append(asyncio.get_running_loop().create_task(work))
        return self.all[-1]

    async def end(self) -> None:
        for task in self.all:
            task.cancel()
        await asyncio.gather(*self.all, return_exceptions=True)
