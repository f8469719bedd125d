"""The deadline clock: one timer for the deadlines of all calls of a gateway."""

import asyncio
from collections.abc import Iterator
from math import inf
from time import monotonic
from typing import Final, Protocol

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Tenant
from oriel_policies.waiting.deadlines import DeadlineWheel
from oriel_wire.context import parse_timeout_ms

YOUNG: Final = -1  # the slot of a call that is in `DeadlineClock.young`
_RESOLUTION_S: Final = 0.005


class Expirable(Protocol):
    """Something with a deadline."""

    @property
    def collecting(self) -> bool:
        """Return whether its client still sends the request."""

    def expired(self) -> None:
        """The deadline passed: end now, and report how far the call had come."""

    def stopping(self) -> None:
        """The gateway is about to end: be refused unless the call has been sent to a server."""


class Young(Expirable, Protocol):
    """Something that has just begun, and most often ends before the next tick of the clock.

    slot: YOUNG until the clock has put it into its wheel, then its slot there.
    """

    slot: int
    deadline: float
    received_s: float


class DeadlineClock:
    """Calls `expired` on everything whose deadline has passed, at most two ticks late. Single writer: the loop.

    A deadline that had passed before it was watched counts from then on.
    young: the calls that began since the last tick. A call enters itself (and calls `start` if the dict was empty) and
    deletes itself when it ends: most calls end before the tick, and so never cost a place in the wheel.
    """

    __slots__ = ("_loop", "_ticking", "_wheel", "young")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wheel: DeadlineWheel[Expirable] = DeadlineWheel(_RESOLUTION_S)
        self._ticking: asyncio.TimerHandle | None = None
        self.young: dict[Young, None] = {}

    def __len__(self) -> int:
        return len(self._wheel)

    def __iter__(self) -> Iterator[Expirable]:
        """Everything that is watched, in no order, as of now."""
        return iter((*self.young, *self._wheel))

    def watch(self, item: Expirable, deadline: float, now: float) -> int:
        """Call `item.expired()` when the deadline passes. Returns the slot for `unwatch`."""
        slot = self._wheel.add(item, deadline, now)
        self.start()
        return slot

    def unwatch(self, item: Expirable, slot: int) -> None:
        """Stop watching an item that has ended by itself. slot: the number that `watch` gave for it; not YOUNG."""
        self._wheel.discard(item, slot)

    def start(self) -> None:
        """Tick until nothing is watched any more."""
        if self._ticking is None:
            self._ticking = self._loop.call_later(_RESOLUTION_S, self._tick)

    def stop(self) -> None:
        """Stop the clock for good."""
        if self._ticking is not None:
            self._ticking.cancel()

    def _tick(self) -> None:
        wheel, young = self._wheel, self.young
        self.young = {}
        for begun in young:
            begun.slot = wheel.add(begun, begun.deadline, begun.received_s)
        due = wheel.due(monotonic())
        # Armed before anything is called: an error in one call must not stop the clock of all others.
        waiting = len(wheel) or len(due)
        self._ticking = self._loop.call_later(_RESOLUTION_S, self._tick) if waiting else None
        for item in due:
            item.expired()


def deadline_of(tenant: Tenant, received_s: float, timeout_ms: str | None) -> float:
    """Return the absolute deadline: the tier's, or an earlier one of the client. Raises INVALID_REQUEST."""
    give_up_s = tenant.tier.give_up_s
    if timeout_ms is not None:
        client_timeout_s = parse_timeout_ms(timeout_ms)
        if client_timeout_s is None or client_timeout_s <= 0.0:
            raise Refused(
                Outcome.INVALID_REQUEST,
                "x-request-timeout-ms has to be a whole number of milliseconds > 0 of at most 18 digits",
            )
        give_up_s = min(give_up_s, client_timeout_s)
    return received_s + give_up_s


def requested_until(received_s: float, timeout_ms: str | None, timeout_s: float | None = None) -> float:
    """Return the deadline that a client asked for, in its own words or in gRPC's; infinite if it asked for none."""
    requested_s = None if timeout_ms is None else parse_timeout_ms(timeout_ms)
    return received_s + min(inf if requested_s is None else requested_s, inf if timeout_s is None else timeout_s)
