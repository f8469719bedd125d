"""What a big repository costs: loading 1,000 small models, idling with them, and watching 100 versions.

    python benchmarks/growth.py repository [--models 1000] [--versions 100] [--idle-s 60] [--json]

The server is `oriel inference` of this checkout with its defaults, a process of its own, Linux only. Reported are wall
time to readiness, CPU time of the server and of the processes that try model files (from /proc: the machine may be
shared), the share of one core while nothing asks for anything, proportional set size (PSS) and threads. Targets: 1,000
models in 60 s, idle below 1 % of a core, watching 100 versions in poll mode at the default interval below 1 %.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
CONFIG = """
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


def mlp(seed: int) -> bytes:
    """16 -> 32 -> 4, some 3 KB."""
    values = np.random.default_rng(seed)
    weights = [
        numpy_helper.from_array(values.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w1", (16, 32)), ("w2", (32, 4)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 16), ("y", 4))]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def write(root: Path, models: int, versions: int) -> None:
    for number in range(models):
        folder = root / f"m{number:04}"
        for version in range(1, versions + 1):
            (folder / str(version)).mkdir(parents=True)
            (folder / str(version) / "model.onnx").write_bytes(mlp(number + version))
        policy = "version_policy { all { } }" if versions > 1 else ""
        (folder / "config.pbtxt").write_text(CONFIG + policy)


class Server:
    """A running server; figures from /proc."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process, self.port = process, port

    def stat(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()

    def cpu_s(self) -> float:
        """User and system time, its ended children included."""
        return sum(int(field) for field in self.stat()[11:15]) * TICK_S

    def threads(self) -> int:
        return int(self.stat()[17])

    def pss_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE).group(1)) / 1024  # type: ignore[union-attr]

    def get(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", body, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ready(self) -> bool:
        try:
            return self.get("/v2/health/ready")[0] == 200
        except OSError:
            return False

    def serving(self) -> int:
        lines = json.loads(self.get("/v2/repository/index", b'{"ready": true}')[1])
        return len(lines)


def free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextmanager
def serve(root: Path, *arguments: str, wait_s: float) -> Iterator[tuple[Server, float]]:
    """The server and the seconds until it was ready."""
    port = free_port()
    began = time.monotonic()
    command = [sys.executable, "-m", "oriel_cli.main", "inference", "--model-repository", str(root)]
    ports = ["--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0"]
    process = subprocess.Popen([*command, *ports, *arguments], stderr=subprocess.DEVNULL, text=True)
    server = Server(process, port)
    try:
        while not server.ready():
            if process.poll() is not None or time.monotonic() - began > wait_s:
                raise SystemExit(f"the server did not get ready within {wait_s:g} s")
            time.sleep(0.05)
        yield server, time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def idle(server: Server, seconds: float) -> float:
    """Per cent of one core."""
    began, before = time.monotonic(), server.cpu_s()
    time.sleep(seconds)
    return 100 * (server.cpu_s() - before) / (time.monotonic() - began)


def measure(root: Path, *arguments: str, idle_s: float) -> dict[str, Any]:
    with serve(root, *arguments, wait_s=600) as (server, load_s):
        loaded_cpu_s = server.cpu_s()
        time.sleep(5)  # the process that tries model files ends
        figures: dict[str, Any] = {
            "versions_ready": server.serving(),
            "load_s": round(load_s, 2),
            "load_cpu_s": round(max(loaded_cpu_s, server.cpu_s()), 2),
            "pss_mib": round(server.pss_mib(), 1),
            "threads": server.threads(),
        }
        figures["idle_core_percent"] = round(idle(server, idle_s), 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--idle-s", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="oriel-growth-") as folder:
        many, one, deep = (Path(folder, name) for name in ("many", "one", "deep"))
        write(many, args.models, 1)
        write(one, 1, 1)
        write(deep, 1, args.versions)
        found["one model"] = measure(one, idle_s=min(5, args.idle_s))
        found[f"{args.models} models"] = measure(many, idle_s=args.idle_s)
        poll = ("--model-control-mode", "poll")
        found[f"{args.versions} versions, poll"] = measure(deep, *poll, idle_s=args.idle_s)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, figures in found.items():
        print(f"{name:22}", "  ".join(f"{key} {value}" for key, value in figures.items()))
