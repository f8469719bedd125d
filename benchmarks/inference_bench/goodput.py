"""Answers within their deadline per second, open loop, two tiers, beside a FIFO and Triton.

    python benchmarks/goodput.py servers [--models encoder mlp] [--factors 0.8 1.0 1.5] [--arrivals poisson bursty]
        [--seconds 4] [--rounds 1] [--threads 1] [--all-delays] [--no-triton] [--json FILE]

Offered by `oriel load` in a process of its own, which refuses phases in which it lagged: Poisson and bursty arrivals
(bursts at three times the rate, 0.3 s on the mean), 30 % gold and 70 % bronze, at shares of the measured capacity: the
closed-loop rate of Oriel at 128 connections. Deadlines are multiples of how long ONNX Runtime alone takes for the
largest batch, 2 for gold, 6 for bronze. Models: a transformer of about 5 ms, a perceptron bound by reading its weights.

Contenders: Oriel, deadlines and tiers by its headers; the same server as a plain FIFO with a fixed batching delay
(benchmarks/inference_bench/serve.py), which knows neither; Triton with the same ONNX session in its Python backend,
`priority` and `timeout` in every request, queue policy REJECT with allow_timeout_override, at the best of five static
batching delays: the best of the 1.0 x cells, or with --all-delays the best of each cell. Same model file, same threads.

Counted besides: calls whose deadline had passed when their batch began to run (in Oriel; there must be none), and rows
that were computed for nobody because their deadline passed meanwhile.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inference_bench.closed_loop import drive
from inference_bench.goodput_cells import Cell, Deadlines, Load, Served, offer, write_bodies
from inference_bench.goodput_report import as_text
from inference_bench.goodput_servers import Servers, rows_for_nobody, running
from inference_bench.in_process import alone
from inference_bench.models import MODELS, Model, write
from inference_bench.targets import ask, http_target

CONNECTIONS = 128
GOLD, BRONZE = 2.0, 6.0
ATTEMPTS = 3
TRITON_DELAYS_US = (0, 1_000, 5_000, 20_000, 50_000)


@dataclass(slots=True)
class Outcome:
    """One model's table. cells: (arrivals, factor) -> contender -> delay -> turns."""

    model: str
    capacity: float
    batch_ms: float
    deadlines: Deadlines
    cells: dict[tuple[str, float], dict[str, dict[int, list[Cell]]]] = field(default_factory=dict)
    rows_for_nobody: int = 0
    executed: int = 0
    expired_executed: int = 0


def largest_batch_s(model: Model, file: Path, threads: int) -> float:
    """Seconds that ONNX Runtime alone takes for the largest batch."""
    return float(alone(file, threads, 4, model.max_batch)["batch_s"][str(model.max_batch)])


def capacity(served: Served, model: Model, seconds: int, folder: Path) -> float:
    target = http_target("capacity", served.port, f"/v2/models/{served.name}/infer", model, binary=True)
    size = ask(target)
    drive(target, CONNECTIONS, 1, size, folder)
    return drive(target, CONNECTIONS, seconds, size, folder).rate


def measure(model: Model, args: argparse.Namespace, folder: Path) -> Outcome:
    file = write(model, folder / "model.onnx")
    batch_s = largest_batch_s(model, file, args.threads)
    deadlines = Deadlines(gold=max(1, round(GOLD * batch_s * 1e3)), bronze=max(1, round(BRONZE * batch_s * 1e3)))
    write_bodies(folder, model, deadlines)
    delays = () if args.no_triton else TRITON_DELAYS_US
    with running(
        model, file, args.threads, folder, fifo_delays=args.fifo_delays, triton_delays=delays
    ) as servers:  # fmt: skip
        own = servers.served["oriel"][0]
        rate = capacity(own, model, 3, folder)
        print(f"{model.name}: {rate:.0f} requests/s, gold {deadlines.gold} ms, bronze {deadlines.bronze} ms",
              file=sys.stderr, flush=True)  # fmt: skip
        outcome = Outcome(model.name, rate, batch_s * 1e3, deadlines)
        fill(outcome, servers, args, folder)
        outcome.rows_for_nobody = rows_for_nobody(own)
    audit = json.loads(servers.audit.read_text())
    outcome.executed, outcome.expired_executed = audit["calls"], audit["expired"]
    return outcome


