"""What all requests of one public HTTP/2 connection share."""

from typing import ClassVar, Final, Protocol

from oriel_gateway.core import Gateway
from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

__all__ = ["LIMITS", "Begun", "PublicConnection"]

LIMITS: Final = H2Limits(max_header_list_bytes=32 * 1024)


class Begun(Protocol):
    """A gRPC call whose metadata is here."""

    def watch(self) -> None:
        """Bound the wait for its first message, if it has not come yet."""


class PublicConnection(H2ServerConnection):
    """A connection of the gateway's clients. begun: calls whose metadata came with the bytes that are being read.

    web: of gRPC-Web; see `ingress.grpc_web`.
    """

    web: ClassVar[bool] = False

    __slots__ = ("begun", "gateway")

    def __init__(self, server: HttpServer, gateway: Gateway) -> None:
        super().__init__(server, LIMITS)
        self.gateway = gateway
        self.begun: list[Begun] = []
        gateway.fronts.add(server)

    def authenticated(self, call: Begun) -> None:
        """The sender of the metadata that was just read is known."""
        self.begun.append(call)
        if (decoder := self.decoder).fresh:
            self.server.fields.keep(decoder.fresh)

    def unread_bytes(self, stream: Stream) -> int:
        """Return how many bytes of an answer wait for the client."""
        return sum(map(len, stream.pending or ()))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.begun:
            for call in self.begun:
                call.watch()
            self.begun.clear()
