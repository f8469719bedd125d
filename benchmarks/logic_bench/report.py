"""Figures of the logic bench as tables and a verdict on each target. Pure."""

from collections.abc import Mapping

from harness.pages import Verdict, table, word

from logic_bench.contenders import DIRECT

__all__ = ["Figures", "as_markdown", "verdicts"]

# connections -> contender -> what -> value
Figures = Mapping[int, Mapping[str, Mapping[str, float]]]
FASTAPI = "fastapi+tritonclient.aio"
FASTAPI_SHARE = 0.33
ADDED_MS = 0.6


def verdicts(figures: Figures) -> list[Verdict]:
    """Every target, at every number of connections it is for."""
    out = []
    bounds = ((FASTAPI, FASTAPI_SHARE), ("litserve", 1.0), ("bentoml", 1.0))
    for connections, by_name in figures.items():
        for other, bound in bounds:
            target = f"CPU at {connections}: at most {bound:g} x {other}"
            ratio = _ratio(by_name, "cpu_us", other)
            out.append(Verdict(target=target, found=_times(ratio), met=None if ratio is None else ratio <= bound))
    alone = figures.get(1, {})
    target = f"p50 added to the model's own at 1 connection: at most {ADDED_MS:g} ms"
    if "oriel" in alone and DIRECT in alone:
        added = alone["oriel"]["p50_ms"] - alone[DIRECT]["p50_ms"]
        out.append(Verdict(target=target, found=f"{added:.3f} ms", met=added <= ADDED_MS))
    else:
        out.append(Verdict(target=target, found="not measured", met=None))
    return out


def _ratio(by_name: Mapping[str, Mapping[str, float]], what: str, other: str) -> float | None:
    if "oriel" not in by_name or other not in by_name:
        return None
    return by_name["oriel"][what] / by_name[other][what]


def _times(ratio: float | None) -> str:
    return "not measured" if ratio is None else f"{ratio:.2f} x"


def as_markdown(figures: Figures) -> str:
    """A table per number of connections, then the targets."""
    parts = []
    heading = ("contender", "CPU-us per request", "min-max", "req/s", "p50 ms", "p99 ms", "added p50 ms", "oriel / it")
    for connections, by_name in figures.items():
        rows = []
        direct = by_name.get(DIRECT)
        for name, f in by_name.items():
            is_model = name == DIRECT
            ratio = None if is_model else _ratio(by_name, "cpu_us", name)
            rows.append(
                (
                    name,
                    "-" if is_model else f"{f['cpu_us']:,.0f}",
                    "-" if is_model else f"{f['cpu_us_min']:,.0f}-{f['cpu_us_max']:,.0f}",
                    f"{f['per_s']:,.0f}",
                    f"{f['p50_ms']:.3f}",
                    f"{f['p99_ms']:.2f}",
                    "-" if is_model or direct is None else f"{f['p50_ms'] - direct['p50_ms']:.3f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                )
            )
        parts.append(f"## {connections} connection{'s' * (connections > 1)}\n\n{table(heading, rows)}")
    found = [(each.target, each.found, word(each.met)) for each in verdicts(figures)]
    parts.append(f"## Targets\n\n{table(('target', 'found', ''), found)}")
    return "\n\n".join(parts) + "\n"
