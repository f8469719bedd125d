"""One bidirectional gRPC stream on its way: a call whose request and answer are many messages.

The first message opens it like a unary call. Later messages are admitted one by one (`admit`): they count for the
limits of their models, and the stream's permit is lent to other calls while it rests (`pools.lending`). The deadline
bounds the first answer; then the tier bounds how long the stream may be silent in both directions, and how long it may
last.
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
from oriel_gateway.pools.lending import PermitLending
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.upstream_answers import DENIED
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.exchanges import Exchange
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

    messages: how many were sent on.
    """

    streams = True
    __slots__ = (
        "_answering",
        "_cost_s",
        "_exchange",
        "_first_s",
        "_grant",
        "_lending",
        "_room",
        "closing",
        "messages",
        "sent",
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
        self.messages = 0
        self._first_s = 0.0  # when its first answer came
        self._cost_s = 0.0  # what it is charged
        self._exchange: Exchange | None = None
        self._lending: PermitLending | None = None
        self._grant: StreamGrant | None = None  # of a stream whose tenant has limits
        self._answering = ""  # the model of the latest answer
        self._room = asyncio.Event()  # the upstream takes more

    # To the upstream -------------------------------------------------------------------------------------------

    def put(self, connection: GrpcExchange, now: float) -> None:
        connection.streamed = True
        if self._exchange is None:
            if self.tenant.allowances:
                self._grant = StreamGrant(self.grant, self.target.name, now)
            self._exchange = Exchange(self.gate.habits, self.tenant.name)
            self._lending = PermitLending(self.gate, self.tenant, self._exchange, self._ticket, self.target.counted)
            self._note_sent(self.target.name)
        self._room.set()
        super().put(connection, now)
        self.sent.set()

    @property
    def may_move(self) -> bool:
        """Return whether nothing of the stream was sent."""
        return self._exchange is None and super().may_move

    def rename(self, model: str) -> bool:
        """False: later messages would still name the other model."""
        return False

    def ends_with_first(self) -> bool:
        return self.closing

    def upstream_timeout_s(self, now: float) -> float:
        return max(0.0, self.deadline - now) + self.tenant.tier.stream_max_s

    def time_for_triton(self, now: float) -> float | None:
        return None  # the deadline of a stream bounds its first answer only

    def _note_sent(self, model: str) -> None:
        exchange, lending = self._exchange, self._lending
        assert exchange is not None and lending is not None
        self.messages += 1
        if self._grant is not None:
            self._grant.message_sent(model, exchange.at_work, monotonic())
        exchange.sent(model)
        lending.message_sent()

    def room(self) -> None:
        """The upstream takes more."""
        self._room.set()

    async def send_message(self, model: str, message: bytes) -> None:
        """Send a further message when the permit and the upstream allow it. Raises Refused."""
        lending = self._lending
        assert lending is not None
        if self.stream is not None:
            self.stream.data_s = monotonic()
        await lending.admit_message(self.tenant, self.target, len(message))
        await self._room.wait()
        connection = self.connection
        if connection is None or self.state == DONE:
            return
        self._body = None  # the call cannot be sent again from here on
        self.body_bytes += len(message)
        priorities = self.gate.pool.triton_priorities
        if priorities and (priority := priorities.get(self.tenant.tier.name)) is not None:
            message = append_schedule(message, priority, None)
        self._note_sent(model)
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
            if self._exchange is not None:
                self._charge(self._exchange.at_work)
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
        """Charge the stream's limits for what the server has done for these models, without the time of a suspended
        permit.
        """
        if self._grant is not None:
            now = monotonic()
            until_s = self._lending.held_until_s(now) if self._lending is not None else now
            self._grant.worked(models, until_s, 1.0 / max(1, self.gate.admission.inflight), now)

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
        client, exchange, lending, stream = self.client, self._exchange, self._lending, self.stream
        assert client is not None and exchange is not None and lending is not None and stream is not None
        stream.data_s = now = monotonic()
        message = data[PREFIX_BYTES:]
        self.bytes_out += len(message)
        model, final = peek_answer(message)
        if self._grant is not None:
            self._answering = model
            at_work = exchange.at_work
            self._charge(at_work if final and not model else (*at_work, model) if model not in at_work else at_work)
        exchange.answered(model, final, now)
        self.moved(message)
        lending.resume()
        lending.wait_for_client()  # until the client has taken the answer, or sends more
        client.write_more(self, data, False)
        if client.keeps_up:
            self._taken()
        else:
            client.on_writable(False)

    def _taken(self) -> None:
        """The client has taken the latest answer."""
        exchange, lending = self._exchange, self._lending
        assert exchange is not None and lending is not None
        if exchange.unanswered > 0:
            lending.answer_arrived()
        else:
            lending.client_took_answer()

    def client_writable(self, writable: bool) -> None:
        connection = self.connection
        if connection is None:
            return
        if writable:
            connection.resume()
            if self.state == ANSWERING:
                self._taken()
        else:
            connection.pause()

    def ended(self, answer: GrpcAnswer) -> None:
        if self._lending is not None:
            self._lending.resume()
        super().ended(answer)

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
        if self._exchange is not None:
            self._charge(self._exchange.at_work)
        super().finish(outcome, error, now)
        self._room.set()
        self.sent.set()
        if self._grant is not None:
            self._grant.settle(round(self._cost_s * 1e6), monotonic())

    def release_permit(self, now: float, good: bool | None, late: bool) -> float:
        """See `Lifecycle.release_permit`: the permit may be suspended, and its time is counted by turns."""
        lending = self._lending
        lent_s = lending.finish(self.cost_us) if lending is not None else 0.0
        self._cost_s = self.gate.release_permit(
            self.target,
            self.tenant,
            self._ticket if lending is None else None,
            now - self.permit_s - lent_s,
            self.cost_us,
            size_bytes=-1,
            good=good,
            late=late,
            messages=max(1, self.messages),
        )
        return self._cost_s

    def settle(self, cost_s: float, executed: bool, now: float) -> None:
        """See `Lifecycle.settle`: a stream's models are charged apart, in `finish`."""
        if self._grant is None:
            super().settle(cost_s, executed, now)
