"""A further message of a gRPC stream. If the stream's permit was lent, it queues for one like any other call."""

import asyncio
from time import monotonic

from oriel_gateway import loan as lending
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.loan import Loan
from oriel_gateway.pools import PoolGate
from oriel_gateway.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.queue import Ticket

__all__ = ["go_on"]


class _Again:
    """It waits; see `pools.Waiter`."""

    def __init__(self, loan: Loan, gate: PoolGate) -> None:
        self._loan = loan
        self._gate = gate
        self.tenant = loan.tenant
        self.queued_s = monotonic()
        self.ticket: Ticket | None = None
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def admitted(self) -> None:
        if self._loan.lent:
            ticket, self.ticket = self.ticket, None
            self._loan.regained(ticket)
        else:  # an answer has just taken the permit back
            self._gate.admission.inflight -= 1

    def displaced(self) -> None:
        if not self.answer.done():
            retry_after_s = self._gate.admission.retry_after_s()
            text = "a more urgent call took the place in the queue"
            self.answer.set_exception(Refused(Outcome.DISPLACED, text, retry_after_s=retry_after_s))


async def go_on(loan: Loan, gate: PoolGate, tenant: Tenant, target: Target, size_bytes: int) -> None:
    """The stream has more work, a message of this size. Raises Refused; cancelled, it waits no more."""
    exchange, queue = loan.exchange, gate.admission.queue
    assert exchange is not None
    if queue.items and not loan.lent:
        if not exchange.unanswered:
            loan.turn()
        elif exchange.ends and _contended(loan, gate):
            await loan.rest()
    if loan.free and not gate.admission.enter():
        await _turn(loan, gate, tenant, target, size_bytes)
    elif loan.free:
        loan.regained()


def _contended(loan: Loan, gate: PoolGate) -> bool:
    """Whether a stream with messages on their way has to let others go first: those of its tier and more urgent ones;
    less urgent ones after it has had its permit for a while, or such streams would leave them nothing."""
    if gate.admission.queue.rows_ahead(loan.tenant.tier.band):
        return True
    return monotonic() - loan.turn_s >= lending.LENT_AFTER_S


async def _turn(loan: Loan, gate: PoolGate, tenant: Tenant, target: Target, size_bytes: int) -> None:
    if not gate.hold(size_bytes, urgent=False):
        retry_after_s = gate.admission.retry_after_s()
        raise Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=retry_after_s)
    try:
        again = _Again(loan, gate)
        give_up_s = tenant.tier.give_up_s
        deadline = again.queued_s + give_up_s
        # It has no target, which is for the first answer: beside calls that have one it goes by its deadline, so it
        # comes before the younger of them in time, and is not passed over as one that is late.
        ticket = gate.wait(again, tenant, target, received_s=deadline, deadline=deadline, size_bytes=size_bytes)
        again.ticket = ticket
        loan.queues(again.answer)
        gate.pump()
        try:
            async with asyncio.timeout(give_up_s):
                await again.answer
        except TimeoutError:
            raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for a permit") from None
        finally:
            gate.forget(ticket)
            if again.ticket is not None:  # it was not by this one that it got a permit
                gate.admission.queue.settle(ticket, 0.0)
            ticket.payload = None
    finally:
        gate.release(size_bytes)
