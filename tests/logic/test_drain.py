"""SIGTERM under load: no request fails, and clients learn early that they have to reconnect elsewhere."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ..waiting import pipe_gate, until
from .processes import STOP_S, LogicServer, linux

SOURCE = """
    from oriel_logic import service

    def reverse(text): return text[::-1]

    @service(name="mixed")
    async def mixed(request, models, ctx):
        return await ctx.run(reverse, request.text())

    @service(name="slow")
    def slow(request):
        print("begun", flush=True)
        with open(request.text(), "rb", 0) as gate:
            gate.read(1)
        return "done"
"""


@pytest.fixture
def process(services: Callable[..., Path], tmp_path: Path) -> Iterator[LogicServer]:
    with LogicServer(services(two=SOURCE), tmp_path / "log") as started:
        yield started


class Caller:
    """Calls one request after the other on one connection, until an answer says that it is the last."""

    def __init__(self, url: httpx.URL) -> None:
        self.url = url
        self.answered = 0
        self.was_told = asyncio.Event()

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(self.url.host, self.url.port)
        head = f"POST {self.url.path}/mixed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc".encode()
        while not self.was_told.is_set():
            writer.write(head)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            assert lines[0] == b"http/1.1 200 ok", lines
            (length,) = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
            assert await reader.readexactly(length) == b'"cba"'
            self.answered += 1
            if b"connection: close" in lines:
                self.was_told.set()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@linux
async def test_a_stop_under_load_fails_no_request(process: LogicServer, tmp_path: Path) -> None:
    url = httpx.URL(process.url)
    admin = process.admin
    seen: list[tuple[int, bool]] = []

    async def ready(client: httpx.AsyncClient) -> int:
        # On a connection of its own, as a prober does.
        return (await client.get(f"{admin}/health/ready", headers={"connection": "close"})).status_code

    async def is_open() -> bool:
        try:
            _, writer = await asyncio.open_connection(url.host, url.port)
        except OSError:
            return False
        writer.close()
        return True

    async def admin_is_gone(client: httpx.AsyncClient) -> bool:
        try:
            seen.append((await ready(client), await is_open()))
        except httpx.TransportError:
            return True
        if (503, True) in seen:
            finish_the_slow_call()
        return False

    with pipe_gate(tmp_path / "gate") as finish_the_slow_call:
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:

            async def is_ready() -> bool:
                return await ready(client) == 200

            await until(is_ready)
            callers = [Caller(url) for _ in range(8)]
            for caller in callers:
                group.create_task(caller.run())
            slow = group.create_task(client.post(f"{url}/slow", content=str(tmp_path / "gate").encode()))
            await until(lambda: "begun" in process.log.read_text() and min(each.answered for each in callers) >= 5)
            process.popen.send_signal(signal.SIGTERM)
            await until(lambda: admin_is_gone(client))
            answer = await slow
    assert answer.json() == "done" and answer.headers["connection"] == "close"
    assert all(each.was_told.is_set() for each in callers)
    assert (503, True) in seen, "it says that it is not ready while it still takes connections"
    assert all(was_open for status, was_open in seen if status == 200)
    assert await asyncio.to_thread(process.popen.wait, STOP_S) == 0
    assert "Traceback" not in process.log.read_text() and "ERROR" not in process.log.read_text()
