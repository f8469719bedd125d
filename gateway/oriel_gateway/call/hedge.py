"""Second copies of calls whose first one is late, where their route asks for that.

"Hedged requests" of Dean and Barroso, The Tail at Scale, 2013.

The copy goes to another endpoint, within the retry budget, and only while its body is still here. The first answer
wins; the other copy is dropped, which its server sees as a departure. Should the first copy break meanwhile, the
second one is the call's. In a trace each copy is a span of its own, and the parent of what its server did.
"""

import asyncio
from time import monotonic
from typing import Any, Protocol

from oriel_gateway.call.attempts import note_answer, note_failure, why_failed
from oriel_gateway.observe.tracing import new_span
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.upstream_answers import AnswerKind
from oriel_gateway.routing.targets import Target
from oriel_wire.errors import UpstreamError

__all__ = ["Hedge"]


class Hedged(Protocol):
    """The call, as far as its second copy is concerned."""

    endpoints: EndpointSet[HttpEndpoint]
    target: Target

    @property
    def first_flying(self) -> bool:
        """Return whether the first copy may still be answered."""

    def second_endpoint(self, now: float) -> HttpEndpoint | None:
        """Pick where a second copy may go now; None: nowhere."""

    def put_copy(self, connection: Any, now: float, span: str) -> None:
        """Write the whole request to a connection, as the hop with this span."""

    def copy_ended(self, hedge: "Hedge", endpoint: HttpEndpoint, error: str) -> None:
        """Record the second copy, which is not the call's. error: see `tracing.Attempt`."""

    def classify(self, head: Any, data: bytes) -> AnswerKind:
        """Return what an error answer means."""

    def take_copy(self, hedge: "Hedge", head: Any, data: bytes, complete: bool) -> None:
        """The second copy was answered first."""

    def failed(self, error: UpstreamError) -> None:
        """Neither copy will be answered."""


class Hedge:
    """Sends the second copy and receives its answer. It ends by `cancel`, by `failed`, or by an answer
    (`Hedged.take_copy`). span: of its hop, in lower-case hex.
    """

    __slots__ = ("_call", "_timer", "connection", "endpoint", "sent_s", "span")

    def __init__(self, call: Hedged, after_s: float) -> None:
        self._call = call
        self._timer = asyncio.get_running_loop().call_later(after_s, self._fire)
        self.endpoint: HttpEndpoint | None = None
        self.connection: Any = None
        self.sent_s = 0.0
        self.span = ""

    @property
    def flying(self) -> bool:
        """Return whether an answer may still come."""
        return self.endpoint is not None

    def _fire(self) -> None:
        now = monotonic()
        endpoint: Any = self._call.second_endpoint(now)  # of either protocol
        if endpoint is None:
            return
        self.endpoint = endpoint
        self.span = new_span()
        connection = endpoint.begin(self, now, head_only=self._call.target.head_only)
        if connection is not None:
            self.connected(connection)

    def cancel(self, error: str = "") -> None:
        """The call needs no second answer any more. error: why the one that came is not used, "" if none came."""
        self._timer.cancel()
        endpoint, self.endpoint = self.endpoint, None
        if self.connection is not None:
            self.connection.abandon()
            self.connection = None
            if endpoint is not None:
                self._call.copy_ended(self, endpoint, error)
        elif endpoint is not None:
            endpoint.forget(self)

    def connected(self, connection: Any) -> None:
        self.connection = connection
        self.sent_s = now = monotonic()
        self._call.put_copy(connection, now, self.span)

    def response(self, head: Any, data: bytes, complete: bool) -> None:
        call, endpoint = self._call, self.endpoint
        assert endpoint is not None
        refused = head.status >= 500 or (head.status >= 400 and call.classify(head, data) is not AnswerKind.ANSWER)
        if refused and call.first_flying:
            now = monotonic()
            note_answer(call.endpoints, endpoint, head, now, now - self.sent_s, call.target.sought)
            if complete:
                self.connection = None
                self.endpoint = None
                call.copy_ended(self, endpoint, str(head.status))
            else:
                self.cancel(str(head.status))
            return
        call.take_copy(self, head, data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        """Do nothing. It is never called: the answer's connection is the call's from its head on."""

    def failed(self, error: UpstreamError) -> None:
        call, endpoint = self._call, self.endpoint
        self.connection = None
        self.endpoint = None
        if endpoint is not None:
            note_failure(call.endpoints, endpoint, error, monotonic(), call.target.sought)
            call.copy_ended(self, endpoint, why_failed(error))
        if not call.first_flying:
            call.failed(error)

    def upstream_writable(self, writable: bool) -> None:
        """The request was written as a whole."""
