"""One bounded HTTP/1.1 GET to a unit's control port, without an HTTP library in the supervisor."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "get"]

MAX_ANSWER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """status: HTTP status; document: the decoded JSON body, None when it is not JSON."""

    status: int
    document: Any


async def get(host: str, port: int, path: str, *, timeout_s: float) -> Answer | None:
    """GET `path`; None when nothing answered properly in `timeout_s`. Cancelled: the connection is closed."""
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _exchange(host, port, path)
    except (OSError, TimeoutError):
        return None
    head, separator, body = raw.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not separator or len(words) < 2 or not words[1].isdigit():
        return None
    return Answer(int(words[1]), _decoded(body))


async def _exchange(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # Units answer with a Content-Length and close, so the body is what follows the head.
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode("ascii"))
        parts: list[bytes] = []
        size = 0
        while part := await reader.read(65536):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise OSError("the answer is too large")
        return b"".join(parts)
    finally:
        writer.close()


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
