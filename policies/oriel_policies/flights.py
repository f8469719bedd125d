"""Equal calls at the same time are made once (single-flight).

    join     the first with a key founds a flight, whoever comes while it is open becomes a member
    leave    a member gives up; when it was the last one, the work has no taker any more and the flight is closed
    land     the work is done or failed: the flight is closed and its members come out, oldest first

The work belongs to the flight, not to its founder: a founder that leaves fails nobody. Who founds, starts the work;
who is told that nobody is left, stops it. After `land` or the last `leave` the next join founds anew.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Flight", "Flights"]

M = TypeVar("M", bound=Hashable)


class Flight(Generic[M]):
    """One piece of work and who waits for it.."""

    __slots__ = ("key", "members")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.members: dict[M, None] = {}


class Flights(Generic[M]):
    """Open flights by key. One writer. A member is in one flight at a time."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Flight[M]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, key: Hashable) -> Flight[M] | None:
        """The open flight with this key."""
        return self._open.get(key)

    def join(self, key: Hashable, member: M) -> tuple[Flight[M], bool]:
        """The flight, and whether it was founded just now."""
        flight = self._open.get(key)
        founded = flight is None
        if flight is None:
            flight = self._open[key] = Flight(key)
        flight.members[member] = None
        return flight, founded

    def leave(self, flight: Flight[M], member: M) -> bool:
        """True when the flight was open and nobody is left in it: stop its work."""
        if member not in flight.members:
            return False
        del flight.members[member]
        if flight.members or self._open.get(flight.key) is not flight:
            return False
        del self._open[flight.key]
        return True

    def land(self, flight: Flight[M]) -> list[M]:
        """The members, each handed out once; none when the flight has landed or was given up before."""
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]
        members = list(flight.members)
        flight.members.clear()
        return members
