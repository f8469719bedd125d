"""State that all requests of one public HTTP/2 connection share."""

from collections.abc import Callable
from typing import ClassVar, Final

from oriel_gateway.core import Gateway
from oriel_policies.documents import Tenant
from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.grpc import RpcHead, RpcShape
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import ENDED, Stream

__all__ = ["LIMITS", "PublicConnection"]

URGENT_S: Final = 1.0  # for this long after an urgent request, a connection is read together with the urgent ones
LIMITS: Final = H2Limits(max_header_list_bytes=32 * 1024)


class PublicConnection(H2ServerConnection):
    """A connection of the gateway's clients. begun: functions of the calls whose metadata came with the bytes that are
    being read, which bound the wait for their first message.

    watches: streams of `Health/Watch`. web: the part for gRPC-Web; see `ingress.grpc_web`.
    """

    web: ClassVar[bool] = False

    __slots__ = ("_gated", "_rank", "_urgent_s", "begun", "gateway", "watches")

    def __init__(self, server: HttpServer, gateway: Gateway) -> None:
        super().__init__(server, LIMITS)
        self.gateway = gateway
        self.begun: list[Callable[[], None]] = []
        self.watches = 0
        self._rank = 0  # rank of its latest request while the loop was behind
        self._urgent_s = 0.0  # when its latest request of rank 0 came
        self._gated = False  # True while it is not read because its turn has not come
        gateway.fronts.add(server)

    def authenticated(self, watch: Callable[[], None], rpc: RpcHead | None) -> None:
        """Remember the metadata that was just read, whose sender is known. watch: see `begun`. rpc: its head."""
        self.begun.append(watch)
        block = None if self._judged is None else self.trust_fields()
        if block is not None and block.decision is None and rpc is not None:
            shape = RpcShape(block, rpc)
            if shape.usable:
                block.decision = shape

    def unwanted(self, size: int) -> None:
        """Count bytes of an unknown sender; see `H2ServerConnection`.

        Behind a proxy the connection may carry requests of others as well: once the client has been asked to leave,
        nothing counts while some are not answered yet, so that they are not cut with it.
        """
        if not self.draining or all(stream.sending == ENDED for stream in self.streams.values()):
            super().unwanted(size)

    def unread_bytes(self, stream: Stream) -> int:
        """Return how many bytes of an answer wait for the client."""
        return sum(map(len, stream.pending or ()))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.begun:
            for watch in self.begun:
                watch()
            self.begun.clear()
        if (gate := self.server.gate) is not None and self._rank and not self._gated:
            if self.arrived_s - self._urgent_s > URGENT_S and not self.transport.is_closing():
                self._gated = True
                self.transport.pause_reading()
                gate(self._rank, self._take_turn)

    def _take_turn(self) -> None:
        self._gated = False
        self._read_on()

    def _read_on(self) -> None:
        if not self._gated:
            super()._read_on()

    def refuses(self, tenant: Tenant) -> bool:
        """Return whether the loop has no time for this request; then `refuse_later`."""
        if self.server.gate is None:
            return False
        rank = self._rank = self.gateway.rank(tenant)
        if not rank:
            self._urgent_s = self.arrived_s
            return False
        return self.gateway.overload.refuses_stream(rank)

    def refuse_later(self, stream: Stream, refuse: Callable[[], None]) -> None:
        """Call `refuse` in a later turn that has time for it. Until then the client can use one stream less."""

        def go_on() -> None:
            if stream.sending != ENDED and not self.closed:
                refuse()

        self.gateway.overload.join(self._rank, go_on)
