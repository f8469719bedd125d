"""ONNX Runtime alone, without a server: rows per second of one session at its best batch.

    python in_process.py MODEL.onnx THREADS SECONDS MAX_BATCH

Prints JSON. The first half of the time looks for the best batch among the powers of two, the second measures it. With
several threads both ways of waiting between operators are tried, spinning and sleeping.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort


def alone(file: Path, threads: int, seconds: int, max_batch: int) -> dict[str, Any]:
    """Run this script in a process of its own; returns what it printed."""
    command = [sys.executable, __file__, str(file), str(threads), str(seconds), str(max_batch)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def session(path: str, threads: int, spinning: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def rate(runner: ort.InferenceSession, rows: int, seconds: float) -> tuple[float, float, float]:
    """Rows per second, median seconds of a run, CPU seconds per row."""
    (given,) = runner.get_inputs()
    kind = {"tensor(float)": np.float32, "tensor(int64)": np.int64}[given.type]
    batch = {"x": np.ones((rows, *given.shape[1:]), kind)}
    runner.run(None, batch)
    times: list[float] = []
    cpu, began = time.process_time(), time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        runner.run(None, batch)
        times.append(time.perf_counter() - now)
    elapsed = time.perf_counter() - began
    return rows * len(times) / elapsed, sorted(times)[len(times) // 2], (time.process_time() - cpu) / rows / len(times)


def main() -> None:
    path, threads, seconds, largest = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    ways = [(spinning, session(path, threads, spinning)) for spinning in (("0", "1") if threads > 1 else ("0",))]
    sizes = [1 << power for power in range(largest.bit_length())]
    share = seconds / 2 / len(sizes) / len(ways)
    found = [(rate(runner, rows, share), rows, spinning, runner) for spinning, runner in ways for rows in sizes]
    _, best, spinning, runner = max(found, key=lambda each: each[0][0])
    rows_per_s, _, cpu_s = rate(runner, best, seconds / 2)
    seconds_by_rows = {rows: round(min(each[0][1] for each in found if each[1] == rows), 6) for rows in sizes}
    figures = {"rate": rows_per_s, "cpu_us": cpu_s * 1e6, "best_batch": best, "spinning": spinning == "1"}
    print(json.dumps({**figures, "batch_s": seconds_by_rows}))


if __name__ == "__main__":
    main()
