"""Exchanges what tenants used with the gateways that share a ledger, so that each of them shows one sum.

A gateway adds what it has counted to the ledger's sums of the month, and takes over what the others have added since it
asked last. At its start, and after a long time without the ledger, it takes over the sums themselves.
"""

import asyncio
import logging
from time import monotonic

from oriel_gateway.limits.ledger import Ledger, LedgerLost
from oriel_gateway.observe.stats import Stats

_log = logging.getLogger(__name__)
EXCHANGE_S = 0.5
OUTDATED_S = 300.0  # the ledger keeps single additions for longer than this
MAX_ADDED = 500  # sums that are added to at a time


class SharedUse:
    """Single writer: the gateway's loop."""

    def __init__(self, stats: Stats, ledger: Ledger) -> None:
        self._stats = stats
        self._ledger = ledger
        self._month = self._after = ""
        self._number = 0  # of the addition under way, which the ledger takes once however often it is sent
        self._adding: dict[str, int] = {}
        self._heard_s = 0.0
        self._unshared = stats.usage.unshared = {}

    async def run(self) -> None:
        """Exchange until this is cancelled."""
        while True:
            try:
                while await self.exchange():
                    pass
            except LedgerLost as error:
                _log.debug("what tenants used is not exchanged now: %s", error)
            await asyncio.sleep(EXCHANGE_S)

    async def exchange(self) -> bool:
        """Add and take over once; return whether there is more to add. Raises LedgerLost: nothing is counted twice."""
        self._stats.count()
        usage, waiting, now = self._stats.usage, self._unshared, monotonic()
        month = usage.month()
        if month != self._month or now > self._heard_s + OUTDATED_S:
            self._month, self._after = month, ""
        if not self._adding and waiting:
            self._number += 1
            self._adding = {name: waiting.pop(name) for name in list(waiting)[:MAX_ADDED]}
        whole, since_s = not self._after, int(usage.since.timestamp())
        found, self._after = await self._ledger.add_use(month, self._number, self._adding, self._after, since_s)
        self._adding, self._heard_s = {}, now
        usage.take_over(found, whole=whole)
        return bool(waiting)
