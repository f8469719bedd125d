"""Measures how soon KEDA hears that an empty pool is called: `python benchmarks/faults.py pushes`.

    [--rounds 10] [--pools 20] [--kills 3] [--json FILE]

Two gateways in processes of their own that share a Redis, and a stand-in for KEDA with a stream per pool to each. In a
round every pool, idle before, gets one call at the first gateway, in turns. Then, `--kills` times each, the gateway
that has KEDA's stream is killed or stopped cleanly while the pool is idle, and a call comes to the other one at once.
The stand-in opens a stream again as KEDA does: 2 s after one that ended with OK, 2, 4, 8 ... s after an error.

    same, other ms    from the call until `true` on the stream of its gateway, and of the other one (promised: 10 and
                      100 at the 99th percentile)
    killed, stopped s from the signal until `true` (promised: 7 and 2.5)
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
from grpc import aio
from tests.conformance.redis_server import PASSWORD, redis_server
from tests.gateway.keda import PATH, Keda, reference
from tests.gateway.process import Process, gateway_process
from tests.gateway.stack import GOLD, documents, nobody

from oriel_cli.up.units import free_ports
from oriel_wire.v2.proto import external_scaler_pb2 as messages

PROMISED = {"same_ms": 10.0, "other_ms": 100.0, "killed_s": 7.0, "stopped_s": 2.5}
APART_S = 0.05
POLL_S = 0.1
LOST_S = 60.0


def files(closed: int, pools: int) -> dict[str, bytes]:
    """Documents of pools whose only server never answers, each with a service of its own."""
    more = "".join(
        f'[pools.p{n}]\nprobe = "/"\ndiscover = "dns:127.0.0.1:{closed}"\n'
        f"[pools.p{n}.scaling]\nminimum = 0\nmaximum = 9\nkeep_alive_ms = 1000\n"
        f'[[routes]]\nservice = "s{n}"\npool = "p{n}"\n'
        for n in range(pools)
    )
    # The routes of single services come before that of all.
    text = documents([closed])["all.toml"].decode()
    return {"all.toml": text.replace("[[routes]]", more + "[[routes]]", 1).encode()}


async def call(port: int, number: int, *, timeout_ms: int = 200) -> float:
    """Send a call that nobody will answer, and return when it was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/services/s{number} HTTP/1.1\r\nhost: a\r\nx-api-key: {GOLD}\r\ncontent-length: 1\r\n"
    sent_s = time.monotonic()
    writer.write(f"{head}x-request-timeout-ms: {timeout_ms}\r\n\r\nx".encode())
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return sent_s


class Stream:
    """KEDA's stream for one pool. heard: times of each `true`; ports: of the gateways that live, the first is asked."""

    def __init__(self, target: str, ports: Sequence[int]) -> None:
        self.target = target
        self.ports = list(ports)
        self.heard: list[float] = []
        self.opened = asyncio.Event()

    async def follow(self) -> None:
        """Open the stream, and again after it has ended; never returns."""
        wait_s = 2.0
        while True:
            async with aio.insecure_channel(f"127.0.0.1:{self.ports[0]}") as channel:
                stream = channel.unary_stream(
                    PATH + "StreamIsActive",
                    messages.ScaledObjectRef.SerializeToString,
                    messages.IsActiveResponse.FromString,
                )(reference(self.target))
                try:
                    async for answer in stream:
                        self.opened.set()
                        if answer.result:
                            self.heard.append(time.monotonic())
                except aio.AioRpcError:
                    pass
                good = await stream.code() == grpc.StatusCode.OK
            wait_s = 2.0 if good else wait_s
            await asyncio.sleep(wait_s)
            wait_s = 2.0 if good else min(60.0, 2.0 * wait_s)

    async def first_after(self, sent_s: float) -> float:
        """Return the seconds from then until a `true`; LOST_S if none comes."""
        async with asyncio.timeout(LOST_S):
            while not self.heard or self.heard[-1] < sent_s:
                await asyncio.sleep(POLL_S / 10)
        return next(at for at in self.heard if at >= sent_s) - sent_s


async def idle(ports: Sequence[int], pools: int) -> None:
    """Wait until no gateway takes a pool for active."""
    async with AsyncExitStack() as stack:
        operators = [Keda(await stack.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}"))) for port in ports]
        for operator in operators:
            for number in range(pools):
                while (await operator.poll(f"p{number}"))[2]:
                    await asyncio.sleep(POLL_S)


@asynccontextmanager
async def two_gateways(pools: int) -> AsyncIterator[tuple[list[Process], list[int]]]:
    """Yield the gateways, and the ports of their scalers."""
    with nobody() as closed, tempfile.TemporaryDirectory() as folder:
        async with redis_server() as redis, AsyncExitStack() as stack:
            ports, members = free_ports("127.0.0.1", 2), []
            for port in ports:
                words = ("--scaler-port", str(port), "--limiter", redis.url)
                starting = gateway_process(Path(folder), files(closed, pools), *words)
                members.append(await stack.enter_async_context(starting))
            yield members, ports


@asynccontextmanager
async def following(streams: Sequence[Stream]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(stream.follow()) for stream in streams]
    try:
        for stream in streams:
            await stream.opened.wait()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pushes(rounds: int, pools: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of every call through its own gateway and through the other one."""
    same, other = [], []
    async with two_gateways(pools) as (members, ports):
        own, far = ([Stream(f"p{n}", [port]) for n in range(pools)] for port in ports)
        async with following([*own, *far]):
            for _ in range(rounds):
                await idle(ports, pools)
                calls = []
                for number in range(pools):
                    calls.append(asyncio.create_task(call(members[0].port, number)))
                    await asyncio.sleep(APART_S)
                for number, sent_s in enumerate(await asyncio.gather(*calls)):
                    same.append(1e3 * await own[number].first_after(sent_s))
                    other.append(1e3 * await far[number].first_after(sent_s))
    return same, other


async def ended(how: signal.Signals) -> float:
    """End the gateway that has the stream. Returns the seconds until KEDA hears of a call at the other one."""
    async with two_gateways(1) as (members, ports):
        stream = Stream("p0", ports)
        async with following([stream]):
            await idle(ports, 1)
            stream.ports.pop(0)
            at_s = time.monotonic()
            os.kill(members[0].pid, how)
            waiting = asyncio.create_task(call(members[1].port, 0, timeout_ms=60_000))
            took_s = await stream.first_after(at_s)
            await waiting
    return took_s


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    same, other = await pushes(args.rounds, args.pools)
    found = {"same_ms": same, "other_ms": other}
    for name, how in (("killed_s", signal.SIGKILL), ("stopped_s", signal.SIGTERM)):
        found[name] = [await ended(how) for _ in range(args.kills)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"  # of the gateways
    os.environ["ORIEL_LIMITER_PASSWORD"] = PASSWORD
    found, kept = asyncio.run(measure(args)), True
    load = os.getloadavg()[0]
    for name, values in found.items():
        if not values:
            continue
        worst = p99(values)
        kept = kept and worst <= PROMISED[name]
        print(
            f"{name}: {statistics.median(values):.2f} (median), {worst:.2f} (p99), {max(values):.2f} (most) "
            f"of {len(values)}; promised {PROMISED[name]:g}; load average {load:.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    sys.exit(int(not kept))
