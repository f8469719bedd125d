"""How the gateway's benchmark judges its runs, and that its page and plot show the results."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from gateway_sla import prepare, tiers_for
from sla_bench.promises import judge
from sla_bench.report import markdown, plot
from sla_bench.stack import haproxy_configuration


def figures(
    attainment: float | None, good: int, p99: float = 100.0, refused: int = 0, late_ms: float = 2403.0
) -> dict[str, Any]:
    return {
        "scheduled_per_s": 10.0,
        "attainment": attainment,
        "goodput_per_s": good / 10,
        "latency_ms": {"p50": 20.0, "p99": p99},
        "good": good,
        "refused": {"503 infeasible": refused} if refused else {},
        "refused_ms": {"503 infeasible": {"p99": 2.0}, "504 deadline_exceeded": {"p99": late_ms}} if refused else {},
        "failed": {},
    }


def cell(load: str, factor: float, **tiers: dict[str, Any]) -> dict[str, Any]:
    good = sum(each["good"] for each in tiers.values())
    return {
        "load": load,
        "factor": factor,
        "tiers": tiers,
        "generator_cores": 0.1,
        "gateway_cores": 0.1,
        "server_cores": 0.9,
        "answered_per_s": good / 10,
        "goodput_per_s": good / 10,
        "control": "",
        "permits": 6,
        "capacity_before": 100.0,
        "capacity_after": 95.0,
    }


def run(gold: float) -> dict[str, Any]:
    loads = [
        cell(f"{factor:g}x", factor, gold=figures(gold, 300), bronze=figures(0.2, 650, refused=9))
        for factor in (1.0, 2.0, 5.0, 10.0)
    ]
    loads.append(cell("0.5x after the flood", 0.0, gold=figures(1.0, 200), bronze=figures(0.995, 300)))
    loads.append(cell("R4 quiet 0.4x, noisy 3x", 0.0, quiet=figures(1.0, 400), noisy=figures(0.2, 580)))
    loads.append(cell("R4 quiet 1.5x, noisy 3x", 0.0, quiet=figures(0.3, 490), noisy=figures(0.2, 490)))
    loads.append(cell("R8 gold 5x, bronze 0.2x", 0.0, gold=figures(0.1, 930), bronze=figures(0.3, 60)))
    tiers = {"gold": {"target_ms": 150}, "bronze": {"target_ms": 600}}
    found = {
        "title": "a server",
        "tiers": tiers,
        "service_ms": 12.0,
        "capacity": 100.0,
        "server_cores": 0.9,
        "learning_s": 8.0,
        "loads": loads,
        "controls": [cell("1x", 1.0, gold=figures(0.02, 5)) | {"control": "fifo", "permits": None}],
    }
    return {**found, "verdicts": judge(found)}


def test_promises_are_judged_one_by_one() -> None:
    assert all(verdict["kept"] for verdict in run(1.0)["verdicts"])
    missed = [verdict["promise"] for verdict in run(0.98)["verdicts"] if not verdict["kept"]]
    assert missed == [f"R1 gold in target at {load}" for load in ("1x", "2x", "5x")]


def test_nothing_is_judged_by_a_phase_around_which_the_capacity_moved() -> None:
    found = run(0.98)
    found["loads"][1]["capacity_after"] = 146.0
    verdicts = {verdict["promise"]: verdict for verdict in judge(found)}
    unjudged = [promise for promise, verdict in verdicts.items() if verdict["kept"] is None]
    assert unjudged == ["R1 gold in target at 2x", "R1 gold refusals", "R5 p99 of 504s at up to 2x"]
    assert verdicts["R1 gold in target at 2x"]["found"] == "98.00 %; capacity moved by 46 %"
    assert verdicts["R1 gold in target at 1x"]["kept"] is False


def test_folder_that_cannot_be_written_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    prepare(tmp_path / "new" / "folder", [], [])
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="file/below cannot be written"):
        prepare(tmp_path / "file" / "below", [], [])


def test_control_holds_at_the_server_what_the_closed_loop_did() -> None:
    text = haproxy_configuration(1234, 5678, 2400)
    assert "bind 127.0.0.1:1234" in text and "server one 127.0.0.1:5678 maxconn 12" in text
    assert "timeout queue 2400\n" in text


def test_refusals_are_judged_by_how_long_they_took() -> None:
    found = run(1.0)
    by_promise = {verdict["promise"]: verdict for verdict in found["verdicts"]}
    assert by_promise["R3 p99 of refusals at 5x"]["found"] == "2.0 ms"
    assert by_promise["R5 p99 of 504s at up to 2x"]["found"] == "deadline + 3.0 ms"
    found["loads"][1]["tiers"]["bronze"] = figures(0.2, 650, refused=9, late_ms=2421.0)
    found["loads"][2]["tiers"]["bronze"]["refused_ms"]["503 infeasible"]["p99"] = 51.0
    missed = [verdict["promise"] for verdict in judge(found) if not verdict["kept"]]
    assert missed == ["R3 p99 of refusals at 5x", "R5 p99 of 504s at up to 2x"]


def test_page_and_plot_show_what_was_found() -> None:
    tiers = {name: {"target_ms": tier.target_ms} for name, tier in tiers_for(0.0125).items()}
    document = {
        "date": "2000-01-01",
        "machine": "one, load average before the run 1.00",
        "commit": "abc1234",
        "seconds": 10.0,
        "layers": 60,
        "tiers": tiers,
        "servers": {"a": run(0.98)},
    }
    page = markdown(document)
    assert "gold 150 ms" in page and "| R1 gold in target at 5x | 98.00 % | >= 99 % | **missed** |" in page
    assert "9 503 infeasible" in page
    drawn = ElementTree.fromstring(plot(document))
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert "### Control: the same load behind HAProxy" in page and "it was 95.0 to 100.0" in page
    assert len(lines) == 4 and lines[0].get("points", "").count(",") == 4
