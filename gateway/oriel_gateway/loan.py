"""The permit of a stream that waits for its client, or says nothing.

A permit stands for work upstream. A client that does not read, or a gRPC stream whose messages have all been answered,
would keep others from it for nothing: twelve such streams of the lowest tier could hold all permits of a pool. So the
permit is lent to whoever waits, and that time is neither charged nor a sample of how long calls take.

After LENT_AFTER_S anybody may have it. A more urgent call, or one of another tenant, gets a reader's at once if it
would have to wait: 200 who asked for 8 MiB and read nothing kept all others waiting for that time, 16 after 16.
Calls of the reader's own tenant do not, or the upstream would hold an answer for every one of them.

A gRPC stream *rests* when each of its messages has had its last answer (`Exchange.rests`) and the client has taken it.
Then anybody has its permit at once, also its own tenant, and its next message queues like any other call: each turn is
charged to its tenant when the permit is lent (`lend`). One that sends a small message every 0.4 s kept its permit for
ever. While somebody waits, a stream also sends no further message before those on their way are answered (`go_on`), or
it would never rest. Where nobody can tell whether more answers come (a decoupled model of a server that does not say),
it goes at once to a more urgent tier only, and to other tenants of its own when the client sends the next message.

A message that its model answers with nothing looks like one that takes long. So a gRPC stream whose server has said
nothing for LENT_AFTER_S, with messages unanswered, lends its permit to those same others if they would have to wait.
But it may be at work: that time is charged, and the permit is owed (`PoolGate.owed`). When it is free and none of those
others waits, it goes back to the stream, not to the next call of the stream's tenant. Its further messages pass: a
stream has one permit for all of them anyway.
"""

import asyncio
from time import monotonic

from oriel_gateway.pools import LEAST_CHARGE, MOST_CHARGE, PoolGate
from oriel_policies.documents import Tenant
from oriel_policies.exchanges import Exchange
from oriel_policies.queue import Ticket

__all__ = ["LENT_AFTER_S", "Loan"]

LENT_AFTER_S = 0.5


