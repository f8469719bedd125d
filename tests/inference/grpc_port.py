"""A gRPC port beside those of a unit, and calls of it made of the `h2` library."""

from math import inf
from time import monotonic
from typing import Any

from oriel_inference.app import Unit
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.grpc import GrpcFrontend, serve_grpc
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2 import grpc

from ..waiting import until
from ..wire.engine_client import bound
from ..wire.h2_peers import Library, library_client

MAX_BYTES = 100_000


class Port:
    """A port beside those of a unit, with its server."""

    def __init__(self, unit: Unit, server: HttpServer, frontend: GrpcFrontend) -> None:
        self.unit = unit
        self.server = server
        self.frontend = frontend

    async def client(self, **options: Any) -> Library:
        """A client; both sides know the other's settings, so that a later sweep cuts nobody for these."""
        client = await library_client(self.server.port, **options)
        await until(lambda: client.settled)
        await until(lambda: all(getattr(each, "settings_acknowledged", False) for each in self.server.connections))
        return client

    def sweep(self, later_s: float) -> None:
        """What the server does in so many seconds."""
        for connection in list(self.server.connections):
            connection.sweep(monotonic() + later_s)


async def port_of(unit: Unit, **options: Any) -> Port:
    frontend, encodings = GrpcFrontend(unit.surface), Encodings(MAX_BYTES)
    server = await serve_grpc(
        frontend, bound(), unit.surface, encodings, max_message_bytes=MAX_BYTES, **{"max_age_s": inf, **options}
    )
    return Port(unit, server, frontend)


def begin(client: Library, path: bytes, *more: tuple[bytes, bytes], end: bool = False, **changed: bytes) -> int:
    """Open a call. changed: other values of usual fields, b"" for none."""
    usual = {":method": b"POST", ":scheme": b"http", ":path": path, ":authority": b"x", "te": b"trailers"}
    usual |= {"content-type": b"application/grpc", **{name.replace("_", "-"): value for name, value in changed.items()}}
    fields = [(name.encode(), value) for name, value in usual.items() if value]
    stream_id: int = client.codec.get_next_available_stream_id()
    client.codec.send_headers(stream_id, [*fields, *more], end_stream=end)
    client.flush()
    return stream_id


def send(client: Library, stream_id: int, data: bytes, *, end: bool = False) -> None:
    client.codec.send_data(stream_id, data, end_stream=end)
    client.flush()


async def ended(client: Library, stream_id: int) -> tuple[int, str, dict[bytes, bytes]]:
    """Status, text and trailing metadata of a call, once its answer has ended."""
    await until(lambda: stream_id in client.ended)
    trailers = client.trailers.get(stream_id) or client.fields[stream_id]
    status, text = grpc.status_of(client.fields[stream_id], trailers)
    return status, grpc.decode_text(text), dict(trailers)
