"""The rules by which a ledger answers asks (`oriel_policies.bounds.ledger`), for a ledger in memory.

The Lua scripts of the Redis ledger have the same rules; one suite of tests/conformance runs against both.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from oriel_policies.bounds.calendar import Period, window_end, window_number
from oriel_policies.bounds.ledger import RATE, SLOTS, Answer, Ask

_US = 1_000_000
_LOG: Final = 2000  # additions that are kept one by one; gateways read them twice a second


class SharedSums:
    """The use of tenants in a month, as gateways have added it up.

    whole: all sums. They begin with `since`, the seconds since 1970 from which on the first gateway has counted.
    """

    def __init__(self, since_s: int) -> None:
        self.whole = {"since": since_s}
        self._added: dict[str, int] = {}  # gateway -> the latest of its additions
        self._log: dict[int, tuple[str, Mapping[str, int]]] = {}

    def add(self, holder: str, number: int, sums: Mapping[str, int], after: str) -> tuple[dict[str, int], str]:
        """Add sums once for each `number`. Returns what others have added after the place `after`, and the next place.

        after: "" for all sums.
        """
        last = next(reversed(self._log), 0)
        if sums and number > self._added.get(holder, 0):
            self._added[holder] = number
            last += 1
            self._log[last] = (holder, sums)
            self._log.pop(last - _LOG, None)
            for name, value in sums.items():
                self.whole[name] = self.whole.get(name, 0) + value
        if not after:
            return dict(self.whole), str(last)
        found: dict[str, int] = {}
        for place in range(max(int(after), last - _LOG) + 1, last + 1):
            by, added = self._log[place]
            for name, value in added.items() if by != holder else ():
                found[name] = found.get(name, 0) + value
        return found, str(last)


@dataclass(slots=True, kw_only=True)
class Record:
    """The ledger's record of one key.

    at: when it was written, in microseconds. holders: slots and expiry of each. period: of a calendar window.
    """

    period: Period = Period.DAY
    arrival: float = 0.0
    at: float = 0.0
    holders: dict[str, tuple[float, float]] = field(default_factory=dict)
    number: int = -1
    born: int = 0
    used: float = 0.0

    def idle(self, now_us: float) -> bool:
        """Return whether a new record would answer alike."""
        if self.number >= 0:
            return self.number < window_number(self.period, now_us / _US)
        return self.arrival <= now_us and all(until <= now_us for _, until in self.holders.values())


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
    record.period = Period.MONTH if ask.step else Period.DAY
    number = window_number(record.period, now_us / _US)
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
    ends_us = window_end(record.period, record.number) * _US - now_us
    return Answer(
        granted=granted,
        wait_us=ends_us if short else 0.0,
        left=there - granted,
        number=record.number,
        born=record.born,
        used=record.used,
        ends_us=ends_us,
    )
