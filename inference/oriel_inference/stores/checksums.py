"""Checksums of a file, by the names that object stores give to their algorithms.

CRC-32C and CRC-64/NVME are not in the standard library. A CRC's register is linear in its bytes. A buffer is therefore
cut into lanes that numpy advances together, eight bytes per step ("slicing by 8", Kounavis and Berry 2005), and the
registers of the lanes are joined pairwise, each moved past the bytes of the next one. This reaches some hundred MB/s on
one core.
"""

from collections.abc import Callable, Collection
from functools import cache
from hashlib import md5, sha1, sha256
from typing import TYPE_CHECKING, BinaryIO
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hashlib import _Hash

READ_BYTES = 1 << 20
LANE_BYTES = 256
MAX_LANES = 4096

_Words = NDArray[np.uint64]


def _apply(tables: _Words, registers: _Words) -> _Words:
    """Apply a linear map to many registers at once. tables: [8, 256], the images of each byte at each place."""
    columns = np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 8)
    out: _Words = tables[0].take(columns[:, 0])
    for place in range(1, 8):
        out ^= tables[place].take(columns[:, place])
    return out


@cache
def _step(polynomial: int) -> _Words:
    """Return the table of one byte: [256]."""
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = np.where(table & np.uint64(1), (table >> np.uint64(1)) ^ np.uint64(polynomial), table >> np.uint64(1))
    return table


@cache
def _past(polynomial: int, doublings: int) -> _Words:
    """Return the map that moves a register past 8 << doublings zero bytes."""
    if doublings:
        half = _past(polynomial, doublings - 1)
        return _apply(half, half.reshape(-1)).reshape(8, 256)
    step = _step(polynomial)
    registers = (np.arange(256, dtype=np.uint64)[None, :] << (8 * np.arange(8, dtype=np.uint64))[:, None]).reshape(-1)
    for _ in range(8):
        registers = step[registers & np.uint64(255)] ^ (registers >> np.uint64(8))
    return registers.reshape(8, 256)


class _Crc:
    """A reflected CRC with all ones at both ends. polynomial: reversed."""

    polynomial: int
    bits: int

    def __init__(self) -> None:
        self._register = (1 << self.bits) - 1

    def update(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data).cast("B")
        while len(view) >= 2 * LANE_BYTES:
            lanes = min(MAX_LANES, 1 << (len(view) // LANE_BYTES).bit_length() - 1)
            self._advance(view[: lanes * LANE_BYTES], lanes)
            view = view[lanes * LANE_BYTES :]
        step = _step(self.polynomial)
        for byte in view:
            self._register = int(step[(self._register ^ byte) & 255]) ^ (self._register >> 8)

    def hexdigest(self) -> str:
        return f"{self._register ^ ((1 << self.bits) - 1):0{self.bits // 4}x}"

    def _advance(self, view: memoryview, lanes: int) -> None:
        words = np.ascontiguousarray(np.frombuffer(view, dtype="<u8").reshape(lanes, -1).T)
        registers = np.zeros(lanes, dtype=np.uint64)
        registers[0] = self._register
        eight = _past(self.polynomial, 0)
        for row in words:
            registers = _apply(eight, registers ^ row)
        doublings = (LANE_BYTES // 8).bit_length() - 1
        while len(registers) > 1:
            registers = _apply(_past(self.polynomial, doublings), registers[::2]) ^ registers[1::2]
            doublings += 1
        self._register = int(registers[0])


class CRC32C(_Crc):
    """CRC-32 with Castagnoli's polynomial."""

    polynomial = 0x82F63B78
    bits = 32


class CRC64NVME(_Crc):
    """CRC-64/NVME, which S3 stores for objects that were uploaded without a checksum."""

    polynomial = 0x9A6C9329AC4BC9B5
    bits = 64


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_KNOWN: "dict[str, Callable[[], _Hash | _Crc32 | _Crc]]" = {
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
