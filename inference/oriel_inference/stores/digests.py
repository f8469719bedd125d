"""Checksums of a file that is still growing, computed behind its writer."""

import os
from collections.abc import Callable
from hashlib import md5, sha1, sha256
from threading import Condition
from typing import Protocol
from zlib import crc32

from oriel_inference.stores.crc import CRC32C, CRC64NVME

READ_BYTES = 1 << 20


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _md5() -> Digest:
    return md5(usedforsecurity=False)


def _sha1() -> Digest:
    return sha1(usedforsecurity=False)


_KNOWN: dict[str, Callable[[], Digest]] = {
    "crc32": _Crc32,
    "crc32c": CRC32C,
    "crc64nvme": CRC64NVME,
    "md5": _md5,
    "sha1": _sha1,
    "sha256": sha256,
}


def digest_of(algorithm: str) -> Digest | None:
    """Return the digest of that name; None if it is not supported here."""
    make = _KNOWN.get(algorithm)
    return make() if make else None


class Follower:
    """Computes checksums of a growing file, in a thread of its own: it reads all bytes before the frontier.

    The loop that fetches the file is the single writer of the frontier.
    """

    def __init__(self, descriptor: int, size: int, digests: list[Digest]) -> None:
        self._descriptor = descriptor
        self._size = size
        self._digests = digests
        self._frontier = 0
        self._ended = False
        self._moved = Condition()

    def advance(self, frontier: int) -> None:
        """Report that every byte before the frontier is written."""
        if frontier - self._frontier >= READ_BYTES or frontier >= self._size:
            with self._moved:
                self._frontier = frontier
                self._moved.notify()

    def end(self) -> None:
        """Report that the rest will not come."""
        with self._moved:
            self._ended = True
            self._moved.notify()

    def run(self) -> bool:
        """Read everything; blocks until that is done, or until `end`: then returns False. Raises OSError."""
        buffer = bytearray(READ_BYTES)
        view, position = memoryview(buffer), 0
        while position < self._size:
            with self._moved:
                self._moved.wait_for(lambda: self._ended or self._frontier > position)  # noqa: B023
                if self._ended:
                    return False
                frontier = self._frontier
            while position < frontier:
                count = os.preadv(self._descriptor, [view[: frontier - position]], position)
                if not count:
                    raise OSError("the file became shorter while it was being fetched")
                for digest in self._digests:
                    digest.update(view[:count])
                position += count
        return True
