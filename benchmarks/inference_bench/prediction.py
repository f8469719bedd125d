"""How far `oriel simulate serve` is from the truth: attainment and p99 of loads that its profile has not seen.

    python benchmarks/goodput.py prediction [--models encoder shallow mlp] [--factors 0.5 0.75 1.0 1.25 1.5]
        [--arrivals poisson bursty] [--seconds 20] [--profile-seconds 3] [--threads 1] [--json FILE]

For each model a server is started and its profile is measured by `oriel simulate profile`, in a closed loop. Then
`oriel load` offers open loops in a process of its own, two tiers (30 % gold, 70 % bronze; deadlines of two and six
times the largest batch), at shares of the capacity that follows from the profile. The same scenario is simulated with
the same arrivals. The error is the difference over what was measured, by tier and load; p99 needs 100 answers.
A load in which the generator lagged is offered again, three times at most, and then judges nothing.

The model `image` can be tried as well: its time goes into reading requests, which the simulation does not know.

Exit status 1 if more than a tenth was missed anywhere. The generator and the server share the machine, as in
`goodput.py servers`: on one that others use the profile and the loads see different machines, and the errors say so.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.load import open_loop

from inference_bench.goodput_cells import TIERS, Deadlines, Served
from inference_bench.goodput_servers import running
from inference_bench.models import MODELS, write
from oriel_cli.load.scenario import read
from oriel_cli.simulate.calibrate import as_text, measured
from oriel_cli.simulate.profile import Profile, mean_ms
from oriel_cli.simulate.serve import simulate
from oriel_cli.table import columns

GOLD, BRONZE = 2.0, 6.0
ATTEMPTS = 3
WARM_UP_S = 2.0
BOUND = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one tier in one load. measured, predicted: a share, or milliseconds; None if it was not quoted."""

    model: str
    arrivals: str
    factor: float
    tier: str
    figure: str
    measured: float | None
    predicted: float | None

    @property
    def error(self) -> float | None:
        """The difference over what was measured; None where there is nothing to compare."""
        if self.measured is None or self.predicted is None:
            return None
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return abs(self.predicted - self.measured) / self.measured


def compared(
    model: str, arrivals: str, factor: float, measured: Mapping[str, Any], predicted: Mapping[str, Any]
) -> Iterator[Compared]:
    """Compare one phase of two documents of `oriel load`, one measured and one simulated."""
    for tier in TIERS:
        true, guess = measured["tiers"][tier], predicted["tiers"][tier]
        pairs = {
            "attainment": (true["attainment"], guess["attainment"]),
            "p99 ms": ((true["latency_ms"] or {}).get("p99"), (guess["latency_ms"] or {}).get("p99")),
        }
        for figure, (here, there) in pairs.items():
            yield Compared(
                model=model, arrivals=arrivals, factor=factor, tier=tier, figure=figure, measured=here, predicted=there
            )


def scenario(
    served: Served, deadlines: Deadlines, *, arrivals: str, rate: float, seconds: float, seed: int
) -> list[str]:
    """The lines of a scenario that can be sent as well as simulated."""
    lines = [f"seed = {seed}", "max_in_flight = 8192"]
    for band, tier in enumerate(TIERS):
        lines += [
            "[[stream]]",
            f'name = "{tier}"',
            f'url = "http://127.0.0.1:{served.port}/v2/models/{served.name}/infer"',
            "rows = 1",
            'encoding = "binary"',
            f'headers = {{ "x-oriel-priority" = "{band}" }}',
            f"target_ms = {deadlines.of(tier)}",
            f"deadline_ms = {deadlines.of(tier)}",
        ]
    for name, kind, length, per_s in (
        ("warm-up", "poisson", WARM_UP_S, 0.3 * rate),
        ("measured", arrivals, seconds, rate),
    ):
        rates = ", ".join(f"{tier} = {per_s * share:.3f}" for tier, share in TIERS.items())
        lines += ["[[phase]]", f'name = "{name}"', f"seconds = {length}", f'arrivals = "{kind}"']
        lines += [f"rates = {{ {rates} }}", f"warm_up = {'true' if name == 'warm-up' else 'false'}"]
        lines += ["burst_factor = 3", "burst_s = 0.3"]
    return lines


