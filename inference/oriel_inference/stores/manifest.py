"""Reads and writes the documents that the cache keeps about its content: small JSON files, used only if they decode.

The manifest of a version lists the bytes that belong into its folder. The record of a model lists its files when it was
last loaded, so that a server can start with it while the store is down.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from oriel_inference.errors import LoadFailed
from oriel_inference.stores.checksums import checksums
from oriel_inference.stores.names import relative_parts
from oriel_inference.stores.own_files import open_new, read_own
from oriel_inference.stores.snapshot import ModelFiles, RemoteFile, VersionFiles, combined_digest
from oriel_wire.objects.client import Stored

MAX_DOCUMENT_BYTES = 32 << 20
SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 2 << 20

T = TypeVar("T")
_SUM = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")


class CachedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the cache.

    name: below the version's folder.
    etag: of the object it came from.
    crc32: of its bytes, in hex.
    """

    name: str
    size: int
    etag: str
    crc32: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a version's folder. shown: `<model>/<version>`, for people who read the cache."""

    shown: str
    files: tuple[CachedFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    key: str
    size: int
    etag: str


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    digest: str = msgspec.field(name="look")  # the name in the files that caches hold
    files: tuple[_File, ...]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was in the store."""

    model: str
    shared: tuple[_File, ...]
    versions: Mapping[int, _Version]

    @classmethod
    def of(cls, model: str, files: ModelFiles) -> "Record":
        return cls(
            model=model,
            shared=tuple(_file(each) for each in files.shared.values()),
            versions={
                version: _Version(digest=each.digest, files=tuple(_file(file) for file in each.files))
                for version, each in files.versions.items()
                if not each.refused
            },
        )

    def after(self, older: "Record", have: Callable[[str], bool]) -> "Record":
        """Return this record, with the files of the `older` one for versions whose newer files are not in the cache.

        have: returns whether the cache holds a digest.
        """
        kept = {
            version: older.versions[version]
            for version, each in self.versions.items()
            if not have(each.digest) and version in older.versions and have(older.versions[version].digest)
        }
        return Record(model=self.model, shared=self.shared, versions={**self.versions, **kept})

    def only(self, versions: Collection[int]) -> "Record":
        kept = {version: each for version, each in self.versions.items() if version in versions}
        return Record(model=self.model, shared=self.shared, versions=kept)

    def files(self, have: Callable[[str], bool]) -> ModelFiles:
        """Return the files as a listing would, for those versions that are in the cache.

        have: returns whether the cache holds a digest.
        """
        shared = {each.name: _remote(each) for each in self.shared}
        return ModelFiles(
            shared=shared,
            digest=combined_digest(shared.values()),
            versions={
                version: VersionFiles(digest=each.digest, files=tuple(_remote(file) for file in each.files))
                for version, each in sorted(self.versions.items())
                if have(each.digest) or not any(file.size for file in each.files)
            },
        )


def _file(file: RemoteFile) -> _File:
    return _File(name=file.name, key=file.object.key, size=file.object.size, etag=file.object.etag)


def _remote(file: _File) -> RemoteFile:
    return RemoteFile(name=file.name, object=Stored(key=file.key, size=file.size, etag=file.etag))


def read_document(path: Path, kind: type[T]) -> T | None:
    """Read a document; return None if it is missing or cannot be read."""
    try:
        data = read_own(path, MAX_DOCUMENT_BYTES + 1)
        return msgspec.json.decode(data, type=kind) if len(data) <= MAX_DOCUMENT_BYTES else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def write_document(path: Path, document: msgspec.Struct) -> None:
    """Write a document in one step: a reader sees the old one or the new one. Raises OSError."""
    beside = path.with_name(f"{path.name}.new")
    with os.fdopen(open_new(beside), "wb") as file:
        file.write(msgspec.json.encode(document))
    os.replace(beside, path)


def agrees(path: Path, file: CachedFile) -> bool:
    """Return whether the bytes match the manifest. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        return size == file.size and checksums(opened, ("crc32",))["crc32"] == file.crc32


def sums(text: str, shown: str) -> dict[str, str]:
    """Parse a file as sha256sum prints it: name -> SHA-256 in lower case. Raises LoadFailed."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        match = _SUM.fullmatch(line)
        if match is None or line.startswith("\\"):
            raise LoadFailed(f"{shown}: line {number} is not a SHA-256 and a name")
        name = match[2].removeprefix("./")
        relative_parts(name)
        found[name] = match[1].lower()
    return found
