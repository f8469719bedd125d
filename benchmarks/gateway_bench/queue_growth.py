"""Cost of a request to the gateway when 10 or 10,000 others wait: CPU from its bytes to the bytes of its answer.

    python benchmarks/growth.py gateway-queue [--depths 10,1000,10000] [--requests 20000] [--repeats 5] [--json]

One process and no sockets: the real connection, parser, call, queue and upstream connection on the real loop, over
transports that keep nothing. As many connections as the depth says (more than the default allows) send a 1 KB request
each and wait; then one answer after another comes from upstream, the next waiting call is sent there, and the client
that was answered sends again. The deadlines are far away. CPU is `time.process_time`, garbage collection included; the
median of the repeats counts.

Cases: one tenant; a hundred tenants in three tiers; every call late already, so that all of them go behind.
"""

import asyncio
import gc
import time
from collections import deque
from hashlib import sha256
from typing import Any

from harness.cost import compare_depths

from oriel_gateway.app import COLLECTOR
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.observe.trace import NullSink

PERMITS = 8
CASES = {"one tenant": (1, 3_600_000), "100 tenants, 3 tiers": (100, 3_600_000), "all late": (1, 1)}
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\nok"


class Transport(asyncio.Transport):
    """Takes bytes and forgets them."""

    def __init__(self, sent: Any = None) -> None:
        super().__init__()
        self._sent = sent

    def write(self, data: Any) -> None:
        if self._sent is not None:
            self._sent()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"")

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    abort = close


def documents(tenants: int, target_ms: int, depth: int) -> bytes:
    lines = []
    for band in range(3):
        lines += [f"[tiers.t{band}]", f"band = {band}", f"target_ms = {target_ms}", "give_up_ms = 3600000"]
    for number in range(tenants):
        digest = sha256(f"key-{number}".encode()).hexdigest()
        lines += [f"[tenants.n{number}]", f'tier = "t{number % 3}"', 'models = ["*"]']
        lines += [f'keys = [{{ sha256 = "{digest}" }}]']
    lines += ["[pools.p]", 'endpoints = ["127.0.0.1:1"]', 'probe = ""', f"max_inflight = {PERMITS}"]
    lines += ["learn_concurrency = false"]
    lines += [f"max_queue = {2 * depth + 100}", '[[routes]]\nmodel = "*"\npool = "p"']
    return "\n".join(lines).encode()


async def measure(case: str, depth: int, requests: int) -> float:
    """CPU microseconds per request."""
    tenants, target_ms = CASES[case]
    snapshot = compile_documents({"all.toml": documents(tenants, target_ms, depth)})
    gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=NullSink())
    server: HttpServer = HttpServer(HttpLimits(max_connections=1 << 20))
    gate = gateway.pools["p"]
    (endpoint,) = gate.endpoints
    busy: deque[UpstreamConnection] = deque()
    for _ in range(PERMITS):
        connection = UpstreamConnection(endpoint)
        connection.connection_made(Transport(lambda connection=connection: busy.append(connection)))
        connection.idle_since = time.monotonic() + 3600.0
        endpoint.idle.append(connection)
    answered: deque[tuple[ClientConnection, bytes]] = deque()

    # One per tenant: what a socket hands over was copied a moment ago, it does not come from cold memory.
    line = "POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-"
    rest = b"\r\ncontent-type: application/json\r\ncontent-length: 1024\r\n\r\n" + bytes(1024)
    requests_of = [f"{line}{number}".encode() + rest for number in range(tenants)]
    for number in range(depth + PERMITS):
        request = requests_of[number % tenants]
        client = ClientConnection(server, gateway)
        client.connection_made(Transport())
        client.transport._sent = lambda client=client, request=request: answered.append((client, request))  # type: ignore[attr-defined]
        client.data_received(request)
    if case == "all late":
        await asyncio.sleep(0.05)

    def turns(count: int) -> None:
        for number in range(count):
            busy.popleft().data_received(ANSWER)
            while answered:
                client, request = answered.popleft()
                client.data_received(request)
            assert number or len(gate.admission.queue) == depth

    turns(min(requests, max(2000, depth)))
    gc.collect()
    await asyncio.sleep(0)
    started = time.process_time()
    done = 0
    while done < requests:
        turns(500)
        done += 500
        await asyncio.sleep(0)
    used = time.process_time() - started
    assert len(gate.admission.queue) == depth and gate.admission.inflight == PERMITS
    return used / done * 1e6


def main() -> None:
    gc.set_threshold(*COLLECTOR)  # as the gateway
    compare_depths(__doc__, CASES, measure)
