"""The `Ledger` seam: who keeps the numbers that gateways share, see oriel_policies.ledger for what is said."""

from collections.abc import Callable, Sequence
from typing import Protocol

from oriel_policies.ledger import Answer, Ask, Record, judge

__all__ = ["PRESENCE_S", "SLOT_TTL_S", "Ledger", "LedgerLost", "MemoryLedger"]

SLOT_TTL_S = 3.0  # slots of a gateway that says nothing are free again after this
PRESENCE_S = 5.0  # a gateway that says nothing is not counted any more after this

Question = tuple[str, Sequence[Ask]]  # tenant, the asks of one call


class LedgerLost(Exception):
    """The ledger did not answer; nobody knows what it did."""


class Ledger(Protocol):
    """One gateway's way to a ledger. Its own name in it is fixed when it is made."""

    async def ask(self, questions: Sequence[Question]) -> Sequence[list[Answer] | None]:
        """Answers in order, each question judged as a whole; None for one whose records cannot be read, which is no
        fault of the others. Raises LedgerLost.

        Cancelled, or lost: nobody knows what was done.
        """

    async def hello(self) -> int:
        """I am here; how many gateways are, this one included. Raises LedgerLost."""

    async def close(self) -> None:
        """Let go of connections."""


class MemoryLedger:
    """A ledger in this process: `seat` gives each gateway its way to it. now_us: its clock."""

    def __init__(self, now_us: Callable[[], float]) -> None:
        self.now_us = now_us
        self.records: dict[str, dict[str, Record]] = {}
        self.present: dict[str, float] = {}

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

    async def hello(self) -> int:
        ledger = self._ledger
        now_us = ledger.now_us()
        ledger.present[self._holder] = now_us
        ledger.present = {name: at for name, at in ledger.present.items() if at > now_us - PRESENCE_S * 1e6}
        return len(ledger.present)

    async def close(self) -> None:
        self._ledger.present.pop(self._holder, None)
