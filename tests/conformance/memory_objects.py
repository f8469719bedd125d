"""An `ObjectClient` and an `ObjectWriter` without a store: a bucket in memory whose failures are set as attributes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import md5

from oriel_wire.objects.client import Stored
from oriel_wire.objects.errors import ObjectChanged, ObjectRefused, StoreUnavailable, TooManyObjects

PIECE_BYTES = 1 << 16


class MemoryObjects:
    """A bucket in memory.

    objects: key -> bytes; `put` and `remove` change them.
    down: while True, no request is answered.
    breaks, breaks_after: the next `breaks` reads fail, each after `breaks_after` bytes.
    spoils: keys whose bytes are changed in transit.
    forbids: keys that are listed, but may not be read.
    checksums: False if the store keeps none.
    held: an event for which every read waits.
    requests: all requests in order: ("list", prefix), ("head", key), ("read", key, start, end), ("put", key).
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None, *, checksums: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self._digests: dict[str, str] = {}
        self.down = False
        self.breaks = 0
        self.breaks_after = 0
        self.spoils: set[str] = set()
        self.forbids: set[str] = set()
        self.checksums = checksums
        self.held: asyncio.Event | None = None
        self.requests: list[tuple[object, ...]] = []
        self.closed = False
        self.writing = threading.Lock()
        for key, data in (objects or {}).items():
            self.put(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._digests[key] = md5(data, usedforsecurity=False).hexdigest()
        self.objects[key] = data

    def remove(self, key: str) -> None:
        """Delete an object, or everything below a folder."""
        self.objects = {
            name: data for name, data in self.objects.items() if name != key and not name.startswith(f"{key}/")
        }

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        self._receive("list", prefix)
        found = [self._stored(key, checksum=False) for key in sorted(self.objects) if key.startswith(prefix)]
        if len(found) > limit:
            raise TooManyObjects(f"below {prefix!r} are more than {limit} objects")
        return found

    async def head(self, key: str) -> Stored:
        self._receive("head", key)
        if key in self.forbids:
            raise ObjectRefused(f"the store does not give this process {key!r}")
        return self._stored(key, checksum=self.checksums)

    async def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        self._receive("read", key, start, end)
        left = self.breaks_after if self.breaks else end
        self.breaks = max(0, self.breaks - 1)
        position = start
        while position < end:
            if self.held is not None:
                await self.held.wait()
            self._check_up()
            if self._stored(key, checksum=False).etag != etag:
                raise ObjectChanged(f"{key} was overwritten")
            piece = self.objects[key][position : min(end, position + PIECE_BYTES)]
            if left <= 0:
                raise StoreUnavailable("the connection broke")
            left -= len(piece)
            yield bytes(reversed(piece)) if key in self.spoils else piece
            position += len(piece)
            await asyncio.sleep(0)  # lets other tasks run between two pieces

    async def close(self) -> None:
        self.closed = True

    def _receive(self, *request: object) -> None:
        self.requests.append(request)
        self._check_up()

    def _check_up(self) -> None:
        if self.down:
            raise StoreUnavailable("the store is down")

    def _stored(self, key: str, *, checksum: bool) -> Stored:
        if key not in self.objects:
            raise ObjectChanged(f"{key} is gone")
        data, digest = self.objects[key], self._digests[key]
        return Stored(key=key, size=len(data), etag=f"{digest}-1", checksum=("md5", digest) if checksum else None)


class MemoryWriter:
    """Writes objects that never change into a bucket in memory.

    denied: while True, the store takes no object from this process.
    """

    def __init__(self, objects: MemoryObjects) -> None:
        self._objects = objects
        self.denied = False

    async def put(self, key: str, data: bytes) -> bool:
        self._objects._receive("put", key)
        if self.denied:
            raise ObjectRefused(f"the store does not take {key!r} from this process")
        with self._objects.writing:  # servers of one test have clients in threads of their own
            if key in self._objects.objects:
                return False
            self._objects.put(key, data)
        return True

    async def close(self) -> None:
        """Nothing is open."""
