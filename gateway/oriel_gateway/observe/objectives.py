"""Counts which calls kept the promise of their tier, and judges at its end each call that did not.

A call that was answered in time costs one comparison and one addition. `Objectives.judge` judges every other one by the
rule of `oriel_policies.promise.objectives`, which names the cause. The judgement is kept in the call's record:
`Record.judged`, None for a call that kept its promise.

Calls are counted per tenant, tier and target. `flush` passes on what came since the last time: to the counters of the
metrics, whose names are bounded, and to the history of 30 days (`observe.budgets`).
"""

from collections.abc import Callable, Iterable
from time import time
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.budgets import Budgets, Key
from oriel_gateway.observe.cube import Cell, Promises
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.observe.top_names import NAMED, OTHER, TopNames
from oriel_policies.documents import Tenant, Tier
from oriel_policies.promise.objectives import (
    LOOP,
    OUTSIDE,
    REFUSED,
    STAGES,
    UPSTREAM_ERROR,
    Stamps,
    Times,
    Usual,
    blame,
    divide,
    passed_in,
    place_not_left,
)
from oriel_wire.observe.server_timing import read_server_timing

__all__ = ["EXCUSED", "RESULTS", "Objectives", "result_of"]

# Results against the target. met, late: answered within the tier's target, or after it. missed: refused or failed here
# or in a later server. excused: the caller's own doing (a wrong request, over its limits, left, a deadline of its own
# that is earlier than the target), which costs no error budget.
RESULTS: Final = ("met", "late", "missed", "excused")
MAX_KEYS: Final = 8192
MAX_PAIRS: Final = 500  # the most pairs of tenant and target with series of their own
MAX_ROUTES: Final = 2048  # routes whose usual times are kept apart; the rest share one entry
NO_TARGET: Final = "none"  # the target's name for a request that was refused before its target was known
CAUSE: Final = "cause:"  # marks causes among the counts of a key

_ANSWERED: Final = Outcome.ANSWERED
_SLACK_S: Final = 1e-6  # a deadline that equals the target is not earlier because of rounding
# Outcomes that a client's own deadline may have led to, if it is earlier than the target.
_OWN_DEADLINE: Final = (Outcome.DEADLINE_EXCEEDED, Outcome.DEADLINE_TOO_SHORT, Outcome.INFEASIBLE)
_PLACE_OF: Final = {
    Outcome.QUEUE_FULL: "queue",
    Outcome.DISPLACED: "queue",
    Outcome.INFEASIBLE: "queue",
    Outcome.DEADLINE_TOO_SHORT: "queue",
    Outcome.UPSTREAM_UNREACHABLE: "endpoint",
    Outcome.SEQUENCE_LOST: "endpoint",
    Outcome.UPSTREAM_BROKEN: UPSTREAM_ERROR,
}


EXCUSED: Final = Judged("excused")


