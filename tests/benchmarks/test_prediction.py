"""Errors and verdicts that `benchmarks/prediction.py` computes from its figures."""

from pathlib import Path
from typing import Any

import pytest
from inference_bench.goodput_cells import Deadlines, Served
from prediction import between, compared, kept, mean_of, report, scenario

from oriel_tools.load.scenario import read
from oriel_tools.simulate.profile import Profile, Size, mean_ms


def phase(attainment: float | None, p99: float | None) -> dict[str, Any]:
    figures = {"attainment": attainment, "latency_ms": {"p99": p99} if attainment is not None else None}
    return {"tiers": {"gold": figures, "bronze": figures}}


def test_an_error_is_the_difference_over_what_was_measured() -> None:
    found = list(compared("m", "poisson", 1.0, phase(0.8, 100.0), phase(0.84, 92.0)))
    assert [each.error for each in found] == pytest.approx([0.05, 0.08] * 2)
    assert kept(found)
    text = "\n".join(report(found))
    assert "attainment: 2 of 2 within 10%; median 5.0%, worst 5.0%" in text


def test_a_miss_of_more_than_a_tenth_is_a_miss() -> None:
    assert not kept(list(compared("m", "poisson", 1.0, phase(0.5, 100.0), phase(0.56, 100.0))))
    assert not kept(list(compared("m", "poisson", 1.0, phase(0.0, 100.0), phase(0.1, 100.0))))


def test_what_was_not_quoted_judges_nothing() -> None:
    found = list(compared("m", "poisson", 1.0, phase(None, None), phase(0.5, 100.0)))
    assert [each.error for each in found] == [None] * 4 and not kept(found), "nothing was judged"
    assert "within" not in "\n".join(report(found))


def test_the_scenario_can_be_read(tmp_path: Path) -> None:
    served = Served(port=1, name="m")
    lines = scenario(served, Deadlines(gold=10, bronze=30), arrivals="bursty", rate=100.0, seconds=5.0, seed=3)
    (tmp_path / "scenario.toml").write_text("\n".join(lines))
    found = read(tmp_path / "scenario.toml")
    assert [stream.target_ms for stream in found.stream] == [10, 30]
    assert found.phase[-1].rates == pytest.approx({"gold": 30.0, "bronze": 70.0})


def test_passes_of_a_figure_are_averaged_and_their_distance_is_told() -> None:
    passes = [next(compared("m", "poisson", 1.0, phase(each, None), phase(0.9, None))) for each in (0.8, 1.0, None)]
    found = mean_of(passes)
    assert (found.measured, found.predicted, found.error) == (
        pytest.approx(0.9),
        pytest.approx(0.9),
        pytest.approx(0.0),
    )
    assert found.apart == pytest.approx(0.2 / 0.9)
    assert mean_of(passes[2:]).error is None and mean_of(passes[1:]).apart is None, "one pass is not apart from itself"
    apart = "\n".join(report([found]))
    assert "attainment, where the measured passes are within 10% of one another: 0 of 0" in apart


def test_a_profile_lies_between_two_others() -> None:
    before = Profile(model="m", max_rows=4, sizes=[Size(rows=1, mean_ms=1.0), Size(rows=4, mean_ms=4.0)], row_ms=0.2)
    after = Profile(model="m", max_rows=4, sizes=[Size(rows=2, mean_ms=4.0, spread=[2.0])], overhead_ms=1.0)
    found = between(before, after)
    assert [size.rows for size in found.sizes] == [1, 2, 4]
    assert mean_ms(found.sizes, 2) == pytest.approx(3.0) and found.sizes[0].spread == [1.5]
    assert (found.overhead_ms, found.row_ms) == (0.5, 0.1)
