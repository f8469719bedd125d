"""Calls of a service whose logic server and model are at zero: `python benchmarks/faults.py services`.

    [--rounds 10] [--calls 4] [--import-s 0]

The demo's `digits` service under `oriel up --scale-to-zero`. In each round several calls arrive while logic and
inference start, the first one at zero and the others at random moments of the following seconds; then both units end.
`--import-s` adds a service whose import takes so long, as one with a large framework does.

    lost          calls that were not answered with 200 (promised: 0), with the status and the body of each
"""

import argparse
import queue
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway_bench.local_start import PATIENCE_S, ROOT, started

SLOW = """import time

from oriel_logic import service

time.sleep({seconds})


@service
def slow_to_import(request) -> str:
    return "here"
"""


def call(url: str, after_s: float) -> str:
    """Call the service in `after_s` seconds; return "" or why there was no answer."""
    time.sleep(after_s)
    body = (ROOT / "examples/digits/7.png").read_bytes()
    fields = {"authorization": "Bearer oriel-demo-gold", "content-type": "image/png"}
    sent_s = time.monotonic()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=PATIENCE_S) as answer:
            answer.read()
    except urllib.error.HTTPError as refused:
        why = f"{refused.code} {refused.read(300).decode(errors='replace')}"
    except OSError as broken:
        why = repr(broken)
    else:
        return ""
    return f"sent after {after_s:.2f} s, lost after {time.monotonic() - sent_s:.2f} s more: {why}"


def asleep(changes: "queue.Queue[dict[str, str]]") -> None:
    """Wait until logic and inference have ended. Exits if they do not."""
    state = dict.fromkeys(("logic", "inference"), "")
    try:
        while set(state.values()) != {"asleep"}:
            change = changes.get(timeout=PATIENCE_S)
            if change["unit"] in state:
                state[change["unit"]] = change["state"]
    except queue.Empty:
        sys.exit(f"logic and inference did not end within {PATIENCE_S:.0f} s: {state}")


def main() -> None:
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
        # the import happens three times: in a scratch process, in the server and in its fork server
        with started(*words, hold_ms=60_000 + round(6e3 * args.import_s)) as (_, gateway, changes):
            url = f"http://{gateway}/v1/services/digits"
            for number in range(1, args.rounds + 1):
                moments = (0.0, *(random.uniform(0.0, 6.0 + 2.0 * args.import_s) for _ in range(args.calls - 1)))
                found = [each for each in callers.map(lambda after_s: call(url, after_s), moments) if each]
                lost += found
                print(number, *(found or ["all answered"]), sep="\n  ", file=sys.stderr, flush=True)
                asleep(changes)
    print(f"{len(lost)} of {args.rounds * args.calls} calls lost in {args.rounds} starts of logic and inference")
    sys.exit(int(bool(lost)))
