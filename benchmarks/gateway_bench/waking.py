"""Measures when held calls go on once the only server of a pool becomes ready: `python benchmarks/faults.py waking`.

    [--rounds 20] [--calls 1000] [--json FILE]

A gateway in a process of its own, and calls of two tiers in turns that wait because the pool's server refuses
connections. Then the server listens. Per round:

    probed ms     from then until it has read the gateway's probe
    first ms      from then until it has read the head of the first call (promised: 50 at the 99th percentile)
    all ms        until it has answered the last one
    inversions    calls of the lower tier beyond the share that the queue leaves them (5 %), while more calls of the
                  higher one were still to come than there are permits (promised: none)
    lost          answers that were not 200
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from tests.gateway.process import gateway_process
from tests.gateway.stack import BRONZE, GOLD, documents

from gateway_bench.faults import figure

PERMITS = 32
FLOOR_SHARE = 0.05
PROMISED_MS = 50.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Round:
    probed_ms: float
    first_ms: float
    all_ms: float
    inversions: int
    lost: int


class Server(asyncio.Protocol):
    """One connection of the server. `seen` notes the first probe and the first call, and the tier of each call.

    A plain protocol: with streams, asyncio takes 10 ms to accept 32 connections before it reads from the first.
    """

    def __init__(self, seen: "Seen") -> None:
        self._seen = seen
        self._data = b""

    def connection_made(self, transport: Any) -> None:
        self._write = transport.write

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n") + 4) > 3:
            now = time.monotonic()
            if not self._data.startswith(b"POST"):
                self._seen.probed_s = self._seen.probed_s or now
            else:
                self._seen.first_s = self._seen.first_s or now
                if len(self._data) < end + 6:
                    return
                self._seen.tiers.append(self._data[end : end + 6].decode().strip())
                end += 6
            self._data = self._data[end:]
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


@dataclass(slots=True)
class Seen:
    probed_s: float = 0.0
    first_s: float = 0.0
    tiers: list[str] = field(default_factory=list)


async def call(port: int, tier: str, key: str) -> int:
    """Return the status of one call over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v2/models/digits/infer HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\nx-request-timeout-ms: 60000\r\n"
    writer.write(f"{head}content-length: 6\r\n\r\n{tier:6}".encode())
    status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    writer.close()
    return status


def inversions(tiers: list[str]) -> int:
    """Count the calls of the lower tier that came before their turn."""
    found, gold, bronze = 0, 0, 0
    for tier in tiers:
        gold, bronze = gold + (tier == "gold"), bronze + (tier == "bronze")
        if tier == "bronze" and gold < tiers.count("gold") - PERMITS and bronze > FLOOR_SHARE * gold + 1:
            found += 1
    return found


async def one_round(calls: int) -> Round:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # refuses connections until it listens
        pool = 'probe = "/v2/health/ready"\nlearn_concurrency = false'
        text = documents([held.getsockname()[1]], max_inflight=PERMITS, max_queue=2 * calls, pool=pool)["all.toml"]
        lines = [line for line in text.split(b"\n") if not line.startswith(b"grpc_endpoints")]
        async with gateway_process(Path(folder), {"all.toml": b"\n".join(lines)}) as gateway:
            each = [("bronze", BRONZE), ("gold", GOLD)]
            waiting = [asyncio.create_task(call(gateway.port, *each[n % 2])) for n in range(calls)]
            while await figure(gateway.admin_port, "oriel_gateway_waiting_for_endpoint") < calls:
                await asyncio.sleep(POLL_S)
            server = Seen()
            ready_s = time.monotonic()
            listening = await asyncio.get_running_loop().create_server(lambda: Server(server), sock=held, backlog=1024)
            statuses = await asyncio.gather(*waiting)
            done_s = time.monotonic()
            listening.close()
    return Round(
        probed_ms=(server.probed_s - ready_s) * 1e3,
        first_ms=(server.first_s - ready_s) * 1e3,
        all_ms=(done_s - ready_s) * 1e3,
        inversions=inversions(server.tiers),
        lost=sum(status != 200 for status in statuses),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"  # of the gateways
    found = [uvloop.run(one_round(args.calls)) for _ in range(args.rounds)]
    first = sorted(each.first_ms for each in found)
    p99 = first[min(len(first) - 1, int(0.99 * len(first)))]
    out_of_order, lost = sum(each.inversions for each in found), sum(each.lost for each in found)
    print(
        f"{args.calls} calls held, {args.rounds} rounds: probed after "
        f"{statistics.median(each.probed_ms for each in found):.1f} ms (median); first call after "
        f"{statistics.median(first):.1f} ms (median), {p99:.1f} ms (p99); all answered after "
        f"{statistics.median(each.all_ms for each in found):.0f} ms (median); "
        f"{out_of_order} inversions, {lost} lost"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    sys.exit(int(p99 > PROMISED_MS or out_of_order > 0 or lost > 0))
