"""`oriel tune`: finds the settings with which a model reaches an objective, and says what each of them is worth."""

import argparse
import asyncio
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import FrameType

import uvloop

from oriel_cli.usage.command import read_prices
from oriel_tools.load.command import write
from oriel_tools.tune.objective import BadObjective, Objective, checked, parse
from oriel_tools.tune.options import Options
from oriel_tools.tune.report import as_document, as_text
from oriel_tools.tune.session import tuned
from oriel_tools.tune.trial import Load
from oriel_wire.distribution import installed_version
from oriel_wire.errors import StartFailed
from oriel_wire.process.flags import number

EXIT_NOT_MET = 1
LEAST_BUDGET_S, MOST_BUDGET_S = 5.0, 7200.0
MAX_REPLICAS = 64
OTHER_PROVIDERS = ("OpenVINOExecutionProvider",)  # for the CPU
COMPILERS = ("openvino",)  # compilers that make models faster on the CPU
_DURATION = re.compile(r"(\d{1,5}(?:\.\d{1,3})?)(s|min)?", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="its name in the repository")
    parser.add_argument(
        "--objective",
        dest="objectives",
        type=_objective,
        action="append",
        required=True,
        metavar="TEXT",
        help="'p99 <= 50 ms for gold at 300/s' or '99 %% within 50 ms at 300/s'; several, the most urgent tier first",
    )
    parser.add_argument("--repository", type=Path, required=True, metavar="DIR", help="the folder of models")
    parser.add_argument(
        "--budget", type=_duration, default=60.0, metavar="TIME", help="for all of it, as 60s or 5min (60s)"
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--rows", type=number(int, 1, 65_536), default=1, metavar="N", help="of each request (1)")
    load.add_argument("--arrivals", choices=("poisson", "bursty"), default="poisson", help="arrival process (poisson)")
    load.add_argument(
        "--deadline-ms",
        type=number(float, 1, 1_000_000),
        default=0.0,
        metavar="MS",
        help="sent with each request (4 times the bound, as the gateway's tiers have)",
    )
    load.add_argument("--seed", type=number(int, 0, 2**31), default=1, metavar="N", help="of the arrivals (1)")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--cores", type=number(int, 1, 1024), default=0, metavar="N", help="of one server (all that there are)"
    )
    servers.add_argument(
        "--replicas", type=number(int, 1, MAX_REPLICAS), default=1, metavar="N", help="equal servers at present (1)"
    )
    servers.add_argument(
        "--max-replicas", type=number(int, 1, MAX_REPLICAS), default=8, metavar="N", help="that there may be (8)"
    )
    servers.add_argument("--prices", type=Path, metavar="FILE|DIR", help="a document, or a folder, with [prices.NAME]")
    parser.add_argument("--patch", type=Path, metavar="FILE", help="write the patch there, for patch -p1 in DIR")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Tune and print what was found. Returns 0 if the objective was reached when it was measured, else 1."""
    try:
        objectives = checked(args.objectives)
    except BadObjective as bad:
        raise StartFailed(f"--objective: {bad}") from bad
    if args.patch is not None and not args.patch.parent.is_dir():
        raise StartFailed(f"{args.patch}: there is no such folder")
    if args.max_replicas < args.replicas:
        raise StartFailed("--max-replicas must be at least --replicas")
    if not args.repository.is_dir():
        raise StartFailed(f"{args.repository}: there is no such folder")
    prices = read_prices(args.prices) if args.prices else []
    options = Options(
        repository=args.repository,
        model=args.model,
        load=Load(
            model=args.model,
            objectives=objectives,
            rows=args.rows,
            arrivals=args.arrivals,
            deadline_ms=args.deadline_ms,
            seed=args.seed,
        ),
        budget_s=args.budget,
        cores=args.cores or _available_cores(),
        replicas=args.replicas,
        most_replicas=args.max_replicas,
        providers=_providers(),
        compilers=_compilers(),
    )
    began = monotonic()

    def say(line: str) -> None:
        print(f"{monotonic() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

    with _interruptible(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(tuned(options, say))
    today = datetime.now(UTC).date().isoformat()
    document = as_document(found, prices, today=today, version=installed_version())
    print(json.dumps(document) if args.json else "\n".join(as_text(document, found)))
    if args.patch is not None:
        write(args.patch, document["patch"])
    return 0 if document["met"] else EXIT_NOT_MET


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt wherever the program is.

    A Runner would only cancel its task, which takes effect when the task waits: a search in virtual time does not.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _objective(text: str) -> Objective:
    try:
        return parse(text)
    except BadObjective as bad:
        raise argparse.ArgumentTypeError(str(bad)) from bad


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * (60.0 if found[2] == "min" else 1.0) if found else 0.0
    if not LEAST_BUDGET_S <= seconds <= MOST_BUDGET_S:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no time from 5s to 120min")
    return seconds


def _available_cores() -> int:
    from oriel_inference.host import available_cores

    return available_cores()


def _providers() -> list[str]:
    """Return the execution providers for the CPU that are installed beside that of ONNX Runtime."""
    from oriel_inference.backends import find_backend
    from oriel_inference.errors import LoadFailed

    try:
        backend = find_backend("onnxruntime")
    except LoadFailed:
        return []
    return [name for name in OTHER_PROVIDERS if not backend.lacks(name)]


def _compilers() -> list[str]:
    """Return the compilers for the CPU that are installed. None if OpenVINO is a provider of ONNX Runtime:
    that is tried instead.
    """
    from oriel_inference.backends.compilers import find_compiler
    from oriel_inference.errors import LoadFailed
    from oriel_inference.model import EngineOptions

    found = []
    for name in COMPILERS if not _providers() else ():
        try:
            find_compiler(name).identity(EngineOptions())
        except LoadFailed:
            continue
        found.append(name)
    return found
