"""The client library's parsers read the text as it was meant, whatever it holds."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oriel_wire.observe.exemplars import Exemplars
from oriel_wire.observe.telemetry import END, Histogram, head, histogram, label_text, pieces, wants_openmetrics

LABELS = st.dictionaries(
    st.sampled_from(["model", "version", "tier", "_team"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e")),
    min_size=1,
)
BOUNDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20, unique=True).map(lambda each: tuple(sorted(each)))


@given(LABELS, st.booleans())
def test_labels_are_read_as_they_were(labels: dict[str, str], openmetrics: bool) -> None:
    text = head("a_total", "counter", "x", openmetrics=openmetrics) + f"a_total{{{label_text(labels)}}} 3\n"
    (family,) = parse_openmetrics(text + "# EOF\n") if openmetrics else parse_text(text)
    (sample,) = family.samples
    assert (family.type, sample.name, sample.value, dict(sample.labels)) == ("counter", "a_total", 3.0, labels)


@given(BOUNDS, st.lists(st.floats(0.0, 1e7)), st.booleans())
def test_histograms_count_every_observation_in_every_bucket_it_fits(
    bounds: tuple[float, ...], values: list[float], openmetrics: bool
) -> None:
    found = Histogram(bounds)
    for value in values:
        found.observe(value)
    text = head("h", "histogram", "x", openmetrics=openmetrics) + "".join(histogram("h", 'a="b"', found))
    (family,) = parse_openmetrics(text + "# EOF\n") if openmetrics else parse_text(text)
    buckets = {float(s.labels["le"]): s.value for s in family.samples if s.name == "h_bucket"}
    expected = {bound: sum(value <= bound for value in values) for bound in (*bounds, float("inf"))}
    assert buckets == expected and found.count == len(values)
    rest = {sample.name: sample.value for sample in family.samples if sample.name != "h_bucket"}
    assert rest == ({} if bounds[0] < 0 else {"h_count": len(values), "h_sum": found.total})


@given(BOUNDS, st.lists(st.floats(0.0, 1e7), min_size=1))
def test_exemplars_are_read_with_the_bucket_that_their_value_is_in(
    bounds: tuple[float, ...], values: list[float]
) -> None:
    found, exemplars = Histogram(bounds), Exemplars[str](clock=lambda: 1_800_000_000.25)
    for number, value in enumerate(values):
        found.observe(value)
        exemplars.note("h", value, f"{number:032x}", bounds)
    text = head("h", "histogram", "x", openmetrics=True) + "".join(histogram("h", 'a="b"', found, exemplars.of("h")))
    (family,) = parse_openmetrics(text + END)
    shown = [each for each in family.samples if each.exemplar is not None]
    latest = {bisect_left(bounds, value): (f"{number:032x}", value) for number, value in enumerate(values)}
    assert len(shown) == len(latest)
    for sample in shown:
        assert sample.exemplar is not None and float(sample.exemplar.timestamp) == 1_800_000_000.25
        bucket = bisect_left((*bounds, float("inf")), float(sample.labels["le"]))
        assert latest[bucket] == (sample.exemplar.labels["trace_id"], sample.exemplar.value)


@given(st.lists(st.floats(0.0, 20.0)), st.lists(st.floats(0.0, 20.0)))
def test_added_histograms_equal_one_that_observed_everything(left: list[float], right: list[float]) -> None:
    both, one = Histogram(), Histogram()
    more = Histogram()
    for value in left:
        both.observe(value)
    for value in right:
        more.observe(value)
    both.add(more)
    for value in (*left, *right):
        one.observe(value)
    assert both.counts == one.counts and both.total == pytest.approx(one.total)


def observed() -> Histogram:
    found = Histogram((0.005, 0.5, 1.0))
    for value in (0.001, 0.005, 0.25, 1.0, 7.5):
        found.observe(value)
    return found


def test_the_inference_servers_text_of_a_histogram_is_this() -> None:
    text = head("h_seconds", "histogram", "Time", openmetrics=False) + "".join(
        histogram("h_seconds", 'a="b"', observed())
    )
    assert (
        text
        == """\
# HELP h_seconds Time
# TYPE h_seconds histogram
h_seconds_bucket{a="b",le="0.005"} 2
h_seconds_bucket{a="b",le="0.5"} 3
h_seconds_bucket{a="b",le="1.0"} 4
h_seconds_bucket{a="b",le="+Inf"} 5
h_seconds_count{a="b"} 5
h_seconds_sum{a="b"} 8.756
"""
    )


def test_counters_of_triton_keep_their_names_in_both_formats() -> None:
    assert head("nv_x", "counter", "t", openmetrics=False).endswith("# TYPE nv_x counter\n")
    assert head("nv_x", "counter", "t", openmetrics=True).endswith("# TYPE nv_x unknown\n")
    assert head("o_total", "counter", "t", openmetrics=True).endswith("# TYPE o counter\n")


@given(st.lists(st.text(max_size=3)), st.integers(1, 5))
def test_pieces_lose_nothing(lines: list[str], size: int) -> None:
    assert "".join(pieces(lines, size=size)) == "".join(lines)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [("", False), ("*/*", False), ("text/plain", False), ("text/plain, application/openmetrics-text;q=0.5", True)],
)
def test_openmetrics_is_for_those_who_name_it(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted
