"""Cost of an HTTP/1.1 request of 1 KB in the gateway's own code, without sockets: CPU-microseconds per request.

    python benchmarks/cost.py gateway [--heads clients] [--connections 32] [--requests 60000] [--rounds 5] [--profile]
    python benchmarks/cost.py gateway --tenants 100000    every call with another key, in no order
    python benchmarks/cost.py gateway --endpoints 1000    a pool with as many endpoints

The real connections of both sides on the real loop, over transports that drop what is written. In each turn every
client connection reads one request, with a head as `gateway_hop` sends it, and each connection to the upstream reads an
answer. The bytes are made before the clock runs. What is missing against a real gateway is the kernel's share and
uvloop's.
"""

import argparse
import asyncio
import cProfile
import gc
import random
import re
import time
from collections.abc import Sequence
from hashlib import sha256

from harness.cost import per_call

from gateway_bench.grpc_cost import DOCUMENTS, KEY, Written
from gateway_bench.traffic import HEADS, PATH, REQUESTS
from gateway_bench.traffic import KEY as SENT
from oriel_gateway.app import COLLECTOR
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.observe.trace import NullSink, SpanSink

SIZE = 1024
SPARE = 4  # connections to each of many endpoints
ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: nginx\r\ndate: Mon, 23 Nov 2026 10:00:00 GMT\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: keep-alive\r\n\r\n%b" % (SIZE, bytes(SIZE))
)


def request(client: str, chance: random.Random, key: str = KEY) -> bytes:
    """A request of a client of `traffic.HEADS`, with what differs in each."""

    def digits(width: int) -> str:
        return f"{chance.getrandbits(4 * width):0{width}x}"

    state = f"tracestate: vendor={digits(chance.randint(8, 32))}\r\n" if chance.random() < 0.25 else ""
    known = {"host": "127.0.0.1:8080", "size": str(SIZE), "id": digits(36)[: chance.randint(8, 36)], "state": state}
    known |= {"trace": digits(32), "span": digits(16), "cookie": digits(26)}
    known["address"] = f"10.{chance.randrange(256)}.{chance.randrange(256)}.7"
    head = re.sub("@([a-z]+)", lambda found: known[found[1]], client).replace(SENT, key)
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + bytes(SIZE)


def keyed(number: int) -> str:
    """The key of a tenant: number 0 has the one of the documents."""
    return f"{KEY}-{number}" if number else KEY


def documents(tenants: int, endpoints: int) -> dict[str, bytes]:
    """Documents with as many tenants and endpoints."""
    addresses = ", ".join(f'"127.0.{number >> 8}.{number & 255}:1"' for number in range(1, endpoints + 1))
    digests = ((number, sha256(keyed(number).encode()).hexdigest()) for number in range(1, tenants))
    lines = (
        f'{{"name": "t{number}", "tier": "gold", "models": ["*"], "keys": [{{"sha256": "{digest}"}}]}}\n'
        for number, digest in digests
    )
    whole = DOCUMENTS.replace('endpoints = ["127.0.0.1:1"]', f"endpoints = [{addresses}]")
    return {"all.toml": whole.encode(), "tenants.ndjson": "".join(lines).encode()}


class Asked(Written):
    """The transport of a connection to an upstream, which adds itself to `asked` when a request is written."""

    def __init__(self, upstream: UpstreamConnection, asked: list[UpstreamConnection]) -> None:
        super().__init__()
        self._upstream, self._asked = upstream, asked

    def write(self, data: bytes) -> None:
        self._asked.append(self._upstream)


class BareGateway:
    """A gateway with connections on both sides, which drop what is written to them."""

    def __init__(self, connections: int, sink: SpanSink, *, tenants: int = 1, endpoints: int = 1) -> None:
        snapshot = compile_documents(documents(tenants, endpoints))
        self.gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=sink)
        server: HttpServer = HttpServer(HttpLimits())
        self._clients = [ClientConnection(server, self.gateway) for _ in range(connections)]
        for client in self._clients:
            client.connection_made(Written())  # type: ignore[arg-type]
        self._asked: list[UpstreamConnection] = []
        for endpoint in self.gateway.pools["p"].endpoints:
            for _ in range(connections if endpoints == 1 else SPARE):
                upstream = UpstreamConnection(endpoint)
                upstream.connection_made(Asked(upstream, self._asked))  # type: ignore[arg-type]
                upstream.idle_since = time.monotonic() + 3600.0
                endpoint.idle.append(upstream)
        self._sent = 0

    async def turn(self, reads: Sequence[bytes]) -> None:
        """Let each client send one of these requests, and each upstream answer."""
        for client, read in zip(self._clients, reads, strict=True):
            client.data_received(read)
        asked, self._asked[:] = [*self._asked], ()
        for upstream in asked:
            upstream.data_received(ANSWER)
        await asyncio.sleep(0)
        self._sent += len(reads)

    def check(self) -> None:
        """End the bench if a request was not answered."""
        if self.gateway.records.stats.finished_count < self._sent:
            raise SystemExit("some requests were not answered")


async def measure(args: argparse.Namespace, profile: cProfile.Profile | None) -> list[float]:
    """CPU-microseconds per request, of each round."""
    gc.set_threshold(*COLLECTOR)  # as the gateway
    bare = BareGateway(args.connections, NullSink(), tenants=args.tenants, endpoints=args.endpoints)
    gc.collect()
    gc.freeze()
    chance, found = random.Random(1), []
    kinds = HEADS[args.heads]
    same = request(REQUESTS, chance)
    for number in range(args.rounds + 1):  # the first one warms up: each tenant has called before
        used, width = 0.0, args.connections
        turns = -(-args.requests // args.rounds // width) if number else max(64, -(-args.tenants // width))
        for turn in range(turns):
            some = [
                chance.randrange(args.tenants) if number else (turn * width + each) % args.tenants
                for each in range(width)
            ]
            keys = [keyed(each) for each in some]
            reads = [request(chance.choice(kinds), chance, key) if kinds else same for key in keys]
            began = time.process_time()
            if profile is not None and number:
                profile.enable()
            await bare.turn(reads)
            if profile is not None:
                profile.disable()
            used += time.process_time() - began
            bare.check()
        if number:
            found.append(used / (turns * args.connections) * 1e6)
    await bare.gateway.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", choices=HEADS, default="varying")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--endpoints", type=int, default=1)
    parser.add_argument("--requests", type=int, default=60_000, help="of all rounds together")
    per_call(parser, measure, "request")
