"""A gRPC stream whose permit was lent goes on: it queues for one like any other call."""

import asyncio
from time import monotonic

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.loan import Loan
from oriel_gateway.pools import PoolGate
from oriel_gateway.targets import Target
from oriel_policies.documents import Tenant

__all__ = ["go_on"]


class _Again:
    """It waits."""

    def __init__(self, loan: Loan, gate: PoolGate) -> None:
        self._loan = loan
        self._gate = gate
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def admitted(self) -> None:
        if self._loan.lent:
            self._loan.regained()
        else:  # an answer has just taken the permit back
            self._gate.admission.inflight -= 1

    def displaced(self) -> None:
        if not self.answer.done():
            retry_after_s = self._gate.admission.retry_after_s()
            text = "a more urgent call took the place in the queue"
            self.answer.set_exception(Refused(Outcome.DISPLACED, text, retry_after_s=retry_after_s))


async def go_on(loan: Loan, gate: PoolGate, tenant: Tenant, target: Target, size_bytes: int) -> None:
    """The stream has more work. Raises Refused; cancelled, it waits no more."""
    if loan.lent and not gate.admission.enter():
        now, give_up_s = monotonic(), tenant.tier.give_up_s
        again = _Again(loan, gate)
        ticket = gate.wait(again, tenant, target, received_s=now, deadline=now + give_up_s, size_bytes=size_bytes)
        loan.queues(again.answer)
        gate.pump()
        try:
            async with asyncio.timeout(give_up_s):
                await again.answer
        except TimeoutError:
            raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for a permit") from None
        finally:
            gate.forget(ticket)
            gate.admission.queue.settle(ticket, 0.0)  # the stream is charged at its end
            ticket.payload = None
    elif loan.lent:
        loan.regained()
    loan.asked()
