"""The goodput table and its targets, from the document the command writes. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.pages import word

from oriel_cli.table import columns

__all__ = ["HEADING", "about", "as_text", "best", "rows", "verdicts"]

# Oriel's goodput over the FIFO's, by share of the capacity.
OVER_FIFO = {0.8: 1.0, 1.0: 1.2, 1.5: 2.0}
HEADING = ("load", "contender", "delay us", "in time/s", "gold", "bronze", "gold p99 ms", "bronze p99 ms", "x FIFO")


def best(by_delay: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, dict[str, float | None]]:
    """The delay with the largest median goodput, and its medians; None where a turn could not be quoted."""
    found = {delay: _medians(turns) for delay, turns in by_delay.items()}
    chosen = max(found, key=lambda delay: found[delay]["goodput"] or 0.0)
    return chosen, found[chosen]


def _medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    return {
        "goodput": _median([turn["goodput"] for turn in turns]),
        **{tier: _median([turn["by_tier"][tier] for turn in turns]) for tier in ("gold", "bronze")},
        **{f"{tier}_p99": _median([turn["p99_ms"][tier] for turn in turns]) for tier in ("gold", "bronze")},
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) and known else None


def rows(model: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Lines of one model's table."""
    out = []
    for cell in model["cells"]:
        found = {name: best(by_delay) for name, by_delay in cell["contenders"].items()}
        fifo = found["fifo"][1]["goodput"]
        for name, (delay, m) in found.items():
            ratio = m["goodput"] / fifo if m["goodput"] is not None and fifo else None
            cells = (m["goodput"], m["gold"], m["bronze"], m["gold_p99"], m["bronze_p99"])
            out.append(
                (
                    f"{cell['factor']:g} x {cell['arrivals']}",
                    name,
                    "-" if name == "oriel" else delay,
                    *("-" if each is None else f"{each:,.0f}" for each in cells),
                    "-" if ratio is None else f"{ratio:.2f}",
                )
            )
    return out


def verdicts(document: Mapping[str, Any]) -> list[tuple[str, str, bool | None]]:
    """Every target: what, what was found, whether it is met (None: a phase could not be quoted)."""
    out: list[tuple[str, str, bool | None]] = []
    for name, model in document["models"].items():
        for cell in model["cells"]:
            medians = {who: best(by_delay)[1]["goodput"] for who, by_delay in cell["contenders"].items()}
            load = f"{name}, {cell['factor']:g} x {cell['arrivals']}"
            if cell["factor"] in OVER_FIFO:
                bound = OVER_FIFO[cell["factor"]]
                out.append(_verdict(f"{load}: at least {bound:g} x FIFO", medians["oriel"], medians["fifo"], bound))
            if "triton-python" in medians:
                out.append(_verdict(f"{load}: not below Triton", medians["oriel"], medians["triton-python"], 1.0))
        expired, executed = model["expired_executed"], model["executed"]
        out.append((f"{name}: no expired request is executed", f"{expired} of {executed}", expired == 0))
    return out


def _verdict(text: str, own: float | None, other: float | None, bound: float) -> tuple[str, str, bool | None]:
    if own is None or other is None:
        return text, "not quoted", None
    if not other:
        return text, f"{own:,.0f} beside none", own > 0
    return text, f"{own / other:.2f} x", own / other >= bound


def as_text(document: Mapping[str, Any]) -> str:
    """Return the report as text for a terminal."""
    lines: list[str] = []
    for name, model in document["models"].items():
        lines += ["", about(name, model), *columns(HEADING, rows(model), right=set(range(2, 9)))]
    judged = [(text, found, word(met)) for text, found, met in verdicts(document)]
    return "\n".join([*lines, "", *columns(("target", "found", ""), judged)]).lstrip("\n")


def about(name: str, model: Mapping[str, Any]) -> str:
    """One line over the table."""
    deadlines = model["deadlines_ms"]
    return (
        f"{name}: capacity {model['capacity']:,.0f}/s, gold within {deadlines['gold']} ms, bronze within "
        f"{deadlines['bronze']} ms; {model['rows_for_nobody']:,} of {model['executed']:,} rows computed for nobody"
    )
