"""The ids of a call in logs and traces."""

from typing import Final, NamedTuple, Protocol

from oriel_wire.observe.trace import random_bits


class Address(Protocol):
    """The address of an endpoint."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Attempt(NamedTuple):
    """One hop to an upstream. Times are monotonic seconds.

    span: its id, in lower-case hex.
    error: why it was in vain; "" if it was not: another one was answered and it was dropped, or it was answered.
    """

    span: str
    endpoint: Address
    start_s: float
    end_s: float
    error: str


MAX_ATTEMPTS: Final = 8


def new_span() -> str:
    """Return the id of a new span, in lower-case hex."""
    return f"{random_bits(64) or 1:016x}"


class Mark:
    """The ids of one call in logs and traces, in lower-case hex.

    parent: the client's span; "" if it sent none.
    own: the gateway's span.
    onward: the span of the hop to the upstream; another one for each attempt.
    kept: why the trace is sampled from its beginning, "ratio" or "client"; "" if it is not.
    flags: the flags of the trace, as they are passed on.
    attempts: the latest `MAX_ATTEMPTS` hops that were in vain or were dropped.
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
    ) -> None:
        self.request_id = request_id
        self.trace = trace
        self.own = own
        self.onward = onward
        self.kept = kept
        self.flags = flags
        self.parent = self.state = ""
        self.attempts: tuple[Attempt, ...] = ()

    def attempted(self, endpoint: Address, start_s: float, end_s: float, error: str) -> None:
        """Record that the hop was in vain. The next one gets a span of its own."""
        self.add_attempt(self.onward, endpoint, start_s, end_s, error)
        self.onward = new_span()

    def add_attempt(self, span: str, endpoint: Address, start_s: float, end_s: float, error: str) -> None:
        """Record a hop; see `Attempt`."""
        self.attempts = (*self.attempts[1 - MAX_ATTEMPTS :], Attempt(span, endpoint, start_s, end_s, error))

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
