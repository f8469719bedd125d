"""A short soak of a real gateway, also with a trace collector that never answers; no bound of time is asserted."""

import json
from pathlib import Path

import pytest
from gateway_bench import soak


def test_figures_of_a_made_up_run() -> None:
    report = soak.Report(
        seconds=100.0, rss_mib=[(0.0, 10.0), (50.0, 20.0), (80.0, 21.0), (110.0, 22.0)], fds=[9, 12, 12]
    )
    report.latencies_ms = [1.0] * 100 + [2.0] * 100
    found = report.summary()
    assert found["rss_slope_mib_per_min"] == pytest.approx(2.0)
    assert (found["fds_first"], found["fds_last"], found["p99_ratio"]) == (12, 12, 2.0)
    assert len(soak.missed(found)) == 2
    assert soak.missed({**found, "rss_slope_mib_per_min": 0.1, "p99_ratio": 1.0}) == []
    assert len(soak.missed({**found, "not_200": 1, "fds_last": 13})) == 4


def test_a_run_that_is_too_short_for_a_bound_says_so_and_does_not_judge_it() -> None:
    worse = {"not_200": 0, "rss_slope_mib_per_min": 9.0, "fds_first": 1, "fds_last": 2, "p99_ratio": 2.0}
    found = [(len(soak.missed(worse, seconds)), len(soak.not_judged(seconds))) for seconds in (1.0, 60.0, 600.0)]
    assert found == [(0, 3), (2, 1), (3, 0)]
    assert len(soak.missed({**worse, "not_200": 1}, 1.0)) == 1, "answers are judged by every run"


@pytest.mark.long
@pytest.mark.parametrize("collector", [pytest.param("none", marks=pytest.mark.long), "blackhole"])
async def test_a_short_soak_answers_everything(collector: str, tmp_path: Path) -> None:
    flags = ("--access-log", str(tmp_path / "log"))
    found = (await soak.soak(1.0, clients=4, collector=collector, warm_s=0.3, flags=flags)).summary()
    text = (tmp_path / "log").read_text()
    reasons = {json.loads(line)["reason"] for line in text.splitlines()}
    assert (
        {"answered", "unauthenticated", "not_found"}
        <= reasons
        <= {"answered", "unauthenticated", "not_found", "client_left"}
    )
    assert text.count("\n") >= found["requests"], "warm-up and refused calls come on top"
    assert not [key for key in soak.KEYS.values() if key in text]
    assert found["requests"] and not found["not_200"] and found["refused_as_meant"]
    if collector == "blackhole":
        assert found["rss_last_mib"] - found["rss_first_mib"] < 32
        assert found["spans_dropped"], "a lost span is counted"
    assert found["stop_s"] < 15, "the bound is 2 s; the rest leaves room for a busy machine"