def measure(name: str, args: argparse.Namespace, folder: Path) -> tuple[Profile, list[Compared]]:
    """Measure one model's profile and all its loads."""
    model, found = MODELS[name], list[Compared]()
    file = write(model, folder / "model.onnx")
    with running(model, file, args.threads, folder, fifo_delays=(), triton_delays=()) as servers:
        served = servers.served["oriel"][0]
        url = f"http://127.0.0.1:{served.port}"
        profile = asyncio.run(measured(url, served.name, seconds=args.profile_seconds))
        print("\n".join(as_text(profile)), file=sys.stderr, flush=True)
        batch_ms = mean_ms(profile.sizes, max(1, profile.max_rows))
        deadlines = Deadlines(gold=max(1, round(GOLD * batch_ms)), bronze=max(1, round(BRONZE * batch_ms)))
        for number, (arrivals, factor) in enumerate([(a, f) for a in args.arrivals for f in args.factors]):
            lines = scenario(
                served,
                deadlines,
                arrivals=arrivals,
                rate=factor * profile.capacity,
                seconds=args.seconds,
                seed=100 + number,
            )
            document = open_loop(lines, folder)
            for _ in range(ATTEMPTS - 1):
                if document["phases"][-1]["quoted"]:
                    break
                document = open_loop(lines, folder)
            phase = document["phases"][-1]
            if phase["objection"]:
                print(f"{name} {arrivals} {factor:g} x: not quoted: {phase['objection']}", file=sys.stderr, flush=True)
            predicted = simulate(read(folder / "scenario.toml"), {served.name: profile})["phases"][-1]
            found += compared(name, arrivals, factor, phase, predicted)
    return profile, found


def report(found: Sequence[Compared]) -> list[str]:
    """The table, and what it comes to."""
    rows = [
        (
            each.model,
            each.arrivals,
            f"{each.factor:g}",
            each.tier,
            each.figure,
            *["-" if value is None else f"{value:.3f}" for value in (each.measured, each.predicted)],
            "-" if each.error is None else f"{each.error:.1%}",
        )
        for each in found
    ]
    heading = ("model", "arrivals", "x", "tier", "figure", "measured", "predicted", "error")
    lines = columns(heading, rows, right=(2, 5, 6, 7))
    for figure in ("attainment", "p99 ms"):
        errors = sorted([each.error for each in found if each.figure == figure and each.error is not None])
        if errors:
            within = sum([1 for error in errors if error <= BOUND])
            lines.append(
                f"{figure}: {within} of {len(errors)} within {BOUND:.0%}; median {errors[len(errors) // 2]:.1%}, "
                f"worst {errors[-1]:.1%}"
            )
    return lines


def kept(found: Sequence[Compared]) -> bool:
    """Return whether there was something to judge, and nothing was missed by more than BOUND."""
    errors = [each.error for each in found if each.error is not None]
    return bool(errors) and max(errors) <= BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["encoder", "shallow", "mlp"])
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 0.75, 1.0, 1.25, 1.5])
    parser.add_argument("--arrivals", nargs="+", choices=("poisson", "bursty"), default=["poisson", "bursty"])
    parser.add_argument("--seconds", type=float, default=20.0, help="of one load (%(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=3.0, help="for each number of callers (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    found, profiles = list[Compared](), list[Profile]()
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            profile, these = measure(name, args, Path(temporary))
        profiles.append(profile)
        found += these
    print("\n".join(report(found)))
    if args.json:
        figures = [{**asdict(each), "error": each.error} for each in found]
        models = [
            {"model": each.model, "capacity": each.capacity, "overhead_ms": each.overhead_ms} for each in profiles
        ]
        args.json.write_text(json.dumps({"models": models, "figures": figures}, indent=1) + "\n")
    sys.exit(0 if kept(found) else 1)
