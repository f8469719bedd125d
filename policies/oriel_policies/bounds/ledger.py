"""The lease protocol by which gateways share limits: what they ask of a ledger, and what it answers.

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

The Lua script of the Redis ledger, `ledger.lua`, answers asks by these rules, as does `ledger_rules` for a ledger in
memory. tests/conformance runs both against one suite.
"""

from dataclasses import dataclass

RATE, SLOTS, WINDOW = "rate", "slots", "window"


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request about one record; see the module's docstring. All amounts are in units.

    key: the record's name within its tenant. limit: burst, slots or units of the window.
    step: rate: microseconds per unit; window: 0 for days, 1 for months. number, born, used: the number, begin and use
    of a window, as last seen; of slots: used is the asker's own count if number >= 0.
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

    used: units used in a window, or slots that the asker holds. ends_us: microseconds until the window ends.
    """

    granted: float
    wait_us: float
    left: float
    number: int = -1
    born: int = 0
    used: float = 0.0
    ends_us: float = 0.0
