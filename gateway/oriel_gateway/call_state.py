"""What one HTTP call knows, holds and has been through; see `call` for what the states mean."""

from time import monotonic
from typing import TYPE_CHECKING, Final

from oriel_gateway.errors import Outcome
from oriel_gateway.tracing import Mark
from oriel_policies.documents import Tenant
from oriel_wire.h1 import RequestHead

if TYPE_CHECKING:
    from oriel_gateway.attempts import Tries
    from oriel_gateway.core import Gateway
    from oriel_gateway.endpoints import HttpEndpoint
    from oriel_gateway.events import Events
    from oriel_gateway.extras import Extras
    from oriel_gateway.hedge import Hedge
    from oriel_gateway.ingress_http import ClientConnection
    from oriel_gateway.limits import Grant
    from oriel_gateway.loan import Loan
    from oriel_gateway.pools import PoolGate
    from oriel_gateway.targets import Target
    from oriel_policies.queue import Ticket
    from oriel_wire.engine.upstream import UpstreamConnection

__all__ = ["ANSWERING", "COLLECT", "DONE", "JOINED", "LEAST_S", "QUEUED", "SENDING", "YOUNG", "CallState"]

COLLECT: Final = 0
QUEUED: Final = 1
JOINED: Final = 2
SENDING: Final = 3
ANSWERING: Final = 4
DONE: Final = 5
LEAST_S: Final = 0.001  # with less left a call is not sent: the next hop is told whole milliseconds
YOUNG: Final = -1  # the slot of a call that the clock of deadlines has not taken in yet


class CallState:
    """Times are monotonic seconds; 0.0 means not reached.

    client: None for a call that is made for others (`detached`).
    ahead: calls before it when it came to the queue, -1 if it did not queue. endpoint: asked last; tried: asked before
    in vain, the latest `TOLD` of them. stick: what chooses the endpoint, "" = whichever is least busy. slot: among the
    deadlines. lines: the part of its head that is the same whenever it is sent, None until it is.
    """

    protocol = "http"
    # Slots and not defaults of the class: what a call reads and never set would cost more than to set it.
    __slots__ = (
        "__weakref__",
        "_asked",
        "_close",
        "_collected",
        "_connection",
        "_data_s",
        "_endpoint",
        "_events",
        "_gate",
        "_gateway",
        "_hedge",
        "_held_bytes",
        "_loan",
        "_parked",
        "_pending",
        "_pending_bytes",
        "_rechunk",
        "_streaming",
        "_ticket",
        "_tries",
        "ahead",
        "bytes_out",
        "client",
        "cost_us",
        "deadline",
        "endpoint",
        "extras",
        "grant",
        "head",
        "lines",
        "mark",
        "method",
        "outcome",
        "permit_s",
        "queued_s",
        "received_s",
        "response_s",
        "sent_s",
        "slot",
        "state",
        "status",
        "stick",
        "target",
        "tenant",
        "tried",
    )

    def __init__(
        self,
        gateway: "Gateway",
        client: "ClientConnection | None",
        gate: "PoolGate",
        head: RequestHead,
        tenant: Tenant,
        target: "Target",
        mark: Mark,
        received_s: float,
        deadline: float,
        lines: bytes | None = None,
    ) -> None:
        self._gateway = gateway
        self._gate = gate
        gate.calls += 1
        self.client = client
        self.head = head
        self.method: str = head.line.method
        self.tenant = tenant
        self.target = target
        self.mark = mark
        self.received_s = received_s
        self.deadline = deadline
        self.lines = lines
        self.state = COLLECT
        self.status = 0
        self.cost_us = self.ahead = -1
        self.outcome = Outcome.ANSWERED
        self.queued_s = self.permit_s = self.sent_s = self.response_s = self._data_s = 0.0
        self.bytes_out = 0
        self.stick = ""
        self.grant: Grant | None = None
        self.extras: Extras | None = None  # of a special route
        self.endpoint: HttpEndpoint | None = None
        self.tried: tuple[HttpEndpoint, ...] = ()
        self._endpoint: HttpEndpoint | None = None  # only while it is the call's
        self._connection: UpstreamConnection | None = None
        self._pending: bytes | list[bytes | bytearray | memoryview] | None = None  # the body: whole, or in pieces
        self._pending_bytes = self._held_bytes = 0  # of the body, and of them on the pool's byte budget
        self._ticket: Ticket | None = None
        self._tries: Tries | None = None
        self._hedge: Hedge | None = None
        self._loan: Loan | None = None  # of a permit whose client does not read
        self._parked = False  # nobody can be asked: waits without a permit
        self._collected = False  # the body is here, the limiter's answer is not
        self._asked = False  # for a load report
        self._close = False  # the answer that has begun ends its connection
        self._rechunk = self._streaming = False
        self._events: Events | None = None  # what an answer of events has come to
        self.slot = YOUNG
        young = gateway.young
        if not young:
            gateway.tick_soon()
        young[self] = None

    @property
    def gateway(self) -> "Gateway":
        """The gateway it came to."""
        return self._gateway

    @property
    def gate(self) -> "PoolGate":
        """The pool it goes to."""
        return self._gate

    @property
    def body_bytes(self) -> int:
        """How much of the body is here."""
        return self._pending_bytes

    def expired(self) -> None:
        """The deadline passed."""
        raise NotImplementedError

    def stopping(self) -> None:
        """The gateway is about to end."""
        raise NotImplementedError

    def watch_until(self, deadline: float) -> None:
        """From now on `deadline` is when `expired` is called."""
        self.unwatch()
        self.slot = self._gateway.watch(self, deadline, monotonic())

    def unwatch(self) -> None:
        """`expired` is not called any more."""
        if self.slot == YOUNG:
            del self._gateway.young[self]
            self.slot = 0
        else:
            self._gateway.unwatch(self, self.slot)
