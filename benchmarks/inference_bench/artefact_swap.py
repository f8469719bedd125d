"""Measures what callers notice when a compiled artefact is built, checked and swapped in under load.

    python benchmarks/faults.py artefact [--rounds 10] [--seconds 10] [--load 0.4] [--compiler openvino] [--json FILE]

Open loop, Poisson arrivals at `--load` of what one core can compute. Each round measures three windows: `steady`, in
which nothing happens; `reload`, while the same model is loaded again, without an artefact and then with one that is not
in the folder; `swap`, from the end of that load until a second after the artefact serves. Latency counts from the time
at which a call was due. The calls of `swap` are also listed by what the model's artefact was doing when they were
due. Bounds: no call fails, and the p99 of `swap` is at most 1.5 times that of `steady`. Exit status 1 if one is missed.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import uvloop
from harness.pages import table, word
from harness.processes import inference

from inference_bench.shift import MODELS, Caller, service_s, write_models

COMPILE = 'parameters {{ key: "oriel.compile" value {{ string_value: "{}" }} }}\n'
WINDOWS = ("steady", "reload", "swap")
MAX_RATIO = 1.5
AFTER_S = 1.0
TIMEOUT_S = 30.0
STATE_S = 120.0  # a swap that takes longer than this has failed
MODEL = MODELS[0]


class Latencies:
    """Latencies of the calls that were due in each window, and the number of those that failed.

    states: of those of `swap`, by the state of the artefact.
    """

    def __init__(self) -> None:
        self.window, self.state = WINDOWS[0], ""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.states: dict[str, list[float]] = defaultdict(list)
        self.failed: dict[str, int] = defaultdict(int)

    def answered(self, window: str, state: str, seconds: float) -> None:
        """Count a call. state: "" outside of `swap`."""
        self.seconds[window].append(seconds)
        if state:
            self.states[state].append(seconds)


def p99(values: list[float]) -> float:
    """Return the 99th percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def verdict(found: Latencies) -> list[tuple[str, str, bool]]:
    """Return each bound with its figure, and whether it is met."""
    failed = sum(found.failed.values())
    ratio = p99(found.seconds["swap"]) / p99(found.seconds["steady"])
    return [
        ("no call fails", str(failed), failed == 0),
        (f"p99 of swap <= {MAX_RATIO} x steady", f"{ratio:.2f} x", ratio <= MAX_RATIO),
    ]


async def offer(port: int, rate: float, found: Latencies, stop: asyncio.Event) -> None:
    """Call at the times of a Poisson process until `stop` is set."""
    chance, caller, due = random.Random(7), Caller(port), time.monotonic()

    async def one(window: str, state: str, due_s: float) -> None:
        try:
            answered, _ = await caller.call(MODEL, TIMEOUT_S)
        except (OSError, EOFError):
            answered = False
        found.answered(window, state, time.monotonic() - due_s)
        found.failed[window] += not answered

    async with asyncio.TaskGroup() as group:
        while not stop.is_set():
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(one(found.window, found.state, due))
    caller.close()


async def rounds(port: int, models: Path, artefacts: Path, rate: float, args: argparse.Namespace) -> Latencies:
    """Measure all windows of all rounds."""
    found, stop = Latencies(), asyncio.Event()
    config = models / MODEL / "config.pbtxt"
    plain = config.read_text()
    offering = asyncio.create_task(offer(port, rate, found, stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=STATE_S, trust_env=False) as client:
        for _ in range(args.rounds):
            found.window = "steady"
            await asyncio.sleep(args.seconds)
            config.write_text(plain)
            found.window = "reload"
            await load(client)
            await asyncio.sleep(AFTER_S)
            shutil.rmtree(artefacts, ignore_errors=True)
            config.write_text(COMPILE.format(args.compiler) + plain)
            await load(client)
            found.window, found.state = "swap", "not known"
            await until_serving(client, found)
            await asyncio.sleep(AFTER_S)
            found.state = ""
    stop.set()
    await offering
    return found


async def load(client: httpx.AsyncClient) -> None:
    (await client.post(f"/v2/repository/models/{MODEL}/load", json={})).raise_for_status()


async def until_serving(client: httpx.AsyncClient, found: Latencies) -> None:
    """Wait until the index says that the artefact serves; note each state. Exits if it says that it will not."""
    async with asyncio.timeout(STATE_S):
        while True:
            lines: list[dict[str, Any]] = (await client.post("/v2/repository/index", json={})).json()
            reason = next((line.get("reason", "") for line in lines if line["name"] == MODEL), "")
            found.state = reason.partition(": ")[2].partition(",")[0] or "not known"
            if ": serving" in reason:
                return
            if ": refused" in reason or ": absent, " in reason:
                sys.exit(f"the artefact does not serve: {reason}")
            await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each steady window")
    parser.add_argument("--load", type=float, default=0.4, help="of what one core can compute")
    parser.add_argument("--compiler", default="onnxruntime-graph", help="or openvino, if it is installed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        models, artefacts = Path(name, "models"), Path(name, "artefacts")
        write_models(models, None)
        flags = ["--model-control-mode", "explicit", "--load-model", "*", "--artefact-folder", str(artefacts)]
        with inference(models, *flags) as (_, port, _):
            rate = args.load / uvloop.run(service_s(port))
            found = uvloop.run(rounds(port, models, artefacts, rate, args))
    windows = [(window, found.seconds[window], str(found.failed[window])) for window in WINDOWS]
    windows += [(f"swap, {state}", seconds, "") for state, seconds in found.states.items()]
    rows = [
        [name, str(len(seconds)), failed, f"{statistics.median(seconds) * 1e3:.1f}", f"{p99(seconds) * 1e3:.1f}"]
        for name, seconds, failed in windows
        if len(seconds) > 1
    ]
    print(table(("window", "calls", "failed", "p50 ms", "p99 ms"), rows))
    judged = verdict(found)
    print(table(("bound", "found", "met"), [[bound, figure, word(met)] for bound, figure, met in judged]))
    if args.json:
        figures = {"rate": rate, "seconds": found.seconds, "states": found.states, "failed": found.failed}
        args.json.write_text(json.dumps(figures))
    return 0 if all(met for _, _, met in judged) else 1
