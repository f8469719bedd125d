"""Limits how often one step of an ensemble runs at once (`max_inflight_requests`) and orders those that wait."""

from typing import Generic, TypeVar

from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue

Waiter = TypeVar("Waiter")


class StepLimit(Generic[Waiter]):
    """Has `limit` places, each taken by `enter` or passed on by `release`. The number of waiting calls is not bounded
    here.

    Every place has to be freed with `release` exactly once.
    """

    __slots__ = ("_free", "_waiting")

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting = SlaQueue(max_items=0, max_bytes=0)

    def __len__(self) -> int:
        """Return how many calls wait."""
        return len(self._waiting)

    def enter(self) -> bool:
        """Take a place if one is free."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def wait(self, waiter: Waiter, like: Ticket) -> Ticket:
        """Wait for a place, in the order of the queue. like: the ticket of the waiting call."""
        ticket = Ticket(
            band=like.band,
            tenant=like.tenant,
            deadline=like.deadline,
            cost=like.cost,
            weight=like.weight,
            payload=waiter,
        )
        ticket.order, ticket.admitted = like.order, True
        self._waiting.push(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Stop waiting."""
        self._waiting.remove(ticket)
        ticket.payload = None

    def release(self) -> Waiter | None:
        """Free a place: return the waiting call that has it now, or None if it is free for the next one."""
        ticket = self._waiting.pop()
        if ticket is None:
            self._free += 1
            return None
        waiter: Waiter = ticket.payload
        ticket.payload = None
        return waiter
