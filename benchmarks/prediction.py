"""How far `oriel simulate serve` is from the truth: attainment and p99 of loads that its profile has not seen.

    python benchmarks/prediction.py [--models encoder shallow mlp] [--factors 0.5 0.75 1.0 1.25 1.5]
        [--arrivals poisson bursty] [--seconds 15] [--profile-seconds 1] [--passes 2] [--threads 1] [--json FILE]

For each model a server is started. `oriel load` offers open loops to it in a process of its own, two tiers (30 % gold,
70 % bronze; deadlines of two and six times the largest batch), at shares of the capacity that follows from the first
profile. Before and after each load a profile is measured by `oriel simulate profile`, in a closed loop, because the
machine may be quicker or slower a minute later. The same scenario is simulated with the same arrivals and the mean of
these two profiles. All loads are offered in as many passes, of which both sides get the mean. The error is the
difference over what was measured, by tier and load; p99 needs 100 answers. `apart` is the difference between the
measured passes over their mean: what nobody can predict. A load in which the generator lagged is offered again, three
times at most, and then judges nothing.

The model `image` can be tried as well: its time goes into reading requests, which the simulation does not know.

Exit status 1 if more than a tenth was missed anywhere. The generator and the server share the machine: on
one that others use the profile and the loads see different machines, and the errors say so.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from harness.load import open_loop
from inference_bench.goodput_cells import TIERS, Deadlines, Served
from inference_bench.goodput_server import running
from inference_bench.models import MODELS, write

from oriel_cli.table import columns
from oriel_tools.load.scenario import read
from oriel_tools.simulate.calibrate import as_text, measured
from oriel_tools.simulate.profile import LoopMs, Profile, Size, mean_ms
from oriel_tools.simulate.serve import simulate
from oriel_tools.simulate.virtual import Servers

GOLD, BRONZE = 2.0, 6.0
ATTEMPTS = 3
WARM_UP_S = 2.0
BOUND = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one tier in one load, or in all passes of it.

    measured, predicted: a share, or milliseconds; None if it was not quoted. apart: the difference between the measured
    passes over their mean, None for fewer than two.
    """

    model: str
    arrivals: str
    factor: float
    tier: str
    figure: str
    measured: float | None
    predicted: float | None
    apart: float | None = None

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


def mean_of(passes: Sequence[Compared]) -> Compared:
    """Return the mean of the passes of one figure in which it was quoted."""
    pairs = [(each.measured, each.predicted) for each in passes if each.error is not None]
    if not pairs:
        return replace(passes[0], measured=None)
    true, guess = [fmean([each for each in side if each is not None]) for side in zip(*pairs, strict=True)]
    found = [each for each, _ in pairs if each is not None]
    apart = (max(found) - min(found)) / true if true else 0.0
    return replace(passes[0], measured=true, predicted=guess, apart=apart if len(found) > 1 else None)


def between(before: Profile, after: Profile) -> Profile:
    """Return the mean of two profiles of one model."""
    rows = sorted({size.rows for size in (*before.sizes, *after.sizes)})
    sizes = [
        Size(
            rows=each,
            mean_ms=(mean_ms(before.sizes, each) + mean_ms(after.sizes, each)) / 2,
            spread=[fmean(pair) for pair in zip(_spread(before, each), _spread(after, each), strict=True)],
        )
        for each in rows
    ]
    return msgspec.structs.replace(
        before,
        sizes=sizes,
        overhead_ms=(before.overhead_ms + after.overhead_ms) / 2,
        row_ms=(before.row_ms + after.row_ms) / 2,
        loop=LoopMs(
            **{name: (getattr(before.loop, name) + getattr(after.loop, name)) / 2 for name in LoopMs.__struct_fields__}
        ),
    )


def _spread(profile: Profile, rows: int) -> list[float]:
    """Return the spread of batches of this number of rows, as `drawn` takes it."""
    return next((size.spread for size in profile.sizes if size.rows >= rows), profile.sizes[-1].spread)


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
    """Measure all loads of one model, with a profile between any two. Returns the first profile too."""
    model, found = MODELS[name], defaultdict[int, list[list[Compared]]](list)
    file = write(model, folder / "model.onnx")
    with running(model, file, args.threads, folder) as (served, _):

        def profiled() -> Profile:
            return asyncio.run(
                measured(f"http://127.0.0.1:{served.port}", served.name, seconds=args.profile_seconds, instances=1)
            )

        first = before = profiled()
        print("\n".join(as_text(first)), file=sys.stderr, flush=True)
        batch_ms = mean_ms(first.sizes, max(1, first.max_rows))
        deadlines = Deadlines(gold=max(1, round(GOLD * batch_ms)), bronze=max(1, round(BRONZE * batch_ms)))
        loads = [(arrivals, factor) for arrivals in args.arrivals for factor in args.factors]
        for _ in range(args.passes):
            for number, (arrivals, factor) in enumerate(loads):
                rate = factor * first.capacity
                lines = scenario(
                    served, deadlines, arrivals=arrivals, rate=rate, seconds=args.seconds, seed=100 + number
                )
                phase, label = offered(lines, folder), f"{name} {arrivals} {factor:g} x"
                if phase["objection"]:
                    print(f"{label}: not quoted: {phase['objection']}", file=sys.stderr, flush=True)
                after = profiled()
                print(f"{label}: the machine has {after.capacity:.0f} rows per second", file=sys.stderr, flush=True)
                profiles = {served.name: between(before, after)}
                predicted = simulate(read(folder / "scenario.toml"), profiles, Servers())["phases"][-1]
                found[number].append(list(compared(name, arrivals, factor, phase, predicted)))
                before = after
    return first, [mean_of(passes) for load in found.values() for passes in zip(*load, strict=True)]


def offered(lines: list[str], folder: Path) -> dict[str, Any]:
    """Offer a load, again if the generator lagged. Returns the last phase of the document of `oriel load`."""
    for _ in range(ATTEMPTS):
        phase: dict[str, Any] = open_loop(lines, folder)["phases"][-1]
        if phase["quoted"]:
            break
    return phase


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
            "-" if each.apart is None else f"{each.apart:.1%}",
        )
        for each in found
    ]
    heading = ("model", "arrivals", "x", "tier", "figure", "measured", "predicted", "error", "apart")
    lines = columns(heading, rows, right=(2, 5, 6, 7, 8))
    for figure in ("attainment", "p99 ms"):
        errors = sorted([each.error for each in found if each.figure == figure and each.error is not None])
        if errors:
            within = sum([1 for error in errors if error <= BOUND])
            lines.append(
                f"{figure}: {within} of {len(errors)} within {BOUND:.0%}; median {errors[len(errors) // 2]:.1%}, "
                f"worst {errors[-1]:.1%}"
            )
            steady = [
                each
                for each in found
                if each.figure == figure and each.error is not None and each.apart is not None and each.apart <= BOUND
            ]
            within = len([each for each in steady if each.error is not None and each.error <= BOUND])
            lines.append(
                f"{figure}, where the measured passes are within {BOUND:.0%} of one another: {within} of {len(steady)}"
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
    parser.add_argument("--seconds", type=float, default=15.0, help="of one load (%(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=1.0, help="for each number of callers (%(default)s)")
    parser.add_argument("--passes", type=int, default=2, help="of all loads of a model (%(default)s)")
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


if __name__ == "__main__":
    main()
