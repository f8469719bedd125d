"""Counts the results of a load. Pure; the generator is the one writer.

Every arrival ends in exactly one of: good, refused (by reason), failed (no proper answer), unsent (the generator's own
fault). Latency counts from the *scheduled* arrival, so a server that stalls is charged for the requests that had to
wait behind the stall (coordinated omission); `service` counts from the moment of sending, for comparison.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from oriel_tools.load.histogram import Histogram

MAX_REASONS = 64
MAX_BINS = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request. kind: good, refused or failed; reason: a word for people and machines, e.g. `503
    queue_full`.
    """

    kind: str
    reason: str = ""
    retry_after_s: float | None = None


@dataclass(slots=True)
class RetryAfter:
    """Span of `Retry-After` of refused requests, in seconds."""

    count: int = 0
    least_s: float = 0.0
    most_s: float = 0.0

    def add(self, wait_s: float) -> None:
        self.least_s = wait_s if not self.count else min(self.least_s, wait_s)
        self.most_s = max(self.most_s, wait_s)
        self.count += 1

    def merge(self, other: "RetryAfter") -> None:
        if other.count:
            self.least_s = other.least_s if not self.count else min(self.least_s, other.least_s)
            self.most_s = max(self.most_s, other.most_s)
            self.count += other.count


@dataclass(slots=True)
class Tally:
    """The counts of one stream (or, merged, one tier) in one phase.

    scheduled: arrivals so far; good: proper answers; kept: good ones within the target since their scheduled arrival
    (without a target: all good ones). latency, service: times of good answers; refusals: times by reason that
    the server took to say no, from the moment of sending; lag: the delay with which each request was sent.
    """

    scheduled: int = 0
    sent: int = 0
    good: int = 0
    kept: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    unsent: dict[str, int] = field(default_factory=dict)
    retry_after: RetryAfter = field(default_factory=RetryAfter)
    latency: Histogram = field(default_factory=Histogram)
    service: Histogram = field(default_factory=Histogram)
    refusals: dict[str, Histogram] = field(default_factory=dict)
    lag: Histogram = field(default_factory=Histogram)

    def finished(self, outcome: Outcome, latency_s: float, service_s: float, target_s: float | None) -> bool:
        """Count a request that was sent. Return True if it kept its promise."""
        if outcome.kind == "good":
            self.good += 1
            self.latency.add(latency_s)
            self.service.add(service_s)
            if target_s is None or latency_s <= target_s:
                self.kept += 1
                return True
            return False
        if outcome.kind == "refused":
            self.refusals.setdefault(_count(self.refused, outcome.reason), Histogram()).add(service_s)
        else:
            _count(self.failed, outcome.reason)
        if outcome.retry_after_s is not None:
            self.retry_after.add(outcome.retry_after_s)
        return False

    def left_out(self, reason: str) -> None:
        """Count an arrival that the generator could not send."""
        _count(self.unsent, reason)

    @property
    def attainment(self) -> float | None:
        """Share of all arrivals whose promise was kept: refusals, failures and slow answers count against it."""
        return self.kept / self.scheduled if self.scheduled else None

    def merge(self, other: "Tally") -> None:
        self.scheduled += other.scheduled
        self.sent += other.sent
        self.good += other.good
        self.kept += other.kept
        for mine, theirs in (
            (self.refused, other.refused),
            (self.failed, other.failed),
            (self.unsent, other.unsent),
        ):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
        for reason, found in other.refusals.items():
            self.refusals.setdefault(reason, Histogram()).merge(found)
        self.retry_after.merge(other.retry_after)
        self.latency.merge(other.latency)
        self.service.merge(other.service)
        self.lag.merge(other.lag)


def total(tallies: Iterable[Tally]) -> Tally:
    """Return all tallies merged into one."""
    whole = Tally()
    for tally in tallies:
        whole.merge(tally)
    return whole


def _count(reasons: dict[str, int], reason: str) -> str:
    """Under which name it was counted."""
    # Reasons come from the server, so their number is bounded.
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = "other"
    reasons[reason] = reasons.get(reason, 0) + 1
    return reason


@dataclass(slots=True)
class Bin:
    """One stretch of time. arrivals, unsent, kept, latency by *scheduled* moment; good, others by moment of ending."""

    arrivals: int = 0
    unsent: int = 0
    kept: int = 0
    good: int = 0
    others: int = 0
    latency: Histogram = field(default_factory=Histogram)


class Timeline:
    """A tier's bins of `width_s` seconds from the start of the run; at most MAX_BINS cover `seconds`."""

    def __init__(self, seconds: float, tail_s: float) -> None:
        steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
        self.width_s = next((step for step in steps if seconds / step <= 60), steps[-1])
        self._last = int((seconds + tail_s) / self.width_s) + 1
        if self._last > MAX_BINS:
            self.width_s = (seconds + tail_s) / MAX_BINS
            self._last = MAX_BINS
        self.bins: list[Bin] = []

    def at(self, offset_s: float) -> Bin:
        """The bin of this moment; what lies beyond the end falls into the last one."""
        index = min(max(0, int(offset_s / self.width_s)), self._last)
        while len(self.bins) <= index:
            self.bins.append(Bin())
        return self.bins[index]
