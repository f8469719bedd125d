"""Figures to tables, and the targets they are held against. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.pages import Verdict, table, word

from inference_bench.workloads import IN_PROCESS, Measured
from oriel_cli.table import columns

__all__ = ["as_document", "as_markdown", "as_text", "verdicts"]

HEADING = ("contender", "tensors", "connections", "req/s", "min-max", "CPU-us", "min-max", "p50 ms", "p99 ms", "PSS MB")
OURS = ("oriel", "oriel compiled")


@dataclass(frozen=True, slots=True)
class _Ratio:
    """The figure of one of ours over another's must be at least, or at most, `bound`."""

    text: str
    workload: str
    connections: int
    figure: str
    other: str
    bound: float
    at_least: bool = True


RATIOS = (
    _Ratio("tiny over HTTP: rate beside Triton Python", "tiny-http", 64, "rate", "triton-python", 1.2),
    _Ratio("tiny over HTTP: rate beside MLServer", "tiny-http", 64, "rate", "mlserver", 8.0),
    _Ratio("tiny over HTTP: CPU beside Triton Python", "tiny-http", 64, "cpu_us", "triton-python", 0.7, False),
    _Ratio("tiny over HTTP, 1 connection: p99 beside Triton", "tiny-http", 1, "p99_ms", "triton-python", 2.0, False),
    _Ratio("tiny over HTTP, 1 connection: p50 beside Triton", "tiny-http", 1, "p50_ms", "triton-python", 1.0, False),
    _Ratio("tiny over gRPC: rate beside Triton Python", "tiny-grpc", 64, "rate", "triton-python", 1.3),
    _Ratio("tiny over gRPC: CPU beside Triton Python", "tiny-grpc", 64, "cpu_us", "triton-python", 0.7, False),
    _Ratio("tiny over gRPC, 1 connection: p50 beside Triton", "tiny-grpc", 1, "p50_ms", "triton-python", 1.0, False),
    _Ratio("tiny over gRPC: CPU beside a no-op echo", "tiny-grpc", 64, "cpu_us", "grpc.aio echo", 1.3, False),
    _Ratio("5 ms model over HTTP: rate beside in-process", "encoder-http", 64, "rate", IN_PROCESS, 0.95),
    _Ratio("5 ms model over gRPC: rate beside in-process", "encoder-grpc", 64, "rate", IN_PROCESS, 0.95),
    _Ratio("600 KB over HTTP: rate beside Triton Python", "image-http", 16, "rate", "triton-python", 1.2),
    _Ratio("600 KB over gRPC: rate beside Triton Python", "image-grpc", 16, "rate", "triton-python", 1.2),
)  # fmt: skip


def verdicts(found: Sequence[Measured]) -> list[Verdict]:
    """Every target that belongs to a measured workload."""
    medians = {each.workload: each.medians() for each in found}
    out = []
    for ours, ratio in product(OURS, RATIOS):
        figures = medians.get(ratio.workload, {}).get(ratio.connections, {})
        if ratio.workload not in medians or (ours != "oriel" and ours not in figures):
            continue
        text = ratio.text if ours == "oriel" else f"{ours}, {ratio.text}"
        bound = f"{'at least' if ratio.at_least else 'at most'} {ratio.bound:g} x"
        own, other = (figures.get(name, {}).get(ratio.figure) for name in (ours, ratio.other))
        if own is None or not other:
            out.append(Verdict(target=f"{text}: {bound}", found="not measured", met=None))
            continue
        value = own / other
        met = value >= ratio.bound if ratio.at_least else value <= ratio.bound
        out.append(Verdict(target=f"{text}: {bound}", found=f"{value:.2f} x", met=met))
    return out


def as_document(found: Sequence[Measured], **about: Any) -> dict[str, Any]:
    """Everything, for machines; `as_text` and `as_markdown` read it."""
    return {
        **about,
        "workloads": {
            each.workload: {
                "medians": {str(connections): by_name for connections, by_name in each.medians().items()},
                "runs": {str(connections): by_name for connections, by_name in each.runs.items()},
                "pss_mb": each.pss_mb,
                "encodings": each.encodings,
                "left_out": each.left_out,
            }
            for each in found
        },
        "targets": [{"target": v.target, "found": v.found, "met": v.met} for v in verdicts(found)],
    }


def _rows(workload: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for connections, by_name in workload["medians"].items():
        for name, m in by_name.items():
            shown = f"{name}, batches of {m['best_batch']:.0f}" if "best_batch" in m else name
            rest = (("cpu_us", 1), ("p50_ms", 2), ("p99_ms", 2))
            cpu, *times = (f"{m[what]:,.{digits}f}" if what in m else "-" for what, digits in rest)
            turns = workload["runs"][connections][name]
            pss = workload["pss_mb"].get(name)
            rows.append(
                (
                    shown,
                    workload["encodings"].get(name, "-"),
                    "-" if name == IN_PROCESS else connections,
                    f"{m['rate']:,.0f}",
                    _range(turns, "rate", 0),
                    cpu,
                    _range(turns, "cpu_us", 1),
                    *times,
                    "-" if pss is None else f"{pss:.0f}",
                )
            )
    return rows


def _range(turns: Sequence[Mapping[str, float]], what: str, digits: int) -> str:
    """The smallest and the largest of all turns."""
    found = [turn[what] for turn in turns if what in turn]
    return f"{min(found):,.{digits}f}-{max(found):,.{digits}f}" if found else "-"


def _targets(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(each["target"], each["found"], word(each["met"])) for each in document["targets"]]


def as_text(document: Mapping[str, Any]) -> str:
    """Return the report as text for a terminal."""
    lines: list[str] = []
    for name, each in document["workloads"].items():
        lines += ["", name, *(f"  {line}" for line in columns(HEADING, _rows(each), right=set(range(2, len(HEADING)))))]
        lines += [f"  left out: {who}: {why}" for who, why in each["left_out"].items()]
    if document["targets"]:
        lines += ["", *columns(("target", "found", ""), _targets(document))]
    return "\n".join(lines).lstrip("\n")


def as_markdown(document: Mapping[str, Any]) -> str:
    """Return the report as Markdown for benchmarks/results."""
    parts = []
    for name, each in document["workloads"].items():
        parts.append(f"## {name}\n\n{table(HEADING, _rows(each))}")
        parts += [f"Left out: {who}: {why}" for who, why in each["left_out"].items()]
    if document["targets"]:
        parts.append(f"## Targets\n\n{table(('target', 'found', ''), _targets(document))}")
    return "\n\n".join(parts) + "\n"
