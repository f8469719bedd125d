"""How the gateway's bench judges, and that page and plot say what was found."""

from typing import Any
from xml.etree import ElementTree

from gateway_sla import judge, tiers_for
from sla_bench.report import markdown, plot


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
        "loads": loads,
    }
    return {**found, "verdicts": judge(found)}


def test_promises_are_judged_one_by_one() -> None:
    assert all(verdict["kept"] for verdict in run(1.0)["verdicts"])
    missed = [verdict["promise"] for verdict in run(0.98)["verdicts"] if not verdict["kept"]]
    assert missed == [f"R1 gold in target at {load}" for load in ("1x", "2x", "5x")]


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
    document = {"date": "2000-01-01", "machine": "one", "seconds": 10.0, "tiers": tiers, "servers": {"a": run(0.98)}}
    page = markdown(document)
    assert "gold 150 ms" in page and "| R1 gold in target at 5x | 98.00 % | >= 99 % | **missed** |" in page
    assert "9 503 infeasible" in page
    drawn = ElementTree.fromstring(plot(document))
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 and lines[0].get("points", "").count(",") == 4
