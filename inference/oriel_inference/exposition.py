"""Metrics as text: the Prometheus exposition format 0.0.4, and OpenMetrics 1.0 for scrapers that ask for it. Pure.

Triton's counters are not called `..._total`, which OpenMetrics demands of counters. Dashboards know those names, so in
OpenMetrics such a family says `unknown` of its type and keeps them.
"""

from collections.abc import Iterable, Iterator, Mapping

from oriel_inference.histogram import Histogram

__all__ = ["OPENMETRICS", "TEXT", "head", "histogram", "label_text", "pieces", "wants_openmetrics"]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def wants_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header names OpenMetrics at all, as Prometheus does by default."""
    return any(part.partition(";")[0].strip() == "application/openmetrics-text" for part in accept.split(","))


def label_text(labels: Mapping[str, str]) -> str:
    """What stands between the braces of a sample."""
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()])


def head(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """The lines before a family's samples. kind: "counter", "gauge" or "histogram"."""
    if openmetrics and kind == "counter":
        kind, name = ("counter", name.removesuffix("_total")) if name.endswith("_total") else ("unknown", name)
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def histogram(name: str, labels: str, found: Histogram) -> Iterator[str]:
    """The samples of one histogram. With a bucket below zero it has no sum: OpenMetrics forbids it."""
    seen = 0
    for bound, seen in found.cumulative():
        yield f'{name}_bucket{{{labels},le="{bound!r}"}} {seen}\n'
    seen += found.counts[-1]
    yield f'{name}_bucket{{{labels},le="+Inf"}} {seen}\n'
    if not found.bounds or found.bounds[0] >= 0.0:
        yield f"{name}_count{{{labels}}} {seen}\n"
        yield f"{name}_sum{{{labels}}} {found.total!r}\n"


def pieces(lines: Iterable[str], *, size: int) -> Iterator[str]:
    """`size` lines at a time."""
    held: list[str] = []
    for line in lines:
        held.append(line)
        if len(held) >= size:
            yield "".join(held)
            held.clear()
    yield "".join(held)
