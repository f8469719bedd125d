"""Servers that share an object store for their artefacts, as far as the store sees them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from memory_objects import MemoryObjects

from oriel_inference.artefacts.group_store import GroupStore
from oriel_wire.objects.client import ObjectClient, ObjectWriter, Stored

LONG_S = 1000.0
PREFIX = "engines/"


@contextmanager
def group(client: ObjectClient, writer: ObjectWriter, request_s: float = LONG_S) -> Iterator[GroupStore]:
    """Give the store as one server uses it; times that a test does not give never pass in it."""
    store = GroupStore(client, writer, prefix=PREFIX, shown="the store", request_s=request_s)
    try:
        yield store
    finally:
        store.close()


class Silent(MemoryObjects):
    """A store that never answers a listing."""

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        self._receive("list", prefix)
        await asyncio.Event().wait()
        raise AssertionError
