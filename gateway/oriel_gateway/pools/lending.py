"""Permit lending: other calls use the permit of a stream that waits for its client or hears nothing from its server.

A permit stands for work upstream. A client that does not read, or a gRPC stream whose messages have all been answered,
would keep the permit from others for nothing: twelve such streams of the lowest tier could hold all permits of a pool.
So the stream's permit is *suspended*: others use it, and that time is neither charged nor a sample of how long calls
take. When the stream goes on, its permit is *resumed*.

After `suspend_after_s` of its pool any call may have it. A more urgent call, or one of another tenant, gets the permit
of a client that does not read at once if it would have to wait. Calls of the stream's own tenant do not, or the
upstream would hold an answer for every one of them.

A gRPC stream *rests* when each of its messages has had its last answer (`Exchange.rests`) and the client has taken it.
Then any call has its permit at once, also one of its own tenant, and the stream's next message queues like any other
call: each turn is charged to its tenant when the permit is suspended. While calls wait, a stream also sends no further
message before those under way are answered, or it would never rest. Where it is unknown whether more answers come (a
decoupled model of a server that does not mark its last answer), the permit goes at once to a more urgent tier only, and
to other tenants of its own tier when the client sends the next message.

A message that its model answers with nothing looks like one that takes long. So a gRPC stream with unanswered messages
whose server has been silent for `suspend_after_s` gives its permit to those same others if they would have to wait. But
the server may be at work: that time is charged, and the permit is to be resumed (`PoolGate.to_resume`). When a permit
is free and none of those others waits, it goes back to the stream, not to the next call of the stream's tenant. The
stream's further messages pass meanwhile: a stream has one permit for all of them anyway.
"""

import asyncio
from time import monotonic

from oriel_gateway.errors import Outcome, Refused, displaced
from oriel_gateway.pools.holding import held_by
from oriel_gateway.pools.pool import LEAST_CHARGE, MOST_CHARGE, PoolGate
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.exchanges import Exchange
from oriel_policies.waiting.flows import Ticket


