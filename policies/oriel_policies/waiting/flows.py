"""Keeps the waiting tickets of each tenant in order, and finds the ticket that expires next. `queue` has the rules.

A flow keeps its tickets by `Ticket.order`. For almost all tickets that is the deadline, so the head of the flow has its
earliest deadline; only a flow that holds other tickets too has a heap of deadlines. `Expiry` has an entry per flow, not
per ticket: in a long queue nothing is sorted twice, and a ticket that was popped is in no structure any more.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from math import inf
from typing import Any

from oriel_policies.waiting.backlog import Backlog
from oriel_policies.waiting.shares import Holding

_BEHIND = 1e9  # seconds: later than any deadline


class Ticket(Holding):
    """One waiting call, which holds a place in its queue; `bytes` holds its part of the queue's bytes, if it has some.

    deadline: absolute monotonic seconds.
    cost: estimated charge, in any unit that all tickets share.

    Whoever makes a ticket may set these before it joins a queue:
    order: rank inside the tenant's flow, the deadline by default; it has no effect on expiry.
    rows: counted by `rows_ahead`.
    admitted: it was admitted by other bounds already, so it takes no room here.
    late_s: the time from which on it cannot be answered in time, and goes behind the tickets of its flow that can.
    target_s: the longest time that such a call may take to be in time.
    model: the name by which a permit is counted; "" if it is not. apart: True if the ticket is in `SlaQueue.aside`.
    """

    __slots__ = (
        "_flow",
        "_number",
        "_queued",
        "admitted",
        "bytes",
        "cost",
        "deadline",
        "apart",
        "late_s",
        "model",
        "order",
        "rows",
        "size_bytes",
        "target_s",
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
    ) -> None:
        super().__init__(band, tenant, weight, payload)
        self.bytes: Holding | None = None
        self.late_s = inf
        self.target_s = 0.0
        self.admitted = False
        self.deadline = self.order = deadline
        self.cost = cost
        self.size_bytes = size_bytes
        self.rows = rows
        self.model = ""
        self.apart = False
        self._queued = False
        self._number = 0  # order of arrival in its queue
        self._flow: Flow | None = None

    def go_last(self) -> None:
        """Go behind all others of the flow, also the late ones, in the order of the deadlines of those that do so."""
        self.late_s = inf
        self.order = 2.0 * _BEHIND + self.deadline


class _Line:
    """The tickets of a flow by (`Ticket.order`, arrival), with lazy removal.

    Nearly all of them arrive in that order already, since a tenant's calls have the same time each. They are kept in a
    list, where one that comes or goes moves no other. Only those that arrive out of order are sorted, in a heap.
    """

    def __init__(self) -> None:
        self.line: deque[Ticket] = deque()
        self.sorted: list[tuple[float, int, Ticket]] = []
        self._dead = 0

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets that wait, in no order."""
        return (ticket for ticket in chain(self.line, (entry[2] for entry in self.sorted)) if ticket._queued)

    def push(self, ticket: Ticket) -> None:
        line = self.line
        if not line or ticket.order >= line[-1].order:
            line.append(ticket)
        else:
            heappush(self.sorted, (ticket.order, ticket._number, ticket))

    def head(self) -> Ticket | None:
        line, entries = self.line, self.sorted
        while line and not line[0]._queued:
            line.popleft()
            self._dead -= 1
        while entries and not entries[0][2]._queued:
            heappop(entries)
            self._dead -= 1
        if not entries:
            return line[0] if line else None
        order, number, ticket = entries[0]
        if line and (line[0].order, line[0]._number) < (order, number):
            return line[0]
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Remove the ticket that `head` has just returned."""
        line = self.line
        if line and line[0] is ticket:
            line.popleft()
        else:
            heappop(self.sorted)

    def buried(self) -> None:
        """Count a ticket that has left the queue but is still stored here."""
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self.line) + len(self.sorted):
            self.line = deque([ticket for ticket in self.line if ticket._queued])
            self.sorted = [entry for entry in self.sorted if entry[2]._queued]
            heapify(self.sorted)
            self._dead = 0

    def clear(self) -> None:
        self.line.clear()
        self.sorted.clear()
        self._dead = 0


class _Heap:
    """Tickets by deadline, with lazy removal."""

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._entries = [(ticket.deadline, ticket._number, ticket) for ticket in tickets]
        heapify(self._entries)
        self._dead = 0

    def push(self, ticket: Ticket) -> None:
        heappush(self._entries, (ticket.deadline, ticket._number, ticket))

    def head(self) -> Ticket | None:
        entries = self._entries
        while entries:
            ticket = entries[0][2]
            if ticket._queued:
                return ticket
            heappop(entries)
            self._dead -= 1
        return None

    def buried(self) -> None:
        """Count a ticket that has left the queue but is still stored in this heap."""
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[2]._queued]
            heapify(self._entries)
            self._dead = 0


class Flow:
    """One tenant inside one band. key: the key of its entry among the band's active flows, or 0.

    watched: see `Expiry`. waiting: tickets, of which `behind` were found to be late. backlog: only if turns are timed.
    """

    __slots__ = ("_by_deadline", "_tickets", "backlog", "behind", "key", "virtual", "waiting", "watched")

    def __init__(self) -> None:
        self._tickets = _Line()
        self._by_deadline: _Heap | None = None  # None while the order is that of the deadlines
        self.virtual = 0.0
        self.waiting = 0
        self.behind = 0
        self.key = 0
        self.watched: float | None = None
        self.backlog: Backlog | None = None

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets that wait, in no order."""
        return iter(self._tickets)

    def push(self, ticket: Ticket) -> None:
        """Add a ticket. `Ticket._number` is its order of arrival."""
        if self._by_deadline is not None:
            self._by_deadline.push(ticket)
        elif ticket.order != ticket.deadline:
            self._by_deadline = _Heap([*self._tickets, ticket])
        self._tickets.push(ticket)
        self.waiting += 1
        self.behind += ticket.order >= _BEHIND

    def head(self, now: float = 0.0) -> Ticket | None:
        """The next ticket by order; those that are late at `now` have been moved behind the others."""
        tickets = self._tickets
        while (ticket := tickets.head()) is not None and ticket.late_s <= now:
            if self._by_deadline is None:
                self._by_deadline = _Heap(tickets)
            tickets.remove(ticket)
            ticket.late_s = inf
            # The one with most time left goes first: the first to expire may be one that cannot be answered at all.
            ticket.order = 2.0 * _BEHIND - ticket.order
            self.behind += 1
            heappush(tickets.sorted, (ticket.order, ticket._number, ticket))
            if self.backlog is not None:
                self.backlog.late(now, ticket.target_s)
        return ticket

    def earliest(self) -> Ticket | None:
        """The next ticket to expire."""
        return self._tickets.head() if self._by_deadline is None else self._by_deadline.head()

    def take_head(self, ticket: Ticket) -> None:
        """Remove the ticket that `head` has just returned."""
        self._tickets.remove(ticket)
        ticket._queued = False
        if self._by_deadline is not None:
            self._by_deadline.buried()
        self._one_less(ticket)

    def bury(self, ticket: Ticket) -> None:
        """Count out a ticket that has left from behind the head; its `_queued` is False. It is removed later."""
        self._tickets.buried()
        if self._by_deadline is not None:
            self._by_deadline.buried()
        self._one_less(ticket)

    def _one_less(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self.behind -= ticket.order >= _BEHIND
        if not self.waiting:
            self.key = 0
            if self.backlog is not None:
                self.backlog.emptied()
            self._tickets.clear()
            self._by_deadline = None


class Expiry:
    """Flows by the earliest deadline among their tickets.

    A flow that waits has an entry at `Flow.watched`, which is never later than its earliest deadline. A new ticket
    may add an earlier entry; one that leaves changes nothing until the entry surfaces and is corrected. All other
    entries are stale.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Flow]] = []
        self._flows = 0  # watched
        self._sequence = 0

    def watch(self, flow: Flow, deadline: float) -> None:
        """Note a new ticket of `flow` with this deadline."""
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
        """Note that no ticket of `flow` waits any more."""
        flow.watched = None
        self._flows -= 1

    def earliest(self) -> Ticket | None:
        """The next ticket to expire, of all flows."""
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
