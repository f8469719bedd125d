"""1 MB JPEG -> tensor behind `oriel logic`, beside the bare function in two processes.

    python benchmarks/logic_server.py jpeg [--seconds 8] [--rounds 5] [--connections 4] [--out FOLDER]

The same function of Pillow and numpy (benchmarks/peers/logic/jpeg/tensor.py: decode, resize to 224 x 224, normalise)
runs twice in every round, one after the other: first in a loop in two processes that do nothing else, then as a
service with two workers, through the server's HTTP port: 1 MB in, 600 KB out, with the load generator (wrk) on the
same cores. What is lost in between is everything that is not the function: HTTP, hand-over to the worker and back,
the loop, and the client.

The loop's lag is the server's own measurement, `oriel_logic_loop_lag_seconds`, in the rounds of the server: p99 is the
upper bound of its bucket. One answer is compared with the function's before it begins. Needs Linux and `wrk`.
"""

import argparse
import importlib.util
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness.environments import commit, machine
from harness.load import post, wrk
from harness.pages import conditions, targets, write_page
from harness.processes import PEERS, free_ports, serving, status_of
from PIL import Image

FOLDER = PEERS / "logic" / "jpeg"
SIZE_BYTES = 1_000_000
WIDTH, HEIGHT = 2048, 1536
SHARE, LAG_MS = 0.90, 5.0
LAG = re.compile(r'oriel_logic_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')


def photograph() -> bytes:
    """A JPEG of 3 megapixels and about 1 MB: smooth colours with grain, the finest that fits."""
    noise = np.random.default_rng(0).normal(0.0, 10.0, (HEIGHT, WIDTH, 3))
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH] / 200.0
    smooth = np.stack([np.sin(rows), np.cos(columns), np.sin(rows + columns)], axis=2) * 90 + 128
    picture = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
    for quality in range(95, 10, -1):
        into = BytesIO()
        picture.save(into, "JPEG", quality=quality)
        if into.tell() <= SIZE_BYTES:
            return into.getvalue()
    raise AssertionError("no quality fits")


def function() -> Any:
    spec = importlib.util.spec_from_file_location("jpeg_tensor", FOLDER / "tensor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prepare


def loop_alone(jpeg: bytes, seconds: float, started: Any, counts: Any) -> None:
    prepare = function()
    prepare(jpeg)
    started.wait()
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        prepare(jpeg)
        count += 1
    counts.put(count)


def bare(jpeg: bytes, seconds: float) -> float:
    """Pictures per second of two processes."""
    context = multiprocessing.get_context("spawn")
    started, counts = context.Barrier(2), context.Queue()
    arguments = (jpeg, seconds, started, counts)
    processes = [context.Process(target=loop_alone, args=arguments) for _ in range(2)]
    for each in processes:
        each.start()
    total = sum(counts.get() for _ in processes)
    for each in processes:
        each.join()
    return total / seconds


@contextmanager
def logic() -> Iterator[tuple[str, str]]:
    """URLs of the service and of the metrics."""
    port, admin = free_ports(2)
    command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(FOLDER), "--workers", "2"]
    command += ["--http-port", str(port), "--admin-port", str(admin), "--no-watch"]
    ready = f"http://127.0.0.1:{admin}/health/ready"
    with serving(command, lambda: status_of(ready) == 200):
        yield f"http://127.0.0.1:{port}/v1/services/tensor", f"http://127.0.0.1:{admin}/metrics"


def lags(metrics: str) -> dict[float, float]:
    """Upper bound in seconds -> samples so far."""
    return {float(bound): float(count) for bound, count in LAG.findall(httpx.get(metrics).text)}


def p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    counts = {bound: after[bound] - before[bound] for bound in after}
    return min(bound for bound, count in counts.items() if count >= 0.99 * counts[float("inf")]) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=8, help="of one turn (8)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a page and its figures there")
    args = parser.parse_args()
    where = machine(os.cpu_count() or 1)
    jpeg = photograph()
    rounds: list[dict[str, float]] = []
    with logic() as (url, metrics), tempfile.TemporaryDirectory() as folder:
        answer = httpx.post(url, content=jpeg, headers={"content-type": "image/jpeg"}, timeout=30)
        if answer.content != function()(jpeg).tobytes():
            sys.exit(f"the service answers {answer.status_code}, and not what the function gives")
        script = post(Path(folder) / "post.lua", jpeg, {"content-type": "image/jpeg"})
        wrk(url, script, args.connections, 2)  # warm-up
        for number in range(args.rounds):
            alone = bare(jpeg, args.seconds)
            before = lags(metrics)
            served = wrk(url, script, args.connections, args.seconds)
            lag = p99_ms(before, lags(metrics))
            rounds.append(
                {"bare_per_s": alone, "served_per_s": served.rate, "lag_p99_ms": lag, "p50_ms": served.p50_ms}
            )
            print(
                f"{number + 1}: bare {alone:.1f}/s, served {served.rate:.1f}/s, loop lag p99 <= {lag:g} ms",
                file=sys.stderr,
            )
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    share = statistics.median(each["served_per_s"] / each["bare_per_s"] for each in rounds)
    met = {
        f"served / bare >= {SHARE:.2f}": (f"{share:.3f}", share >= SHARE),
        f"event-loop lag p99 <= {LAG_MS:g} ms": (f"<= {middle['lag_p99_ms']:g} ms", middle["lag_p99_ms"] <= LAG_MS),
    }
    text = f"JPEG of {len(jpeg)} bytes, {WIDTH} x {HEIGHT}; {args.connections} connections.\n\n"
    text += "| | pictures/s (median) |\n|---|---|\n"
    text += f"| the function alone, two processes | {middle['bare_per_s']:.1f} |\n"
    text += f"| `oriel logic`, two workers | {middle['served_per_s']:.1f} |\n\n"
    text += f"{targets(met)}\n"
    print(text)
    if args.out is not None:
        about = f"`python benchmarks/logic_server.py jpeg`, {args.rounds} rounds of {args.seconds} s; "
        about += f"{where}."
        document = {"seconds": args.seconds, "rounds": rounds, "share": share}
        held = conditions(where, commit(), "not noted (medians)")
        write_page(args.out, "logic-jpeg", "1 MB JPEG to a tensor", f"{held}\n\n{about}", text, document)
