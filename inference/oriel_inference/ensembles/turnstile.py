"""How often one step of an ensemble may run at once (`max_inflight_requests`), and who is next."""

from typing import Generic, TypeVar

from oriel_policies.queue import SlaQueue, Ticket

__all__ = ["Turnstile"]

Waiter = TypeVar("Waiter")


class Turnstile(Generic[Waiter]):
    """`limit` turns, each taken by `enter` or handed over by `release`. Who waits is admitted: there is no bound here.

    Whoever has a turn gives it back with `release` exactly once.
    """

    __slots__ = ("_free", "_waiting")

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting = SlaQueue(max_items=0, max_bytes=0)

    def enter(self) -> bool:
        """Take a turn if one is free."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def wait(self, waiter: Waiter, like: Ticket) -> Ticket:
        """Wait for a turn, in the order of the queue. like: the waiting call's own ticket."""
        ticket = Ticket(
            band=like.band,
            tenant=like.tenant,
            deadline=like.deadline,
            cost=like.cost,
            weight=like.weight,
            payload=waiter,
            order=like.order,
            admitted=True,
        )
        self._waiting.push(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Wait no more."""
        self._waiting.remove(ticket)
        ticket.payload = None

    def release(self) -> Waiter | None:
        """Give a turn back: to the waiter returned, who has it now, or for the next to come."""
        ticket = self._waiting.pop()
        if ticket is None:
            self._free += 1
            return None
        waiter: Waiter = ticket.payload
        ticket.payload = None
        return waiter
