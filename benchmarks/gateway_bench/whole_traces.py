"""Whether each late or missed request of an overload has a whole trace: `python benchmarks/faults.py traces`.

    [--requests 10000] [--factor 2] [--target-ms 150] [--most-s 300]

A gateway, a logic server with a service that calls a model, and an inference server, each of which keeps one trace in a
hundred from its beginning, and a collector that answers at once. First as fast as eight clients can go, for what is
possible; then open loop at `--factor` times that, until `--requests` requests were late or missed, by the gateway's own
counters. A trace is whole if each call of another server that was answered has the span of that server below it.
Ends with exit status 1 if a late or missed request has no span of the gateway, if fewer than 999 of 1,000 such traces
are whole, or if there were too few of them.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from harness.processes import ROOT, accepts, free_ports, gateway, inference_command, serving, status_of
from tests.otlp_receiver import Receiver, attributes, receiving

from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError

CLIENTS = 8
MEASURED_S = 3.0
QUIET_S = 3.0
PATIENCE_S = 60.0
WHOLE = 0.999
PATH = "/v1/services/digits"
COUNTED = re.compile(rb'^oriel_gateway_attainment_total\{result="(late|missed)",tier="gold"\} ([0-9.]+)', re.M)
LOST = re.compile(rb'^oriel_spans_dropped_total\{why="(\w+)"\} ([0-9.]+)', re.M)


def documents(folder: Path, logic: int, target_ms: int) -> Path:
    """Write the policy documents."""
    digest = sha256(b"bench").hexdigest()
    folder.mkdir()
    (folder / "bench.toml").write_text(
        f"""
[tiers.gold]
band = 0
target_ms = {target_ms}
[tenants.bench]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{digest}" }}]
[pools.logic]
endpoints = ["127.0.0.1:{logic}"]
[[routes]]
service = "*"
pool = "logic"
"""
    )
    return folder


class Load:
    """Calls the service through the gateway."""

    def __init__(self, port: int, admin: int) -> None:
        self._client = HttpClient(host="127.0.0.1", port=port, max_connections=4096)
        self._admin = HttpClient(host="127.0.0.1", port=admin)
        self._body = (ROOT / "examples/digits/7.png").read_bytes()
        self._numbers = count(1)
        self.statuses: Counter[int] = Counter()

    async def one(self) -> None:
        headers = [
            ("content-type", "image/png"),
            ("x-api-key", "bench"),
            ("traceparent", f"00-{next(self._numbers):032x}-{'1' * 16}-00"),
        ]
        try:
            answer = await self._client.request(
                "POST", PATH, headers, self._body, deadline=time.monotonic() + PATIENCE_S
            )
            self.statuses[answer.status] += 1
        except UpstreamError:
            self.statuses[0] += 1

    async def capacity_per_s(self) -> float:
        await self.one()
        end = time.monotonic() + MEASURED_S
        before = self.statuses.total()

        async def go() -> None:
            while time.monotonic() < end:
                await self.one()

        await asyncio.gather(*(go() for _ in range(CLIENTS)))
        return (self.statuses.total() - before) / MEASURED_S

    async def bad(self) -> int:
        """Return how many requests were late or missed so far."""
        answer = await self._admin.request("GET", "/metrics", (), deadline=time.monotonic() + PATIENCE_S)
        return sum(int(float(number)) for _, number in COUNTED.findall(answer.body))

    async def lost(self) -> dict[str, int]:
        """Return the spans that the gateway lost, by why."""
        answer = await self._admin.request("GET", "/metrics", (), deadline=time.monotonic() + PATIENCE_S)
        return {why.decode(): int(float(number)) for why, number in LOST.findall(answer.body)}

    async def offer(self, rate: float, wanted: int, most_s: float) -> float:
        """Send requests on schedule until so many were late or missed; return the seconds that took."""
        began, number, enough = time.monotonic(), 0, asyncio.Event()

        async def watch() -> None:
            while await self.bad() < wanted and time.monotonic() - began < most_s:
                await asyncio.sleep(1.0)
            enough.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            while not enough.is_set():
                await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
                number += 1
                group.create_task(self.one())
        return time.monotonic() - began


def until_quiet(receiver: Receiver) -> None:
    """Wait until nothing has come for a while."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if len(receiver.requests) != seen:
            seen, since = len(receiver.requests), time.monotonic()
        time.sleep(0.1)


