"""The `Ledger` protocol: it keeps the counts that gateways share. See `oriel_policies.bounds.ledger` for asks and
answers.

A ledger also knows which gateways share it. A silent gateway has died, or it cannot reach the ledger any more and
admits its share of every limit alone; the ledger cannot tell which. So a silent gateway still counts as one of N for a
while, and the others leave it what it may admit.

The ledger's own clock, which may be set, writes when a gateway was heard last. A gateway brings along how long ago, by
its monotonic clock, it spoke last: where the ledger's clock disagrees it has jumped, and its entries for the other
gateways are moved by as much. Otherwise a step back would leave each gateway alone with the limit until the others
speak again.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import NamedTuple, Protocol

from oriel_policies.bounds.ledger import Answer, Ask

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

        share: the part that this gateway would admit of every limit if it could not reach the ledger.
        """

    async def exchange(self, records: bytes, *, edge: bool = False) -> dict[str, tuple[bytes, float]]:
        """Publish what this gateway has counted of the demand (`oriel_policies.scaling`).

        edge: tell the others at once that there is something new, by their `edges`.
        Returns what the other gateways published within the last MISSED_S, by their names, with its age in seconds.
        Raises LedgerLost.
        """

    def edges(self) -> AsyncGenerator[None]:
        """Yield once this gateway listens, and whenever another one has published an edge. Raises LedgerLost.

        An edge may be lost. The generator may end at any time, and is closed by who began it.
        """

    async def add_use(
        self, month: str, number: int, sums: Mapping[str, int], after: str, since_s: int
    ) -> tuple[dict[str, int], str]:
        """Add to the sums of what tenants used in a month, once however often this gateway sends a `number`.

        since_s: seconds since 1970 from which on this gateway has counted; the first one's are the sum `since`.
        Returns what others have added after the place `after` in the ledger's log, or all sums if it is "", and the
        place that comes next. Raises LedgerLost.
        """

    async def close(self) -> None:
        """Close the connections."""
