"""Cost of our own code per tiny ModelInfer call, without sockets: CPU-microseconds per call.

    python benchmarks/cost.py inference-grpc [--connections 4] [--streams 16] [--calls 40000] [--rounds 5] [--profile]

As `cost.py inference`, over gRPC: in each turn every connection reads `--streams` calls, each with numbers, an id and a
trace context of its own, whose bytes are made before the clock runs.
"""

import argparse
import asyncio
import cProfile
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from gateway_bench.grpc_cost import WIDE, Written, calls, options
from harness.cost import per_call

from inference_bench.cost import write_tiny
from oriel_inference.app import calm_collector, open_unit
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.grpc import GrpcFrontend
from oriel_inference.servers.grpc_call import GrpcConnection, GrpcPort
from oriel_inference.servers.grpc_plans import CallPlans
from oriel_inference.settings import Settings
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.frames import INITIAL_WINDOW_SIZE, MAX_WINDOW, PREFACE, settings
from oriel_wire.h2.grpc import prefix
from oriel_wire.h2.limits import H2Limits
from oriel_wire.v2.proto import v2_pb2


def message(chance: random.Random) -> bytes:
    """A framed ModelInfer request with numbers of its own."""
    request = v2_pb2.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    request.raw_input_contents.append(np.array([chance.random() for _ in range(16)], np.float32).tobytes())
    data = request.SerializeToString()
    return prefix(len(data)) + data


async def measure(args: argparse.Namespace, profile: cProfile.Profile | None) -> list[float]:
    """CPU-microseconds per call, of each round."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tiny(root)
        chosen = Settings(repositories=(root,), http_port=None, grpc_port=None, metrics_port=None, cores=1)
        async with open_unit(chosen) as unit:
            calm_collector()
            surface = unit.surface
            plans = {each: CallPlans(trusted=each, default_timeout_s=60.0) for each in (True, False)}
            encodings = Encodings(1 << 20)
            methods = GrpcFrontend(surface).methods()
            port = GrpcPort(methods=methods, plans=plans, encodings=encodings, max_message_bytes=1 << 20)
            server = HttpServer(HttpLimits())
            connections = []
            for _ in range(args.connections):
                connection = GrpcConnection(server, port, H2Limits(requests_per_turn=1 << 20), trusted=True)
                start = PREFACE + settings({INITIAL_WINDOW_SIZE: MAX_WINDOW}) + WIDE
                connection.take_over(Written(), "127.0.0.1", "", start)  # type: ignore[arg-type]
                connections.append(connection)
            chance, first_id, found = random.Random(1), 1, []
            count = args.connections * args.streams
            for number in range(args.rounds + 1):  # the first one warms up
                used = 0.0
                turns = -(-args.calls // args.rounds // count) if number else 16
                for _ in range(turns):
                    reads = [calls(first_id, args.streams, message(chance), chance) for _ in connections]
                    began = time.process_time()
                    if profile is not None and number:
                        profile.enable()
                    for connection, read in zip(connections, reads, strict=True):
                        connection.data_received(read)
                    while port.calls:
                        await asyncio.sleep(0)
                    if profile is not None:
                        profile.disable()
                    used += time.process_time() - began
                    first_id += 2 * args.streams
                if number:
                    found.append(used / (turns * count) * 1e6)
            for connection in connections:
                connection.connection_lost(None)
            encodings.close()
        return found


def main() -> None:
    per_call(options(__doc__), measure)
