from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.access_log import _line
from oriel_tools.load.arrivals import bursty, merged, poisson, ramp, replayed, trace_offsets, uniform

from ...gateway.records import record

RATES = st.floats(0, 2000)
SPANS = st.floats(0.01, 2)
SEEDS = st.integers(0, 2**32)


@given(RATES, SPANS, SEEDS, st.floats(1, 20), st.floats(0.001, 1))
def test_arrivals_ascend_within_the_phase_and_follow_from_the_seed(
    rate: float, seconds: float, seed: int, factor: float, burst_s: float
) -> None:
    for make in (
        lambda: uniform(rate, seconds),
        lambda: poisson(rate, seconds, Random(seed)),
        lambda: bursty(rate, seconds, Random(seed), factor=factor, burst_s=burst_s),
        lambda: ramp(rate, seconds, Random(seed), factor=factor),
    ):
        found = list(islice(make(), 5000))
        assert found == sorted(found) and all(0 <= each < seconds for each in found)
        assert found == list(islice(make(), 5000))


def test_poisson_has_its_rate_and_its_spread() -> None:
    gaps = _gaps(list(poisson(500, 100, Random(3))))
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert len(gaps) == pytest.approx(50_000, rel=0.02) and spread == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_a_ramp_goes_on_a_straight_line_to_its_end(factor: float) -> None:
    found = list(ramp(500, 100, Random(3), factor=factor))
    assert len(found) == pytest.approx(50_000 * (1 + factor) / 2, rel=0.02)
    half = sum([1 for each in found if each < 50])
    assert half == pytest.approx(25_000 * (1 + (factor - 1) / 4), rel=0.02)


def test_bursts_keep_the_mean_rate_and_spread_more_than_poisson() -> None:
    gaps = _gaps(list(bursty(100, 2000, Random(3), factor=5, burst_s=0.2)))
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert len(gaps) == pytest.approx(200_000, rel=0.05) and spread > 3


def test_uniform_is_evenly_spaced() -> None:
    assert list(uniform(4, 1)) == [0.25, 0.5, 0.75]
    assert list(uniform(0, 1)) == list(poisson(0, 1, Random(1))) == []


@given(st.lists(st.lists(st.floats(0, 10)).map(sorted), max_size=5))
def test_merging_keeps_every_arrival_in_order(schedules: list[list[float]]) -> None:
    found = list(merged([iter(each) for each in schedules]))
    assert [offset for offset, _ in found] == sorted(offset for each in schedules for offset in each)
    for index, schedule in enumerate(schedules):
        assert [offset for offset, of in found if of == index] == schedule


def test_a_trace_gives_each_stream_its_lines_and_those_of_all() -> None:
    lines = ["# recorded on a Monday", "0.5,gold", "", "0.75", "1e0, bronze # late", "3"]
    assert trace_offsets(iter(lines), "gold") == [0.5, 0.75, 3.0]
    assert trace_offsets(iter(lines), "bronze") == [0.75, 1.0, 3.0]
    assert list(replayed([0.5, 0.75, 3.0], 3.0)) == [0.5, 0.75]


@pytest.mark.parametrize("line", ["soon", "nan", "inf", "-1", "0.1"])
def test_a_bad_line_of_a_trace_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2:"):
        trace_offsets(iter(["0.2", line]), "gold")


def logged(second: float, total_ms: float, tenant: str = "acme", tier: str = "gold") -> str:
    """A line as a gateway writes it."""
    who: Any = SimpleNamespace(name=tenant, tier=SimpleNamespace(name=tier))
    line = _line(record(who, None, Outcome.ANSWERED), 0.0)
    told = {"time": f"2026-11-28T10:00:{second:06.3f}+00:00", "stages_ms": {"queue": 1.0, "total": total_ms}}
    assert told.keys() <= line.keys()
    return msgspec.json.encode(line | told).decode() + "\n"


def test_an_access_log_is_a_trace_of_arrivals_by_tenant_or_tier() -> None:
    lines = [logged(2.0, 500.0), logged(2.25, 1250.0, "tiny", "bronze"), "\n", logged(3.0, 1.0)]
    for stream, expected in {
        "acme": [0.5, 1.999],
        "gold": [0.5, 1.999],
        "bronze": [0.0],
        "load": [0.0, 0.5, 1.999],
        "nobody": [],
    }.items():
        assert trace_offsets(iter(lines), stream) == pytest.approx(expected, abs=1e-5), stream


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        logged(1.0, -1.0),
        logged(1.0, 1e300),
        '{"time": 1, "stages_ms": {}}',
        logged(1.0, 2.0).replace("total", "all"),
    ],
)
def test_another_line_in_an_access_log_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(ValueError, match="line 2: this is not a line of a gateway's access log"):
        trace_offsets(iter([logged(1.0, 2.0), line]), "gold")


def _gaps(offsets: list[float]) -> list[float]:
    return [later - sooner for sooner, later in zip(offsets, offsets[1:], strict=False)]
