"""Write large answers to a TLS transport in pieces.

The whole ciphertext of one write lies in memory, and that memory stays with its connection: after one piece of 256 KiB
from an upstream a connection would take that much for as long as it is open.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

PIECE_BYTES = 32 * 1024


class InPieces:
    """A transport that writes to another one in pieces."""

    __slots__ = ("_transport",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if len(data) <= PIECE_BYTES:
            self._transport.write(data)
            return
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            self._transport.write(view[start : start + PIECE_BYTES])

    def writelines(self, lines: Iterable[bytes]) -> None:
        for data in lines:
            self.write(data)
