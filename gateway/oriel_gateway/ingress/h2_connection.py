"""What all requests of one public HTTP/2 connection share."""

from typing import Final, Protocol

from oriel_gateway.core import Gateway
from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.limits import H2Limits

__all__ = ["LIMITS", "PublicConnection"]

LIMITS: Final = H2Limits(max_header_list_bytes=32 * 1024)


class Begun(Protocol):
    """A gRPC call whose metadata is here."""

    def watch(self) -> None:
        """Bound the wait for its first message, if it has not come yet."""


class PublicConnection(H2ServerConnection):
    """A connection of the gateway's clients. begun: calls whose metadata came with the bytes that are being read."""

    __slots__ = ("begun", "gateway")

    def __init__(self, server: HttpServer, gateway: Gateway) -> None:
        super().__init__(server, LIMITS)
        self.gateway = gateway
        self.begun: list[Begun] = []
        gateway.fronts.add(server)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.begun:
            for call in self.begun:
                call.watch()
            self.begun.clear()
