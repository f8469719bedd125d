"""A ledger in memory. `judge` is the reference that the Lua script of the Redis ledger has to match."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from oriel_gateway.limits.ledger import (
    MISSED_S,
    PRESENCE_S,
    SLOT_TTL_S,
    STEP_S,
    WHOLE_SHARE,
    Ledger,
    Presence,
    Question,
)
from oriel_policies.bounds.calendar import Period, window_end, window_number
from oriel_policies.bounds.ledger import RATE, SLOTS, Answer, Ask

_US = 1_000_000


class MemoryLedger:
    """A ledger in this process; `seat` connects a gateway to it.

    now_us: the ledger's clock.
    clock: the clock of the gateways.
    """

    def __init__(self, now_us: Callable[[], float], *, clock: Callable[[], float] = monotonic) -> None:
        self.now_us = now_us
        self.clock = clock
        self.records: dict[str, dict[str, Record]] = {}
        self.present: dict[str, tuple[float, float]] = {}  # holder -> when it last reported, and its share
        self.listeners: dict[str, asyncio.Event] = {}
        self.use: dict[str, dict[str, int]] = {}  # month -> sums
        self.use_log: dict[str, list[tuple[str, dict[str, int]]]] = {}
        self.added: dict[str, int] = {}  # holder -> the latest of its additions
        self.demand: dict[str, tuple[bytes, float]] = {}  # holder -> its latest records, and when they were published

    def seat(self, holder: str) -> Ledger:
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
        ledger, now_us = self._ledger, self._ledger.now_us()
        demand = ledger.demand
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
        ledger = self._ledger
        whole = ledger.use.setdefault(month, {"since": since_s})
        log = ledger.use_log.setdefault(month, [])
        if sums and number > ledger.added.get(self._holder, 0):
            ledger.added[self._holder] = number
            log.append((self._holder, dict(sums)))
            for name, value in sums.items():
                whole[name] = whole.get(name, 0) + value
        if not after:
            return dict(whole), str(len(log))
        found: dict[str, int] = {}
        for holder, added in log[int(after) :]:
            for name, value in added.items() if holder != self._holder else ():
                found[name] = found.get(name, 0) + value
        return found, str(len(log))

    async def close(self) -> None:
        self._ledger.present.pop(self._holder, None)
        self._ledger.demand.pop(self._holder, None)


@dataclass(slots=True)
class Record:
    """The ledger's record of one key. at: when it was written; holders: slots and expiry of each."""

    arrival: float = 0.0
    at: float = 0.0
    holders: dict[str, tuple[float, float]] = field(default_factory=dict)
    number: int = -1
    born: int = 0
    used: float = 0.0


def judge(
    records: MutableMapping[str, Record], asks: Sequence[Ask], *, holder: str, ttl_us: float, now_us: float
) -> list[Answer]:
    """Answer all asks of one call. records: those of the call's tenant. ttl_us: how long slots are held without a
    report.
    """
    found = [records.setdefault(ask.key, Record()) for ask in asks]
    free = [_report(record, ask, holder, ttl_us, now_us) for record, ask in zip(found, asks, strict=True)]
    fits = all(there + 1e-6 >= _least(ask) for there, ask in zip(free, asks, strict=True))
    answers = []
    for record, ask, there in zip(found, asks, free, strict=True):
        granted = 0.0
        if fits:
            granted = max(ask.need, min(ask.want, float(int(there + 1e-6))))
            _grant(record, ask, holder, granted)
        answers.append(_answer(record, ask, holder, granted, there, now_us))
    return answers


def _least(ask: Ask) -> float:
    """Return the fewest units that have to be granted. A need above the limit is met by the whole limit."""
    return min(ask.need, ask.limit)


def _report(record: Record, ask: Ask, holder: str, ttl_us: float, now_us: float) -> float:
    """Apply the asker's report and return the free units."""
    if ask.kind == RATE:
        full = ask.limit * ask.step
        arrival = record.arrival
        if now_us < record.at:
            arrival -= record.at - now_us
        arrival = max(arrival, now_us)
        if ask.spent:
            arrival = min(arrival + ask.spent * ask.step, max(arrival, now_us + full))
        record.arrival = max(arrival + ask.debt * ask.step, now_us)
        record.at = now_us
        return (now_us + full - record.arrival) / ask.step
    if ask.kind == SLOTS:
        others = 0.0
        for name, (slots, until) in list(record.holders.items()):
            if until > now_us + 2 * ttl_us:  # the clock was set back
                record.holders[name] = (slots, now_us + ttl_us)
            if until <= now_us:
                del record.holders[name]
            elif name != holder:
                others += slots
        mine = ask.used if ask.number >= 0 else record.holders.get(holder, (0.0, 0.0))[0]
        mine = max(0.0, mine + ask.debt)
        record.holders[holder] = (mine, now_us + ttl_us)
        return ask.limit - others - mine
    number = window_number(Period.MONTH if ask.step else Period.DAY, now_us / _US)
    if number > record.number:
        record.used = 0.0
    record.number = number
    if not record.born:
        record.born = int(now_us)
    if ask.number == number:
        if ask.born != record.born:
            record.used = max(record.used, ask.used)
        record.used = max(0.0, record.used + ask.debt)
    return ask.limit - record.used


def _grant(record: Record, ask: Ask, holder: str, granted: float) -> None:
    if ask.kind == RATE:
        record.arrival += granted * ask.step
    elif ask.kind == SLOTS:
        slots, until = record.holders[holder]
        record.holders[holder] = (slots + granted, until)
    else:
        record.used += granted


def _answer(record: Record, ask: Ask, holder: str, granted: float, there: float, now_us: float) -> Answer:
    short = _least(ask) - there if _least(ask) > there + 1e-6 else 0.0
    if ask.kind == RATE:
        return Answer(granted=granted, wait_us=short * ask.step, left=there - granted)
    if ask.kind == SLOTS:
        used = record.holders[holder][0]
        return Answer(granted=granted, wait_us=1.0 if short else 0.0, left=there - granted, used=used)
    period = Period.MONTH if ask.step else Period.DAY
    ends_us = window_end(period, record.number) * _US - now_us
    return Answer(
        granted=granted,
        wait_us=ends_us if short else 0.0,
        left=there - granted,
        number=record.number,
        born=record.born,
        used=record.used,
        ends_us=ends_us,
    )
