"""An object store whose answers the test scripts."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from .object_stores import SERVERS, point_to

TOKEN = "TOKEN-OF-THE-SESSION"

Asked = list[str]

Answer = Callable[[str], bytes]


@asynccontextmanager
async def answering(
    answer: Answer, *, endless: bytes = b"", host: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, Asked]]:
    """Yield the address of the store and the list of request heads that it received.

    endless: bytes that are sent again and again after the answer, until the client closes.
    """
    asked: Asked = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            sent = re.search(r"^content-length: ([0-9]+)", asked[-1], re.IGNORECASE | re.MULTILINE)
            if sent is not None and "expect: 100-continue" not in asked[-1].lower():
                await reader.readexactly(int(sent[1]))
            writer.write(answer(asked[-1]))
            while endless:
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0)  # drain() does not always yield; let other tasks run
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(take, host, 0)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pointed(monkeypatch: pytest.MonkeyPatch, kind: str, address: str) -> str:
    server = SERVERS[kind]()
    point_to(monkeypatch, server, int(address.rpartition(":")[2]))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,127.0.0.9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    return server.url
