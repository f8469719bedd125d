"""Measures what a client of the gateway feels of attacks over HTTP/2 (R23).

    python benchmarks/neighbours.py http2 [--seconds 4] [--clients 16] [--only WORD]

A gateway with its default bounds in a process of its own before a small model server in another. A third process
attacks it as fast as it can on `--clients` connections, none of which has a key, and connects again whenever it is cut.
The canary asks over HTTP/1.1. Promised during each flood: no failure, p99 at most 200 ms, 64 MiB of memory at most.
Three processes share the machine's cores, so that on two cores the canary also waits for a processor.
"""

import argparse
import asyncio
import itertools
import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from tests.gateway.pods import files, pod
from tests.gateway.process import gateway_process
from tests.wire.http2_attacks import bomb, request_head

from gateway_bench.neighbours import canary
from oriel_wire.h2.frames import (
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    frame,
    settings,
    window_update,
)

P99_MS, MEMORY_MIB = 200.0, 64.0
PATH = b"/v2/models/digits/infer"
OPEN = PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK
BOTH = END_HEADERS | END_STREAM
HEAD = request_head(PATH)


def repeated(start: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield OPEN + start
        yield from itertools.repeat(piece * (1 + 16_000 // len(piece)))

    return pieces


def numbered(start: bytes, piece: Callable[[int], bytes], count: int = 200) -> Callable[[], Iterator[bytes]]:
    """piece: of one stream."""

    def pieces() -> Iterator[bytes]:
        yield start
        for first in itertools.count(1, 2 * count):
            yield b"".join([piece(first + 2 * number) for number in range(count)])

    return pieces


def bombs() -> Iterator[bytes]:
    yield PREFACE + frame(SETTINGS, 0, 0)
    yield bomb(1, PATH, first=True)
    yield from (bomb(stream, PATH, first=False) for stream in itertools.count(3, 2))


def plain_bombs() -> Iterator[bytes]:
    """The largest blocks that are decoded: many short fields of one byte each."""
    block = HEAD + b"\x90" * 15_000
    yield OPEN
    yield from (frame(HEADERS, BOTH, stream, block) for stream in itertools.count(1, 2))


def reset(stream: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, HEAD) + frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big"))


def request(stream: int) -> bytes:
    return frame(HEADERS, BOTH, stream, HEAD)


CLOSED = PREFACE + settings({INITIAL_WINDOW_SIZE: 0}) + SETTINGS_ACK
WIDE = PREFACE + settings({INITIAL_WINDOW_SIZE: MAX_WINDOW}) + SETTINGS_ACK + window_update(0, 2**30)
ONE = frame(HEADERS, END_HEADERS, 1, HEAD)
FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "rapid reset": numbered(OPEN, reset),
    "requests without a key": numbered(OPEN, request),
    "CONTINUATION": repeated(frame(HEADERS, 0, 1, HEAD), frame(CONTINUATION, 0, 1, b"")),
    "CONTINUATION with fields": repeated(frame(HEADERS, 0, 1, HEAD), frame(CONTINUATION, 0, 1, b"\x90" * 900)),
    "SETTINGS": repeated(b"", frame(SETTINGS, 0, 0)),
    "PING": repeated(b"", frame(PING, 0, 0, bytes(8))),
    "PRIORITY": repeated(b"", frame(PRIORITY, 0, 3, bytes(4) + b"\x10")),
    "empty DATA": repeated(ONE, frame(DATA, 0, 1)),
    "WINDOW_UPDATE": repeated(ONE, window_update(1, 1)),
    "header bombs with a table": bombs,
    "header bombs without one": plain_bombs,
    "closed windows": numbered(CLOSED, request, 100),
    "answers that are not read": numbered(WIDE, request),
}
DEAF = ("closed windows", "answers that are not read")


def attack(port: int, name: str, clients: int) -> None:
    """Flood until this process is killed."""
    sockets: dict[int, tuple[socket.socket, Iterator[bytes], bytes]] = {}
    while True:
        while len(sockets) < clients:
            made = socket.create_connection(("127.0.0.1", port))
            made.setblocking(False)
            sockets[made.fileno()] = made, FLOODS[name](), b""
        readable, writable, _ = select.select([] if name in DEAF else list(sockets), list(sockets), [])
        for number in {*readable, *writable}:
            sock, pieces, rest = sockets[number]
            try:
                if number in readable and not sock.recv(65536):
                    raise ConnectionError
                if number in writable:
                    rest = rest or next(pieces)
                    sockets[number] = sock, pieces, rest[sock.send(rest) :]
            except BlockingIOError:
                pass
            except OSError:
                del sockets[number]
                sock.close()


@contextmanager
def flood(port: int, name: str, clients: int) -> Iterator[Callable[[], bool]]:
    """The attacker in a process of its own; says whether it still attacks."""
    if not name:
        yield lambda: True
        return
    attacker = get_context("spawn").Process(target=attack, args=(port, name, clients), daemon=True)
    attacker.start()
    try:
        yield attacker.is_alive
    finally:
        attacker.kill()
        attacker.join()


async def bench(args: argparse.Namespace) -> bool:
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        async with pod(1) as one, gateway_process(Path(folder), files([one], idempotent=False)) as process:
            await canary(process, one, 1.0)
            print(f"{'flood':28} {'asked':>6} {'failed':>6} {'p50 ms':>7} {'p99 ms':>7} {'worst':>7} {'MiB':>6} cores")
            for name in ["", *[name for name in FLOODS if args.only in name]]:
                before = process.rss_bytes()
                with flood(process.port, name, args.clients) as attacks:
                    await asyncio.sleep(1.0)
                    found = await canary(process, one, args.seconds)
                    more = (process.rss_bytes() - before) / 2**20
                    good = not found.failures and found.p99_ms <= P99_MS and more <= MEMORY_MIB and attacks()
                kept = kept and good
                row = f"{name or 'none':28} {found.asked:6} {found.failures:6} {found.p50_ms:7.2f} {found.p99_ms:7.2f} "
                row += f"{found.worst_ms:7.2f} {more:6.1f} {found.cores:5.2f}"
                print(row if good else f"{row}  MISSED", flush=True)
                await asyncio.sleep(1.0)  # what this flood left is not the next one's
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each flood")
    parser.add_argument("--clients", type=int, default=16, help="connections of the attacker")
    parser.add_argument("--only", default="", help="floods whose name has this word")
    return 0 if asyncio.run(bench(parser.parse_args())) else 1
