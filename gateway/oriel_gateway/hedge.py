"""A second copy of a call whose first one is late, where its route asks for it.

"Hedged requests" of Dean and Barroso, The Tail at Scale, 2013.

The copy goes to another endpoint, within the retry budget, and only while its body is still here. The first answer
wins; the other copy is dropped, which its server sees as a departure. Should the first copy break meanwhile, the
second one is the call's.
"""

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from oriel_gateway.attempts import note_answer, note_failure
from oriel_gateway.endpoints import HttpEndpoint
from oriel_gateway.refusals import Said, what_it_says
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.errors import UpstreamError
from oriel_wire.h1_response import ResponseHead

if TYPE_CHECKING:
    from oriel_gateway.call import Call

__all__ = ["Hedge"]


class Hedge:
    """A ResponseSink beside its call's own. Ends by `cancel`, by an answer (`Call.take`) or with `lost` set."""

    __slots__ = ("_call", "_timer", "connection", "endpoint", "sent_s")

    def __init__(self, call: "Call", after_s: float) -> None:
        self._call = call
        self._timer = asyncio.get_running_loop().call_later(after_s, self._fire)
        self.endpoint: HttpEndpoint | None = None
        self.connection: UpstreamConnection | None = None
        self.sent_s = 0.0

    @property
    def flying(self) -> bool:
        """Whether an answer may still come."""
        return self.endpoint is not None

    def _fire(self) -> None:
        now = monotonic()
        endpoint = self._call.second_endpoint(now)
        if endpoint is None:
            return
        self.endpoint = endpoint
        connection = endpoint.begin(self, now, head_only=self._call.target.head_only)
        if connection is not None:
            self.connected(connection)

    def cancel(self) -> None:
        """The call needs no second answer any more."""
        self._timer.cancel()
        endpoint, self.endpoint = self.endpoint, None
        if self.connection is not None:
            self.connection.abandon()
            self.connection = None
        elif endpoint is not None:
            endpoint.forget(self)

    def connected(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        self.sent_s = now = monotonic()
        self._call.put(connection, now)

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        call, endpoint = self._call, self.endpoint
        assert endpoint is not None
        said_no = head.status >= 500 or (
            head.status >= 400 and what_it_says(head, data, model=call.target.kind == "model") is not Said.ANSWER
        )
        if said_no and call.first_flying:
            now = monotonic()
            note_answer(call.gate.endpoints, endpoint, head, now, now - self.sent_s)
            if complete:
                self.connection = None
                self.endpoint = None
            else:
                self.cancel()
            return
        call.take(self, head, data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        """Never called: the answer's connection is the call's from its head on."""

    def failed(self, error: UpstreamError) -> None:
        call, endpoint = self._call, self.endpoint
        self.connection = None
        self.endpoint = None
        if endpoint is not None:
            note_failure(call.gate.endpoints, endpoint, error, monotonic())
        if not call.first_flying:
            call.failed(error)

    def upstream_writable(self, writable: bool) -> None:
        """The request was written as a whole."""
