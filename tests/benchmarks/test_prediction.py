"""What `benchmarks/goodput.py prediction` computes from its figures."""

from pathlib import Path
from typing import Any

import pytest
from inference_bench.goodput_cells import Deadlines, Served
from inference_bench.prediction import compared, kept, report, scenario

from oriel_cli.load.scenario import read


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
    served = Served(port=1, name="m", parameters=False)
    lines = scenario(served, Deadlines(gold=10, bronze=30), arrivals="bursty", rate=100.0, seconds=5.0, seed=3)
    (tmp_path / "scenario.toml").write_text("\n".join(lines))
    found = read(tmp_path / "scenario.toml")
    assert [stream.target_ms for stream in found.stream] == [10, 30]
    assert found.phase[-1].rates == pytest.approx({"gold": 30.0, "bronze": 70.0})
