"""Protocols by which a call uses what is built on calls: the gateway, the client's connection, others.

`call` and `shared` name these, not the classes that fulfil them (`core.Gateway`, `ingress.http.ClientConnection`,
`shared.special.Extras`, ...), so that no import goes upwards. What lies below a call - the pool, the limits, the
clock - is imported as the class it is: a compiled call reads an attribute of a class faster than of a Protocol.
`call: Any` stands for a `call.http.Call`, which is built on these Protocols itself.
"""

from typing import Any, Protocol

from oriel_gateway.clock import DeadlineClock
from oriel_gateway.errors import Refused
from oriel_gateway.identity.tickets import Tickets
from oriel_gateway.limits import Limiter
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.records import Records
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.target_cache import TargetCache
from oriel_policies.documents import Snapshot, Tenant
from oriel_wire.engine.large_messages import LargeMessages


class Host(Protocol):
    """The gateway that a call came to.

    top_band: the most urgent band of any tier. draining: no new connections are welcome. refusing: what cannot be sent
    at once is refused, because it would still wait when the gateway ends.
    """

    snapshot: Snapshot
    clock: DeadlineClock
    tickets: Tickets | None
    records: Records
    targets: TargetCache
    limiter: Limiter
    bodies: LargeMessages
    pools: dict[str, PoolGate]
    top_band: int
    draining: bool
    refusing: bool

    def deadline(self, tenant: Tenant, received_s: float, timeout_ms: str | None) -> float:
        """Return the absolute deadline: the tier's, or an earlier one that the client asked for."""

    def requested_until(self, received_s: float, timeout_ms: str | None, timeout_s: float | None = None) -> float:
        """Return the deadline that a client asked for; infinite if it asked for none."""


class Client(Protocol):
    """The client that waits for a call's answer: a connection of HTTP/1.1, or a stream of HTTP/2.

    call: the one under way, None between two. forwarded: header lines of the request under way, for the next hop.
    """

    call: Any
    forwarded: str

    @property
    def http_version(self) -> str:
        """ "1.1" or "2"."""

    @property
    def departed(self) -> bool:
        """Return whether the client has closed behind bytes that were not read."""

    @property
    def keeps_up(self) -> bool:
        """Return whether the client takes what is written to it."""

    @property
    def must_close(self) -> bool:
        """Return whether the answer being written ends the connection."""

    def write_answer(self, call: Any, head: Any, data: bytes, complete: bool, now: float) -> bool:
        """Write the head of an upstream's answer and the beginning of its body, or all of it (`complete`).

        Sets `call.stream` if the answer goes on and is more than its bytes. Returns what `answered` is to be told.
        """

    def write_more(self, call: Any, data: bytes, complete: bool) -> None:
        """Write more of an answer whose head is written; `data` may be empty at its end."""

    def write_kept(self, lines: list[bytes], body: bytes) -> bool:
        """Write a whole answer that no upstream gave to this call.

        lines: status line and fields, without a length. Returns what `answered` is to be told.
        """

    def write_refusal(self, refused: Refused, mark: Mark, *, v2: bool, queued_s: float) -> None:
        """Write a whole error answer."""

    def cut_answer(self, call: Any, refused: Refused, *, v2: bool) -> None:
        """End an answer that has begun, so that nobody can take it for a whole one. v2: see `answers.refusal_body`.

        An answer of events reports the error as one more event if it is between two.
        """

    def answered(self, *, close: bool, now: float = 0.0) -> None:
        """The answer is written; close: it ends the connection."""

    def abort(self) -> None:
        """Drop the client: nobody is there any more."""

    def on_writable(self, writable: bool) -> None:
        """The client stopped or resumed taking bytes."""


class Receiver(Protocol):
    """Gets the answer of a call in place of its client: a flight, a shadow copy, the filter of a model list."""

    def response(self, call: Any, head: Any, data: bytes, complete: bool) -> bool:
        """The upstream's head came. False: the call passes the answer on to its client."""

    def response_data(self, call: Any, data: bytes, complete: bool) -> bool:
        """More of the answer came. False: the call passes it on to its client."""

    def refused(self, call: Any, refused: Refused) -> bool:
        """The call fails; who returns True has finished it. False: the client gets the error."""

    def ended(self, call: Any) -> None:
        """The call is over, however it ended. Called once."""


class RouteHooks(Protocol):
    """The addition of a special route to a client's call; a plain call has none.

    model: that the body names, "" if it was not read.
    """

    model: str

    def before_queue(self, call: Any) -> bool:
        """The request is complete. False: the call does not queue, it is answered or waits for something else."""

    def response(self, call: Any, head: Any, data: bytes, complete: bool) -> None:
        """The upstream's head is about to be passed on, and may be changed."""

    def data(self, call: Any, data: bytes, complete: bool) -> None:
        """More of the answer is about to be passed on."""

    def cut_off(self, call: Any) -> None:
        """The call is about to end before its answer is complete."""

    def abandoned(self, call: Any, now: float) -> tuple[bool, float]:
        """Return whether a call that leaves its flight was executed, and the seconds it has to pay for that."""

    def ended(self, call: Any, record: Record | None) -> None:
        """The call is over, however it ended. record: of the call; None if it has none, because it has no client."""
