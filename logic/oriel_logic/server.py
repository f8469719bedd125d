"""The service port: wire's HTTP/1.1 engine in front of an `Envelope`."""

import socket

from oriel_logic.connection import BodyBudget, ServiceConnection
from oriel_logic.envelope import Envelope
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import TrustedPeers

__all__ = ["open_server"]

# Each service has a limit of its own, judged by `Dispatch` before the body is read; what nobody reads is not kept.
MAX_BODY_BYTES = 1 << 40
# A gateway that is still sending when it is refused gets to see why.
DRAIN_BYTES = 64 << 20


async def open_server(
    envelope: Envelope, sock: socket.socket, *, peers: TrustedPeers, max_held_bytes: int
) -> HttpServer:
    """Begin to serve on `sock` (bound, not listening). max_held_bytes: of request bodies, all together."""
    server = HttpServer(HttpLimits(max_body_bytes=MAX_BODY_BYTES, drain_bytes=DRAIN_BYTES))
    budget = BodyBudget(max_held_bytes)
    await server.open(lambda: ServiceConnection(server, envelope, peers, budget), sock)
    return server
