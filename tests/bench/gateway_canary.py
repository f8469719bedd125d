"""What somebody's requests take while others are slow or idle (R20, R32): `python tests/bench/gateway_canary.py`.

    [--seconds 4] [--clients 200] [--idle 2000] [--work-ms 1] [--answer-mib 1]

A gateway with its default bounds in a process of its own before a small model server in another. The canary asks on one
kept connection, and every tenth time on a new one, while so many others send heads or bodies of a byte now and then,
or read nothing of large answers, or have only connected. Promised: no failure, p99 at most 3 x the canary's alone, and
with 2000 idle connections nothing over 1 s; the files come back.
"""

import argparse
import asyncio
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gateway.pods import INFER, files, pod
from tests.gateway.process import Process, gateway_process
from tests.gateway.stack import BRONZE, GOLD, Client

HEAD = b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % BRONZE.encode()
ANSWER_MIB = [1]  # of those that nobody reads
Others = Callable[[Process, int], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one case. cores: of the gateway's process meanwhile."""

    asked: int
    failures: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    cores: float


async def canary(process: Process, seconds: float) -> Found:
    times: list[float] = []
    failures = 0
    cpu, began = process.cpu_s(), time.monotonic()
    async with Client(process.port) as kept:
        while time.monotonic() - began < seconds:
            start = time.monotonic()
            try:
                if len(times) % 10 == 9:
                    async with Client(process.port) as fresh:
                        status = (await fresh.ask(INFER, b"canary", key=GOLD)).status
                else:
                    status = (await kept.ask(INFER, b"canary", key=GOLD)).status
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                status = 0
            failures += status != 200
            times.append((time.monotonic() - start) * 1e3)
    cores = (process.cpu_s() - cpu) / (time.monotonic() - began)
    times.sort()
    p50, p99 = (times[int(len(times) * share)] for share in (0.5, 0.99))
    return Found(asked=len(times), failures=failures, p50_ms=p50, p99_ms=p99, worst_ms=times[-1], cores=cores)


@asynccontextmanager
async def nobody(_: Process, clients: int) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def connected(process: Process, clients: int, *, receive_bytes: int = 0) -> AsyncIterator[list[Client]]:
    """receive_bytes: of each one's kernel buffer, 0: as the kernel likes."""

    async def one() -> Client:
        client = Client(process.port)
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", process.port))
        client.reader, client.writer = await asyncio.open_connection(sock=sock)
        return client

    made: list[Client] = []
    try:
        while len(made) < clients:
            made += await asyncio.gather(*(one() for _ in range(min(50, clients))))
        yield made
    finally:
        for client in made:
            client.writer.transport.abort()


@asynccontextmanager
async def idle(process: Process, clients: int) -> AsyncIterator[None]:
    async with connected(process, clients):
        yield


def trickling(start: bytes, then: bytes) -> Others:
    """`start`, and then a piece a second: each of them dies its death within the promised time."""

    @asynccontextmanager
    async def others(process: Process, clients: int) -> AsyncIterator[None]:
        async with connected(process, clients) as made:
            for client in made:
                client.writer.write(start)

            async def trickle() -> None:
                while True:
                    for client in made:
                        if not client.writer.is_closing():
                            client.writer.write(then)
                        await asyncio.sleep(1.0 / len(made))

            task = asyncio.create_task(trickle())
            try:
                yield
            finally:
                task.cancel()

    return others


@asynccontextmanager
async def readers(process: Process, clients: int) -> AsyncIterator[None]:
    """Who asks for a megabyte and reads nothing."""
    body = b"size %d" % (ANSWER_MIB[0] << 20)
    request = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with connected(process, clients, receive_bytes=4096) as made:
        for client in made:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.writer.write(request)
        yield


CASES: dict[str, Others] = {
    "alone": nobody,
    "slow heads": trickling(HEAD[:30], b"x"),
    "slow bodies": trickling(HEAD + b"content-length: 100000\r\n\r\n", b"x"),
    "slow chunks": trickling(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "readers that do not read": readers,
    "idle": idle,
}


async def bench(seconds: float, clients: int, many: int, work_ms: int) -> bool:
    """Print the table; whether everything was kept."""
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        async with pod(work_ms) as one, gateway_process(Path(folder), files([one], idempotent=False)) as process:
            await canary(process, 1.0)
            before = process.files()
            alone = None
            print(f"{'others':>6} {'':26} {'asked':>6} {'failed':>6} {'p50 ms':>7} {'p99 ms':>7} {'worst':>7} "
                  f"{'p99 x alone':>11} {'cores':>6}")  # fmt: skip
            for name, others in CASES.items():
                number = many if name == "idle" else 0 if name == "alone" else clients
                async with others(process, number):
                    await asyncio.sleep(2.0)
                    found = await canary(process, seconds)
                alone = alone or found
                ratio = found.p99_ms / alone.p99_ms
                good = not found.failures and ratio <= 3.0 and found.worst_ms <= 1000.0
                kept = kept and good
                print(f"{number:6} {name:26} {found.asked:6} {found.failures:6} {found.p50_ms:7.2f} "
                      f"{found.p99_ms:7.2f} {found.worst_ms:7.2f} {ratio:11.2f} {found.cores:6.2f}"
                      f"{'' if good else '  MISSED'}", flush=True)  # fmt: skip
                await asyncio.sleep(0.5)
            for _ in range(100):
                if process.files() <= before + 20:
                    break
                await asyncio.sleep(0.1)
            print(f"files: {before} before, {process.files()} after")
            return kept and process.files() <= before + 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--clients", type=int, default=200, help="that are slow")
    parser.add_argument("--idle", type=int, default=2000, help="connections that say nothing")
    parser.add_argument("--work-ms", type=int, default=1, help="of the model server per call")
    parser.add_argument("--answer-mib", type=int, default=1, help="of the answers that nobody reads")
    args = parser.parse_args()
    ANSWER_MIB[0] = args.answer_mib
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 0 if asyncio.run(bench(args.seconds, args.clients, args.idle, args.work_ms)) else 1


if __name__ == "__main__":
    sys.exit(main())
