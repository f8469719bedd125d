"""Delay of others behind large bodies: `python benchmarks/neighbours.py large-bodies [--mib 60] [--rounds 3]`.

A server of its own process, a canary in another one that asks for a small inference over and over on one connection,
and one large request at a time from here. Printed per kind of request: its status, how long it took, and the
canary's slowest answer meanwhile. "nothing" is the canary's slowest answer while nothing else is asked: what the
machine itself costs. Run it on an otherwise idle machine.
"""

import argparse
import base64
import gzip
import http.client
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness.processes import inference
from tests.inference import models

SMALL = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
OUTPUTS = b', "outputs":[{"name":"sum","parameters":{"binary_data":true}}]'
GZIP = {"content-encoding": "gzip"}
Request = tuple[str, dict[str, str], bytes]


def canary(port: int, pipe: Connection) -> None:
    """Ask all the time; for every word on the pipe send the slowest answer (ms) since the last one."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    worst = 0.0
    while True:
        began = time.perf_counter()
        client.request("POST", "/v2/models/double/infer", SMALL)
        client.getresponse().read()
        worst = max(worst, (time.perf_counter() - began) * 1e3)
        if pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send(worst)
            worst = 0.0
        time.sleep(0.001)


def requests(mib: int) -> dict[str, Callable[[], Request]]:
    size = mib << 20
    head = b'{"inputs":[{"name":"%b","shape":[1,%d],"datatype":"FP32","data":['
    numbers = size // 9

    def tensors(values: bytes, count: int) -> bytes:
        one = b",".join([values] * count)
        both = [head[11:] % (name, count) + one[: (count * (len(values) + 1) - 1)] + b"]}" for name in (b"a", b"b")]
        return b'{"inputs":[' + b",".join(both) + b"]" + OUTPUTS + b"}"

    def binary(count: int) -> tuple[dict[str, str], bytes]:
        entries = [
            {"name": n, "shape": [1, count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
            for n in "ab"
        ]
        text = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
        data = np.random.default_rng(0).random(2 * count, np.float32).tobytes()
        return {"inference-header-content-length": str(len(text))}, text + data

    def packed() -> Request:
        headers, body = binary(size // 8)
        return "/v2/models/pair/infer", {**headers, "content-encoding": "gzip"}, gzip.compress(body, 1)

    def load() -> Request:
        model = models.double()
        model.doc_string = "x" * (size * 3 // 4)
        file = base64.b64encode(model.SerializeToString()).decode()
        parameters = {"config": '{"backend": "onnxruntime"}', "file:1/model.onnx": file}
        return "/v2/repository/models/other/load", {}, json.dumps({"parameters": parameters}).encode()

    def texts() -> Request:
        count = 1 << 18
        entry = {
            "name": "text",
            "shape": [count, 1],
            "datatype": "BYTES",
            "parameters": {"binary_data_size": 5 * count},
        }
        text = json.dumps({"inputs": [entry]}).encode()
        headers = {"inference-header-content-length": str(len(text))}
        return "/v2/models/echo/infer", headers, text + b"\1\0\0\0a" * count

    return {
        "nothing": lambda: ("/v2/models/double/infer", {}, SMALL),
        "spaces, no JSON at all": lambda: ("/v2/models/double/infer", {}, b" " * size),
        "JSON numbers": lambda: ("/v2/models/pair/infer", {}, tensors(b"0.123456", numbers // 2)),
        "JSON zeros": lambda: ("/v2/models/pair/infer", {}, tensors(b"0", size // 4)),
        "JSON numbers, answer in JSON": lambda: (
            "/v2/models/pair/infer",
            {},
            tensors(b"0.123456", numbers // 2).replace(OUTPUTS, b""),
        ),
        "binary": lambda: ("/v2/models/pair/infer", *binary(size // 8)),
        "gzip of binary": packed,
        "gzip of spaces": lambda: ("/v2/models/double/infer", GZIP, gzip.compress(b" " * size, 1)),
        "load with a file": load,
        "JSON as much as the loop reads": lambda: ("/v2/models/pair/infer", {}, tensors(b"0.25", 65_000)),
        "lists as many as it reads": lambda: ("/v2/models/double/infer", {}, b'{"inputs":[1' + b",[]" * 65_000 + b"]}"),
        "quotes, 1 MiB": lambda: ("/v2/models/double/infer", {}, b'{"inputs":[' + b'[],""' * 60_000 + b'"' * 600_000),
        "texts of BYTES, 262,144": texts,
        "generate, 4 MiB of lists": lambda: ("/v2/models/double/generate", {}, b'{"x":[' + b"[]," * 1_390_000 + b"1]}"),
        "generate, 130,000 numbers": lambda: ("/v2/models/double/generate", {}, b'{"x":[' + b"1," * 130_000 + b"1]}"),
    }  # fmt: skip


def main() -> None:
    """Print one line per kind of request."""
    os.nice(5)  # the client's own work shall not be what the canary waits for
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models.put(root, "double", models.double(), models.DOUBLE)
        models.put(root, "pair", models.two_inputs(), None)
        models.put(root, "echo", models.echo(), None)
        flags = ("--allow-grpc=false", "--allow-metrics=false", "--model-control-mode=explicit", "--load-model=*")
        with inference(folder, *flags) as (_, port, _):
            measure(port, requests(arguments.mib), arguments.rounds, arguments.only)


def measure(port: int, kinds: dict[str, Callable[[], Request]], rounds: int, only: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=canary, args=(port, theirs), daemon=True)
    process.start()
    print(f"{'request':32}{'MiB':>6}  {'status':6}{'took s':>8}{'canary ms, slowest of each round':>36}")
    for name, make in kinds.items():
        if only and only not in name:
            continue
        path, headers, body = make()
        worst, status, took_s = [], 0, 0.0
        for _ in range(rounds):
            time.sleep(0.5)
            ours.send("forget")
            ours.recv()
            began = time.perf_counter()
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            client.request("POST", path, body, headers)
            answer = client.getresponse()
            data = answer.read()
            status, took_s = answer.status, time.perf_counter() - began
            client.close()
            time.sleep(max(0.5, 1.0 - took_s))
            ours.send("tell")
            worst.append(ours.recv())
        shown = " ".join(f"{each:8.1f}" for each in worst)
        said = "" if status == 200 else data[:90]
        print(f"{name:32}{len(body) >> 20:6}  {status:<6}{took_s:8.2f}   {shown}  {said}", flush=True)
    ours.send("end")
    process.join()