def judge(receiver: Receiver) -> tuple[int, int, Counter[str]]:
    """Return the traces of late and missed requests, how many of them are whole, and what is missing in the others."""
    traces: dict[bytes, list[Any]] = {}
    for span in receiver.spans():
        traces.setdefault(span.trace_id, []).append(span)
    found = whole = 0
    missing: Counter[str] = Counter()
    for spans in traces.values():
        if not any(attributes(span).get("oriel.sla.result") in ("late", "missed") for span in spans):
            continue
        found += 1
        served = {span.parent_span_id for span in spans if span.kind == span.SPAN_KIND_SERVER}
        lacking = [
            attributes(span)["url.full"].partition("://")[2].partition("/")[2]
            for span in spans
            if span.kind == span.SPAN_KIND_CLIENT
            and "http.response.status_code" in attributes(span)
            and span.span_id not in served
        ]
        whole += not lacking
        missing.update(lacking)
    return found, whole, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="late or missed ones")
    parser.add_argument("--factor", type=float, default=2.0, help="offered load, in multiples of the capacity")
    parser.add_argument("--target-ms", type=int, default=150)
    parser.add_argument("--most-s", type=float, default=300.0, help="the longest time for which load is offered")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, receiving() as receiver, ExitStack() as stack:
        root = Path(folder)
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
            "ORIEL_STATE": folder,
            "NO_PROXY": "127.0.0.1",
        }
        models, logic, logic_admin = free_ports(3)

        def start(command: list[str], ready: Callable[[], bool]) -> None:
            stack.enter_context(serving(command, ready, environment, own_session=False))

        ready = f"http://127.0.0.1:{models}/v2/health/ready"
        start(inference_command(ROOT / "examples/models", models), lambda: status_of(ready) == 200)
        command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(ROOT / "examples/services")]
        command += ["--inference", f"127.0.0.1:{models}", "--no-watch"]
        command += ["--http-port", str(logic), "--admin-port", str(logic_admin)]
        start(command, lambda: accepts(logic) and status_of(f"http://127.0.0.1:{logic_admin}/health/ready") == 200)
        policies = documents(root / "policies", logic, args.target_ms)
        _, port, admin = stack.enter_context(gateway(policies, environment=environment))
        capacity, took_s, bad, lost = asyncio.run(measure(Load(port, admin), args))
        until_quiet(receiver)
        found, whole, missing = judge(receiver)
    print(f"{capacity:.0f} requests/s are possible; {args.factor:g} times that were offered for {took_s:.0f} s")
    print(f"late or missed: {bad}; with spans of the gateway: {found} ({found / max(bad, 1):.3%})")
    print(f"whole traces: {whole} ({whole / max(found, 1):.3%}); spans missing of {dict(missing)}")
    print(f"spans that the gateway lost: {lost}")
    if bad < args.requests:
        print(f"not judged: fewer than {args.requests} requests were late or missed in {args.most_s:g} s")
        return 1
    return 0 if found == bad and whole >= WHOLE * found else 1


async def measure(load: Load, args: argparse.Namespace) -> tuple[float, float, int, dict[str, int]]:
    capacity = await load.capacity_per_s()
    already = await load.bad()
    took_s = await load.offer(args.factor * capacity, args.requests + already, args.most_s)
    return capacity, took_s, await load.bad(), await load.lost()


if __name__ == "__main__":
    sys.exit(main())
