"""Fetches a whole version into a folder of the cache."""

import asyncio
import os
from pathlib import Path
from typing import BinaryIO

from oriel_inference.errors import LoadFailed
from oriel_inference.stores.manifest import MAX_SUMS_BYTES, SUMS_FILE, CachedFile, Manifest, sums
from oriel_inference.stores.snapshot import VersionFiles
from oriel_inference.stores.source import Source

FILES_AT_ONCE = 4


async def fetch_version(source: Source, version: VersionFiles, folder: Path, *, shown: str) -> Manifest:
    """Fetch every file of `version` below `folder`/files, where an earlier try may have left the beginning of some.

    shown: name of the version in errors.
    Raises LoadFailed as `Source.fetch`, also if the version does not match its own SHA256SUMS. Raises OSError.
    """
    objects = {file.name: file.object for file in version.files}
    room = asyncio.Semaphore(FILES_AT_ONCE)

    async def fetched(name: str, sha256: str = "") -> CachedFile:
        async with room:
            with _opened(folder / "files" / name) as file:
                crc32 = await source.fetch(objects[name], file, shown=f"{shown}/{name}", sha256=sha256)
        return CachedFile(name=name, size=objects[name].size, etag=objects[name].etag, crc32=crc32)

    found: dict[str, CachedFile] = {}
    expected: dict[str, str] = {}
    if SUMS_FILE in objects:
        # The smallest first: it may show that the rest has not been uploaded yet.
        found[SUMS_FILE] = await fetched(SUMS_FILE)
        expected = await asyncio.to_thread(_sums, folder / "files" / SUMS_FILE, f"{shown}/{SUMS_FILE}")
        if missing := sorted(set(expected) - set(objects)):
            raise LoadFailed(f"{shown} is incomplete: {missing[0][:100]}, named in {SUMS_FILE}, is missing")
    try:
        async with asyncio.TaskGroup() as group:
            names = [name for name in objects if name not in found]
            tasks = [group.create_task(fetched(name, expected.get(name, ""))) for name in names]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    found |= zip(names, [task.result() for task in tasks], strict=True)
    return Manifest(shown=shown, files=tuple(found.values()))


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b")


def _sums(path: Path, shown: str) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_SUMS_BYTES:
            raise LoadFailed(f"{shown} is larger than {MAX_SUMS_BYTES} bytes")
        return sums(path.read_text("utf-8"), shown)
    except UnicodeDecodeError as error:
        raise LoadFailed(f"{shown} cannot be read as text") from error
