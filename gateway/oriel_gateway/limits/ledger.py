"""The `Ledger` protocol: it keeps the counts that gateways share. See `oriel_policies.ledger` for asks and answers.

A ledger also knows which gateways share it. A silent gateway has died, or it cannot reach the ledger any more and
admits its share of every limit alone; the ledger cannot tell which. So a silent gateway still counts as one of N for a
while, and the others leave it what it may admit.

The ledger's own clock, which may be set, writes when a gateway was heard last. A gateway brings along how long ago, by
its monotonic clock, it spoke last: where the ledger's clock disagrees it has jumped, and its entries for the other
gateways are moved by as much. Otherwise a step back would leave each gateway alone with the limit until the others
speak again.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, Protocol

from oriel_policies.ledger import Answer, Ask, Record, judge

SLOT_TTL_S = 3.0  # slots of a silent gateway are free again after this
PRESENCE_S = 3.0  # a silent gateway may admit calls alone after this
MISSED_S = 60.0  # a silent gateway is not counted any more after this
STEP_S = 2.0  # a larger difference between two clocks is a step
WHOLE_SHARE = 0.999  # the share of a gateway that knows of no other

Question = tuple[str, Sequence[Ask]]  # the tenant, and the asks of one call


class Presence(NamedTuple):
    """The gateways that share the limits.

    gateways: their number, including the `silent` ones.
    alone: the sum of the shares of the silent ones.
    A silent gateway that was the only one is not counted as silent: it has most likely died, and its successor would be
    left with half of every limit.
    """

    gateways: int
    silent: int = 0
    alone: float = 0.0


class LedgerLost(Exception):
    """The ledger did not answer; what it did is unknown."""


class Ledger(Protocol):
    """The connection of one gateway to a ledger. The gateway's name in the ledger is fixed when it is made."""

    async def ask(self, questions: Sequence[Question]) -> Sequence[list[Answer] | None]:
        """Return the answers in order; each question is decided as a whole.

        An answer is None if its records cannot be read, which does not affect the others. Raises LedgerLost. After
        that, or if this is cancelled, it is unknown what the ledger did.
        """

    async def hello(self, share: float) -> Presence:
        """Announce this gateway and return who shares the ledger. Raises LedgerLost.

        share: what this gateway would admit of every limit if it could not reach the ledger.
        """

    async def close(self) -> None:
        """Close the connections."""


class MemoryLedger:
    """A ledger in this process; `seat` connects a gateway to it.

    now_us: the ledger's clock.
    clock: the clock of the gateways.
    """

    def __init__(self, now_us: Callable[[], float], *, clock: Callable[[], float] = monotonic) -> None:
        self.now_us = now_us
        self.clock = clock
        self.records: dict[str, dict[str, Record]] = {}
        self.present: dict[str, tuple[float, float]] = {}  # when it was heard last, and its share

    def seat(self, holder: str) -> "Ledger":
        """Return the ledger as the gateway `holder` sees it."""
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
