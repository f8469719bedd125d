"""Latency of one client's requests while others are slow or idle (R20, R32).

    python benchmarks/neighbours.py gateway
    [--seconds 4] [--rounds 1] [--clients 200] [--idle 2000] [--work-ms 1] [--answer-mib 1 8] [--only WORD]

A gateway with its default bounds in a process of its own before a small model server in another. The canary asks on one
kept connection, and every tenth time on a new one, while other clients send their heads or bodies byte by byte, or read
nothing of large answers, or have only connected. Promised: no failure, p99 at most 3 x the canary's alone, with 2000
idle connections nothing over 1 s; the files come back. With `--seconds` below 4 a handful of calls decides a p99, which
is then not judged.

Large answers come from a model server of their own, in a pool of their own: the gateway is the same, and what it does
for those readers is what the canary feels. Two rows beside it are shown and not judged. "From the canary's server":
there the canary also waits for one thread of Python that has all those answers to send, which no gateway can change.
"Past the gateway": the same readers ask the large server itself, as many at a time as the gateway would let them, so
what the canary feels is the machine that all of them share.
Columns: gateway and server are the cores that the gateway and the canary's model server use; of the canary's time,
"queue" is what it waited for a permit, "upstream" until the head of its answer was back (`Server-Timing`, p99 each).
"""

import argparse
import asyncio
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gateway.pods import INFER, PROBED, Pod, files, pod
from tests.gateway.process import Process, cpu_s, gateway_process
from tests.gateway.stack import BRONZE, GOLD, Client

from oriel_gateway.pools.pool import SUSPEND_AFTER_S

