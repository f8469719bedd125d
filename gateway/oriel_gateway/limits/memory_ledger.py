"""A ledger in memory: the parent of a gateway's worker processes keeps it for them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from typing import Final

from oriel_gateway.limits.ledger import MISSED_S, SLOT_TTL_S, STEP_S, Ledger, Presence, Question
from oriel_gateway.limits.quota_file import CountedRecord, QuotaFile
from oriel_policies.bounds.ledger import WINDOW, Answer, Ask
from oriel_policies.bounds.ledger_rules import Record, SharedSums, judge

_TENANTS: Final = 1000  # with more of them idle records are forgotten
_MONTHS: Final = 2  # the months whose sums are kept


class MemoryLedger:
    """A ledger in this process; `seat` connects a gateway to it.

    now_us: the ledger's clock, in microseconds.
    file: keeps what was used of calendar windows over a restart; None for memory alone.
    use: the sums of what tenants used, by month.
    """

    def __init__(self, now_us: Callable[[], float], file: QuotaFile | None = None) -> None:
        self.now_us = now_us
        self.file = file or QuotaFile(None)
        self.records: dict[str, dict[str, Record]] = {}  # by tenant, those first that were not looked at for longest
        self.present: dict[str, tuple[float, float]] = {}  # holder -> when it last reported, and its share
        self.listeners: dict[str, asyncio.Event] = {}
        self.use: dict[str, SharedSums] = {}
        self.demand: dict[str, tuple[bytes, float]] = {}  # holder -> its latest records, and when they were published

    def seat(self, holder: str) -> Ledger:
        """Return the ledger as the gateway `holder` sees it."""
        return Seat(self, holder)

    def forget(self, holder: str) -> None:
        """Free the slots of a gateway that has ended; other units that it had leased count as used."""
        for known in (self.present, self.demand, self.listeners):
            known.pop(holder, None)
        for records in self.records.values():
            for record in records.values():
                record.holders.pop(holder, None)

    def judge(self, holder: str, tenant: str, asks: Sequence[Ask]) -> list[Answer]:
        """Answer the asks of one call; of too many tenants forget idle records."""
        now_us = self.now_us()
        for name in list(islice(self.records, 2 if len(self.records) > _TENANTS else 0)):
            kept = {key: each for key, each in self.records.pop(name).items() if not each.idle(now_us)}
            if kept:
                self.records[name] = kept
        records = self.records.setdefault(tenant, {})
        for ask in asks:
            if ask.key not in records:
                number, used = self.file.known(tenant, ask.key) if ask.kind == WINDOW else (-1, 0)
                records[ask.key] = CountedRecord(tenant=tenant, key=ask.key, number=number, used=used)
        answers = judge(records, asks, holder=holder, ttl_us=SLOT_TTL_S * 1e6, now_us=now_us)
        for record in (records[ask.key] for ask in asks if ask.kind == WINDOW):
            if isinstance(record, CountedRecord) and record.saved:
                record.saved = False
                self.file.changed(record)
        return answers


class Seat:
    """The ledger as one gateway sees it."""

    def __init__(self, ledger: MemoryLedger, holder: str) -> None:
        self._ledger = ledger
        self._holder = holder

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        return [self._ledger.judge(self._holder, tenant, asks) for tenant, asks in questions]

    async def hello(self, share: float) -> Presence:
        self._ledger.present[self._holder] = (self._ledger.now_us(), share)
        return Presence(len(self._ledger.present))

    async def edges(self) -> AsyncGenerator[None]:
        heard = self._ledger.listeners.setdefault(self._holder, asyncio.Event())
        heard.set()
        while True:
            await heard.wait()
            heard.clear()
            yield

    async def exchange(self, records: bytes, *, edge: bool = False) -> dict[str, tuple[bytes, float]]:
        if edge:
            for holder, listener in self._ledger.listeners.items():
                if holder != self._holder:
                    listener.set()
        now_us, demand = self._ledger.now_us(), self._ledger.demand
        demand[self._holder] = (records, now_us)
        for name, (published, at) in list(demand.items()):
            if at > now_us + STEP_S * 1e6:
                demand[name] = (published, now_us)
            elif now_us - at > MISSED_S * 1e6:
                del demand[name]
        return {n: (r, max(0.0, now_us - at) / 1e6) for n, (r, at) in demand.items() if n != self._holder}

    async def add_use(
        self, month: str, number: int, sums: Mapping[str, int], after: str, since_s: int
    ) -> tuple[dict[str, int], str]:
        use = self._ledger.use
        for old in sorted(use)[:-_MONTHS]:
            del use[old]
        if month not in use:
            use[month] = SharedSums(since_s)
        return use[month].add(self._holder, number, sums, after)

    async def close(self) -> None:
        self._ledger.present.pop(self._holder, None)
        self._ledger.demand.pop(self._holder, None)
