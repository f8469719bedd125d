"""Compares the bill of a mixed load with the sums of the servers: whole, streamed and cut off, gRPC, lists, refusals.

Needs a running demo and its state folder:

    ORIEL_STATE=STATE oriel up --demo
    python benchmarks/bill.py --state STATE --seconds 1200 --rate 4

Late calls of the model mlp_single are hedged and answered calls of mlp are copied to a shadow pool if the demo is
started with `--policies DIR`, the folder that `python benchmarks/bill.py --write-policies DIR` makes, and beside it a
second server with `ORIEL_STATE=STATE`: `oriel inference --model-repository STATE/demo-models-* --http-port 8003
--grpc-port 8004 --metrics-port 8005`.

The exit code is 1 if the gateway adds anything to what the servers recorded, if the tokens that it shows are others, or
if `oriel usage reconcile` finds something. Device time of answers that were cut off is shown as an estimate, apart from
that of the others.
"""

import argparse
import contextlib
import http.client
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

from oriel_cli.up.demo_assets import DEMO_KEYS, find

KEY = DEMO_KEYS["gold"]
ORIEL = Path(sys.executable).with_name("oriel")
SETTLE_S = 4.0  # both the second's lines of the ledger and those of the next
MLP = {"inputs": [{"name": "x", "shape": [1, 1024], "datatype": "FP32", "data": [0.5] * 1024}]}
ROUTES = """
[pools.twins]
endpoints = ["127.0.0.1:8000", "127.0.0.1:8003"]
[pools.shadow]
endpoints = ["127.0.0.1:8003"]
[[routes]]
model = "mlp_single"
pool = "twins"
idempotent = true
hedge_ms = 1
[[routes]]
model = "mlp"
pool = "twins"
shadow = { pool = "shadow", percent = 50.0 }
"""
COPIES = ("oriel_gateway_shadow_copies_total", "oriel_gateway_repeats_total")
INFER = {"inputs": [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}
COUNTERS = ("device_ns", "tokens_in", "tokens_out")


class Mix:
    """Makes the calls. made: how many of each kind were answered as expected; odd: other answers."""

    def __init__(self, base: str, grpc: str) -> None:
        self._where = urlsplit(base).netloc
        self._grpc: Any = InferenceServerClient(grpc)  # type: ignore[no-untyped-call]
        self.made: Counter[str] = Counter()
        self.odd: Counter[str] = Counter()
        self.kinds: dict[str, Callable[[], bool]] = {
            "whole": lambda: self._chat(),
            "streamed": lambda: self._chat(stream=True),
            "cut off": lambda: self._chat(cut=True, stream=True, max_tokens=200),
            "infer": lambda: self._ask("POST", "/v2/models/digits/infer", INFER, 200),
            "hedged": lambda: self._ask("POST", "/v2/models/mlp_single/infer", MLP, 200),
            "shadowed": lambda: self._ask("POST", "/v2/models/mlp/infer", MLP, 200),
            "gRPC": self._infer,
            "list": lambda: self._ask("GET", "/v1/models", None, 200),
            "metadata": lambda: self._ask("GET", "/v2/models/digits", None, 200),
            "refused body": lambda: self._ask("POST", "/v1/chat/completions", {"model": "tiny"}, 400),
            "unknown model": lambda: self._ask("POST", "/v2/models/none/infer", INFER, 404),
        }

    def call(self, kind: str) -> None:
        """Make one call of a kind."""
        try:
            good = self.kinds[kind]()
        except Exception as error:
            # The end of one call: what was not as expected is counted, and the load goes on.
            self.odd[f"{kind}: {type(error).__name__}"] += 1
            return
        (self.made if good else self.odd)[kind] += 1

    def _chat(self, *, cut: bool = False, **more: Any) -> bool:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Is it sunny?"}], "max_tokens": 12}
        return self._ask("POST", "/v1/chat/completions", body | more, 200, cut=cut)

    def _ask(self, method: str, path: str, body: Any, status: int, *, cut: bool = False) -> bool:
        with contextlib.closing(http.client.HTTPConnection(self._where, timeout=30)) as connection:
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read(200) if cut else answer.read()
            return answer.status == status

    def _infer(self) -> bool:
        image = InferInput("image", [1, 64], "FP32")
        image.set_data_from_numpy(np.full((1, 64), 0.5, np.float32))
        answer: Any = self._grpc.infer("digits", [image], headers={"authorization": f"Bearer {KEY}"})
        return answer.as_numpy("label") is not None


def rows(state: str) -> list[dict[str, Any]]:
    """Return the bill by tenant, unit and reason."""
    command = [
        str(ORIEL),
        "usage",
        "export",
        "--state",
        state,
        "--open",
        "--by",
        "tenant,unit,why",
        "--format",
        "ndjson",
    ]
    return [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]


def billed(found: list[dict[str, Any]], unit: str) -> Counter[str]:
    """Return what a unit has recorded for tenants."""
    sums: Counter[str] = Counter()
    for row in found:
        if row["unit"] == unit and not row["why"] and row["tenant"] != "(unbilled)":
            sums.update({name: row[name] for name in (*COUNTERS, "requests")})
    return sums


def shown(mix_of: str) -> Counter[str]:
    """Return what `GET /v1/usage` shows of answered calls, without the estimates of those that were cut off."""
    connection = http.client.HTTPConnection(urlsplit(mix_of).netloc, timeout=30)
    connection.request("GET", "/v1/usage", headers={"authorization": f"Bearer {KEY}"})
    targets = json.loads(connection.getresponse().read())["month"]["targets"]
    sums: Counter[str] = Counter()
    for each in targets:
        if not each["estimated"]:
            sums.update({name: each[name] for name in COUNTERS})
    return sums


def write_policies(folder: Path) -> None:
    """Write the demo's documents with routes that hedge and copy in front of its own: the first that fits wins."""
    assets = find()
    shutil.copytree(assets.policies, folder)
    routes = folder / "routes.toml"
    routes.write_text(ROUTES + routes.read_text())


def copies(admin: str) -> dict[str, float]:
    """Return how many shadow copies and repeated calls the gateway counts."""
    connection = http.client.HTTPConnection(urlsplit(admin).netloc, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in COPIES}


def main() -> int:
    """Run the load and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="http://127.0.0.1:8080")
    parser.add_argument("--grpc", default="127.0.0.1:8081")
    parser.add_argument("--admin", default="http://127.0.0.1:8082")
    parser.add_argument("--write-policies", type=Path, metavar="DIR", help="write the documents, and end")
    parser.add_argument("--state", help="the platform's ORIEL_STATE")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=4.0, help="calls per second")
    args = parser.parse_args()
    if args.write_policies:
        write_policies(args.write_policies)
        return 0
    if not args.state:
        parser.error("--state is needed")
    mix, rng = Mix(args.base, args.grpc), random.Random(1)
    time.sleep(SETTLE_S)
    before, shown_before = rows(args.state), shown(args.base)
    until = time.monotonic() + args.seconds
    while (now := time.monotonic()) < until:
        mix.call(rng.choice(list(mix.kinds)))
        time.sleep(max(0.0, now + 1.0 / args.rate - time.monotonic()))
    time.sleep(SETTLE_S)
    after, page = rows(args.state), shown(args.base)
    page.subtract(shown_before)
    units = {unit: billed(after, unit) for unit in ("inference", "logic", "gateway")}
    for unit, sums in units.items():
        sums.subtract(billed(before, unit))
    servers = {name: units["inference"][name] + units["logic"][name] for name in COUNTERS}
    estimates = {name: units["gateway"][name] for name in COUNTERS}
    print("calls:", dict(mix.made), "odd:", dict(mix.odd))
    print("copies:", copies(args.admin))
    print("servers recorded:", servers)
    print("gateway added:", estimates)
    print("GET /v1/usage shows of answered calls:", {name: page[name] for name in COUNTERS})
    check = subprocess.run(
        [str(ORIEL), "usage", "reconcile", "--state", args.state, "--open"], capture_output=True, text=True
    )
    print("reconcile:", check.stdout.strip().splitlines()[-1], "exit", check.returncode)
    tokens = all(page[name] == servers[name] for name in ("tokens_in", "tokens_out"))
    return int(any(estimates.values()) or not tokens or check.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
