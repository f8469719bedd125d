"""The table of sequences: which of them hold a slot, which wait for one, and which step of each is next. Pure.

A sequence begins with a step that has START. It waits for a slot, in the order of `SlaQueue` by band, tenant and
deadline of that step, and holds the slot until its END has run, until it is lost, or until no step has come for
`idle_s`. One step of a sequence runs at a time; the others wait in the order in which they came. A step belongs to the
latest sequence of its tenant and id. A START while that one is open closes it: its steps still run, and then the new
sequence waits for a slot like any other.

A step that was accepted and is not executed is lost, and its sequence with it: what follows would be computed on a
state that lacks a step. The reason is remembered for a while, for the errors of later steps.

The bytes of all states are one budget by the rule of `oriel_policies.waiting.shares`: a tenant that needs room
displaces the state of one that has most, whose sequence is lost then.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from enum import Enum
from heapq import heappop, heappush
from typing import Generic, TypeVar

from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_policies.waiting.shares import Holding, Shares
from oriel_wire.v2.messages import Array

MAX_REMEMBERED = 4096
REMEMBER_S = 300.0

Id = int | str
Key = tuple[str, Id]  # tenant and id
S = TypeVar("S")  # a step


class End(Enum):
    """The ways in which a sequence ends, as the metrics show them."""

    END = "end"
    RESTARTED = "restarted"
    IDLE = "idle"
    EXPIRED = "expired"
    LEFT = "left"
    REFUSED = "refused"
    FAILED = "failed"
    DIED = "died"
    STOPPED = "stopped"


class OpenSequence(Generic[S]):
    """A sequence that has not ended.

    instance, row: its slot; -1 without one.
    steps: the steps that wait. running: the step that was taken and has not ended.
    state: the tensors that are kept for its next step. room: their part of the budget of bytes.
    ends: the way in which it ends when its steps have run; None while further steps may come.
    before, following: the sequences of the same key around it; it waits in line when `before` has ended.
    """

    __slots__ = ("before", "ends", "following", "instance", "key", "room", "row", "running", "state", "steps", "ticket")

    def __init__(self, key: Key, like: Ticket) -> None:
        self.key = key
        self.room = Holding(like.band, like.tenant, like.weight, self)
        self.instance = self.row = -1
        self.steps: deque[S] = deque()
        self.running: S | None = None
        self.state: Mapping[str, Array] = {}
        self.ends: End | None = None
        self.before: OpenSequence[S] | None = None
        self.following: OpenSequence[S] | None = None
        self.ticket: Ticket | None = None


class SequenceTable(Generic[S]):
    """The sequences of one model.

    slots: slots of each instance. Free ones with low rows are taken first, so that instances fill evenly.
    ended: counter of the sequences that have ended, by way.
    exclusive: True if an id belongs to one tenant at a time.
    states: the budget of bytes of all states. holding: the number of sequences that hold a slot.
    """

    def __init__(
        self,
        *,
        instances: int,
        slots: int,
        idle_s: float,
        max_bytes: int,
        ended: Counter[str],
        exclusive: bool = False,
    ) -> None:
        self._idle_s = idle_s
        self._ended = ended
        self._users: dict[Id, str] | None = {} if exclusive else None
        self._free = [(row, instance) for row in range(slots) for instance in range(instances)]  # a heap
        self._latest: dict[Key, OpenSequence[S]] = {}
        self._line = SlaQueue(max_items=0, max_bytes=0)
        self._idle: dict[OpenSequence[S], float] = {}  # in the order in which they become too old
        self._lost: OrderedDict[Key, tuple[End, float]] = OrderedDict()
        self.states = Shares(max_bytes)
        self.holding = 0

    @property
    def waiting(self) -> int:
        """Return the number of sequences that wait for a slot."""
        return len(self._line)

    def find(self, key: Key) -> OpenSequence[S] | None:
        """Return the latest sequence of a key, if it has not ended."""
        return self._latest.get(key)

    def sequences(self) -> list[OpenSequence[S]]:
        """Return all sequences that have not ended."""
        found = []
        for latest in self._latest.values():
            each: OpenSequence[S] | None = latest
            while each is not None:
                found.append(each)
                each = each.before
        return found

    def is_foreign(self, key: Key) -> bool:
        """Return whether another tenant uses the id, where that is exclusive."""
        return self._users is not None and self._users.get(key[1], key[0]) != key[0]

    def lost(self, key: Key, now: float) -> End | None:
        """Return how the latest sequence of a key was lost; None if it was not, or that is too long ago."""
        how, at_s = self._lost.get(key, (None, now))
        return how if now - at_s < REMEMBER_S else None

    def join(self, key: Key, step: S, like: Ticket, *, start: bool, end: bool) -> OpenSequence[S] | None:
        """Add a step to its sequence; None if it has no START and no sequence of its key is open.

        like: its ticket, by whose rank a new sequence waits for a slot.
        """
        found = self._latest.get(key)
        if start:
            before, found = found, OpenSequence(key, like)
            self._latest[key] = found
            if self._users is not None:
                self._users[key[1]] = key[0]
            self._lost.pop(key, None)
            found.ticket = Ticket(band=like.band, tenant=like.tenant, deadline=like.deadline, payload=found)
            found.ticket.admitted = True  # its step takes the room
            if before is not None:
                before.following, found.before = found, before
                before.ends = before.ends or End.RESTARTED
                self._settle(before)
            else:
                self._line.push(found.ticket)
        elif found is None or found.ends is not None:
            return None
        found.steps.append(step)
        self._idle.pop(found, None)
        if end:
            found.ends = End.END
        return found

    def place(self) -> OpenSequence[S] | None:
        """Give a free slot to the sequence whose turn it is, and return that one; None if there is nothing to do."""
        if not self._free or (ticket := self._line.pop()) is None:
            return None
        found: OpenSequence[S] = ticket.payload
        ticket.payload = found.ticket = None
        found.row, found.instance = heappop(self._free)
        self.holding += 1
        return found

    def take(self, sequence: OpenSequence[S]) -> S | None:
        """Take the next step of a sequence, if it can run now."""
        if sequence.row < 0 or sequence.running is not None or not sequence.steps:
            return None
        sequence.running = sequence.steps.popleft()
        return sequence.running

    def keep(self, sequence: OpenSequence[S], state: Mapping[str, Array]) -> list[OpenSequence[S]] | None:
        """Keep the state that the running step has left. Return the sequences whose states were displaced for it; None
        if there is no room.
        """
        room = sequence.room
        grown = sum([_size_bytes(array) for array in state.values()]) - (room.units if room.held else 0)
        if grown < 0:
            self.states.release(room, -grown)
        displaced = self.states.acquire(room, grown)
        if displaced is None:
            return None
        sequence.state = state
        return [each.payload for each in displaced]

    def finished(self, sequence: OpenSequence[S], now: float) -> None:
        """End the running step."""
        sequence.running = None
        if not sequence.steps and sequence.ends is None:
            self._idle[sequence] = now + self._idle_s
        self._settle(sequence)

    def lose(self, sequence: OpenSequence[S], how: End, now: float) -> list[S]:
        """End a sequence because a step was lost; return its waiting steps. A running step ends with `finished`, and
        holds the slot until then.
        """
        steps, sequence.ends = list(sequence.steps), how
        sequence.steps.clear()
        if self._latest.get(sequence.key) is sequence:
            self._lost[sequence.key] = how, now
            self._lost.move_to_end(sequence.key)
            while len(self._lost) > MAX_REMEMBERED:
                self._lost.popitem(last=False)
        self._settle(sequence)
        return steps

    def next_idle_s(self) -> float | None:
        """Return when `expire` has to be called next; None while no sequence is idle."""
        return next(iter(self._idle.values()), None)

    def expire(self, now: float) -> None:
        """End the sequences that have been idle for too long."""
        while self._idle and self._idle[first := next(iter(self._idle))] <= now:
            self.lose(first, End.IDLE, now)

    def _settle(self, sequence: OpenSequence[S]) -> None:
        """Remove a sequence if it ends and nothing of it is left."""
        if sequence.ends is None or sequence.steps or sequence.running is not None:
            return
        self._ended[sequence.ends.value] += 1
        self._idle.pop(sequence, None)
        self.states.release(sequence.room)
        sequence.state, sequence.room.payload = {}, None
        if sequence.row >= 0:
            heappush(self._free, (sequence.row, sequence.instance))
            self.holding -= 1
            sequence.row = -1
        elif sequence.ticket is not None:
            self._line.remove(sequence.ticket)
            sequence.ticket.payload = None
            sequence.ticket = None
        before, following = sequence.before, sequence.following
        if before is not None:
            before.following = following
        if following is not None:
            following.before = before
            if before is None and following.ticket is not None:
                self._line.push(following.ticket)
        elif before is not None:
            self._latest[sequence.key] = before
        else:
            del self._latest[sequence.key]
            if self._users is not None:
                del self._users[sequence.key[1]]
        sequence.before = sequence.following = None


def _size_bytes(array: Array) -> int:
    return array.nbytes + sum([len(text) for text in array.flat]) if array.dtype.kind == "O" else array.nbytes