class Loan:
    """One call's permit, as long as it is the call's. lent: somebody else has it. On the loop; `end` it once.

    exchange: of a gRPC stream; None of a reader of an HTTP answer. pauses: the stream rests, or its client has sent the
    next message, whatever the server may still say. ticket: of the turn in which it has the permit, if it had to queue.
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
        "exchange",
        "lent",
        "paid_s",
        "pauses",
        "rests",
        "tenant",
        "ticket",
    )

    def __init__(
        self, gate: PoolGate, tenant: Tenant, exchange: Exchange | None = None, ticket: Ticket | None = None
    ) -> None:
        self._gate = gate
        self.tenant = tenant
        self.exchange = exchange
        self.ticket = ticket
        self.lent = False
        self.rests = False
        self.pauses = False
        self.paid_s = 0.0  # what its tenant was charged for turns that are over
        self._began_s = self._turn_s = monotonic()  # since when it has the permit, at first and this time
        self._over = False
        self._moved_s = 0.0  # of a stream with messages unanswered: since when the server says nothing
        self._since_s = 0.0  # waits for the client since then
        self._free_s = 0.0  # lent since then, and surely not at work
        self._total_s = 0.0
        self._turn: asyncio.Future[None] | None = None
        self._resting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> bool:
        """It is lent, of a stream that has nothing to do."""
        return self._free_s > 0.0

    @property
    def waits(self) -> bool:
        """For its client."""
        return self._since_s > 0.0

    @property
    def turn_s(self) -> float:
        """Since when it has the permit."""
        return self._turn_s

    @property
    def silent(self) -> bool:
        """Of those that may be lent: the stream may be at work, but the server says nothing."""
        return self.exchange is not None and not self._since_s

    def held_until_s(self, now: float) -> float:
        """`now`, or when the permit was lent of a stream that has nothing to do."""
        return self._free_s or now

    def idle(self) -> None:
        """The stream waits for its client from now on. Cheap: one timer per half a second, not per message."""
        gate = self._gate
        self._moved_s = 0.0
        if not self._since_s:
            self._since_s = monotonic()
            if not self.lent:
                gate.lendable[self] = None
                if gate.admission.queue.items:
                    gate.pump()
        self._watch()

    def read(self) -> None:
        """The client has taken the answer of a gRPC stream that has none to wait for."""
        assert self.exchange is not None
        if self._since_s and self.exchange.rests(monotonic(), LENT_AFTER_S):
            self._told()
            if not self.lent and not self._over:
                self.rests = self.pauses = True
                if self._gate.admission.queue.items:
                    self._gate.pump()

    async def rest(self) -> None:
        """Wait until the stream rests, LENT_AFTER_S at most."""
        self._resting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(LENT_AFTER_S):
                await self._resting
        except TimeoutError:
            assert self.exchange is not None
            self.exchange.held()
        finally:
            self._resting = None

    def turn(self) -> None:
        """The client sends on: whatever the server may still say, others may have the permit first."""
        if self._since_s and not self.lent and not self._over:
            self.pauses = True
            self._gate.pump()

    def busy(self) -> None:
        """It goes on, and takes its permit back at once: for a while more than the pool's may be out."""
        self._since_s = 0.0
        self.rests = self.pauses = False
        self._gate.lendable.pop(self, None)
        if self.lent:
            self._gate.admission.inflight += 1
            self.regained()

    def asked(self) -> None:
        """The stream sent a message. While others are unanswered that is no sign of work: a silent one stays so."""
        if not self._moved_s and not self._over:
            self.answered()

    def answered(self) -> None:
        """The server said something, and messages are unanswered."""
        self.busy()
        self._moved_s = monotonic()
        self._watch()

    def lend(self) -> None:
        """Somebody else has the permit from now on; whoever calls this sees to it."""
        gate = self._gate
        gate.lendable.pop(self, None)
        self.lent = True
        self.rests = self.pauses = False
        if self._since_s:
            self._free_s = now = monotonic()
            share_s = (now - self._turn_s) / max(1, gate.admission.inflight)
            self.paid_s += share_s
            self._settle(share_s)
        else:
            gate.owed[self] = None
        gate.admission.inflight -= 1

    def returned(self) -> None:
        """What is owed comes back, and may be lent again."""
        self._gate.admission.inflight += 1
        self.regained()
        self._gate.lendable[self] = None

    def queues(self, turn: "asyncio.Future[None]") -> None:
        """It waits for a permit, and is told if an answer has taken it back before."""
        self._turn = turn

    def regained(self, ticket: Ticket | None = None) -> None:
        """It has a permit again. ticket: by which it has waited for it."""
        self._gate.owed.pop(self, None)
        turn, self._turn = self._turn, None
        if turn is not None and not turn.done():
            turn.set_result(None)
        self._since_s = 0.0
        self.lent = False
        if self._free_s:
            self._turn_s = now = monotonic()
            self._total_s += now - self._free_s
            self._free_s = 0.0
            self.ticket = ticket

    def end(self, cost_us: int = -1) -> float:
        """The call is over and will give its permit back: seconds for which it was lent with nothing to do.

        cost_us: what the server reported of the whole, -1 for nothing.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._over = True
        if self.ticket is not None:
            now = monotonic()
            left_s = (now - self._turn_s) / max(1, self._gate.admission.inflight)
            if cost_us >= 0:  # as `PoolGate.leave` bounds it
                most_s = MOST_CHARGE * (now - self._began_s - self._total_s)
                left_s = min(max(cost_us * 1e-6 - self.paid_s, LEAST_CHARGE * left_s), most_s)
            self._settle(left_s)
        self.busy()
        return self._total_s

    def _settle(self, cost_s: float) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self._gate.admission.queue.settle(ticket, cost_s)

    def _told(self) -> None:
        if self._resting is not None and not self._resting.done():
            self._resting.set_result(None)

    def _watch(self) -> None:
        if self._timer is None and not self.lent:
            self._timer = asyncio.get_running_loop().call_later(LENT_AFTER_S, self._look)

    def _look(self) -> None:
        self._timer = None
        since_s = self._since_s or self._moved_s
        if not since_s or self.lent:
            return
        left_s = since_s + LENT_AFTER_S - monotonic()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
        if self.exchange is not None:
            self.exchange.silent()
        if self._since_s:
            self.lend()
        else:
            self._gate.lendable[self] = None
        self._gate.pump()
