"""Cost of our own code per tiny v2 HTTP request, without sockets: CPU-microseconds per request, by stage if asked.

    python benchmarks/cost.py inference [--connections 64] [--seconds 3] [--rounds 5] [--profile] [--binary]
                                         [--same] [--access-log] [--sample-every 100]

The inference unit's own connection class, frontend and batcher with ONNX Runtime behind them; each round hands every
connection one whole request and lets the loop turn until all are answered. What is missing against a real server is
the kernel's share and uvloop's. Use it to compare two states of the code; `inference_server.py` compares servers.
"""

import argparse
import dataclasses
import json
import random
import socket
import tempfile
from itertools import cycle
from pathlib import Path

import numpy as np
import uvloop
from harness.cost import Transport, options, rounds, turn

from inference_bench.models import MODELS, write
from oriel_inference.app import open_unit
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.http import HttpFrontend
from oriel_inference.servers.statuses import head_refusal
from oriel_inference.settings import Settings
from oriel_wire.engine.buffered import BufferedConnection
from oriel_wire.engine.buffered import serve as serve_http
from oriel_wire.engine.limits import HttpLimits

CONFIG = """
backend: "onnxruntime" max_batch_size: 64
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { }
"""


def request(binary: bool, chance: random.Random | None) -> bytes:
    """A request; with `chance` its numbers, id and trace context are its own."""
    data = [n / 16 for n in range(16)] if chance is None else [chance.random() for _ in range(16)]
    one = {"name": "x", "shape": [1, 16], "datatype": "FP32"}
    extra = ""
    tail = b""
    if binary:
        tail = np.array(data, np.float32).tobytes()
        one["parameters"] = {"binary_data_size": len(tail)}  # type: ignore[assignment]
        document = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
        extra = f"Inference-Header-Content-Length: {len(document)}\r\n"
    else:
        document = json.dumps({"inputs": [{**one, "data": data}]}).encode()
    if chance is not None:
        extra += f"x-request-id: {chance.getrandbits(144):036x}\r\n"
        extra += f"traceparent: 00-{chance.getrandbits(128):032x}-{chance.getrandbits(64):016x}-00\r\n"
    body = document + tail
    head = (
        "POST /v2/models/tiny/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
        f"{extra}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def write_tiny(root: Path, sample_every: int | None = None) -> None:
    """A repository with the one model. sample_every: rows per sampled row; None for the default."""
    (root / "tiny" / "1").mkdir(parents=True)
    write(MODELS["tiny"], root / "tiny" / "1" / "model.onnx")
    sampling = f'parameters {{ key: "oriel.quality.every" value {{ string_value: "{sample_every}" }} }}\n'
    (root / "tiny" / "config.pbtxt").write_text(CONFIG + ("" if sample_every is None else sampling))


async def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tiny(root, args.sample_every)
        settings = Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, cores=1)
        settings = dataclasses.replace(settings, access_log=str(root / "access.json") if args.access_log else "")
        async with open_unit(settings) as unit:
            frontend = HttpFrontend(unit.surface, Encodings(1 << 20), unit.large_json)
            sock = socket.socket()
            sock.bind(("127.0.0.1", 0))
            server = await serve_http(frontend.handle, sock, limits=HttpLimits())
            connections = []
            for _ in range(args.connections):
                connection = BufferedConnection(server, frontend.handle, frontend.refuse, head_refusal, frontend.views)
                connection.connection_made(Transport())  # type: ignore[arg-type]
                connections.append(connection)
            chance = None if args.same else random.Random(1)
            requests = cycle([request(args.binary, chance) for _ in range(1 if args.same else 8192)])

            await turn(connections, requests, 1.0)
            await rounds(connections, requests, args)
            if unit.surface.meter.log is not None:
                print(f"{unit.surface.meter.log.dropped} lines of the access log dropped")
            for connection in connections:
                connection.connection_lost(None)
            await server.drain(0.1)


def main() -> None:
    parser = options(__doc__, connections=64, rounds=5)
    parser.add_argument("--access-log", action="store_true", help="write the access log as well")
    parser.add_argument("--binary", action="store_true", help="tensors in the binary extension instead of JSON")
    parser.add_argument("--sample-every", type=int, metavar="N", help="sample one row in N; 0 for none")
    parser.add_argument("--same", action="store_true", help="requests that repeat byte by byte")
    uvloop.run(measure(parser.parse_args()))
