"""Outlier ejection: which endpoints of a pool are worse than the others, and for how long they get no calls.

Passive outlier detection, after Envoy's (`envoy.config.cluster.v3.OutlierDetection`): an endpoint is judged by its
answers in comparison with the rest of its pool, never by itself; it comes back by a probe, after a time that doubles;
and at most half of a pool is ejected (the panic threshold), because an error that all share is not the endpoints' own.

Answers are compared model by model. An endpoint is ejected if it is worse for all the models it answers for; if it is
worse for some of them only, these models' calls alone go to other endpoints.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Final

BROKEN_IN_A_ROW = 3
MIN_ANSWERS = 20
ERROR_RATE = 0.5
SLOWER = 5.0
SLOWER_S = 0.1
BASE_S = 1.0
LONGEST_S = 60.0
FORGIVEN_S = 30.0
SUSPECT_S = 0.25  # silence after which the endpoint is probed
SILENT_S = 0.6
SILENT_ANSWERS = 5.0  # multiples of the usual answer time
_ALPHA: Final = 0.1


class Cause(StrEnum):
    """The reason of an ejection; the value is the metric label."""

    BROKEN = "broken"
    ERRORS = "errors"
    LATENCY = "latency"
    STUCK = "stuck"


class Record:
    """The answers of one endpoint. error_rate, mean_s: exponentially weighted. broken: exchanges in a row without an
    answer. heard_s: the time when the last byte came, or when the endpoint got work after being idle."""

    __slots__ = ("answers", "broken", "error_rate", "heard_s", "mean_s")

    def __init__(self) -> None:
        self.answers = 0
        self.broken = 0
        self.error_rate = 0.0
        self.mean_s = 0.0
        self.heard_s = 0.0

    def succeeded(self, latency_s: float) -> None:
        """Record an answer that is not an error of the server."""
        self.answers += 1
        self.broken = 0
        self.error_rate -= _ALPHA * self.error_rate
        self.mean_s += (_ALPHA if self.answers > 1 else 1.0) * (latency_s - self.mean_s)

    def declined(self) -> None:
        """Record an answer to a caller's mistake; its latency is not counted."""
        self.broken = 0
        self.error_rate -= _ALPHA * self.error_rate

    def erred(self) -> None:
        """Record a complete answer that reports a failure of the server."""
        self.answers += 1
        self.broken = 0
        self.error_rate += _ALPHA * (1.0 - self.error_rate)

    def broke(self) -> bool:
        """Record an exchange without a complete answer (closed, reset, unreadable). True if there were too many in a
        row.
        """
        self.broken += 1
        self.error_rate += _ALPHA * (1.0 - self.error_rate)
        return self.broken >= BROKEN_IN_A_ROW


class Ejection:
    """The ejection time of one endpoint: 1 s, doubled each time up to 60 s; reset after 30 s of good service."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.until_s = 0.0
        self._times = 0

    def eject(self, cause: Cause, now: float) -> None:
        """Eject the endpoint, or extend its ejection after a failed probe."""
        if self.cause is None and now > self.until_s + FORGIVEN_S:
            self._times = 0
        self.cause = cause
        self.until_s = now + min(LONGEST_S, BASE_S * 2.0**self._times)
        self._times = min(self._times + 1, 16)

    def admit(self, now: float) -> None:
        """Restore the endpoint after a successful probe."""
        self.cause = None
        self.until_s = now


def most_ejected(count: int) -> int:
    """Return how many of `count` usable endpoints may be ejected at the same time."""
    return count // 2


def outliers(records: Sequence[Record]) -> list[tuple[int, Cause]]:
    """(index, cause) of the endpoints that fail or are slow while the others are not. O(n log n)."""
    known = [(index, record) for index, record in enumerate(records) if record.answers >= MIN_ANSWERS]
    if len(known) < 2:
        return []
    out = []
    total = sum(record.error_rate for _, record in known)
    middle_s = sorted(record.mean_s for _, record in known)[(len(known) - 1) // 2]
    for index, record in known:
        others = (total - record.error_rate) / (len(known) - 1)
        if record.error_rate > ERROR_RATE and record.error_rate > 3.0 * others:
            out.append((index, Cause.ERRORS))
        elif record.mean_s > SLOWER * middle_s and record.mean_s > middle_s + SLOWER_S:
            out.append((index, Cause.LATENCY))
    return out


def outliers_by_model(endpoints: Sequence[Mapping[str, Record]]) -> list[tuple[int, str, Cause]]:
    """(index, model, cause) of the endpoints that fail or are slow for a model; model "": for all they answer for.

    endpoints: the records of each by model; "" for calls that name none.
    """
    judged: dict[int, int] = defaultdict(int)
    worse: dict[int, list[tuple[str, Cause]]] = defaultdict(list)
    for model in dict.fromkeys(chain.from_iterable(endpoints)):
        having = [index for index, records in enumerate(endpoints) if model in records]
        for index in having:
            judged[index] += endpoints[index][model].answers >= MIN_ANSWERS
        for place, cause in outliers([endpoints[index][model] for index in having]):
            worse[having[place]].append((model, cause))
    out = []
    for index, found in worse.items():
        all_of_them = len(found) == judged[index]
        out.extend([(index, "", found[0][1])] if all_of_them else [(index, model, cause) for model, cause in found])
    return out


def silent_for_too_long(record: Record, now: float, by_model: Iterable[Record] = ()) -> bool:
    """Return whether an endpoint with work, but without a probe, is silent for longer than its answers ever took.

    Needs a history: the first call of a slow model looks the same as a stuck server.
    by_model: the records of its models; the slowest of them is the measure.
    """
    silence_s, slowest_s = now - record.heard_s, max([each.mean_s for each in (record, *by_model)])
    return record.answers >= MIN_ANSWERS and silence_s > max(SILENT_S, SILENT_ANSWERS * slowest_s)
