"""The ids of a call in logs and traces, and what `records` reads of a call that is over."""

from typing import Final, Protocol

from oriel_gateway.errors import Outcome
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.trace import random_bits


class Address(Protocol):
    """The address of an endpoint."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


# One hop to an upstream that was in vain: its span, the endpoint, monotonic seconds, and why.
Attempt = tuple[str, Address, float, float, str]
MAX_ATTEMPTS: Final = 8


class Mark:
    """The ids of one call in logs and traces, in lower-case hex.

    parent: the client's span; "" if it sent none.
    own: the gateway's span.
    onward: the span of the hop to the upstream.
    kept: why the trace is sampled from its beginning, "ratio" or "client"; "" if it is not.
    flags: of the trace, as they are passed on.
    attempts: see `attempted`.
    """

    __slots__ = ("attempts", "flags", "kept", "onward", "own", "parent", "request_id", "state", "trace")

    def __init__(
        self,
        request_id: str,
        trace: str,
        own: str,
        onward: str,
        kept: str = "",
        flags: str = "02",
        parent: str = "",
        state: str = "",
    ) -> None:
        self.request_id = request_id
        self.trace = trace
        self.own = own
        self.onward = onward
        self.kept = kept
        self.flags = flags
        self.parent = parent
        self.state = state
        self.attempts: tuple[Attempt, ...] = ()

    def attempted(self, endpoint: Address, start_s: float, end_s: float, error: str) -> None:
        """Record a hop that was in vain, the latest `MAX_ATTEMPTS` of them. The next one gets a span of its own."""
        self.attempts = (*self.attempts[1 - MAX_ATTEMPTS :], (self.onward, endpoint, start_s, end_s, error))
        self.onward = f"{random_bits(64) or 1:016x}"

    @property
    def trace_id(self) -> int:
        """The id of the trace as a number."""
        return int(self.trace, 16)

    @property
    def span_id(self) -> int:
        """The id of the gateway's own span as a number."""
        return int(self.own, 16)

    @property
    def parent_id(self) -> int:
        """The id of the client's span as a number; 0 if it sent none."""
        return int(self.parent, 16) if self.parent else 0

    @property
    def forward_id(self) -> int:
        """The id of the span of the hop to the upstream as a number."""
        return int(self.onward, 16)

    def traceparent(self) -> str:
        """Return the header value for the upstream."""
        return f"00-{self.trace}-{self.onward}-{self.flags}"

    def traceresponse(self) -> str:
        """Return the header value for the client: the gateway's own span."""
        return f"00-{self.trace}-{self.own}-{self.flags}"


class Recorded(Protocol):
    """The facts of a finished call over any protocol. Times are monotonic seconds; 0.0 means not reached."""

    mark: Mark
    tenant: Tenant
    target: Target
    outcome: Outcome
    status: int
    received_s: float
    queued_s: float
    permit_s: float
    sent_s: float
    response_s: float
    deadline: float
    ahead: int  # calls before it when it joined the queue; -1 if it did not queue
    bytes_out: int
    timing: str  # `Server-Timing` of the server behind; "" if it sent none
    used: str  # what the answer said it used, see `oriel_wire.context.parse_cost`

    @property
    def beside(self) -> int: ...  # calls that its pool has in flight, itself included

    @property
    def protocol(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def endpoint(self) -> Address | None: ...

    @property
    def code(self) -> int: ...  # of gRPC, if the upstream sent one; else -1

    @property
    def http_version(self) -> str: ...

    @property
    def held(self) -> tuple[str, float] | None: ...
