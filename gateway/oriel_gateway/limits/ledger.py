"""The `Ledger` seam: who keeps the numbers that gateways share, see oriel_policies.ledger for what is said.

It also knows who shares them. A gateway that falls silent without a word has died, or it cannot reach the ledger any
more and admits its share of every limit alone; nobody can tell which. So for a while it goes on to count as one of N,
and what it may admit is what the others have to leave.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from oriel_policies.ledger import Answer, Ask, Record, judge

__all__ = ["MISSED_S", "PRESENCE_S", "SLOT_TTL_S", "Ledger", "LedgerLost", "MemoryLedger", "Presence"]

SLOT_TTL_S = 3.0  # slots of a gateway that says nothing are free again after this
PRESENCE_S = 3.0  # a gateway that says nothing may be on its own after this
MISSED_S = 300.0  # and is not counted any more after this

Question = tuple[str, Sequence[Ask]]  # tenant, the asks of one call


class Presence(NamedTuple):
    """gateways: that share the limits, silent ones included. alone: the silent ones' shares, added up."""

    gateways: int
    alone: float


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
    """A ledger in this process: `seat` gives each gateway its way to it. now_us: its clock."""

    def __init__(self, now_us: Callable[[], float]) -> None:
        self.now_us = now_us
        self.records: dict[str, dict[str, Record]] = {}
        self.present: dict[str, tuple[float, float]] = {}  # when last heard, share

    def seat(self, holder: str) -> "Ledger":
        """The ledger as the gateway `holder` sees it."""
        return _Seat(self, holder)


class _Seat:
    def __init__(self, ledger: MemoryLedger, holder: str) -> None:
        self._ledger = ledger
        self._holder = holder

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
        ledger.present[self._holder] = (now_us, share)
        ledger.present = {n: last for n, last in ledger.present.items() if abs(now_us - last[0]) <= MISSED_S * 1e6}
        silent = [share for at, share in ledger.present.values() if now_us - at > PRESENCE_S * 1e6]
        return Presence(len(ledger.present), sum(silent))

    async def close(self) -> None:
        self._ledger.present.pop(self._holder, None)
