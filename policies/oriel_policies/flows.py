"""One tenant's waiting tickets, and which of all that wait is due next. Parts of `queue`, which has the rules.

A flow keeps its tickets by `Ticket.order`. That is the deadline for almost all of them, so the earliest deadline of a
flow is its head's; only a flow that holds others too has a second heap. `Expiry` has an entry per flow and not per
ticket: in a long queue nothing is sorted twice, and a ticket that was popped is nowhere any more.
"""

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any

from oriel_policies.backlog import Backlog

__all__ = ["Expiry", "Flow", "Ticket"]

_BEHIND = 1e9  # seconds: later than any deadline, and the order among those that are late stays


class Ticket:
    """One waiting call.

    band: 0 is the most urgent. deadline: absolute monotonic seconds. cost: estimated charge, any one unit;
    weight: the tenant's share inside its band. order: rank inside the tenant's flow, the deadline by default; it
    never moves an expiry. rows: counted by `rows_ahead`. admitted: other bounds than this queue's let it in, see above.
    late_s: from then on it cannot be in time any more and goes behind those of its flow that can; target_s: how long
    a call like it may take to be in time. payload: the caller's own, never looked at.
    """

    __slots__ = (
        "_flow",
        "_queued",
        "admitted",
        "band",
        "cost",
        "deadline",
        "late_s",
        "order",
        "payload",
        "rows",
        "size_bytes",
        "target_s",
        "tenant",
        "weight",
    )

    def __init__(
        self,
        *,
        band: int,
        tenant: str,
        deadline: float,
        cost: float = 1.0,
        weight: float = 1.0,
        size_bytes: int = 0,
        rows: int = 1,
        payload: Any = None,
        order: float | None = None,
        admitted: bool = False,
        late_s: float = inf,
        target_s: float = 0.0,
    ) -> None:
        self.band = band
        self.late_s = late_s
        self.target_s = target_s
        self.admitted = admitted
        self.tenant = tenant
        self.deadline = deadline
        self.order = deadline if order is None else order
        self.cost = cost
        self.weight = weight
        self.size_bytes = size_bytes
        self.rows = rows
        self.payload = payload
        self._queued = False
        self._flow: Flow | None = None

    def __repr__(self) -> str:
        return f"<Ticket band={self.band} tenant={self.tenant} deadline={self.deadline:.3f}>"


class _Heap:
    """Tickets by key, with lazy removal."""

    __slots__ = ("_dead", "entries")

    def __init__(self, entries: list[tuple[float, int, Ticket]]) -> None:
        heapify(entries)
        self.entries = entries
        self._dead = 0

    def head(self) -> Ticket | None:
        entries = self.entries
        while entries:
            ticket = entries[0][2]
            if ticket._queued:
                return ticket
            heappop(entries)
            self._dead -= 1
        return None

    def buried(self) -> None:
        """One more ticket of this heap has left without being taken out."""
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self.entries):
            self.entries = [entry for entry in self.entries if entry[2]._queued]
            heapify(self.entries)
            self._dead = 0

    def clear(self) -> None:
        self.entries.clear()
        self._dead = 0


class Flow:
    """One tenant inside one band. key: its live entry among the band's active flows. watched: see `Expiry`.

    waiting: tickets, of which `behind` were found to be late. backlog: only if its turns are timed.
    """

    __slots__ = ("_by_deadline", "_tickets", "backlog", "behind", "key", "virtual", "waiting", "watched")

    def __init__(self) -> None:
        self._tickets = _Heap([])
        self._by_deadline = self._tickets
        self.virtual = 0.0
        self.waiting = 0
        self.behind = 0
        self.key: tuple[float, int] | None = None
        self.watched: float | None = None
        self.backlog: Backlog | None = None

    def push(self, ticket: Ticket, sequence: int) -> None:
        """One more that waits."""
        tickets, timed = self._tickets, self._by_deadline
        order, deadline = ticket.order, ticket.deadline
        if timed is not tickets:
            heappush(timed.entries, (deadline, sequence, ticket))
        elif order != deadline:
            known = [(each.deadline, number, each) for _, number, each in tickets.entries if each._queued]
            self._by_deadline = _Heap([*known, (deadline, sequence, ticket)])
        heappush(tickets.entries, (order, sequence, ticket))
        self.waiting += 1

    def head(self, now: float = 0.0) -> Ticket | None:
        """The next by order; what is late at `now` has gone behind."""
        while (ticket := self._tickets.head()) is not None and ticket.late_s <= now:
            ticket.late_s = inf
            self.behind += 1
            tickets = self._tickets
            if self._by_deadline is tickets:
                self._by_deadline = _Heap([each for each in tickets.entries if each[2]._queued])
            ticket.order += _BEHIND
            heapreplace(tickets.entries, (ticket.order, tickets.entries[0][1], ticket))
            if self.backlog is not None:
                self.backlog.late(now, ticket.target_s)
        return ticket

    def earliest(self) -> Ticket | None:
        """The next to expire."""
        return self._by_deadline.head()

    def take_head(self) -> None:
        """What `head` has just shown leaves."""
        tickets = self._tickets
        ticket = heappop(tickets.entries)[2]
        ticket._queued = False
        if self._by_deadline is not tickets:
            self._by_deadline.buried()
        self._one_less(ticket)

    def bury(self, ticket: Ticket) -> None:
        """Any other has left: its `_queued` is false."""
        self._tickets.buried()
        if self._by_deadline is not self._tickets:
            self._by_deadline.buried()
        self._one_less(ticket)

    def _one_less(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self.behind -= ticket.order >= _BEHIND
        if not self.waiting:
            self.key = None
            if self.backlog is not None:
                self.backlog.emptied()
            self._tickets.clear()
            self._by_deadline = self._tickets


class Expiry:
    """Flows by the earliest deadline among their tickets.

    A flow that waits has an entry at `Flow.watched`, which is never later than its earliest deadline: what comes adds
    an earlier entry, what leaves changes nothing until the entry surfaces and is put right. All others are stale.
    """

    __slots__ = ("_entries", "_flows", "_sequence")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Flow]] = []
        self._flows = 0  # watched
        self._sequence = 0

    def watch(self, flow: Flow, deadline: float) -> None:
        """A ticket of `deadline` has come to `flow`."""
        watched = flow.watched
        if watched is None:
            self._flows += 1
        elif deadline >= watched:
            return
        flow.watched = deadline
        self._sequence += 1
        entries = self._entries
        heappush(entries, (deadline, self._sequence, flow))
        if len(entries) > 64 and len(entries) > 4 * self._flows:
            valid = {entry[2]: entry for entry in entries if entry[0] == entry[2].watched}
            self._entries = list(valid.values())
            heapify(self._entries)

    def forget(self, flow: Flow) -> None:
        """Nothing of `flow` waits any more."""
        flow.watched = None
        self._flows -= 1

    def earliest(self) -> Ticket | None:
        """The next to expire of all."""
        entries = self._entries
        while entries:
            deadline, _, flow = entries[0]
            if deadline != flow.watched:
                heappop(entries)
                continue
            ticket = flow.earliest()
            assert ticket is not None
            if ticket.deadline == deadline:
                return ticket
            flow.watched = ticket.deadline
            self._sequence += 1
            heapreplace(entries, (ticket.deadline, self._sequence, flow))
        return None
