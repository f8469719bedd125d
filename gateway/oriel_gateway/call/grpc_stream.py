"""One bidirectional gRPC stream on its way: a call whose request and answer are many messages.

The first message opens it like a unary call; from its answer on the stream has a slot in place of a permit
(`pools.stream_slots`). Later messages are sent when the limits of their models allow it. The deadline bounds the first
answer; then the tier bounds how long the stream may be silent in both directions, and how long it may last.
"""

import asyncio
from collections.abc import Collection
from time import monotonic
from typing import Final

from oriel_gateway.call.grpc import GrpcCall, GrpcRequest
from oriel_gateway.call.lifecycle import ANSWERING, DONE
from oriel_gateway.call.stream import AnswerStream
from oriel_gateway.contracts import Client, Host
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import StreamGrant
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.grpc_answers import GrpcAnswer, GrpcExchange
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.upstream_answers import DENIED
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.unanswered import Unanswered
from oriel_wire.errors import UpstreamError
from oriel_wire.h2.grpc import PREFIX_BYTES, prefix
from oriel_wire.v2.grpc_names import append_schedule, peek_answer

__all__ = ["GrpcStreamCall"]

_ASK_AGAIN_S: Final = 0.01  # after this time the meter knows how long a message has to wait


class _Decision:
    """Waits for the decision of the limiter's ledger on one message."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def granted(self) -> None:
        if not self.made.done():
            self.made.set_result(None)

    def refuse(self, refused: Refused) -> None:
        if not self.made.done():
            self.made.set_exception(refused)


class GrpcStreamCall(GrpcCall):
    """A stream. sent: set once the first message is on its way. closing: the client has sent its last message.

    unanswered: the messages that the server may still be working on.
    """

    streams = True
    __slots__ = (
        "_answering",
        "_cost_s",
        "_first_s",
        "_grant",
        "_room",
        "closing",
        "sent",
        "unanswered",
    )

    def __init__(
        self,
        gateway: Host,
        client: Client | None,
        gate: PoolGate,
        head: GrpcRequest,
        tenant: Tenant,
        target: Target,
        mark: Mark,
        received_s: float,
        deadline: float,
    ) -> None:
        super().__init__(gateway, client, gate, head, tenant, target, mark, received_s, deadline)
        self.sent = asyncio.Event()
        self.closing = False
        self.unanswered = Unanswered()
        self.messages = 0
        self._first_s = 0.0  # when its first answer came
        self._cost_s = 0.0  # what it is charged
        self._grant: StreamGrant | None = None  # of a stream whose tenant has limits
        self._answering = ""  # the model of the latest answer
        self._room = asyncio.Event()  # the upstream takes more

    # To the upstream -------------------------------------------------------------------------------------------

    def put(self, connection: GrpcExchange, now: float) -> None:
        connection.streamed = True
        if not self.messages:
            if self.tenant.allowances:
                self._grant = StreamGrant(self.grant, self.target.name, now)
            self._note_sent(self.target.name, now)
        self.as_stream().begin_work(self.permit_s)
        self._room.set()
        super().put(connection, now)
        self.sent.set()

    @property
    def may_move(self) -> bool:
        """Return whether nothing of the stream was sent."""
        return not self.messages and super().may_move

    def rename(self, model: str) -> bool:
        """False: later messages would still name the other model."""
        return False

    def ends_with_first(self) -> bool:
        return self.closing

    def upstream_timeout_s(self, now: float) -> float:
        return max(0.0, self.deadline - now) + self.tenant.tier.stream_max_s

    def time_for_triton(self, now: float) -> float | None:
        return None  # the deadline of a stream bounds its first answer only

    def _note_sent(self, model: str, now: float) -> None:
        self.messages += 1
        if self._grant is not None:
            self._grant.message_sent(model, self.unanswered.models, now)
        self.unanswered.sent(model)

    def room(self) -> None:
        """The upstream takes more."""
        self._room.set()

    async def send_message(self, model: str, message: bytes) -> None:
        """Send a further message when the upstream has room for it."""
        if self.stream is not None:
            self.stream.data_s = monotonic()
        await self._room.wait()
        connection = self.connection
        if connection is None or self.state == DONE:
            return
        self._body = None  # the call cannot be sent again from here on
        self.body_bytes += len(message)
        priorities = self.gate.pool.triton_priorities
        if priorities and (priority := priorities.get(self.tenant.tier.name)) is not None:
            message = append_schedule(message, priority, None)
        now = monotonic()
        self._note_sent(model, now)
        self.as_stream().message_sent(now)
        if not connection.send_more(prefix(len(message)) + message, False):
            self._room.clear()

    def end_messages(self) -> None:
        """The client has sent its last message."""
        self.closing = True
        if self.connection is not None and self.sent.is_set():
            self.connection.send_more(b"", True)

    # Limits of later messages ----------------------------------------------------------------------------------

    def moved(self, data: bytes, model: str | None = None) -> None:
        """Count bytes for the limits. model: the model of a message; None for an answer."""
        if self._grant is not None:
            self._grant.answered(len(data), self._answering if model is None else model, monotonic())
        elif self.grant is not None:
            self.grant.move(len(data), monotonic())

    async def further(self, tenant: Tenant, target: Target, size_bytes: int) -> float:
        """Count a later message of the stream. Returns 0.0, or the seconds until its rate allows it. Raises Refused."""
        if self._grant is None:  # its tenant has got limits since the stream began
            self._grant = StreamGrant(self.grant, self.target.name, monotonic())
        got = self.gateway.limiter.acquire_further(tenant, target, size_bytes, monotonic(), self._grant.held)
        if isinstance(got, float):
            return got
        added = False
        try:
            if not got.ready:
                got.waiter = decision = _Decision()
                await decision.made
            self._charge(self.unanswered.models)
            if self.state != DONE:
                self._grant.add_message(got, target.name, monotonic())
                added = True
        except Refused as refused:
            if refused.outcome is not Outcome.RATE_LIMITED:
                raise
            return _ASK_AGAIN_S
        finally:
            if not added:
                got.settle(0, False, monotonic())
        return 0.0

    def _charge(self, models: Collection[str]) -> None:
        """Charge the stream's limits for the time in which the server worked for these models and the client read."""
        if self._grant is not None and not self.as_stream().paused:
            self._grant.worked(models, 1.0 / self.gate.streams.at_servers, monotonic())

    # From the upstream -----------------------------------------------------------------------------------------

    def response(self, head: GrpcAnswer, data: bytes, complete: bool) -> None:
        """The first answer came, or the stream ends without one. A stream that has begun is not sent again."""
        now = monotonic()
        client, endpoint = self.client, self.endpoint
        assert client is not None and endpoint is not None
        self.response_s = self._first_s = now
        self.state = ANSWERING
        self.status = head.status
        if head.status < 400:
            self.endpoints.note_answer(endpoint, now, now - self.sent_s, self.target.sought)
        else:
            self.endpoints.note_error(endpoint, head.status, now, now - self.sent_s, model=self.target.sought)
            if self.classify(head, data) in DENIED:
                self.endpoints.model_locations.note_denied(endpoint, self.target.sought, now)
        self.stream = AnswerStream(now, unbounded=True)
        self.watch_until(self.stream.ends_s(self.tenant.tier, now))
        self._body = None
        self.as_stream().begin_answer(now)
        if complete:
            self.answer = head
            self.cost_us = head.cost_us
            self.timing = head.server_timing
            self.used = head.used
            self.connection = None
            client.write_answer(self, head, data, True, now)
            self.finish(Outcome.ANSWERED, "", now)
            client.answered(close=False, now=now)
            return
        self.bytes_out = 0
        client.write_answer(self, head, b"", False, now)
        self._message(data)

    def response_data(self, data: bytes, complete: bool) -> None:
        """A further message of the answer, with its prefix; or its end."""
        client = self.client
        assert client is not None
        if not complete:
            self._message(data)
            return
        self.connection = None
        client.write_more(self, b"", True)
        self.finish(Outcome.ANSWERED)
        client.answered(close=False)

    def _message(self, data: bytes) -> None:
        client, stream, unanswered = self.client, self.stream, self.unanswered
        assert client is not None and stream is not None
        stream.data_s = now = monotonic()
        message = data[PREFIX_BYTES:]
        self.bytes_out += len(message)
        model, final = peek_answer(message)
        if self._grant is not None:
            self._answering = model
            at_work = unanswered.models
            self._charge(at_work if (final and not model) or model in at_work else (*at_work, model))
        unanswered.answered(model, final)
        self.as_stream().answered(now, bool(unanswered.models))
        self.moved(message)
        client.write_more(self, data, False)
        if not client.keeps_up:
            client.on_writable(False)

    def client_writable(self, writable: bool) -> None:
        if not writable:
            self._charge(self.unanswered.models)
        elif self._grant is not None:
            self._grant.resume(monotonic())
        super().client_writable(writable)

    def failed(self, error: UpstreamError) -> None:
        self._room.set()
        if self.messages > 1:
            self._body = None
        super().failed(error)

    # The end ---------------------------------------------------------------------------------------------------

    def expired(self) -> None:
        stream = self.stream
        if stream is None:
            super().expired()
            return
        ends_s = stream.ends_s(self.tenant.tier, self._first_s)
        if monotonic() < ends_s:
            self.watch_until(ends_s)
            return
        message = "the stream was silent, or went on, for longer than its tier may"
        self.refuse(Refused(Outcome.DEADLINE_EXCEEDED, message))

    def stopping(self) -> None:
        if not self._first_s:
            super().stopping()

    def finish(self, outcome: Outcome, error: str = "", now: float = 0.0) -> None:
        if self.state == DONE:
            return
        self._charge(self.unanswered.models)
        super().finish(outcome, error, now)
        self._room.set()
        self.sent.set()
        if self._grant is not None:
            self._grant.settle(round(self._cost_s * 1e6), monotonic())

    def release_permit(self, now: float, good: bool | None, late: bool) -> float:
        self._cost_s = super().release_permit(now, good, late)
        return self._cost_s

    def settle(self, cost_s: float, executed: bool, now: float) -> None:
        """See `Lifecycle.settle`: a stream's models are charged apart, in `finish`."""
        if self._grant is None:
            super().settle(cost_s, executed, now)
