"""Cost of our own code per request of a service with one model call, without sockets: CPU-us per request.

    python benchmarks/cost.py logic [--connections 16] [--seconds 3] [--rounds 7] [--profile]

The logic server's own connection class, dispatch, pipeline and inference client; only the sockets are missing: heads
and bodies are handed to the connection, and a model server's answer, recorded once, to the client. What is missing
against a real server is the kernel's share and uvloop's. Use it to compare two states of the code;
`logic_server.py` compares frameworks.
"""

import argparse
import asyncio
import gc
import json
import time
from itertools import repeat

import numpy as np
import uvloop
from harness.cost import Transport, options, rounds, turn

from logic_bench.contenders import FILES, picture
from oriel_logic.app import Unit
from oriel_logic.client.upstreams import Upstreams
from oriel_logic.command import at_start
from oriel_logic.server.connection import BodyBudget, ServiceConnection
from oriel_logic.settings import Settings
from oriel_logic.workers.launch import ForkServer
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.observe.trace import NullSink
from oriel_wire.v2.http import encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, tensor

METADATA = {
    "name": "digits",
    "versions": ["1"],
    "platform": "onnxruntime_onnx",
    "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 64]}],
    "outputs": [
        {"name": "label", "datatype": "INT64", "shape": [-1, 1]},
        {"name": "probabilities", "datatype": "FP32", "shape": [-1, 10]},
    ],
}


class ModelServer(Transport):
    """The transport of the inference client: what is written to it is answered."""

    protocol: UpstreamConnection

    def write(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.protocol.data_received, model_answer(data))


def model_answer(data: bytes) -> bytes:
    """Return an inference server's answer to a request's bytes."""
    if data.startswith(b"GET"):
        body = json.dumps(METADATA).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    return INFERRED


def inferred() -> bytes:
    outputs = [tensor("label", np.array([[7]])), tensor("probabilities", np.ones((1, 10), np.float32))]
    wanted = [RequestedOutput(each.name, True) for each in outputs]
    request = InferRequest(model_name="digits", model_version="", inputs=[], outputs=wanted)
    response = InferResponse(model_name="digits", model_version="1", outputs=outputs)
    parts, head = encode_response(response, request)
    body = b"".join(bytes(part) for part in parts)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
        b"server-timing: queue;dur=0.012, compute;dur=0.105\r\nx-oriel-cost-us: 105\r\ncontent-length: %d\r\n\r\n"
        % (head, len(body))
    ) + body


INFERRED = inferred()


def request() -> bytes:
    body = json.dumps({"image": picture()}).encode()
    head = (
        "POST /v1/services/label HTTP/1.1\r\nHost: 127.0.0.1:8090\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def keep_connections(unit: Unit, count: int) -> None:
    """Fill the inference client's pool with connections that answer by themselves."""
    assert isinstance(unit._upstreams, Upstreams)
    (target,) = unit._upstreams.servers._endpoints._endpoints
    endpoint = target.client.endpoint
    for _ in range(count):
        transport = ModelServer()
        transport.protocol = connection = UpstreamConnection(endpoint)
        connection.connection_made(transport)
        connection.idle_since = time.monotonic() + 3600.0
        endpoint.idle.append(connection)


async def measure(args: argparse.Namespace) -> None:
    settings = Settings(
        services=(FILES / "services",), inference=(("127.0.0.1", 1),), http_port=0, admin_port=0, watch=False
    )
    listing, files = at_start(settings)
    server = ForkServer.launch(files, max_frame_bytes=settings.max_frame_bytes)
    unit = Unit(settings, server, listing, NullSink())
    await unit.start()
    keep_connections(unit, args.connections)
    front = HttpServer(HttpLimits())
    budget, peers = BodyBudget(64 << 20), TrustedPeers(settings.trusted_peers)
    connections = []
    for _ in range(args.connections):
        connection = ServiceConnection(front, unit.envelope, peers, budget, local=False)
        connection.connection_made(Transport())
        connections.append(connection)
    requests = repeat(request())

    await turn(connections, requests, 1.0)
    gc.collect()
    gc.freeze()
    await rounds(connections, requests, args)
    await unit.close()


def main() -> None:
    uvloop.run(measure(options(__doc__, connections=16, rounds=7).parse_args()))
