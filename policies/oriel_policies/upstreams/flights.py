"""Equal calls at the same time are made once (single-flight).

    join     the first call with a key creates a flight; further calls while it is open become members
    leave    a member gives up; if it was the last one, nobody waits for the work and the flight is closed
    land     the work has finished or failed: the flight is closed and its members are returned, oldest first

The work belongs to the flight, not to the call that created it, so that no other call fails when that one leaves. The
call that creates the flight starts the work, and the last call to leave stops it. After `land` or the last `leave` the
next `join` creates a new flight.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)


class Flight(Generic[M]):
    """One piece of work and the members that wait for it."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.members: dict[M, None] = {}


class Flights(Generic[M]):
    """Open flights by key. Single writer. A member is in one flight at a time."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Flight[M]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, key: Hashable) -> Flight[M] | None:
        """The open flight with this key."""
        return self._open.get(key)

    def join(self, key: Hashable, member: M) -> tuple[Flight[M], bool]:
        """The flight, and whether it was created by this call."""
        flight = self._open.get(key)
        founded = flight is None
        if flight is None:
            flight = self._open[key] = Flight(key)
        flight.members[member] = None
        return flight, founded

    def leave(self, flight: Flight[M], member: M) -> bool:
        """True if the flight was open and has no member left: the caller stops its work."""
        if member not in flight.members:
            return False
        del flight.members[member]
        if flight.members or self._open.get(flight.key) is not flight:
            return False
        del self._open[flight.key]
        return True

    def land(self, flight: Flight[M]) -> list[M]:
        """The members, each returned once; none if the flight has landed or was given up before."""
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]
        members = list(flight.members)
        flight.members.clear()
        return members
