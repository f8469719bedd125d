"""The kinds of limits that a tenant may have: one row each, from the field of the documents to the texts for people.

A limit counts units of one of `Counts`, and in one of three ways: as a rate with bursts, as slots that calls hold, or
as the use of a calendar window. Whatever names a limit reads this table: the check of the documents, the bounds that
are counted, the headers of answers, and explanations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from oriel_policies.bounds.calendar import Period

__all__ = ["KINDS", "LIMIT_KINDS", "UNITS", "Counts", "LimitKind", "Unit"]

_MOST = 10**12


class Counts(IntEnum):
    """The kind of unit that a bound counts; the index into a call's amounts."""

    REQUESTS = 0
    BYTES = 1
    COMPUTE_US = 2
    TOKENS = 3
    BUDGET = 4


@dataclass(frozen=True, slots=True)
class Unit:
    """The names of a unit for people.

    plural: its name in sentences. shown: its name in `GET /v1/limits`. header: its name in `RateLimit-Policy`, "" for
    the header's own. scale: counted units in one unit of sentences, headers and documents.
    """

    plural: str
    shown: str
    header: str
    scale: int = 1


UNITS: Mapping[Counts, Unit] = {
    Counts.REQUESTS: Unit("requests", "requests", ""),
    Counts.BYTES: Unit("bytes", "bytes", "content-bytes"),
    Counts.COMPUTE_US: Unit("ms of computing", "compute_us", "compute-ms", 1000),
    Counts.TOKENS: Unit("tokens", "tokens", "tokens"),
    Counts.BUDGET: Unit("units of a budget", "budget", ""),  # a budget names its own unit
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKind:
    """One kind of limit.

    field, burst: its fields in the documents; without `burst` it has no bursts. name: the bound's name in headers.
    counts: the unit that it counts. seconds: the time in which a rate allows its amount, 0.0 for what is no rate.
    slots: calls hold it while they run. period: the period of a calendar window. least, most, most_burst: bounds
    of the fields. sentence: its explanation, with places for both.
    """

    field: str
    burst: str = ""
    name: str
    counts: Counts
    seconds: float = 0.0
    slots: bool = False
    period: Period | None = None
    least: float = 1
    most: int = _MOST
    most_burst: int = _MOST
    sentence: str

    @property
    def allowed(self) -> str:
        """The amounts that the fields may have, for the error of a document."""
        least = f"{self.least:.6f}".rstrip("0").rstrip(".")
        burst = f", and {self.burst} 1 to {self.most_burst}" if self.burst else ""
        return f"{self.field} must be {least} to {self.most}{burst}"


# All kinds, in the order in which explanations name them.
LIMIT_KINDS = (
    LimitKind(
        field="requests_per_s",
        burst="burst",
        name="requests",
        counts=Counts.REQUESTS,
        seconds=1.0,
        least=1e-6,  # one call in twelve days; a quota can count less
        most=10**6,
        most_burst=10**6,
        sentence="{amount:g} requests per second, bursts of {burst}",
    ),
    LimitKind(
        field="concurrency",
        name="concurrency",
        counts=Counts.REQUESTS,
        slots=True,
        sentence="{amount:.0f} at once",
    ),
    LimitKind(
        field="bytes_per_s",
        burst="bytes_burst",
        name="bytes",
        counts=Counts.BYTES,
        seconds=1.0,
        sentence="{amount:g} bytes per second, bursts of {burst}",
    ),
    LimitKind(
        field="tokens_per_minute",
        burst="tokens_burst",
        name="tokens",
        counts=Counts.TOKENS,
        seconds=60.0,
        sentence="{amount:g} tokens per minute on the OpenAI paths of texts, bursts of {burst}",
    ),
    LimitKind(
        field="requests_per_day",
        name="requests-day",
        counts=Counts.REQUESTS,
        period=Period.DAY,
        sentence="{amount:.0f} requests a day",
    ),
    LimitKind(
        field="requests_per_month",
        name="requests-month",
        counts=Counts.REQUESTS,
        period=Period.MONTH,
        sentence="{amount:.0f} requests a month",
    ),
    LimitKind(
        field="compute_ms_per_day",
        name="compute-day",
        counts=Counts.COMPUTE_US,
        period=Period.DAY,
        sentence="{amount:.0f} compute-milliseconds a day",
    ),
    LimitKind(
        field="compute_ms_per_month",
        name="compute-month",
        counts=Counts.COMPUTE_US,
        period=Period.MONTH,
        sentence="{amount:.0f} compute-milliseconds a month",
    ),
)
KINDS: Mapping[str, LimitKind] = {kind.field: kind for kind in LIMIT_KINDS}
