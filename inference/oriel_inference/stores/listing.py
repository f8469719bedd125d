"""Lists the content of a store: all keys and ETags, which polls compare."""

import asyncio
import time
from collections.abc import Mapping

from oriel_inference.stores.snapshot import ModelFiles, snapshot
from oriel_inference.stores.source import Source

MAX_OBJECTS = 100_000


class Listing:
    """Lists the objects below `prefix`, one listing at a time. Used on the loop of the client only."""

    def __init__(self, source: Source, prefix: str, *, max_objects: int, max_version_bytes: int) -> None:
        self._source = source
        self._prefix = prefix
        self._max_objects = max_objects
        self._max_version_bytes = max_version_bytes
        self._looking = asyncio.Lock()
        self._began_s = 0.0
        self._found: Mapping[str, ModelFiles] = {}

    async def poll(self) -> Mapping[str, ModelFiles]:
        """List the store and return its content. Calls during a listing share the next one, which begins after them.

        Raises StoreUnavailable, TooManyObjects.
        """
        called_s = time.monotonic()
        async with self._looking:
            if self._began_s > called_s:
                return self._found
            began_s = time.monotonic()
            objects = await self._source.list(self._prefix, limit=self._max_objects)
            # In a thread, because a hundred thousand names take a while.
            found = await asyncio.to_thread(snapshot, objects, self._prefix, max_version_bytes=self._max_version_bytes)
            self._began_s, self._found = began_s, found
            return found
