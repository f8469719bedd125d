"""Measures the way from clone to first answer: wall time, start time, memory and number of processes.

    python benchmarks/first_answer.py [--cold] [--json]

Clones this repository into a temporary folder, runs `make run` there as a new user would (on free ports), and asks the
gateway for a digit until it answers. --cold gives pip and uv empty caches, so every package is downloaded. Memory is
PSS (shared pages divided among their users, from /proc/*/smaps_rollup) of each unit's process tree after 5 idle
seconds. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from harness.processes import ROOT, pss_mb, tree

KEY = "oriel-demo-gold"


def ask(url: str, image: bytes) -> dict[str, Any]:
    """One digit through the gateway."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "image/png"}
    with urllib.request.urlopen(urllib.request.Request(url, image, headers), timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="empty package caches")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ORIEL_STATE": f"{folder}/state"}
        environment.pop("VIRTUAL_ENV", None)
        if args.cold:
            environment |= {"UV_CACHE_DIR": f"{folder}/uv", "PIP_CACHE_DIR": f"{folder}/pip"}
        began = time.monotonic()
        subprocess.run(["git", "clone", "-q", str(ROOT), f"{folder}/oriel"], check=True)
        command = ["make", "-s", "run", "ARGS=--free-ports --json"]
        stack = subprocess.Popen(command, cwd=f"{folder}/oriel", env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert stack.stdout is not None
            line = stack.stdout.readline()
            if not line:
                sys.exit("make run did not come up")
            up = json.loads(line)
            gateway = next(unit for unit in up["units"] if unit["unit"] == "gateway")
            image = Path(f"{folder}/oriel/examples/digits/7.png").read_bytes()
            answer = ask(f"http://{gateway['addresses']['http']}/v1/services/digits", image)
            first_answer_s = time.monotonic() - began
            time.sleep(5)
            memory = {unit["unit"]: round(pss_mb(unit["pid"]), 1) for unit in up["units"]}
            processes = len(tree(up["pid"]))
        finally:
            stack.terminate()
            stack.wait(30)
        figures = {
            "caches": "cold" if args.cold else "warm",
            "clone_to_first_answer_s": round(first_answer_s, 1),
            "start_s": up["start_s"],
            "answer": answer["label"],
            "idle_pss_mb": memory,
            "processes": processes,
        }
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:26} {value}")


if __name__ == "__main__":
    main()
