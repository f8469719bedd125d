"""Fetches one object into one file, with several readers if that is faster, and resumes an earlier try.

A single connection is enough for a near store, a distant one needs many. So a fetch begins with one reader and doubles
their number while that makes it faster and the rest would take longer than `split_s`. More would do harm: some stores
read the whole object for each range. Each block that has arrived is recorded in a journal with its CRC. A later try
verifies the recorded blocks and fetches only the others. The cache's manifest holds the same CRCs. The checksum of the
whole object, if there is one to compare with, is computed while the object is fetched.
"""

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from oriel_inference.errors import LoadFailed, NotKept, ObjectChanged, StoreUnavailable
from oriel_inference.stores.digests import Digest, Follower, digest_of
from oriel_inference.stores.gate import BROUGHT_BYTES, Gate
from oriel_inference.stores.manifest import crc32_of
from oriel_inference.stores.ranges import BLOCK_BYTES, Run, Work
from oriel_wire.objects.client import ObjectClient, Stored

HEAD_S = 30.0
STALL_BYTES = 256 << 10
FAILURES = ("cache", "changed", "corrupt", "refused", "unavailable")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Limits of a fetch.

    readers: the largest number of readers per file.
    split_s: more readers are started while the rest of the file would take longer than this.
    tick_s: between two checks of the readers.
    window_s: in which a speed is measured.
    gain: twice the readers have to be so much faster.
    stall_s: without progress for so long, the fetch fails.
    """

    readers: int = 8
    split_s: float = 2.0
    tick_s: float = 0.1
    window_s: float = 0.5
    gain: float = 1.25
    stall_s: float = 30.0
    block_bytes: int = BLOCK_BYTES


@dataclass(slots=True)
class Counts:
    """Counts since the start. Single writer: the loop of the client."""

    read_bytes: int = 0
    resumed: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch.

    crc32: of each block.
    sha256: of the file's bytes if it was requested, else "".
    checked: whether a checksum of the store was compared.
    wrong: the checksum that the bytes do not match, "" if none.
    """

    crc32: tuple[int, ...]
    sha256: str = ""
    checked: bool = False
    wrong: str = ""


async def fetch_file(
    client: ObjectClient,
    gate: Gate,
    listed: Stored,
    path: Path,
    journal: Path,
    *,
    shown: str,
    sha256: bool,
    settings: FetchSettings,
    counts: Counts,
) -> Fetched:
    """Fetch the bytes of `listed` to `path`. Raises LoadFailed; fetched bytes stay for the next try unless they are
    wrong.

    shown: the file's name in errors.
    sha256: whether it is requested.
    A cancelled fetch can be resumed, too.
    """
    async with gate.attempt():
        try:
            async with asyncio.timeout(HEAD_S):
                stored = await client.head(listed.key)
        except TimeoutError as error:
            raise StoreUnavailable(f"the object store does not answer within {HEAD_S:g} s") from error
    if (stored.etag, stored.size) != (listed.etag, listed.size):
        raise ObjectChanged(f"{shown} was overwritten while it was being fetched")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unwritten(shown, error) from error
    try:
        os.ftruncate(descriptor, stored.size)
        fetch = _Fetch(client, gate, stored, descriptor, journal, shown, sha256, settings, counts)
        fetched = await fetch.run()
        if fetched.wrong:
            counts.failures["corrupt"] += 1
            os.unlink(journal)
    except OSError as error:
        raise _unwritten(shown, error) from error
    finally:
        os.close(descriptor)
    return fetched


def _unwritten(shown: str, error: OSError) -> LoadFailed:
    return NotKept(f"{shown} cannot be written into the model cache: {error.strerror}")