HEAD = b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % BRONZE.encode()
LARGE_HEAD = HEAD.replace(b"digits", b"large")
PERMITS = 16  # of each pool
JUDGED_S = 4.0  # of each case, from which its p99 is judged
Others = Callable[[Process, int], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of one case.

    cores, server_cores: cores that the gateway's process and the canary's model server used meanwhile.
    """

    asked: int
    failures: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    queue_ms: float
    upstream_ms: float
    cores: float
    server_cores: float


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def canary(process: Process, server: Pod, seconds: float) -> Found:
    times: list[float] = []
    stages: dict[str, list[float]] = {"gateway-queue": [0.0], "gateway-upstream": [0.0]}
    failures = 0
    cpu, server_cpu, began = process.cpu_s(), cpu_s(server.process.pid), time.monotonic()
    async with Client(process.port) as kept:
        while time.monotonic() - began < seconds:
            start = time.monotonic()
            try:
                if len(times) % 10 == 9:
                    async with Client(process.port) as fresh:
                        reply = await fresh.ask(INFER, b"canary", key=GOLD)
                else:
                    reply = await kept.ask(INFER, b"canary", key=GOLD)
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                failures += 1
            else:
                failures += reply.status != 200
                for part in reply.headers.get("server-timing", "").split(", "):
                    name, _, took = part.partition(";dur=")
                    if name in stages:
                        stages[name].append(float(took))
            times.append((time.monotonic() - start) * 1e3)
    took_s = time.monotonic() - began
    return Found(
        asked=len(times),
        failures=failures,
        p50_ms=statistics.median(times),
        p99_ms=p99(times),
        worst_ms=max(times),
        queue_ms=p99(stages["gateway-queue"]),
        upstream_ms=p99(stages["gateway-upstream"]),
        cores=(process.cpu_s() - cpu) / took_s,
        server_cores=(cpu_s(server.process.pid) - server_cpu) / took_s,
    )


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do `work` until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def nobody(_: Process, clients: int) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def connected(port: int, clients: int, *, receive_bytes: int = 0) -> AsyncIterator[list[Client]]:
    """Open connections. receive_bytes: the size of each one's kernel buffer; 0 for the kernel's default."""

    async def one() -> Client:
        client = Client(port)
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
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
    async with connected(process.port, clients):
        yield


def trickling(start: bytes, then: bytes) -> Others:
    """Clients that send `start`, and `then` once a second; the gateway ends each of them within the promised time."""

    @asynccontextmanager
    async def others(process: Process, clients: int) -> AsyncIterator[None]:
        async with connected(process.port, clients) as made:
            for client in made:
                client.writer.write(start)

            async def trickle() -> None:
                while True:
                    for client in made:
                        if not client.writer.is_closing():
                            client.writer.write(then)
                        await asyncio.sleep(1.0 / len(made))

            async with meanwhile(trickle()):
                yield

    return others


def readers(head: bytes, mib: int) -> Others:
    """Clients that ask for an answer of `mib` MiB and read nothing of it."""

    @asynccontextmanager
    async def others(process: Process, clients: int) -> AsyncIterator[None]:
        body = b"size %d" % (mib << 20)
        request = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        async with connected(process.port, clients, receive_bytes=4096) as made:
            for client in made:
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.writer.write(request)
            yield

    return others


def straight(port: int, mib: int) -> Others:
    """The same clients at the model server itself, as many at a time as the gateway would let them."""

    @asynccontextmanager
    async def others(_: Process, clients: int) -> AsyncIterator[None]:
        body = b"size %d" % (mib << 20)
        async with connected(port, clients, receive_bytes=4096) as made:

            async def ask() -> None:
                for number, client in enumerate(made):
                    if number and number % PERMITS == 0:
                        await asyncio.sleep(SUSPEND_AFTER_S)
                    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                    client.writer.write(LARGE_HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))

            async with meanwhile(ask()):
                yield

    return others


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of neighbours: what they do, how many they are, and whether the promise is about it."""

    name: str
    others: Others
    clients: int
    judged: bool = True


def cases(clients: int, many: int, answer_mib: list[int], large: int) -> list[Case]:
    """Alone is the first. large: the port of the server of large answers."""
    found = [
        Case(name="alone", others=nobody, clients=0),
        Case(name="slow heads", others=trickling(HEAD[:30], b"x"), clients=clients),
        Case(name="slow bodies", others=trickling(HEAD + b"content-length: 100000\r\n\r\n", b"x"), clients=clients),
        Case(
            name="slow chunks",
            others=trickling(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
            clients=clients,
        ),
    ]
    for mib in answer_mib:
        name = f"no reading of {mib} MiB"
        found.append(Case(name=name, others=readers(LARGE_HEAD, mib), clients=clients))
        for where, others in (
            ("from the canary's server", readers(HEAD, mib)),
            ("past the gateway", straight(large, mib)),
        ):
            found.append(Case(name=f"{name} {where}", others=others, clients=clients, judged=False))
    found.append(Case(name="idle", others=idle, clients=many))
    return found


def policies(canarys: Pod, large: Pod, readers: int) -> dict[str, bytes]:
    """Two pools; the queue of each has room for all readers."""
    ((name, text),) = files([canarys], idempotent=False).items()
    text = text.replace(b"max_queue = 100\n", b"max_queue = %d\n" % (readers + 100))
    pool = b'[pools.large]\nendpoints = ["127.0.0.1:%d"]\nmax_inflight = %d\nmax_queue = %d\n%b\n' % (
        *(large.port, PERMITS, readers + 100, PROBED.encode()),
    )
    text = text.replace(b"[[routes]]", pool + b'[[routes]]\nmodel = "large"\npool = "large"\n[[routes]]', 1)
    return {name: text.replace(b'models = ["digits"]', b'models = ["digits", "large"]')}


def row(case: Case, found: Found, ratio: float, good: bool) -> str:
    return (
        f"{case.clients:6} {case.name:42} {found.asked:6} {found.failures:6} {found.p50_ms:7.2f} {found.p99_ms:7.2f} "
        f"{found.worst_ms:7.2f} {ratio:11.2f} {found.queue_ms:7.2f} {found.upstream_ms:8.2f} {found.cores:7.2f} "
        f"{found.server_cores:6.2f}{'' if good else '  MISSED' if case.judged else '  (not judged)'}"
    )


async def bench(args: argparse.Namespace) -> bool:
    """Print the table; whether everything was kept, p99 by the median of the rounds."""
    kept, most = True, 3.0 if args.seconds >= JUDGED_S else float("inf")
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            pod(args.work_ms) as one,
            pod(args.work_ms) as large,
            gateway_process(Path(folder), policies(one, large, args.clients)) as process,
        ):
            first, *others = cases(args.clients, args.idle, args.answer_mib, large.port)
            chosen = [first, *(case for case in others if args.only in case.name)]
            await canary(process, one, 1.0)
            before = process.files()
            print(f"{'others':>6} {'':42} {'asked':>6} {'failed':>6} {'p50 ms':>7} {'p99 ms':>7} {'worst':>7} "
                  f"{'p99 x alone':>11} {'queue':>7} {'upstream':>8} {'gateway':>7} {'server':>6}")  # fmt: skip
            for _ in range(args.rounds):
                alone = 0.0
                for case in chosen:
                    async with case.others(process, case.clients):
                        await asyncio.sleep(2.0)
                        found = await canary(process, one, args.seconds)
                    alone = alone or found.p99_ms
                    ratio = found.p99_ms / alone
                    ratios.setdefault(case.name, []).append(ratio)
                    fine = not found.failures and found.worst_ms <= 1000.0
                    kept = kept and (fine or not case.judged)
                    print(row(case, found, ratio, fine and ratio <= most), flush=True)
                    await asyncio.sleep(2.0)  # what the others left is not the next ones'
            for case in chosen[1:]:
                each = ratios[case.name]
                kept = kept and (not case.judged or statistics.median(each) <= most)
                print(f"{case.name}: p99 x alone {statistics.median(each):.2f} (median of {len(each)}, "
                      f"{min(each):.2f} to {max(each):.2f}){'' if case.judged else ', not judged'}")  # fmt: skip
            if args.seconds < JUDGED_S:
                print(f"not judged: p99, because {args.seconds:g} s of each case are too few; it takes {JUDGED_S:g} s")
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
    parser.add_argument("--rounds", type=int, default=1, help="of all cases")
    parser.add_argument("--answer-mib", type=int, nargs="+", default=[1, 8], help="of the answers that nobody reads")
    parser.add_argument("--only", default="", help="cases whose name has this word, and alone")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 0 if asyncio.run(bench(args)) else 1