class Objectives:
    """Judges and counts the calls of a gateway. Single writer: the gateway's loop.

    tenants, pairs: the counters of the metrics, with a bounded number of names. budgets: the history of 30 days.
    attainment: calls by (tier, result) since the start.
    max_keys: keys that are counted apart between two flushes.
    """

    def __init__(self, *, clock: Callable[[], float] = time, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._counts: dict[Key, Promises] = {}
        self._usual: dict[str, Usual] = {}
        self._clock = clock
        self.tenants: TopNames[str] = TopNames(lambda _: OTHER, max_named=NAMED)
        self.pairs: TopNames[Key] = TopNames(
            lambda key: (OTHER, key[1], OTHER),
            max_named=MAX_PAIRS,
            eligible=lambda key: self.tenants.names(key[0]),
            at_once=False,
        )
        self.budgets = Budgets()
        self.attainment: dict[tuple[str, str], int] = {}
        # returns how long the gateway's loop stood still between two moments
        self.stood_still_s: Callable[[float, float], float] = lambda began_s, ended_s: 0.0

    # Judging ---------------------------------------------------------------------------------------------------

    def judge(self, call: Record, tier: Tier, route: str) -> Judged:
        """Judge a call that was not answered well, or not within the target of its tier. route: its target's."""
        outcome, status, answered_s = call.outcome, call.status, call.answered_s
        answered = outcome is _ANSWERED
        late = answered and status < 400
        if not late:
            if result_of(outcome, status) == "excused":
                return EXCUSED
            own = outcome in _OWN_DEADLINE or status == 504
            if own and call.deadline - call.received_s < tier.target_s - _SLACK_S:
                return EXCUSED
            if not answered and outcome is not Outcome.DEADLINE_EXCEEDED:
                return Judged("missed", _PLACE_OF.get(outcome, REFUSED))
        stamps = stamps_of(call)
        times = divide(stamps, read_server_timing(call.timing) if call.timing else {})
        usual = self._usual.get(route) or self._usual.get(OTHER)
        if late:
            cause, excess_s = blame(times, usual)
        elif status == 504 and call.timing:  # the deadline passed in a server that tells where
            cause, excess_s = blame(times, usual)
        elif answered:
            cause, excess_s = UPSTREAM_ERROR, 0.0
        else:
            cause = place_not_left(stamps)
            place = STAGES.index(cause)
            excess_s = max(0.0, times[place] - (usual.times[place] if usual is not None else 0.0))
        if cause in OUTSIDE and excess_s and 2.0 * self.stood_still_s(call.received_s, answered_s) >= excess_s:
            cause = LOOP
        return Judged("late" if late else "missed", cause, excess_s, passed_in(times, tier.target_s))

    def refused(self, outcome: Outcome, tenant: Tenant, left_s: float) -> Judged:
        """Judge a request that was refused before it became a call. left_s: see `Refused`."""
        if result_of(outcome, 0) == "excused" or left_s < tenant.tier.target_s - _SLACK_S:
            return EXCUSED
        return Judged("missed", _PLACE_OF.get(outcome, REFUSED))

    def learn(self, route: str, times: Times) -> None:
        """Learn what is usual for a route from a call that kept its promise."""
        usual = self._usual.get(route)
        if usual is None:
            if len(self._usual) >= MAX_ROUTES:
                route = OTHER
            usual = self._usual.setdefault(route, Usual())
        usual.learn(times)

    # Counting --------------------------------------------------------------------------------------------------

    def count(self, cells: Iterable[Cell]) -> None:
        """Count requests whose senders are known."""
        for cell in cells:
            if cell.tenant is not None:
                target = NO_TARGET if cell.target is None else cell.target.route
                self.counts(cell.tenant.name, cell.tenant.tier.name, target).add(cell.promises)

    def counts(self, tenant: str, tier: str, target: str) -> Promises:
        """Return the counts to add to until `flush`; beyond `max_keys` they are those of the others of the tier."""
        key = (tenant, tier, target)
        found = self._counts.get(key)
        if found is None:
            if len(self._counts) >= self._max_keys:
                key = (OTHER, tier, OTHER)
                found = self._counts.get(key)
            if found is None:
                found = self._counts[key] = Promises()
        return found

    def shown_as(self, key: Key) -> Key:
        """Return the key under which the metrics show the calls of `key` now."""
        return key if self.pairs.names(key) else (OTHER, key[1], OTHER)

    def flush(self) -> None:
        """Pass on the calls that were counted since the previous flush."""
        now = self._clock()
        found, self._counts = self._counts, {}
        for key, counts in found.items():
            tenant, tier, _ = key
            for result in RESULTS:
                count: int = getattr(counts, result)
                if count:
                    self.tenants.count(tenant, result, count)
                    self.pairs.count(key, result, count)
                    self.attainment[tier, result] = self.attainment.get((tier, result), 0) + count
            for cause, count in counts.causes.items():
                self.pairs.count(key, CAUSE + cause, count)
            bad = counts.late + counts.missed
            if counts.met or bad:
                self.budgets.add(key, now, counts.met + bad, bad, counts.causes)


def stamps_of(call: Record) -> Stamps:
    """Return the times at which a call reached its stages."""
    return Stamps(
        call.received_s,
        call.limited_s,
        call.queued_s,
        call.permit_s,
        call.sent_s,
        call.response_s,
        call.answered_s or call.ended_s,
        call.held_s,
    )


def times_of(call: Record) -> Times:
    """Return the seconds that the call spent in each of `oriel_policies.promise.objectives.STAGES`."""
    return divide(stamps_of(call), read_server_timing(call.timing) if call.timing else {})


def result_of(outcome: Outcome, status: int) -> str:
    """Return `missed` or `excused` for a call without a good answer. status: the upstream's, if it answered."""
    if outcome is Outcome.CALLER_LEFT:
        return "excused"
    return "missed" if (status or STATUS.get(outcome, 0)) >= 500 else "excused"
