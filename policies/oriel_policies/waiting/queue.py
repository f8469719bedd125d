"""The SLA queue: the order of waiting calls, shared by the gateway's admission and the batchers.

Rules, in this order:

1. Bands are strict: the lowest band number that waits goes first.
2. Every band that is passed over earns `floor_share` of a turn per turn, and goes when it has earned a whole one.
   So the lowest band gets at least that share of the turns while it waits, and so does every band in between.
3. Inside a band tenants share by charge: start-time fair queueing (Goyal, Vin, Cheng 1996). Each tenant's flow has a
   virtual time that grows by cost / weight with each turn; the smallest goes. A flow that comes back starts no
   earlier than the band's own virtual time, so idling earns nothing; what it owes it still owes until the band
   runs empty, which ends the busy period and all debts.
4. Inside a flow the earliest deadline goes first (or the lowest `Ticket.order`, where a caller ranks its own calls);
   equal ones in order of arrival. A ticket that cannot be in time any more (`Ticket.late_s`, judged when its turn
   comes) goes behind those that can: under overload its turn is better spent on an answer in time. Among late tickets
   the latest deadline goes first, because the one with more time left is more likely to be answered at all. Tickets of
   calls that were held for a first server go behind these (`Ticket.go_last`): they have the most time left.

Bounds: `max_items` and `max_bytes`, both shared by the rule of `oriel_policies.waiting.shares`: when full, an arriving
ticket displaces the newest ones of the least urgent bands, or of the tenant of its own band that has most above its
share; otherwise it is refused and nothing changes. Each band keeps `floor_share` of both from the others. Tickets whose
model may have no permit now are kept apart (`aside`) by `set_aside`, in a queue of the same order for each model, but
within the same bounds; `bring_back` returns one of them. A ticket that was `admitted` elsewhere takes no room, is never
refused for it and never displaced.

Ownership: one writer, the loop that owns the queue. A ticket is in exactly one state; each queued ticket leaves
exactly once, by `pop`, `remove`, `expire` or displacement. `pop` removes a ticket from all structures at once. A ticket
that leaves otherwise stays in its flow's line until it comes to the head, or until such entries are the majority and
the line is rebuilt. So every operation is O(log n) amortised.
"""

from bisect import insort
from heapq import heapify, heappop, heappush, heapreplace

from oriel_policies.waiting.backlog import Backlog
from oriel_policies.waiting.flows import Expiry, Flow, Ticket
from oriel_policies.waiting.shares import FLOOR_SHARE, Holding, Shares

_EPSILON = 1e-9
_IDLE_FLOWS = 1024


class _Band:
    def __init__(self, number: int) -> None:
        self.number = number
        self.flows: dict[str, Flow] = {}
        self.active: list[tuple[float, int, Flow]] = []  # never later than the flow's virtual time; see `Flow.key`
        self.entered = 0
        self.items = 0
        self.rows = 0
        self.virtual = 0.0
        self.finish = 0.0  # the largest virtual time any flow has reached
        self.credit = 0.0

    def next_flow(self) -> Flow:
        """The flow whose turn it is; its entry is then the first one and up to date."""
        active = self.active
        while True:
            virtual, key, flow = active[0]
            if flow.key != key:
                heappop(active)
            elif flow.virtual > virtual:  # charged since: one correction covers several charges
                self.entered += 1
                flow.key = self.entered
                heapreplace(active, (flow.virtual, flow.key, flow))
            else:
                return flow

    def enter(self, flow: Flow) -> None:
        """Add a new entry for a flow that waits again, or owes less than its entry says. Older entries become stale."""
        self.entered += 1
        flow.key = self.entered
        active = self.active
        heappush(active, (flow.virtual, flow.key, flow))
        if len(active) > 64 and len(active) > 4 * len(self.flows):
            self.active = [entry for entry in active if entry[2].key == entry[1]]
            heapify(self.active)

    def forget_idle(self) -> None:
        """Drop flows that neither wait nor owe."""
        self.flows = {name: f for name, f in self.flows.items() if f.waiting or f.virtual > self.virtual}


def _number(ticket: Ticket) -> int:
    return ticket._number


