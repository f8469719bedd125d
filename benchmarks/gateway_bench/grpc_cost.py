"""Cost of a unary gRPC call of 1 KB in the gateway's own code, without sockets: CPU-microseconds per call.

    python benchmarks/cost.py grpc [--connections 4] [--streams 16] [--calls 40000] [--rounds 5] [--profile]

The real connections of both sides on the real loop, over transports that drop what is written. In each turn every
client connection reads `--streams` calls with ids of their own, as `peers/gateway/grpc_load.py` sends them, and the
connection to the upstream reads the answers to all of them. Their bytes are made before the clock runs, and the bytes
that the gateway writes are not read: only that every call was answered is checked. What is missing against a real
gateway is the kernel's share and uvloop's.
"""

import argparse
import asyncio
import cProfile
import gc
import random
import time
from hashlib import sha256
from typing import Any

from harness.cost import Transport, per_call
from peers.gateway.grpc_load import METHOD, ids, message

from oriel_gateway.app import COLLECTOR
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.h2 import Http2Connection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.h2_upstream import H2Upstream
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_WINDOW,
    PREFACE,
    SETTINGS_ACK,
    frame,
    settings,
    window_update,
)
from oriel_wire.h2.grpc import HEAD, prefix
from oriel_wire.h2.hpack import literal
from oriel_wire.observe.trace import NullSink

KEY = "oriel-bench"
DOCUMENTS = f"""
[tiers.gold]
band = 0
target_ms = 60000
give_up_ms = 600000
[tenants.one]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{sha256(KEY.encode()).hexdigest()}" }}]
[pools.p]
endpoints = ["127.0.0.1:1"]
grpc_endpoints = ["127.0.0.1:2"]
probe = ""
max_inflight = 4096
learn_concurrency = false
[[routes]]
model = "*"
pool = "p"
"""
FIXED = b"".join(
    literal(name, value)
    for name, value in (
        (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
        (b":authority", b"127.0.0.1:8001"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"grpc-python/1.80.0 grpc-c/53.0.0 (linux; chttp2)"),
        (b"grpc-accept-encoding", b"identity, deflate, gzip"),
        (b"grpc-timeout", b"5S"),
        (b"authorization", b"Bearer " + KEY.encode()),
    )
)
WIDE = SETTINGS_ACK + window_update(0, MAX_WINDOW - 65535)
ANSWER = prefix(1024) + bytes(1024)
OK = literal(b"grpc-status", b"0")


class Written(Transport):
    """Drops what is written; the bytes are counted."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)


def calls(first_id: int, count: int, data: bytes, chance: random.Random) -> bytes:
    """The bytes of `count` calls."""
    return b"".join(
        frame(HEADERS, END_HEADERS, stream_id, METHOD + FIXED + ids(chance)) + frame(DATA, END_STREAM, stream_id, data)
        for stream_id in range(first_id, first_id + 2 * count, 2)
    )


def answers(first_id: int, count: int) -> bytes:
    """The bytes of the answers to `count` calls."""
    return b"".join(
        frame(HEADERS, END_HEADERS, stream_id, HEAD)
        + frame(DATA, 0, stream_id, ANSWER)
        + frame(HEADERS, END_HEADERS | END_STREAM, stream_id, OK)
        for stream_id in range(first_id, first_id + 2 * count, 2)
    )


async def measure(args: argparse.Namespace, profile: cProfile.Profile | None) -> list[float]:
    """CPU-microseconds per call, of each round."""
    gc.set_threshold(*COLLECTOR)  # as the gateway
    snapshot = compile_documents({"all.toml": DOCUMENTS.encode()})
    gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=NullSink())
    server: HttpServer = HttpServer(HttpLimits())
    endpoint: Any = gateway.pools["p"].grpc[0]
    count, streams = args.connections * args.streams, args.streams
    upstream = H2Upstream(endpoint)
    upstream.connection_made(Written())  # type: ignore[arg-type]
    wide = {INITIAL_WINDOW_SIZE: MAX_WINDOW}
    upstream.data_received(settings({**wide, MAX_CONCURRENT_STREAMS: 2 * count}) + WIDE)
    endpoint._connections.append(upstream)
    clients = []
    for _ in range(args.connections):
        client = Http2Connection(server, gateway)
        client.take_over(Written(), "127.0.0.1", "", PREFACE + settings(wide) + WIDE)  # type: ignore[arg-type]
        clients.append(client)
    data, chance, ended, first_id = message(1024), random.Random(1), 0, 1
    found = []
    for number in range(args.rounds + 1):  # the first one warms up
        used = 0.0
        turns = -(-args.calls // args.rounds // count) if number else 16
        for _ in range(turns):
            reads = [calls(first_id, streams, data, chance) for _ in clients]
            back = answers(upstream._next_id, count)
            began = time.process_time()
            if profile is not None and number:
                profile.enable()
            for client, read in zip(clients, reads, strict=True):
                client.data_received(read)
            await asyncio.sleep(0)
            upstream.data_received(back)
            await asyncio.sleep(0)
            if profile is not None:
                profile.disable()
            used += time.process_time() - began
            first_id += 2 * streams
            ended += count
            if any(client.streams for client in clients) or gateway.records.stats.finished_count < ended:
                raise SystemExit("some calls were not answered")
        if number:
            found.append(used / (turns * count) * 1e6)
    await gateway.close()
    return found


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options of such a command over gRPC."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16, help="calls at a time on each connection (16)")
    parser.add_argument("--calls", type=int, default=40_000, help="of all rounds together")
    return parser


def main() -> None:
    per_call(options(__doc__), measure)
