"""Measures how late the answer to an expired request is, promise R5: `python benchmarks/goodput.py expiry`.

    [--model encoder] [--factors 1 1.5 2] [--seconds 10] [--rounds 3] [--threads 1] [--json FILE]

Promised: 504 within the deadline and 20 ms (p99) at up to twice the capacity, not after the batch, and no expired call
is executed. Offered by `oriel load` (open loop, Poisson) in a process of its own to one inference server, 30 % gold and
70 % bronze, deadlines of 2 and 6 times as long as ONNX Runtime alone takes for the largest batch.

Printed per load and tier: answers in time per second, the 504s, and by how much the p50, the p99 and the slowest of
them missed the deadline (milliseconds, from sending to the last byte, so the generator's own delays are in it). A phase
in which the generator lagged is offered again, and left out if it lags always. Exit status 1 if a p99 is above 20 ms.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inference_bench.closed_loop import drive
from inference_bench.goodput_cells import TIERS, Cell, Deadlines, Load, Served, offer, write_body
from inference_bench.goodput_server import running
from inference_bench.in_process import alone
from inference_bench.models import MODELS, Model, write
from inference_bench.targets import ask, http_target

PROMISED_MS = 20.0
EXPIRED = "504 deadline_exceeded"
GOLD, BRONZE = 2.0, 6.0
CONNECTIONS, ATTEMPTS = 128, 3


def capacity(served: Served, model: Model, seconds: int, folder: Path) -> float:
    """Requests per second in a closed loop."""
    target = http_target("capacity", served.port, f"/v2/models/{served.name}/infer", model, binary=True)
    size = ask(target)
    drive(target, CONNECTIONS, 1, size, folder)
    return drive(target, CONNECTIONS, seconds, size, folder).rate


def quoted(served: Served, load: Load, deadlines: Deadlines, folder: Path) -> Cell:
    """Offer a phase; again, up to ATTEMPTS times, if the generator lagged, because then the phase says nothing."""
    found = offer(served, load, deadlines, folder)
    for _ in range(ATTEMPTS - 1):
        if found.goodput is not None:
            break
        found = offer(served, load, deadlines, folder)
    return found


def lateness(cell: Cell, deadlines: Deadlines, tier: str) -> dict[str, float] | None:
    """Return by how many milliseconds the 504s missed their deadline; None without enough of them."""
    found = cell.refused_ms.get(tier, {}).get(EXPIRED)
    if not found or found["p99"] is None:
        return None
    return {name: found[name] - deadlines.of(tier) for name in ("p50", "p99", "max") if found[name] is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("encoder", "mlp"), default="encoder")
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 1.5, 2.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of one phase (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="ONNX Runtime's threads (1)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    model = MODELS[args.model]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = write(model, folder / "model.onnx")
        batch_s = float(alone(file, args.threads, 4, model.max_batch)["batch_s"][str(model.max_batch)])
        deadlines = Deadlines(gold=round(GOLD * batch_s * 1e3), bronze=round(BRONZE * batch_s * 1e3))
        write_body(folder, model)
        with running(model, file, args.threads, folder) as (served, audited):
            rate = capacity(served, model, 3, folder)
            print(f"{model.name}: {rate:.0f} requests/s, largest batch {batch_s * 1e3:.0f} ms, {deadlines}")
            for factor in args.factors:
                for number in range(args.rounds):
                    load = Load(factor=factor, rate=rate * factor, seconds=args.seconds, seed=number + 1)
                    cell = quoted(served, load, deadlines, folder)
                    for tier in TIERS:
                        late = lateness(cell, deadlines, tier)
                        row = {"factor": factor, "turn": number + 1, "tier": tier, "late_ms": late}
                        rows.append({**row, "cell": asdict(cell)})
                        print(_line(row, cell), flush=True)
        audit = json.loads(audited.read_text())
    document = {
        "capacity": rate,
        "largest_batch_ms": batch_s * 1e3,
        "deadlines_ms": asdict(deadlines),
        "executed": audit["calls"],
        "expired_executed": audit["expired"],
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))
    print(f"calls executed {audit['calls']}, of them expired when their batch began {audit['expired']}")
    kept = audit["expired"] == 0
    for factor in args.factors:
        p99 = [row["late_ms"]["p99"] for row in rows if row["factor"] == factor and row["late_ms"]]
        if not p99:
            print(f"{factor:g} x: fewer than 100 requests of a tier expired in every turn")
            continue
        worst = max(p99)
        kept &= worst <= PROMISED_MS
        print(
            f"{factor:g} x: p99 of the 504s is deadline + {statistics.median(p99):.1f} ms (median of {len(p99)}; "
            f"worst {worst:.1f}), promised + {PROMISED_MS:g} ms"
        )
    return 0 if kept else 1


def _line(row: dict[str, Any], cell: Cell) -> str:
    late = row["late_ms"]
    said = " ".join(f"{name} +{late[name]:.1f}" for name in late) if late else "fewer than 100 expired"
    goodput = cell.by_tier[row["tier"]]
    in_time = "-" if goodput is None else f"{goodput:.0f}"
    quoted = "" if cell.objection is None else f"  NOT QUOTED: {cell.objection}"
    return f"{row['factor']:g} x {row['tier']:7} {in_time:>6}/s in time  504s late by ms: {said}{quoted}"
