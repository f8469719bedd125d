"""Cost of a big repository: loading 1,000 small models, idling with them, and watching 100 versions.

    python benchmarks/growth.py repository [--models 1000] [--versions 100] [--idle-s 60] [--json]

The server is `oriel inference` of this checkout with its defaults, a process of its own, Linux only. Reported are wall
time to readiness, CPU time of the server and of the processes that try model files (from /proc: the machine may be
shared), the share of one core while nothing asks for anything, proportional set size (PSS) and threads. Targets: 1,000
models in 60 s, idle below 1 % of a core, watching 100 versions in poll mode at the default interval below 1 %.
"""

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from harness.processes import cpu_s, inference, pss_mb
from onnx import TensorProto, helper, numpy_helper

from inference_bench.models import document

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
    return document(graph)


def write(root: Path, models: int, versions: int) -> None:
    for number in range(models):
        folder = root / f"m{number:04}"
        for version in range(1, versions + 1):
            (folder / str(version)).mkdir(parents=True)
            (folder / str(version) / "model.onnx").write_bytes(mlp(number + version))
        policy = "version_policy { all { } }" if versions > 1 else ""
        (folder / "config.pbtxt").write_text(CONFIG + policy)


def models_ready(port: int) -> int:
    """Count the versions that the server lists as ready."""
    url = f"http://127.0.0.1:{port}/v2/repository/index"
    with urllib.request.urlopen(url, b'{"ready": true}', timeout=10) as answer:
        return len(json.load(answer))


def idle(pid: int, seconds: float) -> float:
    """Per cent of one core."""
    began, before = time.monotonic(), cpu_s(pid, ended=True)
    time.sleep(seconds)
    return 100 * (cpu_s(pid, ended=True) - before) / (time.monotonic() - began)


def measure(root: Path, *flags: str, idle_s: float) -> dict[str, Any]:
    began = time.monotonic()
    with inference(root, *flags, start_s=600) as (pid, port, _):
        load_s = time.monotonic() - began
        time.sleep(5)  # the process that tries model files ends
        return {
            "versions_ready": models_ready(port),
            "load_s": round(load_s, 2),
            "load_cpu_s": round(cpu_s(pid, ended=True), 2),
            "pss_mib": round(pss_mb(pid), 1),
            "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
            "idle_core_percent": round(idle(pid, idle_s), 3),
        }


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