class SlaQueue:
    """Bounded queue of tickets in the order of this module's rules.

    items: tickets that are not set aside. aside: the queues of those that are, by model.
    slots, bytes: the budgets of `max_items` and `max_bytes` over all bands, by `Ticket.size_bytes`.
    floor_share: turns per turn earned by each band that is passed over, and its part of both bounds, 0 <= share < 1.
    """

    def __init__(self, *, max_items: int, max_bytes: int, floor_share: float = FLOOR_SHARE) -> None:
        self.slots = Shares(max_items, floor_share=floor_share)
        self.bytes = Shares(max_bytes, floor_share=floor_share)
        self.floor_share = floor_share
        self.items = 0
        self.aside: dict[str, SlaQueue] = {}
        self._sequence = 0
        self._bands: dict[int, _Band] = {}
        self._waiting: list[int] = []  # numbers of the bands that hold tickets, most urgent first
        self._expiry = Expiry()

    def __len__(self) -> int:
        return self.items + sum([apart.items for apart in self.aside.values()])

    def _all(self, number: int) -> list[_Band]:
        """The band of this number, and those of the tickets that are held."""
        return [queue._bands[number] for queue in (self, *self.aside.values()) if number in queue._bands]

    def waiting(self, band: int) -> list[Ticket]:
        """The tickets of `band` that take room, by arrival. O(n log n)."""
        flows = [flow for each in self._all(band) for flow in each.flows.values()]
        return sorted([ticket for flow in flows for ticket in flow if not ticket.admitted], key=_number)

    @property
    def size_bytes(self) -> int:
        """The bytes of the tickets that take room."""
        return self.bytes.held

    def depth(self, band: int) -> int:
        """Tickets that wait in `band`."""
        return sum([each.items for each in self._all(band)])

    def depths(self) -> list[tuple[int, int, int]]:
        """(band, tickets, rows) of every band that has ever held one, most urgent first."""
        bands = {number: self._all(number) for number in sorted(self._bands)}
        return [(n, sum([each.items for each in of]), sum([each.rows for each in of])) for n, of in bands.items()]

    def rows_ahead(self, band: int) -> int:
        """Rows that wait in `band` and in more urgent ones, and are not held."""
        return sum([self._bands[number].rows for number in self._waiting if number <= band])

    def backlog(self, band: int, tenant: str, model: str = "") -> tuple[Backlog | None, int, int]:
        """The measured turns of this tenant in `band`, the number of its tickets that wait there, and how many of them
        were found to be late; only those of `model` if some of its tickets are held."""
        found = self.aside.get(model, self)._bands.get(band)
        flow = found.flows.get(tenant) if found else None
        return (flow.backlog, flow.waiting, flow.behind) if flow else (None, 0, 0)

    def push(self, ticket: Ticket) -> list[Ticket] | None:
        """Queue `ticket`. Returns the tickets that it displaced, which have left the queue.

        None: the queue is full, and nothing has changed. A ticket object is queued once in its life.
        """
        displaced: list[Ticket] = []
        if not ticket.admitted:
            if ticket.size_bytes:
                if self.slots.held >= self.slots.bound and not self.slots.fits(ticket, 1):
                    return None
                holding = Holding(ticket.band, ticket.tenant, ticket.weight, ticket)
                losers = self.bytes.acquire(holding, ticket.size_bytes)
                if losers is None:
                    return None
                ticket.bytes = holding
                displaced += [each.payload for each in losers]
                for each in displaced:
                    self.remove(each)
            losers = self.slots.acquire(ticket, 1)
            if losers is None:
                self._free(ticket)
                return None
            for loser in losers:
                assert isinstance(loser, Ticket)
                self.remove(loser)
                displaced.append(loser)
        self._sequence += 1
        ticket._number = self._sequence
        self._insert(ticket)
        return displaced

    def _insert(self, ticket: Ticket) -> None:
        band = self._bands.get(ticket.band)
        if band is None:
            band = self._bands[ticket.band] = _Band(ticket.band)
        if not band.items:
            insort(self._waiting, ticket.band)
            band.credit = 0.0
        flow = band.flows.get(ticket.tenant)
        if flow is None:
            if len(band.flows) > _IDLE_FLOWS + 2 * len(band.active):
                band.forget_idle()
            flow = band.flows[ticket.tenant] = Flow()
        ticket._queued = True
        ticket._flow = flow
        flow.push(ticket)
        self._expiry.watch(flow, ticket.deadline)
        band.items += 1
        band.rows += ticket.rows
        self.items += 1
        if flow.waiting == 1:
            flow.virtual = max(flow.virtual, band.virtual)
            band.enter(flow)

    def set_aside(self, now: float = 0.0) -> None:
        """Set the ticket aside that `pop` would return now."""
        band = self._choose()
        assert band is not None
        flow = band.next_flow()
        ticket = flow.head(now)
        assert ticket is not None
        flow.take_head(ticket)
        self._left(ticket, flow, band)
        apart = self.aside.get(ticket.model)
        if apart is None:
            apart = self.aside[ticket.model] = SlaQueue(max_items=0, max_bytes=0, floor_share=self.floor_share)
        ticket.apart = True
        apart._insert(ticket)

    def bring_back(self, model: str, now: float = 0.0) -> None:
        """Return the next of the tickets of this model that are set aside to the others."""
        apart = self.aside[model]
        band = apart._choose()
        assert band is not None
        ticket = apart._take(band, band.next_flow(), now)
        ticket.apart = False
        if not apart.items:
            del self.aside[model]
        self._insert(ticket)

    def peek(self, now: float = 0.0) -> Ticket | None:
        """The ticket that `pop` would return now."""
        band = self._choose()
        return band.next_flow().head(now) if band else None

    def pop(self, now: float = 0.0) -> Ticket | None:
        """Take the ticket whose turn it is and charge its tenant the estimated cost.

        now: monotonic seconds, by which tickets are late and turns are timed; 0.0: neither.
        """
        band = self._choose()
        return self._free(self._take(band, band.next_flow(), now)) if band is not None else None

    def _take(self, band: _Band, flow: Flow, now: float) -> Ticket:
        ticket = flow.head(now)
        assert ticket is not None
        top = self._waiting[0]
        for number in self._waiting:
            if number != top:
                passed = self._bands[number]
                passed.credit = min(passed.credit + self.floor_share, 1.0)
        if band.number != top:
            band.credit = max(0.0, band.credit - 1.0)
        band.virtual = max(band.virtual, flow.virtual)
        flow.virtual += ticket.cost / ticket.weight
        band.finish = max(band.finish, flow.virtual)
        flow.take_head(ticket)
        if now:
            if flow.backlog is None:
                flow.backlog = Backlog()
            flow.backlog.turn(now, flow.waiting > 0)
        self._left(ticket, flow, band)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Remove the ticket of a caller that left. False if it does not wait here."""
        if not ticket._queued:
            return False
        queue = self.aside[ticket.model] if ticket.apart else self
        queue._leave(ticket)
        if queue is not self and not queue.items:
            del self.aside[ticket.model]
        self._free(ticket)
        return True

    def expire(self, now: float) -> list[Ticket]:
        """Remove and return the tickets whose deadline is at or before `now`, earliest first."""
        expired: list[Ticket] = []
        while (ticket := self._earliest()) is not None and ticket.deadline <= now:
            self.remove(ticket)
            expired.append(ticket)
        return expired

    def next_deadline(self) -> float | None:
        """Return when `expire` has to be called next, in absolute seconds; None when nothing waits."""
        ticket = self._earliest()
        return ticket.deadline if ticket else None

    def _earliest(self) -> Ticket | None:
        first = self._expiry.earliest()
        for apart in self.aside.values():
            other = apart._expiry.earliest()
            if other is not None and (first is None or other.deadline < first.deadline):
                first = other
        return first

    def settle(self, ticket: Ticket, actual_cost: float) -> None:
        """Correct the charge of a popped ticket from its estimate to `actual_cost`. Call it at most once."""
        flow = ticket._flow
        if flow is None or ticket._queued:
            return
        ticket._flow = None
        before = flow.virtual
        flow.virtual = max(0.0, before + (actual_cost - ticket.cost) / ticket.weight)
        if flow.waiting and flow.virtual < before:
            self._bands[ticket.band].enter(flow)

    def _choose(self) -> _Band | None:
        waiting = self._waiting
        if not waiting:
            return None
        if len(waiting) > 1:
            for number in reversed(waiting[1:]):
                band = self._bands[number]
                if band.credit + self.floor_share >= 1.0 - _EPSILON:
                    return band
        return self._bands[waiting[0]]

    def _leave(self, ticket: Ticket) -> None:
        flow = ticket._flow
        assert flow is not None
        ticket._queued = False
        flow.bury(ticket)
        self._left(ticket, flow, self._bands[ticket.band])

    def _left(self, ticket: Ticket, flow: Flow, band: _Band) -> None:
        if not flow.waiting:
            self._expiry.forget(flow)
        band.items -= 1
        band.rows -= ticket.rows
        self.items -= 1
        if not band.items:
            self._waiting.remove(band.number)
            band.active.clear()
            band.virtual = band.finish

    def _free(self, ticket: Ticket) -> Ticket:
        """Release the room of a ticket that has left."""
        if not ticket.admitted:
            self.slots.release(ticket)
            if ticket.bytes is not None:
                self.bytes.release(ticket.bytes)
                ticket.bytes = None  # breaks the cycle of references between the two
        return ticket
