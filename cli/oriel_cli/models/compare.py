"""`oriel models compare MODEL --repository DIR`: the variants of a model beside the model itself, in error and speed.

Runs here, without a server; nothing else should use the machine meanwhile. `--url` adds the answers of a running one.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from oriel_cli.errors import CommandFailed
from oriel_cli.models.served_model import ServedModel
from oriel_cli.table import columns
from oriel_wire.process.flags import number

Actions = Any  # argparse gives its class no public name
Contestant = Any  # the inference server's; the command line names units lazily
TIMEOUT_S = 60.0
_positive = number(int, 1, 100_000)


def add_action(actions: Actions) -> None:
    """Add the command to those of `oriel models`."""
    text = "compare the variants of a model with the model: largest errors, equal top-1, median time per batch size"
    made: argparse.ArgumentParser = actions.add_parser("compare", help=text, description=f"{text}.")
    made.add_argument("name", metavar="MODEL")
    made.add_argument("--repository", type=Path, required=True, metavar="DIR", help="the folder of models")
    made.add_argument(
        "--url", metavar="URL", help="compare what the model on this server's HTTP port answers as well (row served)"
    )
    made.add_argument(
        "--compiler",
        dest="also",
        action="append",
        default=[],
        metavar="NAME",
        help="compare what this compiler makes of the model as well, as openvino (repeatable)",
    )
    made.add_argument(
        "--batch",
        dest="batches",
        action="append",
        type=_positive,
        default=[],
        metavar="ROWS",
        help="rows of a batch to time (repeatable; default 1, 8 and 32, as far as the model takes them)",
    )
    made.add_argument(
        "--runs", type=_positive, default=50, metavar="N", help="timed runs per variant and batch size (default 50)"
    )
    made.add_argument(
        "--seconds",
        type=number(float, 0, 3600),
        default=10.0,
        metavar="S",
        help="begin no further runs of a batch size after this time (default 10)",
    )
    made.add_argument("--cores", type=_positive, default=0, metavar="N", help="cores to use (default: all)")
    made.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from oriel_inference.artefacts.compare import ComparisonOptions, compare
    from oriel_inference.errors import InferenceError, LoadFailed

    def progress(text: str) -> None:
        print(f"{args.name}: {text}", file=sys.stderr, flush=True)

    try:
        client = httpx.Client(base_url=args.url or "", timeout=TIMEOUT_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise CommandFailed(f"{args.url!r} is not a URL such as http://127.0.0.1:8000") from error

    def served(loaded: Any) -> Any:
        session = loaded.sessions[0]
        return ServedModel(client, args.name, loaded.spec.version, session.inputs, session.outputs)

    try:
        with client:
            found = compare(
                args.repository,
                args.name,
                ComparisonOptions(
                    also=args.also,
                    batches=args.batches,
                    runs=args.runs,
                    seconds=args.seconds,
                    cores=args.cores or len(os.sched_getaffinity(0)),
                ),
                served=served if args.url else None,
                progress=progress,
            )
    except LoadFailed as failure:
        raise CommandFailed(failure.reason) from failure
    except InferenceError as error:
        raise CommandFailed(f"a run failed: {error.message}") from error
    reference = found.contestants[0].median_ms
    lines = [_line(each, reference) for each in found.contestants]
    if args.json:
        print(json.dumps({"model": found.model, "version": found.version, "variants": lines}))
    else:
        print(f"{found.model}/{found.version}, compared over {max(each['samples'] for each in lines)} samples")
        print("\n".join(_table(lines, list(reference))))
    if lines[0]["reason"]:  # the result is printed all the same
        raise CommandFailed(lines[0]["reason"])
    return 0


def _line(contestant: Contestant, reference_ms: Mapping[int, float]) -> dict[str, Any]:
    """Return a contestant as it is printed. top1: the lowest share of all outputs; None where that means nothing."""
    errors, median_ms = contestant.errors, contestant.median_ms
    return {
        **{name: getattr(contestant, name) for name in ("name", "state", "reason", "provider", "samples")},
        "absolute": max((each.absolute for each in errors), default=None),
        "relative": max((each.relative for each in errors), default=None),
        "top1": min((each.top1 for each in errors if each.top1 is not None), default=None),
        "outputs": [asdict(each) for each in errors],
        "median_ms": median_ms,
        "cpu_ms": contestant.cpu_ms,
        "speedup": {rows: reference_ms[rows] / ms for rows, ms in median_ms.items() if ms and rows in reference_ms},
    }


def _table(lines: Sequence[Mapping[str, Any]], batches: Sequence[int]) -> list[str]:
    heading = ["VARIANT", "STATE", "PROVIDER", "ABSOLUTE", "RELATIVE", "TOP-1"]
    heading += [*(f"{rows} ROW{'S' * (rows > 1)} MS" if rows else "RUN MS" for rows in batches), "REASON"]
    rows = [
        [
            each["name"],
            each["state"],
            each["provider"] or "-",
            *("-" if each[key] is None else f"{each[key]:.3g}" for key in ("absolute", "relative")),
            "-" if each["top1"] is None else f"{each['top1']:.1%}",
            *(_time(each, size) for size in batches),
            each["reason"],
        ]
        for each in lines
    ]
    return columns(heading, rows, right=range(3, len(heading) - 1))


def _time(line: Mapping[str, Any], rows: int) -> str:
    """Return the median time of a run, and how many times as fast as the reference it is."""
    if rows not in line["median_ms"]:
        return "-"
    faster = "" if line["state"] == "reference" or rows not in line["speedup"] else f" ({line['speedup'][rows]:.2f}x)"
    return f"{line['median_ms'][rows]:.3f}{faster}"
