"""Models on demand with too little memory: thirty models called by Zipf's law, memory for seven (PROMISES R50).

    python benchmarks/neighbours.py on-demand [--seconds 120] [--exponent 1.0] [--callers 12] [--json]

Every caller sends its next call when the last one is answered, to a model drawn by Zipf's law. Reported are the share
of the calls that were refused or waited (bound: 40 %), how many of the most called model's were refused after its first
answer (bound: none), and the proportional set size by which the server's process has grown since before its first load,
as a multiple of its budget: median and peak of samples taken every half second (bound: 1.2). The process that tries
each model file before its first load is not counted: it ends when there is nothing to try.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from harness.processes import inference
from onnx import TensorProto, helper, numpy_helper

from inference_bench.models import save

MODELS = 30
SIDE = 2048  # 16 MiB of weights
BUDGET_MIB = 147
WAITED_S = 0.25
CONFIG = """
backend: "onnxruntime"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1, 2048 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] } ]
"""


def write_models(root: Path) -> None:
    """Write models that are equal but for their names."""
    values = np.random.default_rng(1)
    wide = numpy_helper.from_array(values.standard_normal((SIDE, SIDE)).astype(np.float32), "w")
    narrow = numpy_helper.from_array(values.standard_normal((SIDE, 4)).astype(np.float32), "v")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, SIDE])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])
    for number in range(MODELS):
        (root / f"m{number}/1").mkdir(parents=True)
        (root / f"m{number}/config.pbtxt").write_text(CONFIG)
        save(helper.make_graph(nodes, "g", [x], [y], [wide, narrow]), root / f"m{number}/1/model.onnx")


class Found:
    """The calls by how they went. after_first: refused calls of models that had answered before, by model."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.waited: Counter[int] = Counter()
        self.odd: Counter[int] = Counter()
        self.after_first: Counter[int] = Counter()
        self.answered: set[int] = set()

    def add(self, model: int, status: int, took_s: float) -> None:
        self.calls["all"] += 1
        if status == 503:
            self.refused[model] += 1
            self.after_first[model] += model in self.answered
        elif status != 200:
            self.odd[status] += 1
        else:
            self.answered.add(model)
            self.waited[model] += took_s > WAITED_S


def pss_mib(pid: int) -> float:
    """Return the proportional set size of one process, without its children."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


async def call(port: int, until: float, rng: random.Random, weights: list[float], found: Found) -> None:
    """Call models over one connection until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, SIDE], "datatype": "FP32", "data": [0.5] * SIDE}]})
    while time.monotonic() < until:
        (model,) = rng.choices(range(MODELS), weights)
        head = f"POST /v2/models/m{model}/infer HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        began = time.monotonic()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(answer.split("content-length: ")[1].split("\r\n")[0]))
        found.add(model, int(answer.split()[1]), time.monotonic() - began)
    writer.close()


async def measure(pid: int, port: int, args: argparse.Namespace) -> tuple[Found, list[float]]:
    """Make the calls, and sample the memory of the server."""
    found, grown = Found(), list[float]()
    weights = [1.0 / (number + 1) ** args.exponent for number in range(MODELS)]
    before, until = pss_mib(pid), time.monotonic() + args.seconds
    callers = [
        asyncio.create_task(call(port, until, random.Random(number), weights, found)) for number in range(args.callers)
    ]
    while time.monotonic() < until:
        await asyncio.sleep(0.5)
        grown.append((pss_mib(pid) - before) / BUDGET_MIB)
    await asyncio.gather(*callers)
    return found, grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--callers", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oriel-on-demand-") as folder:
        write_models(Path(folder))
        flags = ("--model-control-mode", "demand", "--model-memory-budget", f"{BUDGET_MIB << 20}")
        with inference(Path(folder), *flags) as (pid, port, _):
            found, grown = asyncio.run(measure(pid, port, args))
    refused, waited = found.refused.total(), found.waited.total()
    result = {
        "calls": found.calls["all"],
        "other_statuses": dict(found.odd),
        "refused_percent": round(100 * refused / found.calls["all"], 2),
        "waited_percent": round(100 * waited / found.calls["all"], 2),
        "most_called_refused_after_its_first_answer": found.after_first[0],
        "memory_of_budget_median": round(statistics.median(grown), 2),
        "memory_of_budget_peak": round(max(grown), 2),
    }
    print(json.dumps(result) if args.json else "\n".join(f"{name:44} {value}" for name, value in result.items()))
