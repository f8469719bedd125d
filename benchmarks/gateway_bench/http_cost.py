"""Cost of an HTTP/1.1 request of 1 KB in the gateway's own code, without sockets: CPU-microseconds per request.

    python benchmarks/cost.py gateway [--heads clients] [--connections 32] [--requests 60000] [--rounds 5] [--profile]

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
ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: nginx\r\ndate: Mon, 23 Nov 2026 10:00:00 GMT\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: keep-alive\r\n\r\n%b" % (SIZE, bytes(SIZE))
)


def request(client: str, chance: random.Random) -> bytes:
    """A request of a client of `traffic.HEADS`, with what differs in each."""

    def digits(width: int) -> str:
        return f"{chance.getrandbits(4 * width):0{width}x}"

    state = f"tracestate: vendor={digits(chance.randint(8, 32))}\r\n" if chance.random() < 0.25 else ""
    known = {"host": "127.0.0.1:8080", "size": str(SIZE), "id": digits(36)[: chance.randint(8, 36)], "state": state}
    known |= {"trace": digits(32), "span": digits(16), "cookie": digits(26)}
    known["address"] = f"10.{chance.randrange(256)}.{chance.randrange(256)}.7"
    head = re.sub("@([a-z]+)", lambda found: known[found[1]], client).replace(SENT, KEY)
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + bytes(SIZE)


class BareGateway:
    """A gateway with connections on both sides, which drop what is written to them."""

    def __init__(self, connections: int, sink: SpanSink) -> None:
        snapshot = compile_documents({"all.toml": DOCUMENTS.encode()})
        self.gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=sink)
        server: HttpServer = HttpServer(HttpLimits())
        endpoint = self.gateway.pools["p"].endpoints[0]
        self._clients = [ClientConnection(server, self.gateway) for _ in range(connections)]
        self._upstreams = [UpstreamConnection(endpoint) for _ in self._clients]
        for connection in (*self._clients, *self._upstreams):
            connection.connection_made(Written())  # type: ignore[arg-type]
        for upstream in self._upstreams:
            upstream.idle_since = time.monotonic() + 3600.0
        endpoint.idle.extend(self._upstreams)
        self._sent = 0

    async def turn(self, reads: Sequence[bytes]) -> None:
        """Let each client send one of these requests, and each upstream answer."""
        for client, read in zip(self._clients, reads, strict=True):
            client.data_received(read)
        for upstream in self._upstreams:
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
    bare = BareGateway(args.connections, NullSink())
    chance, found = random.Random(1), []
    kinds = HEADS[args.heads]
    same = request(REQUESTS, chance)
    for number in range(args.rounds + 1):  # the first one warms up
        used = 0.0
        turns = -(-args.requests // args.rounds // args.connections) if number else 64
        for _ in range(turns):
            reads = [request(chance.choice(kinds), chance) if kinds else same for _ in range(args.connections)]
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
    parser.add_argument("--requests", type=int, default=60_000, help="of all rounds together")
    per_call(parser, measure, "request")
