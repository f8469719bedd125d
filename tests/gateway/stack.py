"""A gateway on a free port in front of an upstream that the test scripts."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Any

import grpc
from grpc import aio

from oriel_gateway.core import Gateway
from oriel_gateway.identity.callers import Callers
from oriel_gateway.identity.tickets import Tickets
from oriel_gateway.ingress.http import ClientConnection, serve_public
from oriel_gateway.limits import EmbeddedLimiter, Limiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.sampling import ALWAYS, Sampling
from oriel_wire.observe.trace import ListSink

GOLD, BRONZE, LIMITED = "key-gold", "key-bronze", "key-limited"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def documents(
    ports: list[int], *, max_inflight: int = 8, max_queue: int = 100, extra: str = "", pool: str = 'probe = ""'
) -> dict[str, bytes]:
    endpoints = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    return {
        "all.toml": f"""
[tiers.gold]
band = 0
target_ms = 2000
[tiers.bronze]
band = 2
target_ms = 2000
[pools.p]
endpoints = [{endpoints}]
grpc_endpoints = [{endpoints}]
max_inflight = {max_inflight}
max_queue = {max_queue}
max_body_bytes = 1000000
{pool}
[[routes]]
model = "*"
pool = "p"
[[routes]]
service = "*"
pool = "p"
[tenants.g]
tier = "gold"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{digest(GOLD)}" }}, {{ sha256 = "{digest("old")}", expires = 2020-01-01T00:00:00Z }}]
[tenants.b]
tier = "bronze"
models = ["digits"]
services = ["digits"]
keys = [{{ sha256 = "{digest(BRONZE)}" }}]
[tenants.limited]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{digest(LIMITED)}" }}]
limit = {{ requests_per_s = 0.5, burst = 2 }}
{extra}
""".encode()
    }


Answer = Callable[["Seen"], Awaitable[bytes]]


class Seen:
    """One request as the upstream received it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head = head.decode("latin-1")
        self.body = body

    def get(self, name: str) -> str | None:
        for line in self.head.split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


class Upstream:
    """A scripted HTTP/1.1 server: `answer` returns the raw bytes; requests are kept in `seen`."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.departures = 0
        self.port = 0
        self.answer: Answer = self.ok
        self._serving: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def ok(self, seen: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-up: 1\r\nserver-timing: infer;dur=1.5\r\n\r\nok"

    async def close(self) -> None:
        """Abort all connections, as the end of a process does."""
        for writer in self._serving.values():
            writer.transport.abort()
        await asyncio.gather(*(task for task in self._serving if task is not None), return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving[task] = writer
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                seen = Seen(head, b"")
                if seen.get("transfer-encoding"):
                    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
                        seen.body += await reader.readexactly(size)
                        await reader.readexactly(2)
                    await reader.readexactly(2)
                else:
                    seen.body = await reader.readexactly(int(seen.get("content-length") or 0))
                self.seen.append(seen)
                answering = asyncio.ensure_future(self.answer(seen))
                leaving = asyncio.ensure_future(reader.read(1))
                # retrieves the exception, which nobody else may do
                leaving.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.departures += 1
                    answering.cancel()
                    return
                data = answering.result()
                if not data:
                    return
                writer.write(data)
                await writer.drain()
                first = await leaving
                if not first:
                    return
                reader._buffer[:0] = first  # type: ignore[attr-defined]  # put back what the departure check took
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            del self._serving[task]


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    up = Upstream()
    server = await asyncio.start_server(up.serve, "127.0.0.1", 0)
    up.port = server.sockets[0].getsockname()[1]
    try:
        yield up
    finally:
        server.close()
        await up.close()


@asynccontextmanager
async def gateway(
    files: dict[str, bytes],
    *,
    limits: HttpLimits | None = None,
    limiter: Limiter | None = None,
    callers: type[Callers] = Callers,
    sampling: Sampling = ALWAYS,
) -> AsyncIterator[tuple[int, Gateway]]:
    gate = Gateway(compile_documents(files), limiter=limiter or EmbeddedLimiter(), sink=ListSink(sampling))
    if callers is not Callers:
        gate.callers = callers(gate.snapshot)
    server: HttpServer = HttpServer(limits or HttpLimits())
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    await server.open(lambda: ClientConnection(server, gate), sock)
    try:
        yield server.port, gate
    finally:
        await server.drain(0.0)
        await gate.close()


@asynccontextmanager
async def internal(core: Gateway, *keys: bytes) -> AsyncIterator[int]:
    """Yield the port that takes tickets signed with these keys, as `app` opens it."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = await serve_public(core, sock)
    core.callers.tickets, core.callers.internal = Tickets(keys), server.memo
    try:
        yield server.port
    finally:
        await server.drain(0.0)


@asynccontextmanager
async def grpc_server(handler: "grpc.GenericRpcHandler[Any, Any]") -> AsyncIterator[int]:
    """Yield the port of a gRPC server that is stopped in any case; a running one would fail a later test."""
    server = aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.0)


@contextmanager
def nobody() -> Iterator[int]:
    """Yield a port that refuses connections. It stays bound, so that no server of another test listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Reply:
    """One answer as the client received it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
        self.body = body


class Client:
    """A client on one connection that sends and receives raw bytes, so that no library normalises them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(
        self, target: str, body: bytes = b"", *, key: str | None = GOLD, method: str = "POST", headers: str = ""
    ) -> None:
        auth = f"authorization: Bearer {key}\r\n" if key else ""
        head = f"{method} {target} HTTP/1.1\r\nhost: x\r\n{auth}{headers}content-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode("latin-1") + body)

    async def reply(self, timeout_s: float = 60.0) -> Reply:
        async with asyncio.timeout(timeout_s):
            head = await self.reader.readuntil(b"\r\n\r\n")
            reply = Reply(head[:-4], b"")
            if reply.status == 204:
                pass
            elif reply.headers.get("transfer-encoding") == "chunked":
                while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
                    reply.body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
            elif "content-length" in reply.headers:
                reply.body = await self.reader.readexactly(int(reply.headers["content-length"]))
            else:
                reply.body = await self.reader.read()
            return reply

    async def ask(self, target: str, body: bytes = b"", **more: str | None) -> Reply:
        self.send(target, body, **more)  # type: ignore[arg-type]
        return await self.reply()
