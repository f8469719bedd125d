import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from oriel_cli import probe


@asynccontextmanager
async def answering(answer: bytes, *, hold: bool = False) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if hold:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", probe.Answer(200, {})),
        (b"HTTP/1.1 503 No\r\n\r\nnot json", probe.Answer(503, None)),
        (b"SSH-2.0-OpenSSH\r\n\r\n", None),
    ],
)
async def test_an_answer_is_read_or_counts_as_none(answer: bytes, expected: probe.Answer | None) -> None:
    async with answering(answer) as port:
        assert await probe.get("127.0.0.1", port, "/x", timeout_s=60) == expected


async def test_who_never_finishes_is_given_up() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n", hold=True) as port:
        assert await probe.get("127.0.0.1", port, "/x", timeout_s=0.05) is None
