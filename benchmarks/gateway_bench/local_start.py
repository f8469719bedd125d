"""How soon `oriel up --scale-to-zero` answers the first call: `python benchmarks/faults.py local`.

    [--rounds 10]

The demo's `digits` model, no inference process, and a spare process with its imports done. Between two rounds the
process has ended and the next spare is ready (after `keep_alive_ms`, a second here). A round counts only if the spare
was waiting before the call and has answered it; else the command ends with exit status 1 and with what was missing.

    first ms      from sending until the whole answer (promised: 300, in every round)
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PROMISED_MS = 300.0
PATIENCE_S = 120.0
END_S = 60.0
STILL_S = 1.0  # a process that slept all this time without using the CPU has done its imports
ROOT = Path(__file__).parents[2]
_COMMAND = "import sys; from oriel_cli.main import main; sys.exit(main())"


def ask(url: str) -> float:
    """Return the milliseconds of one call. Exits with the reason if it is not answered."""
    body = (ROOT / "examples/digits/7.v2.json").read_bytes()
    fields = {"authorization": "Bearer oriel-demo-gold", "x-request-timeout-ms": "60000"}
    sent_s = time.monotonic()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=PATIENCE_S) as answer:
            answer.read()
    except urllib.error.HTTPError as refused:
        took_s, text = time.monotonic() - sent_s, refused.read(1000).decode(errors="replace")
        sys.exit(f"the first call was refused after {took_s:.2f} s: {refused.code} {text}")
    return (time.monotonic() - sent_s) * 1e3


def read(lines: IO[bytes], changes: "queue.Queue[dict[str, str]]") -> None:
    """Put what `oriel up` reports of its units into the queue."""
    for line in lines:
        changes.put(json.loads(line))


def spares(parent: int) -> list[int]:
    """Return the inference processes of `oriel up` that were started as spares."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = each.read_text().rpartition(")")[2].split()
            command = each.with_name("cmdline").read_bytes().split(b"\0")
            if int(words[1]) == parent and b"oriel_cli.up.spare" in command and b"inference" in command:
                found.append(int(each.parent.name))
    return found


def state_of(process: int) -> tuple[str, int]:
    """Return the state of a process, S while it sleeps, and the CPU time that it has used; ("", 0) without one."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[0], int(words[11]) + int(words[12])


def sleeps(process: int) -> bool:
    """Return whether a process waits for something all the time."""
    before = state_of(process)
    ends_s = time.monotonic() + STILL_S
    while time.monotonic() < ends_s:
        if before[0] != "S" or state_of(process) != before:
            return False
        time.sleep(STILL_S / 20)
    return True


def wait(check: Callable[[], object], what: str) -> None:
    """Wait until `check` returns something. Exits after PATIENCE_S."""
    ends_s = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > ends_s:
            sys.exit(f"after {PATIENCE_S:.0f} s there was still no {what}")
        time.sleep(0.05)


def one_round(url: str, up: int, changes: "queue.Queue[dict[str, str]]") -> float:
    """Return the milliseconds of a first call; afterwards the process that answered it has ended."""
    wait(lambda: len(spares(up)) == 1 and sleeps(spares(up)[0]), "spare process that waits")
    (spare,) = spares(up)
    before = state_of(spare)
    took_ms = ask(url)
    state, used = state_of(spare)
    if not state or used == before[1]:
        sys.exit("the call was not answered by the spare process")
    with suppress(queue.Empty):
        while (change := changes.get(timeout=PATIENCE_S))["unit"] != "inference" or change["state"] != "asleep":
            pass
        return took_ms
    sys.exit(f"the inference process did not end within {PATIENCE_S:.0f} s")


@contextmanager
def started(
    *words: str, hold_ms: int = 30_000
) -> Iterator[tuple["subprocess.Popen[bytes]", str, "queue.Queue[dict[str, str]]"]]:
    """Run the demo with `--scale-to-zero` and pools that are idle after a second.

    Yields the process of `oriel up`, the gateway's host:port, and what is reported of the units.
    """
    with tempfile.TemporaryDirectory() as folder:
        policies = Path(folder, "policies")
        shutil.copytree(ROOT / "policies/examples", policies)
        routes = (policies / "routes.toml").read_text()
        assert "keep_alive_ms = 20000" in routes and "hold_ms = 30000" in routes
        routes = routes.replace("keep_alive_ms = 20000", "keep_alive_ms = 1000")
        (policies / "routes.toml").write_text(routes.replace("hold_ms = 30000", f"hold_ms = {hold_ms}"))
        command = ("up", "--demo", "--scale-to-zero", "--policies", str(policies), "--free-ports", "--json", *words)
        environment = {**os.environ, "ORIEL_STATE": folder, "OTEL_TRACES_SAMPLER_ARG": "0"}
        process = subprocess.Popen(
            (sys.executable, "-P", "-c", _COMMAND, *command), stdout=subprocess.PIPE, env=environment, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            units = json.loads(process.stdout.readline())["units"]
            (gateway,) = (unit["addresses"]["http"] for unit in units if unit["unit"] == "gateway")
            changes: queue.Queue[dict[str, str]] = queue.Queue()
            threading.Thread(target=read, args=(process.stdout, changes), daemon=True).start()
            yield process, gateway, changes
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                sys.exit(f"`oriel up` did not end within {END_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    took: list[float] = []
    with started() as (process, gateway, changes):
        for _ in range(args.rounds):
            took.append(one_round(f"http://{gateway}/v2/models/digits/infer", process.pid, changes))
            print(f"{len(took)}: {took[-1]:.0f} ms", file=sys.stderr, flush=True)
    most = max(took)
    print(
        f"first answer after {statistics.median(took):.0f} ms (median), {most:.0f} ms (longest) of {len(took)} starts "
        f"with a spare process; promised {PROMISED_MS:.0f}; load average {os.getloadavg()[0]:.1f}"
    )
    sys.exit(int(most > PROMISED_MS))