class PermitLending:
    """The lending of one call's permit, for as long as the call has it. Used on the loop; `finish` it once.

    exchange: the messages of a gRPC stream; None for a client that reads an HTTP answer.
    suspended: whether other calls use the permit now.
    rests: whether the stream rests, see the module's head.
    pauses: whether the stream rests, or its client has sent the next message while the server may still answer.
    model: by which its permit is counted.
    ticket: the queue's ticket of the turn in which the stream has the permit; None if it did not queue for it.
    charged_s: what the tenant was charged for turns that are over.
    """

    __slots__ = (
        "_began_s",
        "_free_s",
        "_gate",
        "_moved_s",
        "_over",
        "_resting",
        "_since_s",
        "_timer",
        "_total_s",
        "_turn",
        "_turn_s",
        "charged_s",
        "exchange",
        "model",
        "pauses",
        "rests",
        "suspended",
        "tenant",
        "ticket",
    )

    def __init__(
        self,
        gate: PoolGate,
        tenant: Tenant,
        exchange: Exchange | None = None,
        ticket: Ticket | None = None,
        model: str = "",
    ) -> None:
        self._gate = gate
        self.model = model
        self.tenant = tenant
        self.exchange = exchange
        self.ticket = ticket
        self.suspended = False
        self.rests = False
        self.pauses = False
        self.charged_s = 0.0
        self._began_s = self._turn_s = monotonic()  # when it got the permit first, and when for this turn
        self._over = False
        self._moved_s = 0.0  # since when the server of a stream with unanswered messages is silent
        self._since_s = 0.0  # since when the stream waits for its client
        self._free_s = 0.0  # since when the permit is suspended while the server surely has nothing to do
        self._total_s = 0.0
        self._turn: asyncio.Future[None] | None = None
        self._resting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def suspended_at_rest(self) -> bool:
        """Return whether the permit is suspended while the server has nothing to do for the stream."""
        return self._free_s > 0.0

    @property
    def waits_for_client(self) -> bool:
        """Return whether the stream waits for its client."""
        return self._since_s > 0.0

    @property
    def silent(self) -> bool:
        """Return whether the server of a stream whose permit can be lent may be at work: messages are unanswered."""
        return self.exchange is not None and not self._since_s

    def held_until_s(self, now: float) -> float:
        """Return `now`, or when the permit was suspended while the server had nothing to do."""
        return self._free_s or now

    def wait_for_client(self) -> None:
        """The stream waits for its client from now on. This sets one timer per half a second, not per message."""
        gate = self._gate
        self._moved_s = 0.0
        if not self._since_s:
            self._since_s = monotonic()
            if not self.suspended:
                gate.lendable[self] = None
                if gate.admission.queue.items:
                    gate.pump()
        self._poll_later()

    def client_took_answer(self) -> None:
        """The client has taken the answer of a gRPC stream, and no further answer is expected."""
        assert self.exchange is not None
        if self._since_s and self.exchange.rests(monotonic(), self._gate.suspend_after_s):
            self._wake()
            if not self.suspended and not self._over:
                self.rests = self.pauses = True
                if self._gate.admission.queue.items:
                    self._gate.pump()

    def resume(self) -> None:
        """Take the permit back at once because the stream goes on; for a while the pool may exceed its permits."""
        self._since_s = 0.0
        self.rests = self.pauses = False
        self._gate.lendable.pop(self, None)
        if self.suspended:
            self._gate.admission.grant(self.model, monotonic())
            self.resumed()

    def message_sent(self) -> None:
        """The stream sent a message. A silent stream stays silent: messages are no sign that the server works."""
        if not self._moved_s and not self._over:
            self.answer_arrived()

    def answer_arrived(self) -> None:
        """The server has answered, and messages are unanswered."""
        self.resume()
        self._moved_s = monotonic()
        self._poll_later()

    def suspend(self) -> None:
        """Free the permit for another call; the caller of this method hands it out."""
        gate = self._gate
        gate.lendable.pop(self, None)
        self.suspended = True
        self.rests = self.pauses = False
        if self._since_s:
            self._free_s = now = monotonic()
            share_s = (now - self._turn_s) / max(1, gate.admission.inflight)
            self.charged_s += share_s
            self._settle(share_s)
        else:
            gate.to_resume[self] = None
        gate.admission.decline(self.model)

    def resume_at_work(self) -> None:
        """Return the permit to a silent stream; it may be suspended again."""
        self._gate.admission.grant(self.model, monotonic())
        self.resumed()
        self._gate.lendable[self] = None

    def resumed(self, ticket: Ticket | None = None) -> None:
        """The stream has a permit again. ticket: the one with which it queued for the permit."""
        self._gate.to_resume.pop(self, None)
        turn, self._turn = self._turn, None
        if turn is not None and not turn.done():
            turn.set_result(None)
        self._since_s = 0.0
        self.suspended = False
        if self._free_s:
            self._turn_s = now = monotonic()
            self._total_s += now - self._free_s
            self._free_s = 0.0
            self.ticket = ticket

    def finish(self, cost_us: int = -1) -> float:
        """Take the permit back because the call is over and will release it.

        Returns the seconds for which it was suspended while the server had nothing to do.
        cost_us: what the server reported as the cost of the whole call; -1 if it reported nothing.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._over = True
        if self.ticket is not None:
            now = monotonic()
            left_s = (now - self._turn_s) / max(1, self._gate.admission.inflight)
            if cost_us >= 0:  # with the bounds of `PoolGate.release_permit`
                most_s = MOST_CHARGE * (now - self._began_s - self._total_s)
                left_s = min(max(cost_us * 1e-6 - self.charged_s, LEAST_CHARGE * left_s), most_s)
            self._settle(left_s)
        self.resume()
        return self._total_s

    # A further message -----------------------------------------------------------------------------------------

    async def admit_message(self, tenant: Tenant, target: Target, size_bytes: int) -> None:
        """Wait until a further message of the stream may be sent; if the permit is suspended, queue for one.

        Raises Refused QUEUE_FULL, DISPLACED or DEADLINE_EXCEEDED. If it is cancelled, the queue place is left.
        """
        gate, exchange = self._gate, self.exchange
        assert exchange is not None
        if gate.admission.queue.items and not self.suspended:
            if not exchange.unanswered:
                self._let_others_first()
            elif exchange.ends and self._contended():
                await self._wait_for_rest(exchange)
        if self.suspended_at_rest and not gate.admission.enter(self.model, monotonic()):
            await self._queue_for_permit(tenant, target, size_bytes)
        elif self.suspended_at_rest:
            self.resumed()

    def _let_others_first(self) -> None:
        """The client sends on: others may have the permit first, although the server may still answer."""
        if self._since_s and not self.suspended and not self._over:
            self.pauses = True
            self._gate.pump()

    def _contended(self) -> bool:
        """Return whether a stream with messages under way has to let waiting calls go first.

        It lets those of its own tier and of more urgent ones go first, and less urgent ones once it has had its permit
        for a while, or such streams would leave them nothing.
        """
        if self._gate.admission.queue.rows_ahead(self.tenant.tier.band):
            return True
        return monotonic() - self._turn_s >= self._gate.suspend_after_s

    async def _wait_for_rest(self, exchange: Exchange) -> None:
        """Wait until the stream rests, for `PoolGate.suspend_after_s` at most."""
        self._resting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._gate.suspend_after_s):
                await self._resting
        except TimeoutError:
            exchange.held()
        finally:
            self._resting = None

    async def _queue_for_permit(self, tenant: Tenant, target: Target, size_bytes: int) -> None:
        gate = self._gate
        message = _QueuedMessage(self, gate)
        holding = held_by(tenant, message)
        if not gate.take_bytes(holding, size_bytes):
            retry_after_s = gate.admission.retry_after_s()
            raise Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=retry_after_s)
        try:
            give_up_s = tenant.tier.give_up_s
            deadline = message.queued_s + give_up_s
            # It has no target time, which is for the first answer. Its deadline orders it among the calls that have
            # one: it goes before the younger of them in time, and is not passed over as a late one.
            ticket = gate.join_queue(
                message, tenant, target, received_s=deadline, deadline=deadline, size_bytes=size_bytes
            )
            message.ticket = ticket
            self._turn = message.permit
            gate.pump()
            try:
                async with asyncio.timeout(give_up_s):
                    await message.permit
            except TimeoutError:
                raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for a permit") from None
            finally:
                gate.leave_queue(ticket)
                if message.waits:
                    gate.admission.queue.settle(ticket, 0.0)
                ticket.payload = None
        finally:
            gate.bytes.release(holding)

    # Its clock -------------------------------------------------------------------------------------------------

    def _settle(self, cost_s: float) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self._gate.admission.queue.settle(ticket, cost_s)

    def _wake(self) -> None:
        if self._resting is not None and not self._resting.done():
            self._resting.set_result(None)

    def _poll_later(self) -> None:
        if self._timer is None and not self.suspended:
            self._timer = asyncio.get_running_loop().call_later(self._gate.suspend_after_s, self._poll)

    def _poll(self) -> None:
        self._timer = None
        since_s = self._since_s or self._moved_s
        if not since_s or self.suspended:
            return
        left_s = since_s + self._gate.suspend_after_s - monotonic()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._poll)
            return
        if self.exchange is not None:
            self.exchange.silent()
        if self._since_s:
            self.suspend()
        else:
            self._gate.lendable[self] = None
        self._gate.pump()


class _QueuedMessage:
    """A further message of a stream that waits for a permit; see `pool.Waiter`."""

    def __init__(self, lending: PermitLending, gate: PoolGate) -> None:
        self._lending = lending
        self._gate = gate
        self.tenant = lending.tenant
        self.queued_s = monotonic()
        self.ticket: Ticket | None = None
        self.permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def waits(self) -> bool:
        """Return whether its ticket was not admitted: it waits, or an answer has brought the permit back."""
        return self.ticket is not None

    def admitted(self) -> None:
        if self._lending.suspended:
            ticket, self.ticket = self.ticket, None
            self._lending.resumed(ticket)
        else:  # an answer has just taken the permit back
            self._gate.admission.decline(self._lending.model)

    def displaced(self) -> None:
        if not self.permit.done():
            self.permit.set_exception(displaced(self._gate.admission.retry_after_s()))
