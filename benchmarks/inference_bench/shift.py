"""Measures how soon two models of one server share its cores anew when 10 of 11 calls turn from the one to the other.

    python benchmarks/goodput.py shift [--cores 2] [--seconds 20] [--load 0.75] [--json out.json]

Poisson arrivals at `--load` of what the cores can compute; a call counts if it is answered within five times what one
run takes alone. The same arrivals go to servers whose models have no `count`, one instance each, and every fixed split
that gives one of them all cores. Prints calls in time per second: the first 5 seconds of each phase, and the rest of
it. The bound is judged on the rest: at least 90 % of the best fixed split of that phase. Exit status 1 if it is missed.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import uvloop
from harness.processes import inference
from onnx import TensorProto, helper, numpy_helper

from inference_bench.models import save

MODELS = ("one", "two")
SETTLED_S = 5.0
BOUND = 0.9
TARGETS = 5.0  # service times of one run
WIDTH, LAYERS = 512, 400
CONFIG = """
backend: "onnxruntime" max_batch_size: 1
input [ { name: "x" data_type: TYPE_FP32 dims: [ 512 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 512 ] } ]
"""
Counts = dict[tuple[int, bool, str], int]  # (phase, settled, model) -> calls


def write_models(folder: Path, split: tuple[int, int] | None) -> None:
    """split: instances of each model; None for as many as the work needs."""
    weight = numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "w")
    names = ["x", *(f"v{n}" for n in range(1, LAYERS)), "y"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [before, "w"], [after]) for before, after in zip(names, names[1:], strict=False)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [weight],
    )
    for index, name in enumerate(MODELS):
        (folder / name / "1").mkdir(parents=True)
        group = f"instance_group [ {{ kind: KIND_CPU count: {split[index]} }} ]" if split else ""
        (folder / name / "config.pbtxt").write_text(CONFIG + group)
        save(graph, folder / name / "1/model.onnx")


class Caller:
    """Connections to one server, one per call in flight."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._body = json.dumps(
            {"inputs": [{"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": [1] * WIDTH}]}
        ).encode()

    async def call(self, model: str, timeout_s: float) -> tuple[bool, float]:
        """Returns whether it was answered, and after how many seconds."""
        began = time.monotonic()
        # The server closes what was idle for long.
        while self._idle and (self._idle[-1][0].at_eof() or self._idle[-1][1].is_closing()):
            self._idle.pop()[1].close()
        pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = pair
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        head += f"x-oriel-timeout-ms: {round(timeout_s * 1e3)}\r\nContent-Length: {len(self._body)}\r\n\r\n"
        writer.write(head.encode() + self._body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(answer.split("content-length: ")[1].split("\r\n")[0]))
        self._idle.append(pair)
        return answer.split()[1] == "200", time.monotonic() - began

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def service_s(port: int) -> float:
    """The median time of a call that has the server for itself."""
    caller = Caller(port)
    times = [(await caller.call(MODELS[n % 2], 60.0))[1] for n in range(40)]
    caller.close()
    return statistics.median(times[10:])


async def shift(port: int, rate: float, target_s: float, seconds: float) -> Counts:
    """Calls in time. The arrivals are the same in every run."""
    chance, caller, counts = random.Random(7), Caller(port), Counts()
    start = time.monotonic() + 0.2

    async def one(phase: int, settled: bool, model: str) -> None:
        answered, took_s = await caller.call(model, target_s)
        counts[phase, settled, model] = counts.get((phase, settled, model), 0) + (answered and took_s <= target_s)

    async with asyncio.TaskGroup() as group:
        due = 0.0
        while (due := due + chance.expovariate(rate)) < 2 * seconds:
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            phase, into_s = divmod(due, seconds)
            model = MODELS[int(phase) ^ (chance.random() < 1 / 11)]
            group.create_task(one(int(phase), into_s >= SETTLED_S, model))
    caller.close()
    return counts


def per_second(counts: Counts, phase: int, settled: bool, seconds: float) -> float:
    """Calls of both models in time per second."""
    found = sum(counts.get((phase, settled, model), 0) for model in MODELS)
    return found / (seconds - SETTLED_S if settled else SETTLED_S)


def judge(rates: Mapping[str, Counts], seconds: float) -> dict[int, float]:
    """Phase -> what instances by demand reach of the best fixed split once they have settled."""
    fixed = [counts for name, counts in rates.items() if name != "by demand"]
    return {
        phase: per_second(rates["by demand"], phase, True, seconds)
        / max(1e-9, *(per_second(each, phase, True, seconds) for each in fixed))
        for phase in range(2)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase, more than 5")
    parser.add_argument("--load", type=float, default=0.75, help="part of the cores' capacity")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.seconds <= SETTLED_S:
        parser.error("--seconds must be more than 5")
    cores = args.cores
    splits = {"by demand": None, "1 + 1": (1, 1), f"{cores} + 1": (cores, 1), f"1 + {cores}": (1, cores)}
    found: dict[str, Counts] = {}
    rate = target_s = 0.0
    for name, split in splits.items():
        with tempfile.TemporaryDirectory() as folder:
            write_models(Path(folder), split)
            flags = ("--cores", str(cores), "--backend-config", "onnxruntime,intra_op_thread_count=1")
            with inference(folder, *flags) as (_, port, _):
                alone_s = uvloop.run(service_s(port))
                if not rate:
                    rate, target_s = args.load * cores / alone_s, TARGETS * alone_s
                    print(f"one run {alone_s * 1e3:.1f} ms; {rate:.1f} calls/s, target {target_s * 1e3:.0f} ms")
                    print(f"{'':12} {'phase 1: 0-5 s':>16} {'then':>8} {'phase 2: 0-5 s':>16} {'then':>8}")
                found[name] = uvloop.run(shift(port, rate, target_s, args.seconds))
        cells = [per_second(found[name], phase, settled, args.seconds) for phase in (0, 1) for settled in (False, True)]
        print(f"{name:12} {cells[0]:16.1f} {cells[1]:8.1f} {cells[2]:16.1f} {cells[3]:8.1f}", flush=True)
    kept = judge(found, args.seconds)
    load = os.getloadavg()
    print(", ".join(f"phase {phase + 1}: {part:.0%} of the best fixed split" for phase, part in kept.items()))
    print(f"load average {load[0]:.1f} on {os.cpu_count()} processors")
    if args.json:
        rows = {name: {"/".join(map(str, key)): n for key, n in counts.items()} for name, counts in found.items()}
        args.json.write_text(json.dumps({"rate": rate, "target_s": target_s, "load": load, "calls": rows}, indent=1))
    sys.exit(min(kept.values()) < BOUND)
