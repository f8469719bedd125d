"""The text of a registry is the one that the client library writes, byte for byte."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from oriel_wire.observe.exposition import PIECE_LINES, exposition
from oriel_wire.observe.telemetry import END

NAMES = ["tier", "pool", "a", "zone"]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.floats() | st.integers(-(2**70), 2**70)
EXEMPLARS = st.none() | st.builds(
    lambda trace, value, at: Exemplar({"trace_id": trace}, value, at),
    st.text("0123456789abcdef", min_size=1, max_size=32),
    st.floats(allow_nan=False),
    st.floats(0.0, 2e9),
)


class Families(Collector):
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


@st.composite
def families(draw: st.DrawFn) -> list[Metric]:
    found: list[Metric] = []
    for number in range(draw(st.integers(0, 4))):
        names = draw(st.lists(st.sampled_from(NAMES), unique=True))
        labels = st.lists(TEXTS, min_size=len(names), max_size=len(names))
        name = f"oriel_family_{number}"
        kind = draw(st.sampled_from(["counter", "gauge", "histogram"]))
        if kind == "gauge":
            gauge = GaugeMetricFamily(name, "What it is.", labels=names)
            for _ in range(draw(st.integers(0, 3))):
                gauge.add_metric(draw(labels), draw(VALUES))
            found.append(gauge)
        elif kind == "counter":
            counter = CounterMetricFamily(name, "What it counts.", labels=names)
            for _ in range(draw(st.integers(0, 3))):
                created = draw(st.none() | st.floats(0.0, 2e9))
                counter.add_metric(draw(labels), draw(VALUES), created=created, exemplar=draw(EXEMPLARS))
            found.append(counter)
        else:
            histogram = HistogramMetricFamily(name, "How long it took.", labels=names)
            for _ in range(draw(st.integers(0, 3))):
                buckets = [("0.1", draw(VALUES), draw(EXEMPLARS)), ("+Inf", draw(VALUES), draw(EXEMPLARS))]
                histogram.add_metric(draw(labels), buckets, draw(st.none() | st.floats()))  # type: ignore[arg-type]
            found.append(histogram)
    return found


def registry_of(found: list[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Families(found))
    return registry


@given(families())
def test_the_client_library_writes_the_same(found: list[Metric]) -> None:
    registry = registry_of(found)
    assert "".join(exposition(registry, openmetrics=False)) == generate_latest(registry).decode()
    assert "".join(exposition(registry, openmetrics=True)) + END == generate_openmetrics(registry).decode()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_histograms_of_the_library_too(openmetrics: bool) -> None:
    registry = CollectorRegistry()
    LibraryHistogram("lag_seconds", "How late it was.", buckets=(0.1, 1.0), registry=registry).observe(0.2)
    judge = (generate_openmetrics if openmetrics else generate_latest)(registry).decode()
    assert "".join(exposition(registry, openmetrics=openmetrics)) + END * openmetrics == judge


def test_a_large_family_comes_in_pieces() -> None:
    gauge = GaugeMetricFamily("oriel_many", "Many of them.", labels=["a"])
    for number in range(3 * PIECE_LINES):
        gauge.add_metric([str(number)], number)
    sizes = [piece.count("\n") for piece in exposition(registry_of([gauge]), openmetrics=True)]
    assert max(sizes) == PIECE_LINES and sum(sizes) == 3 * PIECE_LINES + 2
