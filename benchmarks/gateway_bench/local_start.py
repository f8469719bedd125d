"""Measures how soon `oriel up --scale-to-zero` answers its first call: `python benchmarks/faults.py local`.

    [--rounds 10]

The demo's `digits` model, no inference process, and a spare process with its imports done. Between two rounds the
process has ended and the next spare is ready (after `keep_alive_ms`, a second here).

    first ms      from sending until the whole answer (promised: 300)
"""

import argparse
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import IO

PROMISED_MS = 300.0
PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]
_COMMAND = "import sys; from oriel_cli.main import main; sys.exit(main())"


def ask(url: str) -> float:
    """Return the milliseconds of one call. Raises OSError if it fails."""
    body = (ROOT / "examples/digits/7.v2.json").read_bytes()
    fields = {"authorization": "Bearer oriel-demo-gold", "x-request-timeout-ms": "60000"}
    sent_s = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=PATIENCE_S) as answer:
        answer.read()
    return (time.monotonic() - sent_s) * 1e3


def read(lines: IO[bytes], changes: "queue.Queue[dict[str, str]]") -> None:
    """Put what `oriel up` reports of its units into the queue."""
    for line in lines:
        changes.put(json.loads(line))


def spares(parent: int) -> int:
    """Count the spare inference processes of `oriel up`."""
    found = 0
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = each.read_text().rpartition(")")[2].split()
            command = each.with_name("cmdline").read_bytes().split(b"\0")
            found += int(words[1]) == parent and b"oriel_cli.spare" in command and b"inference" in command
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policies = Path(folder, "policies")
        shutil.copytree(ROOT / "policies/examples", policies)
        routes = (policies / "routes.toml").read_text()
        (policies / "routes.toml").write_text(routes.replace("keep_alive_ms = 20000", "keep_alive_ms = 1000"))
        words = ("up", "--demo", "--scale-to-zero", "--policies", str(policies), "--free-ports", "--json")
        environment = {**os.environ, "ORIEL_STATE": folder, "OTEL_TRACES_SAMPLER_ARG": "0"}
        process = subprocess.Popen(
            (sys.executable, "-P", "-c", _COMMAND, *words), stdout=subprocess.PIPE, env=environment, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            units = json.loads(process.stdout.readline())["units"]
            (gateway,) = (unit["addresses"]["http"] for unit in units if unit["unit"] == "gateway")
            url = f"http://{gateway}/v2/models/digits/infer"
            changes: queue.Queue[dict[str, str]] = queue.Queue()
            threading.Thread(target=read, args=(process.stdout, changes), daemon=True).start()
            took = []
            for _ in range(args.rounds):
                ends_s = time.monotonic() + PATIENCE_S
                while not spares(process.pid) and time.monotonic() < ends_s:
                    time.sleep(0.1)
                time.sleep(3.0)  # until the spare process has done its imports
                took.append(ask(url))
                while (change := changes.get(timeout=PATIENCE_S))["unit"] != "inference" or change["state"] != "asleep":
                    pass
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    most = max(took)
    print(
        f"first answer after {statistics.median(took):.0f} ms (median), {most:.0f} ms (longest) of {len(took)} starts "
        f"with a spare process; promised {PROMISED_MS:.0f}; load average {os.getloadavg()[0]:.1f}"
    )
    sys.exit(int(statistics.median(took) > PROMISED_MS))
