"""The `Ledger` seam: who keeps the numbers that gateways share, see oriel_policies.ledger for what is said.

It also knows who shares them. A gateway that falls silent without a word has died, or it cannot reach the ledger any
more and admits its share of every limit alone; nobody can tell which. So for a while it goes on to count as one of N,
and what it may admit is what the others have to leave.

Who was heard when is written by the ledger's own clock, which may be set. A gateway brings along how long ago, by its
monotonic clock, it spoke last: where the ledger's clock says otherwise it has jumped, and what it wrote of the others
is moved by as much. Else a step back would leave each gateway alone with the limit until the others speak again.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, Protocol

from oriel_policies.ledger import Answer, Ask, Record, judge

__all__ = [
    "MISSED_S",
    "PRESENCE_S",
    "SLOT_TTL_S",
    "STEP_S",
    "WHOLE_SHARE",
    "Ledger",
    "LedgerLost",
    "MemoryLedger",
    "Presence",
]

SLOT_TTL_S = 3.0  # slots of a gateway that says nothing are free again after this
PRESENCE_S = 3.0  # a gateway that says nothing may be on its own after this
MISSED_S = 60.0  # and is not counted any more after this
STEP_S = 2.0  # a larger difference between two clocks is a step
WHOLE_SHARE = 0.999  # of whoever knows of nobody else

Question = tuple[str, Sequence[Ask]]  # tenant, the asks of one call


class Presence(NamedTuple):
    """gateways: that share the limits, `silent` of them included. alone: the silent ones' shares, added up.

    Who was the only one and is silent is not among the silent: it has most likely died, and whoever came after it would
    be left with half of every limit.
    """

    gateways: int
    silent: int = 0
    alone: float = 0.0


class LedgerLost(Exception):
    """The ledger did not answer; nobody knows what it did."""


class Ledger(Protocol):
    """One gateway's way to a ledger. Its own name in it is fixed when it is made."""

    async def ask(self, questions: Sequence[Question]) -> Sequence[list[Answer] | None]:
        """Answers in order, each question judged as a whole; None for one whose records cannot be read, which is no
        fault of the others. Raises LedgerLost.

        Cancelled, or lost: nobody knows what was done.
        """

    async def hello(self, share: float) -> Presence:
        """I am here, and if I were not I would admit `share` of every limit; who else is. Raises LedgerLost."""

    async def close(self) -> None:
        """Let go of connections."""


class MemoryLedger:
    """A ledger in this process: `seat` gives each gateway its way to it. now_us: its clock; clock: the gateways'."""

    def __init__(self, now_us: Callable[[], float], *, clock: Callable[[], float] = monotonic) -> None:
        self.now_us = now_us
        self.clock = clock
        self.records: dict[str, dict[str, Record]] = {}
        self.present: dict[str, tuple[float, float]] = {}  # when last heard, share

    def seat(self, holder: str) -> "Ledger":
        """The ledger as the gateway `holder` sees it."""
        return _Seat(self, holder)


class _Seat:
    def __init__(self, ledger: MemoryLedger, holder: str) -> None:
        self._ledger = ledger
        self._holder = holder
        self._heard_s: float | None = None

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        ledger = self._ledger
        now_us = ledger.now_us()
        return [
            judge(
                ledger.records.setdefault(tenant, {}),
                asks,
                holder=self._holder,
                ttl_us=SLOT_TTL_S * 1e6,
                now_us=now_us,
            )
            for tenant, asks in questions
        ]

    async def hello(self, share: float) -> Presence:
        ledger = self._ledger
        now_us = ledger.now_us()
        now_s = ledger.clock()
        jump_us, own = 0.0, ledger.present.get(self._holder)
        if own is not None and self._heard_s is not None:
            jump_us = now_us - own[0] - (now_s - self._heard_s) * 1e6
        self._heard_s = now_s
        for name, (at, others) in ledger.present.items():
            if abs(jump_us) >= STEP_S * 1e6:
                ledger.present[name] = (min(at + jump_us, now_us), others)
            elif at > now_us + STEP_S * 1e6:
                ledger.present[name] = (now_us, others)
        ledger.present[self._holder] = (now_us, share)
        ledger.present = {n: last for n, last in ledger.present.items() if now_us - last[0] <= MISSED_S * 1e6}
        silent = [
            share for at, share in ledger.present.values() if now_us - at > PRESENCE_S * 1e6 and share < WHOLE_SHARE
        ]
        return Presence(len(ledger.present), len(silent), sum(silent))

    async def close(self) -> None:
        self._ledger.present.pop(self._holder, None)
