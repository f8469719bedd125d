"""Histograms and the text of `/metrics`, for all three units. Pure.

`Histogram` counts on the hot path; its `buckets()` go into a family of `prometheus_client` (gateway, logic) or into
text of this module (inference, whose thousand models are written in pieces). The text is the Prometheus exposition
format 0.0.4, or OpenMetrics 1.0 for scrapers that ask for it.

The names of Triton's counters do not end in `_total`, as OpenMetrics demands of counters. Dashboards rely on those
names, so OpenMetrics gets them unchanged and with the type `unknown`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from oriel_wire.observe.exemplars import Exemplar

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
END = "# EOF\n"  # the last line of OpenMetrics
# Not final: the compiler misreads a final tuple that begins with a float.
DURATION_BOUNDS_S: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Histogram:
    """Counts observations in fixed buckets. Single writer.

    bounds: the buckets' upper bounds, ascending and inclusive. counts: observations per bucket, not cumulative; one
    more bucket holds what is above the last bound. total: the sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: list[float]) -> None:
        """Count some observations."""
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.total += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def add(self, other: "Histogram") -> None:
        """Add the observations of `other`, which has the same bounds."""
        self.total += other.total
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]

    def buckets(self) -> list[tuple[str, int]]:
        """(label `le`, observations at or below that bound) of every bucket; the last label is `+Inf`."""
        return list(zip((*map(repr, self.bounds), "+Inf"), accumulate(self.counts), strict=True))


def wants_openmetrics(accept: str) -> bool:
    """Return whether an `Accept` header names OpenMetrics at all, as Prometheus does by default."""
    return any(part.partition(";")[0].strip() == "application/openmetrics-text" for part in accept.split(","))


def label_text(labels: Mapping[str, str]) -> str:
    """The labels of a sample as they stand between its braces, values escaped."""
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()])


def head(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """The HELP and TYPE lines of a family. kind: "counter", "gauge" or "histogram"."""
    if openmetrics and kind == "counter":
        kind, name = ("counter", name.removesuffix("_total")) if name.endswith("_total") else ("unknown", name)
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def histogram(
    name: str, labels: str, found: Histogram, exemplars: Mapping[int, Exemplar] | None = None
) -> Iterator[str]:
    """The lines of one histogram. One with a bound below zero gets no count and sum, which OpenMetrics forbids then.

    exemplars: traces by the number of their bucket; only for OpenMetrics.
    """
    buckets, before = found.buckets(), f"{labels}," if labels else ""
    for number, (bound, seen) in enumerate(buckets):
        exemplar = exemplars.get(number) if exemplars else None
        beside = "" if exemplar is None else exemplar_text(exemplar)
        yield f'{name}_bucket{{{before}le="{bound}"}} {seen}{beside}\n'
    if not found.bounds or found.bounds[0] >= 0.0:
        yield f"{name}_count{{{labels}}} {buckets[-1][1]}\n"
        yield f"{name}_sum{{{labels}}} {found.total!r}\n"


def exemplar_text(exemplar: Exemplar) -> str:
    """An exemplar as it stands behind the value of its sample."""
    return f' # {{trace_id="{exemplar.trace}"}} {exemplar.value!r} {exemplar.at_s:.3f}'


def pieces(lines: Iterable[str], *, size: int) -> Iterator[str]:
    """Join the lines into texts of `size` lines each; the last one is shorter and may be empty."""
    held: list[str] = []
    for line in lines:
        held.append(line)
        if len(held) >= size:
            yield "".join(held)
            held.clear()
    yield "".join(held)
