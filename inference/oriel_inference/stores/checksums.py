"""Checksums of a file, by the names that object stores give to their algorithms."""

from collections.abc import Callable, Collection
from hashlib import md5, sha1, sha256
from typing import BinaryIO, Protocol
from zlib import crc32

from oriel_inference.stores.crc import CRC32C, CRC64NVME

READ_BYTES = 1 << 20


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_KNOWN: dict[str, Callable[[], _Digest]] = {
    "crc32": _Crc32,
    "crc32c": CRC32C,
    "crc64nvme": CRC64NVME,
    "md5": lambda: md5(usedforsecurity=False),
    "sha1": lambda: sha1(usedforsecurity=False),
    "sha256": sha256,
}


def checksums(file: BinaryIO, algorithms: Collection[str]) -> dict[str, str]:
    """Read the whole file; return algorithm -> checksum in hex, without the algorithms that are not known here.

    Raises OSError.
    """
    digests = {name: _KNOWN[name]() for name in algorithms if name in _KNOWN}
    file.seek(0)
    while piece := file.read(READ_BYTES):
        for digest in digests.values():
            digest.update(piece)
    return {name: digest.hexdigest() for name, digest in digests.items()}
