"""Calls of a service whose logic server and model are at zero: `python benchmarks/soak.py services`.

    [--rounds 10] [--calls 4] [--import-s 0]

The demo's `digits` service under `oriel up --scale-to-zero`. In each round several calls arrive while logic and
inference start, the first one at zero and the others at random moments of the following seconds; then both units end.
`--import-s` adds a service whose import takes so long, as one with a large framework does.

    lost          calls that were not answered with 200 (promised: 0), with the status and the body of each
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from harness.processes import ROOT

PATIENCE_S = 120.0
SLOW = """import time

from oriel_logic import service

time.sleep({seconds})


@service
def slow_to_import(request) -> str:
    return "here"
"""


@contextmanager
def started(hold_ms: int, *words: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Run the demo with `--scale-to-zero` and pools that are idle after a second.

    Yields the address of the gateway and the lines in which `oriel up` reports of its units.
    """
    with tempfile.TemporaryDirectory() as folder:
        policies = Path(folder, "policies")
        shutil.copytree(ROOT / "policies/examples", policies)
        routes = (policies / "routes.toml").read_text()
        assert "keep_alive_ms = 20000" in routes and "hold_ms = 30000" in routes
        routes = routes.replace("keep_alive_ms = 20000", "keep_alive_ms = 1000")
        (policies / "routes.toml").write_text(routes.replace("hold_ms = 30000", f"hold_ms = {hold_ms}"))
        command = [sys.executable, "-m", "oriel_cli.main", "up", "--demo", "--scale-to-zero", "--free-ports", "--json"]
        environment = {**os.environ, "ORIEL_STATE": folder, "OTEL_TRACES_SAMPLER_ARG": "0"}
        process = subprocess.Popen(
            [*command, "--policies", str(policies), *words], stdout=subprocess.PIPE, env=environment, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            units = json.loads(process.stdout.readline())["units"]
            (gateway,) = (unit["addresses"]["http"] for unit in units if unit["unit"] == "gateway")
            yield gateway, process.stdout
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def call(url: str, after_s: float) -> str:
    """Call the service in `after_s` seconds; return "" or why there was no answer."""
    time.sleep(after_s)
    body = (ROOT / "examples/digits/7.png").read_bytes()
    fields = {"authorization": "Bearer oriel-demo-gold", "content-type": "image/png"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=PATIENCE_S) as answer:
            answer.read()
    except urllib.error.HTTPError as refused:
        return f"sent after {after_s:.2f} s: {refused.code} {refused.read(300).decode(errors='replace')}"
    except OSError as broken:
        return f"sent after {after_s:.2f} s: {broken!r}"
    return ""


def asleep(lines: IO[bytes]) -> None:
    """Wait until logic and inference have ended."""
    state = dict.fromkeys(("logic", "inference"), "")
    while set(state.values()) != {"asleep"}:
        change = json.loads(lines.readline())
        if change["unit"] in state:
            state[change["unit"]] = change["state"]


def main() -> None:
    """Run the rounds and print how many calls were lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=4, help="calls in each round")
    parser.add_argument("--import-s", type=float, default=0.0, help="how long the import of another service takes")
    args = parser.parse_args()
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.calls) as callers:
        words: tuple[str, ...] = ()
        if args.import_s:
            Path(folder, "slow_to_import.py").write_text(SLOW.format(seconds=args.import_s))
            words = ("--services", str(ROOT / "examples/services"), "--services", folder)
        # The import happens three times: in a scratch process, in the server and in its fork server.
        with started(60_000 + round(6e3 * args.import_s), *words) as (gateway, lines):
            for number in range(1, args.rounds + 1):
                moments = (0.0, *(random.uniform(0.0, 6.0 + 2.0 * args.import_s) for _ in range(args.calls - 1)))
                url = f"http://{gateway}/v1/services/digits"
                found = [each for each in callers.map(lambda after_s, url=url: call(url, after_s), moments) if each]
                lost += found
                print(number, *(found or ["all answered"]), sep="\n  ", file=sys.stderr, flush=True)
                asleep(lines)
    print(f"{len(lost)} of {args.rounds * args.calls} calls lost in {args.rounds} starts of logic and inference")
    sys.exit(int(bool(lost)))
