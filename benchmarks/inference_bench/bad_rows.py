"""Cost of one caller whose rows fail to the others (PROMISES R40): answers per second with and without it.

    python benchmarks/neighbours.py bad-rows [--connections 32] [--bad 8] [--seconds 5] [--rounds 3]

A model looks up a row by an index and multiplies it some times. Every connection sends its next call when the last one
is answered; one more sends `--bad` calls a second whose index is out of range and has to be answered 400. Rounds with
and without it alternate, on a server of its own process.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop
from harness.processes import inference
from onnx import TensorProto, helper, numpy_helper

from inference_bench.models import save

CONFIG = """
backend: "onnxruntime" max_batch_size: 32
input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } } ]
output [ { name: "row" data_type: TYPE_FP32 dims: [ 512 ] } ]
dynamic_batching { }
"""
LAYERS = 24


def write_model(folder: Path) -> None:
    table = numpy_helper.from_array(np.ones((16, 512), np.float32), "table")
    weight = numpy_helper.from_array(np.eye(512, dtype=np.float32), "w")
    nodes = [helper.make_node("Gather", ["table", "index"], ["v0"])]
    nodes += [
        helper.make_node("MatMul", [f"v{n}", "w"], [f"v{n + 1}" if n + 1 < LAYERS else "row"]) for n in range(LAYERS)
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("index", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, ["n", 512])],
        [table, weight],
    )
    (folder / "lookup/1").mkdir(parents=True)
    (folder / "lookup/config.pbtxt").write_text(CONFIG)
    save(graph, folder / "lookup/1/model.onnx")


class Caller:
    """One connection. answered: by status."""

    def __init__(self, port: int, index: int) -> None:
        body = json.dumps({"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [index]}]})
        head = "POST /v2/models/lookup/infer HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        self._port = port
        self.answered: dict[int, int] = {}

    async def run(self, until: float, every_s: float = 0.0) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        due = time.monotonic()
        while (now := time.monotonic()) < until:
            if every_s:
                due += every_s
                await asyncio.sleep(max(0.0, due - now))
            writer.write(self._request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            status = int(head.split()[1])
            self.answered[status] = self.answered.get(status, 0) + 1
        writer.close()


async def measure(args: argparse.Namespace, port: int) -> None:
    found: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(2 * args.rounds + 1):
        with_bad = bool(round_ % 2)
        callers = [Caller(port, n % 16) for n in range(args.connections)]
        bad = Caller(port, 99)
        until = time.monotonic() + args.seconds
        work = [each.run(until) for each in callers]
        await asyncio.gather(*work, *([bad.run(until, 1.0 / args.bad)] if with_bad else []))
        failed = sum(count for each in callers for status, count in each.answered.items() if status != 200)
        if failed or set(bad.answered) - {400}:
            raise SystemExit(f"{failed} neighbours failed; the bad caller was answered {bad.answered}")
        if round_:  # the first one warms up
            found[with_bad].append(sum(each.answered.get(200, 0) for each in callers) / args.seconds)
    without, beside = (statistics.median(found[each]) for each in (False, True))
    print(f"{without:.0f}/s alone, {beside:.0f}/s beside {args.bad} bad calls a second: {beside / without:.1%} kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--bad", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with inference(folder, "--cores", "1") as (_, port, _):
            uvloop.run(measure(args, port))
