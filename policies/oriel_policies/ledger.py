"""The lease protocol by which gateways share limits, and the arithmetic of the ledger.

A *ledger* keeps one record per bound of a tenant. A gateway leases units ahead of need and grants them to calls by
itself. An `Ask` concerns one record. It asks for a least and a wanted number of units, and it reports units that were
used beyond the granted ones: `debt` is counted in full; `spent` was granted while the ledger could not be reached, and
may empty a rate but never put it into debt. The asks of one call are judged together: all get what they need, or none
gets anything. Their reports count in any case. A negative `debt` returns unused units.

Records, times in microseconds of the ledger's own clock (so that the gateways' clocks do not matter):
    rate     the theoretical arrival time of GCRA, and when it was written. If the ledger's clock has been set back
             since, as by a failover, the debt stays the same
    slots    the slots of each holder, with an expiry, so that the slots of a gateway that died become free. A gateway
             without another ask under way reports its own count, which replaces the ledger's: it is right also after a
             flush, an expiry or a lost answer
    window   the calendar window (UTC), the units used in it, and an identity. Gateways report what they saw last: a
             ledger that was flushed takes the largest report, so that a quota is not handed out twice

`judge` is the reference, used by a ledger inside our own process. The Lua script of the Redis ledger implements the
same, and tests/conformance runs both against one suite.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

from oriel_policies.calendar import Period, window_end, window_number

__all__ = ["Answer", "Ask", "Record", "RATE", "SLOTS", "WINDOW", "judge"]

RATE, SLOTS, WINDOW = "rate", "slots", "window"
_US = 1_000_000


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request about one record; see the module's docstring. All amounts are in units.

    key: the record's name within its tenant. limit: burst, slots or units of the window.
    step: rate: microseconds per unit; window: 0 for days, 1 for months. number, born, used: of a window, as last seen;
    of slots: used is the asker's own count if number >= 0.
    """

    key: str
    kind: str
    limit: float
    step: float
    need: float = 0.0
    want: float = 0.0
    debt: float = 0.0
    spent: float = 0.0
    number: int = -1
    born: int = 0
    used: float = 0.0


@dataclass(slots=True, kw_only=True)
class Answer:
    """granted: units that the asker now has. wait_us: if > 0, the time until the needed units are available.

    used: of a window, or the slots that the asker holds. ends_us: until the window ends.
    """

    granted: float
    wait_us: float
    left: float
    number: int = -1
    born: int = 0
    used: float = 0.0
    ends_us: float = 0.0


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
    """Answer the asks of one call; `records` are those of its tenant. ttl_us: how long slots are held without a
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
    """The least units needed; more than the limit is granted when the whole limit is free."""
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
