"""Lists and fetches the objects of one store, behind a circuit breaker.

An object is read by one request into a file. If the connection breaks, the next request goes on where the file ends,
for the same ETag only. The file is then read once and compared with every checksum that is known; wrong bytes are
fetched once more.

After a request without an answer, one request per `OUTAGE_S` finds out whether the store is back. Meanwhile all others
fail with the same error and send nothing, however many pollers and loads need the store.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from oriel_inference import errors
from oriel_inference.errors import LoadFailed, ObjectChanged, StoreUnavailable
from oriel_inference.stores.checksums import checksums
from oriel_policies.upstreams.breaker import Breaker
from oriel_wire.objects import errors as client_errors
from oriel_wire.objects.client import ObjectClient, Stored

OUTAGE_S = 10.0
LISTING_S = 60.0
HEAD_S = 30.0
# A fetch fails if fewer bytes than this come in this time.
STALL_S = 30.0
STALL_BYTES = 256 << 10
# A connection that broke after fewer bytes counts as no answer at all.
RESUMED_BYTES = 64 << 10
FAILURES = ("cache", "changed", "corrupt", "refused", "unavailable")


_KINDS: Mapping[type[client_errors.ObjectStoreError], type[LoadFailed]] = {
    client_errors.StoreUnavailable: errors.StoreUnavailable,
    client_errors.ObjectChanged: errors.ObjectChanged,
    client_errors.ObjectRefused: errors.ObjectRefused,
    client_errors.TooManyObjects: errors.TooManyObjects,
}


class Corrupt(LoadFailed):
    """The fetched or the uploaded bytes do not match a checksum."""


@dataclass(slots=True)
class Counts:
    """Counts since the start. Single writer: the loop of the client."""

    read_bytes: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))


class Source:
    """The objects of one store. Single writer: the event loop of its client.

    now: monotonic seconds.
    stall_s: seconds in which STALL_BYTES have to come.
    """

    def __init__(
        self, client: ObjectClient, *, now: Callable[[], float] = time.monotonic, stall_s: float = STALL_S
    ) -> None:
        self.counts = Counts()
        self._client = client
        self._now = now
        self._stall_s = stall_s
        # One failure is enough to stop asking, and one answer to go on.
        self._breaker = Breaker(threshold=1, probe_s=OUTAGE_S, probation_s=0.0)
        self._failure = ""

    @property
    def answers(self) -> bool:
        """Return whether the store answered the last request."""
        return self._breaker.closed

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        """Return all objects below `prefix`. Raises StoreUnavailable, TooManyObjects."""
        async with self._attempt("listing the object store", LISTING_S):
            return await self._client.list(prefix, limit=limit)

    async def fetch(self, listed: Stored, file: BinaryIO, *, shown: str, sha256: str = "") -> str:
        """Write all bytes of `listed` to `file`; return their CRC-32.

        file: file that may hold the first bytes already. A failed or cancelled fetch leaves them to the next one.
        shown: name of the file in errors.
        sha256: checksum that the bytes need to have besides the store's own, "" if there is none.
        Raises LoadFailed: StoreUnavailable, ObjectChanged, ObjectRefused, or Corrupt if the bytes are wrong twice.
        Raises OSError.
        """
        for last in (False, True):
            async with self._attempt(f"describing {shown}", HEAD_S):
                stored = await self._client.head(listed.key)
            if (stored.etag, stored.size) != (listed.etag, listed.size):
                raise ObjectChanged(f"{shown} was overwritten since the store was listed")
            await self._read(stored, file, shown)
            algorithm, checksum = stored.checksum or ("", "")
            found = await asyncio.to_thread(checksums, file, {"crc32", "sha256" if sha256 else "", algorithm})
            if found.get(algorithm, checksum) != checksum:
                wrong, keep = f"does not match the {algorithm} that the object store reports", False
            elif sha256 and found["sha256"] != sha256:
                # Bytes that the store's own checksum confirms are those that were uploaded.
                wrong, keep = "does not agree with its line in SHA256SUMS", last or algorithm in found
            else:
                break
            self.counts.failures["corrupt"] += 1
            if not keep:
                file.truncate(0)
            if keep or last:
                raise Corrupt(f"{shown} {wrong}")
        return found["crc32"]

    async def close(self) -> None:
        await self._client.close()

    async def _read(self, stored: Stored, file: BinaryIO, shown: str) -> None:
        """Read what `file` lacks, with as many requests as that takes."""
        if file.seek(0, os.SEEK_END) > stored.size:
            file.truncate(0)
        try:
            async with asyncio.timeout(self._stall_s) as stall:
                while (start := file.seek(0, os.SEEK_END)) < stored.size:
                    async with self._attempt(f"reading {shown}", None):
                        await self._append(stored, file, start, stall)
        except TimeoutError as error:
            # The store may answer others, so this is no outage.
            raise StoreUnavailable(f"{shown}: less than {STALL_BYTES} bytes came in {self._stall_s:g} s") from error

    async def _append(self, stored: Stored, file: BinaryIO, start: int, stall: asyncio.Timeout) -> None:
        """Append the bytes from `start` on. If the connection breaks after RESUMED_BYTES or more, return early.

        stall: put off while bytes come.
        """
        position = marked = start
        read = self._client.read(stored.key, start=start, end=stored.size, etag=stored.etag)
        try:
            async with aclosing(read) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    position += file.write(piece)
                    self.counts.read_bytes += len(piece)
                    if position - marked >= STALL_BYTES:
                        marked = position
                        stall.reschedule(asyncio.get_running_loop().time() + self._stall_s)
        except client_errors.StoreUnavailable:
            if position - start < RESUMED_BYTES:
                raise

    @asynccontextmanager
    async def _attempt(self, doing: str, limit_s: float | None) -> AsyncIterator[None]:
        """Run one request in this context, and translate its errors. Raises LoadFailed; StoreUnavailable at once while
        no request may be sent.

        doing: the request, for the error if it takes longer than `limit_s` seconds.
        """
        now = self._now()
        if not self._breaker.closed and not self._breaker.probe(now):
            raise StoreUnavailable(self._failure)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except (client_errors.ObjectStoreError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                failure: LoadFailed = StoreUnavailable(f"{doing} takes more than {limit_s} s")
            else:
                failure = load_failed(error)
            if isinstance(failure, StoreUnavailable):
                self._failure = failure.reason
                self._breaker.record_failure(self._now())
            else:
                self._breaker.succeeded(now)  # it answered
            raise failure from error
        self._breaker.succeeded(now)


def load_failed(error: client_errors.ObjectStoreError) -> LoadFailed:
    """The load failure with the same text, of the corresponding class."""
    return _KINDS.get(type(error), LoadFailed)(str(error))
