"""One phase: `oriel load` offers one load to an inference server, in a process of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.load import open_loop

from inference_bench.models import Model

__all__ = ["TIERS", "Cell", "Deadlines", "Load", "Served", "offer", "write_body"]

TIERS = {"gold": 0.3, "bronze": 0.7}  # share of the arrivals
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Milliseconds from the arrival to the answer."""

    gold: int
    bronze: int

    def of(self, tier: str) -> int:
        return self.gold if tier == "gold" else self.bronze


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """factor: of the capacity. rate: per second, both tiers."""

    factor: float
    rate: float
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model behind a port. name: its name there."""

    port: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """goodput: answers within their deadline per second, by tier and in all; None if the phase cannot be quoted.

    refused_ms: tier -> reason -> percentiles of the time until the refusal; empty if the phase cannot be quoted.
    """

    goodput: float | None
    by_tier: Mapping[str, float | None]
    objection: str | None
    refused_ms: Mapping[str, Mapping[str, Any]]


def write_body(folder: Path, model: Model) -> None:
    """A v2 request as JSON."""
    row = model.row()
    tensor = {"name": "x", "shape": list(row.shape), "datatype": model.datatype, "data": row.ravel().tolist()}
    (folder / "plain.json").write_text(json.dumps({"inputs": [tensor]}))


def offer(served: Served, load: Load, deadlines: Deadlines, folder: Path) -> Cell:
    """Offer `load` after a short warm-up and wait until all of it has ended."""
    document = open_loop(_scenario(served, load, deadlines, folder), folder)
    return _cell(document["phases"][-1])


def _scenario(served: Served, load: Load, deadlines: Deadlines, folder: Path) -> list[str]:
    lines = [f"seed = {load.seed}", "max_in_flight = 8192"]
    for level, tier in enumerate(TIERS):
        headers = f'"x-oriel-timeout-ms" = "{deadlines.of(tier)}", "x-oriel-priority" = "{level}"'
        lines += [
            "[[stream]]",
            f'name = "{tier}"',
            f'url = "http://127.0.0.1:{served.port}/v2/models/{served.name}/infer"',
            f'body = "{folder / "plain.json"}"',
            'encoding = "binary"',
            f"headers = {{ {headers} }}",
            f"target_ms = {deadlines.of(tier)}",
            f"timeout_s = {deadlines.of(tier) / 1000 + 1}",
        ]
    for name, seconds, rate in (
        ("warm-up", WARM_UP_S, load.rate / load.factor * 0.3),
        ("measured", load.seconds, load.rate),
    ):
        rates = ", ".join(f"{tier} = {rate * share:.3f}" for tier, share in TIERS.items())
        lines += ["[[phase]]", f'name = "{name}"', f"seconds = {seconds}", 'arrivals = "poisson"']
        lines += [f"rates = {{ {rates} }}", f"warm_up = {'true' if name == 'warm-up' else 'false'}"]
    return lines


def _cell(phase: Mapping[str, Any]) -> Cell:
    tiers = phase["tiers"]
    return Cell(
        goodput=phase["all"]["goodput_per_s"],
        by_tier={tier: found["goodput_per_s"] for tier, found in tiers.items()},
        objection=phase["objection"],
        refused_ms={tier: found["refused_ms"] or {} for tier, found in tiers.items()},
    )
