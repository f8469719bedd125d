"""The ids of a call in logs and traces."""

from time import monotonic
from typing import Final, NamedTuple, Protocol

from oriel_gateway.identity.tenant_buckets import TenantBuckets
from oriel_policies.documents import ApiKey
from oriel_wire.context import valid_request_id
from oriel_wire.observe.sampling import Sampling, without_threshold
from oriel_wire.observe.trace import TraceIds, random_bits, read_traceparent


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
_SAMPLED: Final = frozenset(("01", "03"))
# Flags of a trace with the sampled bit set, and cleared.
_WITH: Final = {"00": "01", "01": "01", "02": "03", "03": "03"}
_WITHOUT: Final = {"00": "00", "01": "00", "02": "02", "03": "02"}


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


class Marks:
    """Makes the ids of calls. sampling: decides which traces are kept from their beginning."""

    __slots__ = ("_client_traces", "_ids", "_sampling", "_threshold")

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._threshold = sampling.hex_threshold
        self._ids = TraceIds()
        self._client_traces = TenantBuckets()

    def of(self, request_id: str | None, traceparent: str | None, tracestate: str | None) -> Mark:
        """Return the ids of a request: the client's own where they are valid, fresh ones otherwise.

        The id of a trace decides if it is kept from its beginning, or the client if it sent one; `judge` is called when
        the client is known.
        """
        ids = self._ids
        if len(ids.spans) < 2 or not ids.traces:
            ids.refill()
        spans = ids.spans
        own, onward = spans.pop(), spans.pop()
        if request_id is None or not valid_request_id(request_id):
            request_id = own
        parent = read_traceparent(traceparent, tracestate) if traceparent else None
        if parent is None:
            mark = Mark(request_id, ids.traces.pop(), own, onward)
            if mark.trace[18:] >= self._threshold:
                mark.kept, mark.flags, mark.state = "ratio", "03", self._sampling.state
            return mark
        trace, span, flags, state = parent
        kept = "client" if flags in _SAMPLED else ""
        if not self._sampling.parent_based:
            decided, state = self._sampling.decided(int(trace, 16), state)
            kept, flags = ("ratio", _WITH[flags]) if decided else ("", _WITHOUT[flags])
        mark = Mark(request_id, trace, own, onward, kept, flags)
        mark.parent, mark.state = span, state
        return mark

    def judge(self, mark: Mark, key: ApiKey) -> None:
        """Keep a client's wish for a trace within its tenant's limit; above it the call is as one that had none.

        Calls of our own units for a tenant are part of a trace that was decided before, and are not counted. They have
        the id of the request that their ticket came with.
        """
        if key.delegated:
            mark.request_id = key.name
        elif mark.kept == "client" and not self._client_traces.allows(key.tenant.name, monotonic()):
            mark.kept, mark.flags, mark.state = "", _WITHOUT[mark.flags], without_threshold(mark.state)
