"""Adds up the records of all gateways, and knows whether one of them is missing.

A gateway that stopped cleanly takes its record away, one that died falls silent. For SILENT_S the calls that waited in
a silent one still count, because it may only have been slow; after that its clients have connected elsewhere. Its
arrivals count until they leave the window by themselves. For MISSING_S a silent member makes the sum PARTIAL, during
which nobody may scale down. After that it is forgotten. If the records as a whole have not been read for MISSING_S,
the sum is UNAVAILABLE: a gateway that sees only itself must not decide for all.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Final

from oriel_policies.scaling.records import WINDOW_S, PoolRecord

SILENT_S: Final = 10.0
MISSING_S: Final = 60.0


class State(Enum):
    """The degree to which a sum over gateways can be trusted."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    UNAVAILABLE = "unavailable"


@dataclass(slots=True, eq=False, repr=False)
class Demand:
    """The demand for one pool over all gateways. total: the sum of the records. continuous: the whole window was seen
    and no member was lost in it, so that a change of rate inside the window is a change of demand."""

    total: PoolRecord
    state: State
    _: KW_ONLY
    continuous: bool


class Members:
    """The records of one pool by gateway. Single writer."""

    __slots__ = ("_lost_s", "_read_s", "_records", "_since_s")

    def __init__(self, now: float) -> None:
        # by member: its record, and when that was made on our own clock
        self._records: dict[str, tuple[PoolRecord, float]] = {}
        self._since_s = now
        self._read_s = now
        self._lost_s = now - MISSING_S

    def read(self, records: Mapping[str, tuple[PoolRecord, float]], now: float) -> None:
        """Take in a complete reading of the records: member -> (record, its age in seconds). An absent member has
        left.
        """
        kept = {name: (record, now - age_s) for name, (record, age_s) in records.items() if age_s < MISSING_S}
        # After an outage of the store, some members may not have written again yet.
        outage = now - self._read_s > SILENT_S
        if outage or len(kept) < len(records) or self._records.keys() - kept.keys():
            self._lost_s = now
        self._records = kept
        self._read_s = now

    def note_own(self, name: str, record: PoolRecord, now: float) -> None:
        """Take in a newer record of one member without reading all of them."""
        self._records[name] = (record, now)

    def demand(self, now: float) -> Demand:
        """Return the sum as of `now`."""
        total, silent = PoolRecord(), now - self._read_s > SILENT_S
        for name in list(self._records):
            record, made_s = self._records[name]
            age_s = max(0.0, now - made_s)
            if age_s >= MISSING_S:
                del self._records[name]
                self._lost_s = now
                continue
            alive = age_s <= SILENT_S
            silent = silent or not alive
            total.add(record, age_s, with_backlog=alive)
        seen_s = now - max(self._since_s, self._lost_s)
        continuous = not silent and min(seen_s, total.observed_s) >= WINDOW_S
        if now - self._read_s >= MISSING_S:
            return Demand(total, State.UNAVAILABLE, continuous=False)
        partial = silent or now - self._lost_s < MISSING_S
        return Demand(total, State.PARTIAL if partial else State.COMPLETE, continuous=continuous)