class _Fetch:
    def __init__(
        self,
        client: ObjectClient,
        gate: Gate,
        stored: Stored,
        descriptor: int,
        journal: Path,
        shown: str,
        sha256: bool,
        settings: FetchSettings,
        counts: Counts,
    ) -> None:
        self._client = client
        self._gate = gate
        self._stored = stored
        self._descriptor = descriptor
        self._journal_path = journal
        self._journal = -1
        self._shown = shown
        self._settings = settings
        self._counts = counts
        self._work = Work(0)
        self._level = 1  # number of readers
        self._settled = False  # more readers were no faster
        self._speed = 0.0  # with half of them, bytes/s
        self._window_s, self._window_bytes = 0.0, 0  # when it began, and the bytes fetched by then
        self._read_bytes = 0
        self._blocks: dict[int, int] = {}  # CRCs of the blocks that are here
        wanted = {*(["sha256"] if sha256 else []), *([stored.checksum[0]] if stored.checksum else [])}
        digests: dict[str, Digest | None] = {name: digest_of(name) for name in sorted(wanted)}
        self._digests = {name: digest for name, digest in digests.items() if digest is not None}
        self._follower = Follower(descriptor, stored.size, list(self._digests.values()))

    async def run(self) -> Fetched:
        size, block = self._stored.size, self._settings.block_bytes
        self._blocks = await asyncio.to_thread(_journalled, self._journal_path, self._descriptor, size, block)
        self._work = Work(size, self._blocks, block_bytes=block)
        if self._blocks:
            self._counts.resumed += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._journal = os.open(self._journal_path, flags, 0o600)
        if not self._digests:
            self._follower.end()  # there is nothing to compare with
        following = asyncio.create_task(asyncio.to_thread(self._follower.run))
        try:
            self._follower.advance(self._work.frontier)
            await self._read_all()
            await asyncio.wait({following})
            following.result()
        finally:
            # A thread cannot be cancelled: the descriptor is closed when it has ended.
            self._follower.end()
            await asyncio.wait({following})
            os.close(self._journal)
        found = {name: digest.hexdigest() for name, digest in self._digests.items()}
        algorithm, expected = self._stored.checksum or ("", "")
        checked = algorithm in found
        wrong = algorithm if checked and found[algorithm] != expected else ""
        crcs = tuple(crc for _, crc in sorted(self._blocks.items()))
        return Fetched(crcs, found.get("sha256", ""), checked, wrong)

    async def _read_all(self) -> None:
        readers: set[asyncio.Task[None]] = set()
        tick_s, stall_s = self._settings.tick_s, self._settings.stall_s
        marked_s, marked_bytes = time.monotonic(), 0
        try:
            while self._work.left:
                while len(readers) < self._wanted(len(readers)) and (run := self._work.more()):
                    readers.add(asyncio.create_task(self._reader(run)))
                done, readers = await asyncio.wait(readers, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
                if self._read_bytes - marked_bytes >= STALL_BYTES:
                    marked_s, marked_bytes = time.monotonic(), self._read_bytes
                elif time.monotonic() - marked_s > stall_s:
                    raise StoreUnavailable(f"{self._shown}: less than {STALL_BYTES} bytes came in {stall_s:g} s")
        finally:
            for each in readers:
                each.cancel()
            if readers:
                await asyncio.wait(readers)

    def _wanted(self, now: int) -> int:
        """Return the number of readers that there should be. now: their present number."""
        took_s = time.monotonic() - self._window_s
        if not now or not self._window_s or took_s < self._settings.window_s:
            return now or 1
        speed = (self._read_bytes - self._window_bytes) / took_s
        self._window_s, self._window_bytes = time.monotonic(), self._read_bytes
        if self._work.left <= self._settings.split_s * speed:
            return now
        if now == self._level and not self._settled:
            if speed < self._settings.gain * self._speed:
                self._settled = True
            else:
                self._speed, self._level = speed, min(2 * self._level, self._settings.readers)
        return self._level

    async def _reader(self, run: Run) -> None:
        """Read `run` to its end, which may move nearer meanwhile; then the next run that has no reader."""
        following: Run | None = run
        while following is not None:
            await self._read(following)
            self._work.done(following)
            following = self._work.next()

    async def _read(self, run: Run) -> None:
        block = self._settings.block_bytes
        sum_at, check = run.pos, 0  # the CRC of the block from its beginning to `run.pos`
        while run.left:
            brought = 0
            try:
                async with self._gate.attempt() as attempt:
                    read = self._client.read(self._stored.key, start=run.pos, end=run.end, etag=self._stored.etag)
                    async with aclosing(read) as pieces:  # type: ignore[type-var]
                        async for piece in pieces:
                            attempt.brought(len(piece))
                            brought = attempt.brought_bytes
                            view = memoryview(piece)[: run.left]
                            self._came(len(view))
                            while view:
                                part = view[: min(block - (run.pos - sum_at), run.left)]
                                os.pwrite(self._descriptor, part, run.pos)
                                check = crc32(part, check)
                                run.pos += len(part)
                                view = view[len(part) :]
                                if run.pos - sum_at == block or run.pos == self._stored.size:
                                    self._blocks[sum_at // block] = check
                                    os.write(self._journal, f"{sum_at // block} {check:08x}\n".encode())
                                    sum_at, check = run.pos, 0
                            self._follower.advance(self._work.frontier)
                            if not run.left:
                                break
                    if run.left:
                        raise StoreUnavailable(f"{self._shown}: {run.left} bytes are missing")
            except StoreUnavailable:
                if brought < BROUGHT_BYTES:
                    raise
                self._counts.resumed += 1

    def _came(self, size_bytes: int) -> None:
        self._window_s = self._window_s or time.monotonic()
        self._read_bytes += size_bytes
        self._counts.read_bytes += size_bytes


def _journalled(journal: Path, descriptor: int, size: int, block_bytes: int) -> dict[int, int]:
    """Return the blocks that an earlier try noted and that are unchanged, with their CRCs."""
    try:
        lines = journal.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    noted: dict[int, str] = {}
    for line in lines:
        block, _, check = line.partition(" ")
        if block.isdigit() and len(check) == 8 and int(block) * block_bytes < size:
            noted[int(block)] = check
    found = {block: crc32_of(descriptor, block * block_bytes, block_bytes) for block in noted}
    return {block: check for block, check in found.items() if f"{check:08x}" == noted[block]}
