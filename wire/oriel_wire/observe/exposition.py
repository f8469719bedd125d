"""Writes the metrics of a registry of `prometheus_client` as text, as the library does, in a fraction of its time.

The library checks each character of a name in each line, which holds the event loop for longer than any request
(docs/decisions, 114). Between two pieces a caller on the loop lets it go on.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from oriel_wire.observe.telemetry import head, label_text, pieces

__all__ = ["counts", "exposition", "merged"]

PIECE_LINES = 500
_number: Callable[[float], str] = floatToGoString


def exposition(registry: CollectorRegistry, *, openmetrics: bool) -> Iterator[str]:
    """Yield the text in pieces of at most PIECE_LINES lines. OpenMetrics needs `telemetry.END` behind them.

    Families are counters, gauges and histograms.
    """
    for metric in registry.collect():
        yield from pieces(_lines(metric, openmetrics), size=PIECE_LINES)


def merged(texts: Iterable[str], one_value: Callable[[str, str, float, float], float]) -> str:
    """Return the metrics of several processes as one text, in the form that the texts have.

    one_value: name and kind of a family and two values -> the value that stands for both. One exemplar of two stays.
    """
    families: dict[str, dict[str, tuple[float, str] | None]] = {}
    name = kind = ""
    for text in texts:
        for line in filter(None, text.split("\n")):
            if line.startswith("#"):
                name, kind = line.split(" ", 3)[2], line.rpartition(" ")[2]
                families.setdefault(name, {}).setdefault(line, None)
                continue
            plain, mark, example = line.rpartition(" # {")
            plain, example = (plain, example) if mark else (line, "")
            series, _, value = plain.rpartition(" ")
            number, known = float(value), families[name].get(series)
            if known is not None:
                number, example = one_value(name, kind, known[0], number), example or known[1]
            families[name][series] = number, mark + example
    rows = (row for family in families.values() for row in family.items())
    return "".join(f"{row}\n" if value is None else f"{row} {_number(value[0])}{value[1]}\n" for row, value in rows)


def counts(text: str) -> str:
    """Return the text of a process that has ended without its gauges: its counts stay counted."""
    kept, kind = [], ""
    for line in text.split("\n"):
        if line.startswith("#"):
            kind = line.rpartition(" ")[2]
        if line.startswith("#") or kind in ("counter", "histogram"):
            kept.append(line)
    return "\n".join(kept)


def _lines(metric: Metric, openmetrics: bool) -> Iterator[str]:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    yield from head(name, metric.type, metric.documentation, openmetrics=openmetrics).splitlines(keepends=True)
    if openmetrics:
        for sample in metric.samples:
            yield f"{_series(sample)} {_number(sample.value)}{_exemplar(sample)}\n"
        return
    created = f"{metric.name}_created"
    apart = []
    for sample in metric.samples:
        line = f"{_series(sample)} {_number(sample.value)}\n"
        if sample.name == created:
            apart.append(line)
        else:
            yield line
    if apart:
        yield from head(created, "gauge", metric.documentation, openmetrics=False).splitlines(keepends=True)
        yield from apart


def _series(sample: Sample) -> str:
    labels = sample.labels
    if not labels:
        return sample.name
    return f"{sample.name}{{{label_text(dict(sorted(labels.items())))}}}"


def _exemplar(sample: Sample) -> str:
    exemplar = sample.exemplar
    if exemplar is None:
        return ""
    return f" # {{{label_text(exemplar.labels)}}} {_number(exemplar.value)} {exemplar.timestamp}"
