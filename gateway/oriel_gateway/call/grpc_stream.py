"""The gRPC side of a call whose request and answer are many messages: one bidirectional stream.

The first message opens it like a unary call; from its answer on the stream has a slot in place of a permit
(`pools.stream_slots`). Later messages are sent when the limits of their models allow it. The deadline bounds the first
answer; then the tier bounds how long the stream may be silent in both directions, and how long it may last.
"""

import asyncio
from collections.abc import Collection
from time import monotonic
from typing import Final

from oriel_gateway.call.contracts import ANSWERING, DONE, Call, Side
from oriel_gateway.call.grpc import encoded_head, requested_by, schedule_of
from oriel_gateway.call.stream import AnswerStream
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import StreamGrant
from oriel_gateway.pools.grpc_answers import GrpcAnswer, GrpcExchange
from oriel_gateway.pools.upstream_answers import DENIED, AnswerKind
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.unanswered import Unanswered
from oriel_wire.h2.grpc import PREFIX_BYTES, prefix
from oriel_wire.v2.grpc_names import peek_answer

__all__ = ["GrpcStreamSide"]

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


class GrpcStreamSide(Side):
    """The side of one stream.

    sent: set once the first message is on its way, or the call is over.
    closing: the client has sent its last message.
    unanswered: the messages that the server may still be working on.
    """

    __slots__ = ("_answering", "_grant", "_messages", "_room", "closing", "sent", "unanswered")

    def __init__(self) -> None:
        super().__init__("grpc", streams=True)
        self.sent = asyncio.Event()
        self.closing = False
        self.unanswered = Unanswered()
        self._messages = 0  # number of messages that were sent on
        self._grant: StreamGrant | None = None  # None unless the tenant has limits
        self._answering = ""  # the model of the latest answer
        self._room = asyncio.Event()  # the upstream takes more

    @property
    def messages(self) -> int:
        return self._messages

    @property
    def may_move(self) -> bool:
        return not self._messages

    def requested_until(self, call: Call) -> float:
        return requested_by(call)

    def rename(self, call: Call, model: str) -> bool:
        """False: later messages would still name the other model."""
        return False

    # Sending to the upstream -----------------------------------------------------------------------------------

    def write(self, call: Call, connection: GrpcExchange, now: float) -> None:
        """Write the first message. The deadline bounds its answer only, so Triton is told no timeout."""
        connection.streamed = True
        connection.most_bytes = call.gate.pool.max_response_bytes
        if not self._messages:
            if call.tenant.allowances:
                self._grant = StreamGrant(call.grant, call.target.name, now)
            self._note_sent(call.target.name, now)
        call.as_stream().begin_work(call.permit_s)
        self._room.set()
        schedule = schedule_of(call, None)
        timeout_s = max(0.0, call.deadline - now) + call.tenant.tier.stream_max_s
        head, data = encoded_head(call, connection, timeout_s), call.body() + schedule
        data = prefix(len(data)) + data
        if self.closing:
            connection.send_whole(head, data)
        else:
            connection.send(head, data, False)
        self.sent.set()

    def _note_sent(self, model: str, now: float) -> None:
        self._messages += 1
        if self._grant is not None:
            self._grant.message_sent(model, self.unanswered.models, now)
        self.unanswered.sent(model)

    def room(self) -> None:
        self._room.set()

    async def send_message(self, call: Call, model: str, message: bytes) -> None:
        """Send a further message when the upstream has room for it."""
        if call.stream is not None:
            call.stream.data_s = monotonic()
        await self._room.wait()
        connection = call.connection
        if connection is None or call.state == DONE:
            return
        call.replace_body(None, call.bytes_in + len(message))  # the call cannot be sent again from here on
        message += schedule_of(call, None)
        now = monotonic()
        self._note_sent(model, now)
        call.as_stream().message_sent(now)
        if not connection.send_more(prefix(len(message)) + message, False):
            self._room.clear()

    def end_messages(self, call: Call) -> None:
        """The client has sent its last message."""
        self.closing = True
        if call.connection is not None and self.sent.is_set():
            call.connection.send_more(b"", True)

    # Limits of later messages ----------------------------------------------------------------------------------

    def count_bytes(self, call: Call, size_bytes: int, model: str) -> None:
        """Count the bytes of a message or an answer for the limits. model: the one that it names."""
        if self._grant is not None:
            self._grant.count_answer(size_bytes, model, monotonic())
        elif call.grant is not None:
            call.grant.move(size_bytes, monotonic())

    async def further(self, call: Call, tenant: Tenant, target: Target, size_bytes: int) -> float:
        """Count a later message of the stream. Returns 0.0, or the seconds until its rate allows it. Raises Refused."""
        if self._grant is None:  # its tenant has got limits since the stream began
            self._grant = StreamGrant(call.grant, call.target.name, monotonic())
        got = call.gateway.limiter.acquire_further(tenant, target, size_bytes, monotonic(), self._grant.held)
        if isinstance(got, float):
            return got
        added = False
        try:
            if not got.ready:
                got.waiter = decision = _Decision()
                await decision.made
            self._charge(call, self.unanswered.models)
            if call.state != DONE:
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

    def _charge(self, call: Call, models: Collection[str]) -> None:
        """Charge the stream's limits for the time in which the server worked for these models and the client read."""
        if self._grant is not None and not call.as_stream().paused:
            self._grant.worked(models, 1.0 / call.gate.streams.at_servers, monotonic())

    # Callbacks of the upstream's answer ------------------------------------------------------------------------

    def classify(self, call: Call, head: GrpcAnswer, data: bytes) -> AnswerKind:
        return head.kind(model=bool(call.target.sought))

    def reads(self, call: Call, head: GrpcAnswer, data: bytes, complete: bool) -> bool:
        """Take the first answer, or the end without one. A stream that has begun is not sent again."""
        now = monotonic()
        client, endpoint, sought = call.client, call.endpoint, call.target.sought
        assert client is not None and endpoint is not None
        call.response_s = now
        call.state = ANSWERING
        call.status = head.status
        if head.status < 400:
            call.endpoints.note_answer(endpoint, now, now - call.sent_s, sought)
        else:
            call.endpoints.note_error(endpoint, head.status, now, now - call.sent_s, model=sought)
            if self.classify(call, head, data) in DENIED:
                call.endpoints.model_locations.note_denied(endpoint, sought, now)
        call.stream = stream = AnswerStream(now, unbounded=True)
        call.watch_until(stream.ends_s(call.tenant.tier, now))
        call.replace_body(None, call.bytes_in)
        call.as_stream().begin_answer(now)
        if complete:
            call.answer = head
            call.cost_us, call.timing, call.used = head.cost_us, head.server_timing, head.used
            call.connection = None
            client.write_answer(call, head, data, True, now)
            call.finish(Outcome.ANSWERED, "", now)
            client.answered(close=False, now=now)
        else:
            client.write_answer(call, head, b"", False, now)
            call.response_data(data, False)
        return False

    def note_data(self, call: Call, data: bytes, complete: bool) -> None:
        """Count a further message of the answer, which has its prefix; there is none at the end."""
        if complete:
            return
        stream, unanswered = call.stream, self.unanswered
        assert stream is not None
        stream.data_s = now = monotonic()
        message = data[PREFIX_BYTES:]
        call.bytes_out += len(message)
        model, final = peek_answer(message)
        if self._grant is not None:
            self._answering = model
            at_work = unanswered.models
            self._charge(call, at_work if (final and not model) or model in at_work else (*at_work, model))
        unanswered.note_answer(model, final)
        call.as_stream().note_answer(now, bool(unanswered.models))
        self.count_bytes(call, len(message), model)

    def client_writable(self, call: Call, writable: bool) -> None:
        if not writable:
            self._charge(call, self.unanswered.models)
        elif self._grant is not None:
            self._grant.resume(monotonic())

    def failed(self, call: Call) -> None:
        self._room.set()
        if self._messages > 1:
            call.replace_body(None, call.bytes_in)

    # The end ---------------------------------------------------------------------------------------------------

    def finishing(self, call: Call) -> None:
        self._charge(call, self.unanswered.models)

    def settle(self, call: Call, cost_s: float, executed: bool, now: float) -> None:
        """Settle what the limits granted: the models of a stream are charged apart, as far as they have limits."""
        self._room.set()
        self.sent.set()
        if self._grant is None:
            super().settle(call, cost_s, executed, now)
        else:
            self._grant.settle(round(cost_s * 1e6), now)
