"""Exchanges what tenants used, and which promises were kept, with the gateways that share a ledger, so that each of
them shows one sum.

A gateway adds what it has counted to the ledger's sums of the month, and takes over what the others have added since it
asked last. At its start, and after a long time without the ledger, it takes over the sums themselves; those of promises
also of the month before.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from random import random
from time import monotonic, time

from oriel_gateway.limits.ledger import Ledger, LedgerLost
from oriel_gateway.observe.stats import Stats

_log = logging.getLogger(__name__)
EXCHANGE_S = 0.5
OUTDATED_S = 300.0  # the ledger keeps single additions for longer than this: 20,000 of them, `ADDITIONS_PER_S` a second
ADDITIONS_PER_S = 50  # the most that all gateways make; each of them reads every one
MAX_ADDED = 500  # sums that are added to at a time


class SharedUse:
    """Single writer: the gateway's loop. gateways: returns the number of gateways that share the ledger."""

    def __init__(self, stats: Stats, ledger: Ledger, gateways: Callable[[], int] = lambda: 1) -> None:
        self._stats = stats
        self._ledger = ledger
        self._gateways = gateways
        self._month = self._after = ""
        self._number = 0  # number of the addition under way, which the ledger takes once however often it is sent
        self._adding: dict[str, int] = {}
        self._heard_s = 0.0
        self._unshared: dict[str, int] = {}
        stats.usage.unshared = stats.objectives.budgets.unshared = self._unshared

    async def run(self) -> None:
        """Exchange until this is cancelled."""
        while True:
            try:
                while await self.exchange():
                    pass
            except LedgerLost as error:
                _log.debug("the tenants' usage cannot be exchanged with the other gateways now: %s", error)
            await asyncio.sleep(self.every_s * (0.5 + random()))

    @property
    def every_s(self) -> float:
        """Seconds between two exchanges, in the mean: the more gateways there are, the less often each of them asks."""
        return max(EXCHANGE_S, self._gateways() / ADDITIONS_PER_S)

    async def exchange(self) -> bool:
        """Add and take over once; return whether there is more to add. Raises LedgerLost: nothing is counted twice."""
        usage, budgets = self._stats.usage, self._stats.objectives.budgets
        waiting, now = self._unshared, monotonic()
        month = usage.month()
        if month != self._month or now > self._heard_s + OUTDATED_S:
            self._month, self._after = month, ""
        if not self._adding and waiting:
            self._number += 1
            self._adding = {name: waiting.pop(name) for name in list(waiting)[:MAX_ADDED]}
        whole, since_s = not self._after, int(usage.since.timestamp())
        before: dict[str, int] = {}
        if whole:
            last = (date.fromisoformat(f"{month}-01") - timedelta(days=1)).isoformat()[:7]
            before, _ = await self._ledger.add_use(last, 0, {}, "", since_s)
            before.pop("since", None)
        found, self._after = await self._ledger.add_use(month, self._number, self._adding, self._after, since_s)
        self._adding, self._heard_s = {}, now
        if whole:
            found = dict(Counter(before) + Counter(found) + Counter(waiting))
        usage.take_over(found, whole=whole)
        budgets.take_over(found, time(), whole=whole)
        return bool(waiting)
