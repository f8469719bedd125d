"""A client of the HTTP engine that sends raw bytes."""

import asyncio
import socket
from collections.abc import Callable


def bound() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


async def talk(port: int, data: bytes, *, until: Callable[[bytes], bool] | None = None) -> bytes:
    """Send bytes, and read until `until` holds or the server closes; returns what was read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = b""
    async with asyncio.timeout(60):
        while until is None or not until(got):
            more = await reader.read(65536)
            if not more:
                break
            got += more
    writer.close()
    return got


def count(needle: bytes, n: int) -> Callable[[bytes], bool]:
    return lambda got: got.count(needle) >= n
