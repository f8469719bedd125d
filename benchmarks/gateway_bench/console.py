"""Measures the cost of the console in the gateway, and the size of its page.

    python benchmarks/cost.py console [--seconds 20] [--waiting 10000] [--ended 2000] [--json] [--pictures DIR]

The page, in a headless Chromium on loopback: bytes as they are sent (gzip), requests of the first screen, and the first
contentful paint, the median of five loads without a cache. Without Chromium this part is left out.

The gateway, in this process on its real loop, with its admin port on a socket: `--waiting` calls of 100 tenants in
three tiers wait, and `--ended` decisions per second come to the ring, as under load. A viewer in another process
reads the stream. CPU is that of this process with the viewer, less the same without. A snapshot is made in one turn
of the loop: the longest one, by the thread's CPU time and by the clock, is the stall that the console causes.

`--pictures DIR` writes the pictures of docs/console.md there instead.

Ends with 1 if a goal is missed: 60 KB, 4 requests, 150 ms, 1 % of a core, 20 ms.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import uvloop
from PIL import Image
from tests.path.browser import CHROMIUM, Page, opened

from gateway_bench.console_scene import load, scene
from gateway_bench.queue_growth import Transport, documents
from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.console.live import STREAM, Live, Source
from oriel_gateway.admin.console.pages import PATHS
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.sampling import NEVER
from oriel_wire.observe.trace import NullSink
from oriel_wire.process.control import ControlLimits, serve_control
from oriel_wire.process.process import listen

GOALS = {"bytes": 60 * 1024, "requests": 4, "paint_ms": 150.0, "cpu_percent": 1.0, "stall_ms": 20.0}
LOADS = 5
COLOURS = 160  # of a picture: a third of the bytes
VIEWER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"GET /console/live HTTP/1.1\\r\\nhost: 127.0.0.1\\r\\n\\r\\n")
while s.recv(65536): pass
"""
PAINT = "performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)[0]"