def fill(outcome: Outcome, servers: Servers, args: argparse.Namespace, folder: Path) -> None:
    """Every cell. 1.0 x comes first: it also finds Triton's delay for the others."""
    chosen: dict[str, int] = {}
    for factor in sorted(args.factors, key=lambda each: each != 1.0):
        for arrivals in args.arrivals:
            cell = outcome.cells.setdefault((arrivals, factor), {})
            for number in range(args.rounds):
                load = Load(
                    arrivals=arrivals,
                    factor=factor,
                    rate=outcome.capacity * factor,
                    seconds=args.seconds,
                    seed=number + 1,
                )
                for name, by_delay in servers.served.items():
                    for delay, served in by_delay.items():
                        if name in chosen and delay != chosen[name] and not args.all_delays:
                            continue
                        found = quoted(served, load, outcome.deadlines, folder)
                        cell.setdefault(name, {}).setdefault(delay, []).append(found)
                        _say(outcome.model, load, name, delay, found)
        if factor == 1.0 or not chosen:
            chosen = {name: _best(outcome, name) for name in servers.served}


def quoted(served: Served, load: Load, deadlines: Deadlines, folder: Path) -> Cell:
    """Offer a phase; again, up to ATTEMPTS times, if the generator lagged, because then the phase says nothing."""
    found = offer(served, load, deadlines, folder)
    for _ in range(ATTEMPTS - 1):
        if found.goodput is not None:
            break
        found = offer(served, load, deadlines, folder)
    return found


def _best(outcome: Outcome, name: str) -> int:
    """The delay with the largest sum of goodput over the cells so far."""
    sums: dict[int, float] = {}
    for cell in outcome.cells.values():
        for delay, turns in cell[name].items():
            sums[delay] = sums.get(delay, 0.0) + statistics.mean(each.goodput or 0.0 for each in turns)
    return max(sums, key=lambda delay: sums[delay])


def _say(model: str, load: Load, name: str, delay: int, found: Cell) -> None:
    goodput = f"{found.goodput:7.0f}/s in time" if found.goodput is not None else f"not quoted: {found.objection}"
    print(f"{model:8} {load.arrivals:8} {load.factor:g} x {name:14} delay {delay:6} us  {goodput}",
          file=sys.stderr, flush=True)  # fmt: skip


def as_document(outcomes: list[Outcome], **about: Any) -> dict[str, Any]:
    models = {
        each.model: {
            "capacity": each.capacity,
            "largest_batch_ms": each.batch_ms,
            "deadlines_ms": asdict(each.deadlines),
            "rows_for_nobody": each.rows_for_nobody,
            "executed": each.executed,
            "expired_executed": each.expired_executed,
            "cells": [
                {
                    "arrivals": arrivals,
                    "factor": factor,
                    "contenders": {
                        name: {str(delay): [asdict(turn) for turn in turns] for delay, turns in by_delay.items()}
                        for name, by_delay in cell.items()
                    },
                }
                for (arrivals, factor), cell in sorted(each.cells.items())
            ],
        }
        for each in outcomes
    }
    return {**about, "models": models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("encoder", "mlp"), default=["encoder", "mlp"])
    parser.add_argument("--factors", nargs="+", type=float, default=[0.8, 1.0, 1.5])
    parser.add_argument("--arrivals", nargs="+", choices=("poisson", "bursty"), default=["poisson", "bursty"])
    parser.add_argument("--seconds", type=float, default=4.0, help="of one phase (4)")
    parser.add_argument("--rounds", type=int, default=1, help="each with arrivals of its own (1)")
    parser.add_argument("--threads", type=int, default=1, help="ONNX Runtime's threads, everywhere (1)")
    parser.add_argument("--fifo-delays", type=int, nargs="+", default=[5_000], metavar="US", help="(5000)")
    parser.add_argument("--all-delays", action="store_true", help="all of Triton's delays in every cell")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    outcomes = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            outcomes.append(measure(MODELS[name], args, Path(temporary)))
    document = as_document(outcomes, threads=args.threads, seconds=args.seconds, rounds=args.rounds)
    print(as_text(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
