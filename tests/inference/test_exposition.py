"""What is written, whatever it holds, is read by the client library's parsers as it was meant."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oriel_inference.exposition import head, histogram, label_text, pieces, wants_openmetrics
from oriel_inference.histogram import Histogram
from oriel_inference.host import HostLoad

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


def machine(proc: Path, busy: int, idle: int) -> None:
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (proc / "meminfo").write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  40 kB\nHugePages_Total:  0\n")


def test_utilisation_is_that_of_the_last_window(tmp_path: Path) -> None:
    now = [0.0]
    machine(tmp_path, 100, 100)
    host = HostLoad(tmp_path, lambda: now[0])
    assert host.utilization() == 0.0
    machine(tmp_path, 130, 110)
    now[0] = 0.5
    assert host.utilization() == 0.0, "too short a window"
    now[0] = 2.0
    assert host.utilization() == 0.75
    machine(tmp_path, 130, 210)
    assert host.utilization() == 0.75, "read again at once"
    now[0] = 4.0
    assert host.utilization() == 0.0
    assert host.memory_bytes() == (102_400, 61_440)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2", "cpu a b c d e f g h"])
def test_a_machine_that_does_not_say_has_no_figures(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
        (tmp_path / "meminfo").write_text(text)
    host = HostLoad(tmp_path, lambda: 0.0)
    assert host.utilization() is None and host.memory_bytes() is None