class Timed(Source):
    """Notes how long each snapshot took: the thread's CPU time, and by the clock."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self.took_s: list[tuple[float, float]] = []

    def snapshot(self) -> bytes:
        cpu, clock = time.thread_time(), time.monotonic()
        made = super().snapshot()
        self.took_s.append((time.thread_time() - cpu, time.monotonic() - clock))
        return made


async def cost(waiting: int, ended: int, seconds: float) -> dict[str, float]:
    """The CPU and the stall of one viewer."""
    snapshot = compile_documents({"all.toml": documents(100, 3_600_000, waiting)})
    gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=NullSink(), sampling=NEVER)
    front: HttpServer = HttpServer(HttpLimits(max_connections=1 << 20))
    gateway.pools["p"].admission.limit = 0
    rest = b"\r\ncontent-type: application/json\r\ncontent-length: 1024\r\n\r\n" + bytes(1024)
    kept = []
    for number in range(waiting):
        client = ClientConnection(front, gateway)
        client.connection_made(Transport())
        line = f"POST /v2/models/m{number % 20}/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-{number % 100}"
        client.data_received(line.encode() + rest)
        kept.append(client)
    assert gateway.pools["p"].admission.queue.items == waiting
    source = Timed(gateway)
    live, stop = Live(source), asyncio.Event()
    sock = listen("127.0.0.1", 0, "console")
    port = sock.getsockname()[1]
    limits = ControlLimits(streams=frozenset({STREAM}))
    serving = asyncio.create_task(serve_control(admin_app(gateway, live=live), sock, stop, limits=limits))
    ending = asyncio.create_task(_end_calls(gateway, kept, ended))
    try:
        await asyncio.sleep(1.0)
        without = await _cpu(seconds)
        viewer = subprocess.Popen([sys.executable, "-c", VIEWER, str(port)])
        try:
            while live.made < 3:
                await asyncio.sleep(0.05)
            source.took_s.clear()
            size = len(source.snapshot())
            with_viewer = await _cpu(seconds)
        finally:
            viewer.kill()
            viewer.wait()
    finally:
        ending.cancel()
        live.close()
        stop.set()
        await serving
    return {
        "cpu_percent": 100.0 * (with_viewer - without),
        "stall_ms": 1e3 * max(cpu for cpu, _ in source.took_s),
        "stall_clock_ms": 1e3 * max(clock for _, clock in source.took_s),
        "snapshot_ms": 1e3 * statistics.median(cpu for cpu, _ in source.took_s),
        "snapshot_bytes": size,
    }


async def _end_calls(gateway: Gateway, kept: list[ClientConnection], per_s: int) -> None:
    """Put decisions of the waiting calls into the ring and count them, without ending the calls."""
    records, number = gateway.records, 0
    calls = [client.call for client in kept if client.call is not None]
    while calls and per_s:
        await asyncio.sleep(0.05)
        now = time.monotonic()
        for _ in range(per_s // 20):
            number += 1
            call = calls[number % len(calls)]
            records.ended(call, now, "", now, 1024, (), 0.0, 0.0)
    await asyncio.Event().wait()


async def _cpu(seconds: float) -> float:
    """The CPU seconds per second of this process."""
    before, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - before) / (time.monotonic() - began)


def page_facts(base: str) -> dict[str, float]:
    """Bytes, requests and paint of the page at `base`."""
    size = 0
    with httpx.Client(base_url=base, headers={"accept-encoding": "gzip"}) as client:
        for path in PATHS:
            with client.stream("GET", path) as answer:
                size += sum(len(piece) for piece in answer.iter_raw())
    facts: dict[str, float] = {"bytes": size}
    if CHROMIUM is None:
        return facts
    with tempfile.TemporaryDirectory() as profile, opened(Path(profile)) as page:
        page.tell("Network.setCacheDisabled", cacheDisabled=True)
        paints = []
        for _ in range(LOADS):
            page.open("about:blank#")
            page.requested.clear()
            page.tell("Page.navigate", url=f"{base}/console")
            page.wait("document.querySelector('.area-calls')")
            paints.append(float(page.wait(PAINT)))
        facts["requests"] = len([url for url in page.requested if url.startswith(base)])
        facts["paint_ms"] = statistics.median(paints)
    return facts


def take_pictures(base: str, folder: Path, warm_s: float) -> None:
    """Write the pictures of docs/console.md."""
    with tempfile.TemporaryDirectory() as profile, opened(Path(profile)) as page:
        _size(page, 1440, 900, "light")
        page.open(f"{base}/console")
        page.wait("document.querySelector('.area-calls tbody tr[data-key]')")
        page.run(f"new Promise(done => setTimeout(done, {warm_s * 1e3}))")
        _save(page, folder / "console-wide-light.png")
        _size(page, 1440, 900, "dark")
        _save(page, folder / "console-wide-dark.png")
        _size(page, 390, 844, "light")
        _save(page, folder / "console-narrow-light.png")
        _size(page, 1440, 900, "light")
        rows = "[...document.querySelectorAll('.area-calls tbody tr')]"
        page.run(f"{rows}.find(each => each.innerText.includes('late')).click()")
        page.wait("document.querySelector('.waterfall')")
        _save(page, folder / "console-call-light.png")
        page.run("document.getElementById('details-close').click()")
        page.run("document.querySelector('tr[data-key=\"tenants/partner-7\"]').click()")
        page.wait("document.querySelector('#explain')")
        page.run("document.querySelector('#explain').value = 'model:forecaster'")
        page.run("document.querySelector('#explain').dispatchEvent(new Event('change', {bubbles: true}))")
        page.wait("document.querySelector('.steps li')")
        _save(page, folder / "console-tenant-light.png")


def _size(page: Page, width: int, height: int, theme: str) -> None:
    page.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.tell("Emulation.setDeviceMetricsOverride", **size)


def _save(page: Page, path: Path) -> None:
    page.run("new Promise(done => setTimeout(done, 1500))")  # until the next snapshot is drawn
    picture = Image.open(BytesIO(b64decode(page.tell("Page.captureScreenshot", format="png")["data"])))
    # The method that keeps colours which few points have.
    small = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


async def _pictures(folder: Path, warm_s: float) -> None:
    async with scene(trace_url="https://traces.example.com/trace/{trace_id}") as shown:
        calling = asyncio.create_task(load(shown))
        await asyncio.to_thread(take_pictures, shown.admin, folder, warm_s)
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling


async def _page() -> dict[str, float]:
    async with scene() as shown:
        return await asyncio.to_thread(page_facts, shown.admin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="with and without the viewer, each (20)")
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--ended", type=int, default=2_000, help="calls per second that end (2000)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pictures", type=Path, metavar="DIR")
    parser.add_argument("--warm-s", type=float, default=75.0, help="how long the scene runs before its pictures (75)")
    args = parser.parse_args()
    if args.pictures is not None:
        uvloop.run(_pictures(args.pictures, args.warm_s))
        return 0
    found: dict[str, Any] = {**uvloop.run(_page()), **uvloop.run(cost(args.waiting, args.ended, args.seconds))}
    missed = [name for name, goal in GOALS.items() if name in found and found[name] > goal]
    if args.json:
        print(json.dumps({**found, "missed": missed}))
    else:
        for name, value in found.items():
            goal = f"   goal {GOALS[name]:g}{'  MISSED' if name in missed else ''}" if name in GOALS else ""
            print(f"{name:<16} {value:>10.2f}{goal}")
    return 1 if missed else 0
