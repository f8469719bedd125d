"""Reads and writes the documents that the cache keeps about its content: small JSON files, used only if they decode.

The manifest of a version lists the bytes that belong into its folder.
"""

import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import relative_parts
from oriel_inference.stores.checksums import checksums
from oriel_inference.stores.own_files import open_new, read_own

MAX_DOCUMENT_BYTES = 32 << 20
SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 2 << 20

T = TypeVar("T")
_SUM = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")


class CachedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the cache.

    name: below the version's folder.
    etag: ETag of the object it came from.
    crc32: CRC-32 of its bytes, in hex.
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


def read_document(path: Path, kind: type[T]) -> T | None:
    """Read a document; return None if it is missing or cannot be read."""
    try:
        data = read_own(path, MAX_DOCUMENT_BYTES + 1)
        return msgspec.json.decode(data, type=kind) if len(data) <= MAX_DOCUMENT_BYTES else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def write_document(path: Path, document: object) -> None:
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
