"""Fetches a whole version into a folder of the cache and compares every known checksum."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from oriel_inference.errors import LoadFailed, NotKept
from oriel_inference.stores.fetch_file import Counts, Fetched, FetchSettings, fetch_file
from oriel_inference.stores.gate import Gate
from oriel_inference.stores.manifest import MAX_SUMS_BYTES, SUMS_FILE, CachedFile, Manifest, sums
from oriel_inference.stores.snapshot import RemoteFile, VersionFiles
from oriel_wire.objects.client import ObjectClient

FILES_AT_ONCE = 4


class Corrupt(LoadFailed):
    """The fetched or the uploaded bytes do not match a checksum."""


async def fetch_version(
    client: ObjectClient,
    gate: Gate,
    version: VersionFiles,
    folder: Path,
    *,
    shown: str,
    settings: FetchSettings,
    counts: Counts,
) -> Manifest:
    """Fetch every file of `version` below `folder`/files. What an earlier try left there is used as far as it is
    correct.

    Raises LoadFailed: StoreUnavailable, ObjectChanged, or Corrupt for a file that is wrong twice or does not match the
    version's own SHA256SUMS.
    """
    fetch = _Version(client, gate, version, folder, shown, settings, counts)
    found = await fetch.run()
    return Manifest(
        shown=shown,
        block_bytes=settings.block_bytes,
        files=tuple(
            CachedFile(name=file.name, size=file.object.size, etag=file.object.etag, crc32=found[file.name])
            for file in version.files
        ),
    )


class _Version:
    def __init__(
        self,
        client: ObjectClient,
        gate: Gate,
        version: VersionFiles,
        folder: Path,
        shown: str,
        settings: FetchSettings,
        counts: Counts,
    ) -> None:
        self._client = client
        self._gate = gate
        self._files = {file.name: (index, file) for index, file in enumerate(version.files)}
        self._folder = folder
        self._shown = shown
        self._settings = settings
        self._counts = counts
        self._room = asyncio.Semaphore(FILES_AT_ONCE)
        self._expected: Mapping[str, str] = {}

    async def run(self) -> Mapping[str, tuple[int, ...]]:
        """Return name -> CRC-32 of each block."""
        await asyncio.to_thread(self._folders)
        found: dict[str, tuple[int, ...]] = {}
        if SUMS_FILE in self._files:
            # The smallest first: it may show that the rest has not been uploaded yet.
            found[SUMS_FILE] = await self._one(SUMS_FILE)
            self._expected = await asyncio.to_thread(self._sums)
            if missing := sorted(set(self._expected) - set(self._files)):
                raise LoadFailed(f"{self._shown} is incomplete: {missing[0][:100]}, named in {SUMS_FILE}, is missing")
        names = [name for name in self._files if name != SUMS_FILE]
        tasks = [asyncio.create_task(self._one(name)) for name in names]
        try:
            found.update(zip(names, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        return found

    def _folders(self) -> None:
        try:
            (self._folder / "blocks").mkdir(mode=0o700, exist_ok=True)
            for parent in {(self._folder / "files" / name).parent for name in self._files}:
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise NotKept(f"{self._shown} cannot be written into the model cache: {error.strerror}") from error

    def _sums(self) -> Mapping[str, str]:
        path = self._folder / "files" / SUMS_FILE
        shown = f"{self._shown}/{SUMS_FILE}"
        try:
            if path.stat().st_size > MAX_SUMS_BYTES:
                raise LoadFailed(f"{shown} is larger than {MAX_SUMS_BYTES} bytes")
            return sums(path.read_text("utf-8"), shown)
        except (OSError, UnicodeDecodeError) as error:
            raise LoadFailed(f"{shown} cannot be read as text") from error

    async def _one(self, name: str) -> tuple[int, ...]:
        async with self._room:
            index, file = self._files[name]
            fetched = await self._fetch(index, file)
            if fetched.wrong or (self._disagrees(name, fetched) and not fetched.checked):
                # Bytes may have changed on their way, so all of them are fetched once more.
                fetched = await self._fetch(index, file, anew=True)
            if fetched.wrong:
                raise Corrupt(f"{self._shown}/{name} does not match the {fetched.wrong} that the object store reports")
            if self._disagrees(name, fetched):
                self._counts.failures["corrupt"] += 1
                raise Corrupt(f"{self._shown}/{name} does not agree with its line in {SUMS_FILE}")
            return fetched.crc32

    def _disagrees(self, name: str, fetched: Fetched) -> bool:
        return name in self._expected and self._expected[name] != fetched.sha256

    async def _fetch(self, index: int, file: RemoteFile, *, anew: bool = False) -> Fetched:
        journal = self._folder / "blocks" / str(index)
        if anew:
            await asyncio.to_thread(journal.unlink, missing_ok=True)
        return await fetch_file(
            self._client,
            self._gate,
            file.object,
            self._folder / "files" / file.name,
            journal,
            shown=f"{self._shown}/{file.name}",
            sha256=file.name in self._expected,
            settings=self._settings,
            counts=self._counts,
        )
