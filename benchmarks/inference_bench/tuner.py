"""Whether `oriel tune` finds more than a grid search does in the same time on the same machine.

    python benchmarks/goodput.py tuner [--cases encoder-1 mlp-3 ...] [--budget 60] [--run-seconds 3]
        [--judge-seconds 10] [--rounds 2] [--delays-us 0 100 200 300] [--cores N] [--json FILE]

A case is a model with an objective: a bound (a multiple of the time of its largest batch) at a rate (a multiple of its
capacity with one instance of one thread, the setting that both begin with). Most rates are more than that setting can
take, because where it reaches the objective there is nothing to find. Capacity and batch are measured once for each
model, at the cost of neither.

The rival walks a grid in the manner of Triton's Model Analyzer: first the setting as it is, then for 1 to 5 instances
the largest batches 1, 2, 4, ... up to the configured one with each of some delays, larger batches only as long as
throughput grows. With `--delays-us 0` it is the smaller grid of the automatic search, without delays.
Each point is one measured run of --run-seconds at the rate of the objective; Model Analyzer measures each at up to
eleven numbers of callers, so this is in favour of the grid. It has as much time as `oriel tune` took for everything,
from the start of its server on, and takes the setting with most answers in time.

Both settings are then measured in turns with arrivals that neither has seen. Found goodput: answers within the bound
per second. Within one percent it is a tie, and so are equal settings; a run in which the generator lagged decides
nothing.

Exit status 1 unless the tuner is better in eight of ten cases. Ten cases take about half an hour. The generator and the
server share the machine: on one that others use it judges nothing.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic

import uvloop

from inference_bench.contenders import repository
from inference_bench.models import MODELS, write
from oriel_cli.table import columns
from oriel_inference.settings import available_cores
from oriel_tools.load.tally import Tally, total
from oriel_tools.simulate.profile import Profile, mean_ms
from oriel_tools.tune.machine import Machine, serving
from oriel_tools.tune.objective import Objective, Reached
from oriel_tools.tune.options import Options
from oriel_tools.tune.session import Tuned, read_text, tuned
from oriel_tools.tune.setting import Setting, Subject, changed
from oriel_tools.tune.trial import Arrivals, Load

MOST_INSTANCES = 5  # Model Analyzer's default
DELAYS_US = (0, 100, 200, 300)
TIE = 0.01
WANTED = 0.8
PROFILE_S = 1.0
LOAD_S = 1.0  # to load a setting
JUDGE_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """bound: of the time of the largest batch. rate: of the capacity."""

    name: str
    model: str
    bound: float
    rate: float
    arrivals: Arrivals = "poisson"


CASES = {
    case.name: case
    for case in (
        Case(name="encoder-1", model="encoder", bound=0.7, rate=1.1),
        Case(name="encoder-2", model="encoder", bound=1.0, rate=1.3),
        Case(name="encoder-3", model="encoder", bound=1.5, rate=1.5),
        Case(name="encoder-4", model="encoder", bound=2.0, rate=1.1, arrivals="bursty"),
        Case(name="shallow-1", model="shallow", bound=1.5, rate=1.1),
        Case(name="shallow-2", model="shallow", bound=3.0, rate=0.9, arrivals="bursty"),
        Case(name="mlp-1", model="mlp", bound=0.7, rate=0.8),
        Case(name="mlp-2", model="mlp", bound=1.5, rate=1.1),
        Case(name="mlp-3", model="mlp", bound=3.0, rate=0.9, arrivals="bursty"),
        Case(name="image-1", model="image", bound=3.0, rate=1.1),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one of the two found. runs: measured ones of the grid, simulated ones of the tuner. goodput: judged."""

    setting: Setting
    seconds: float
    runs: int
    goodput: float = 0.0
    attained: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One case. objection: why its measurement must not be quoted."""

    case: str
    objective: str
    tuner: Side
    grid: Side
    objection: str = ""

    @property
    def verdict(self) -> str:
        """better, worse or tie, from the tuner's side; open if nothing was decided."""
        if self.tuner.setting == self.grid.setting:
            return "tie"
        if self.objection:
            return "open"
        mine, theirs = self.tuner.goodput, self.grid.goodput
        if abs(mine - theirs) <= TIE * max(mine, theirs):
            return "tie"
        return "better" if mine > theirs else "worse"


def walk(present: Setting, delays_us: Sequence[int]) -> Generator[Setting, float, None]:
    """Yield the points of the grid in Model Analyzer's order. It is sent the throughput of each."""
    yield present
    for instances in range(1, MOST_INSTANCES + 1):
        rows, before = 1, list[float]()
        while rows <= present.max_rows:
            best = 0.0
            for delay_us in delays_us:
                throughput = yield replace(present, instances=instances, max_rows=rows, delay_us=delay_us, preferred=())
                best = max(best, throughput)
            if before and best <= max(before):
                break
            before.append(best)
            rows *= 2


async def searched(options: Options, budget_s: float, run_s: float, delays_us: Sequence[int]) -> Side:
    """Walk the grid until the time is over."""
    began, runs = monotonic(), 0
    text = read_text(options.repository, options.model)
    async with serving(options.repository, options.model, cores=options.cores) as machine:
        subject = await _subject(machine, options, text)
        points = walk(subject.present, delays_us)
        setting = next(points)
        best, most = setting, -1.0
        while not runs or monotonic() + LOAD_S + 1.2 * run_s <= began + budget_s:
            await machine.load(changed(subject, setting))
            tallies, _ = await machine.offered(options.load.scenario(machine.url, run_s), attempts=1)
            runs += 1
            whole = total(tallies)
            if whole.kept / run_s > most:
                best, most = setting, whole.kept / run_s
            try:
                setting = points.send(whole.good / run_s)
            except StopIteration:
                break
    return Side(setting=best, seconds=monotonic() - began, runs=runs)


async def _subject(machine: Machine, options: Options, text: str) -> Subject:
    return Subject(model=options.model, text=text, completed=await machine.completed(), cores=options.cores)


async def judged(
    options: Options, settings: Sequence[Setting], seconds: float, rounds: int
) -> tuple[list[Reached], str]:
    """Measure settings in turns. Returns what each got, and an objection."""
    text, objection = read_text(options.repository, options.model), ""
    async with serving(options.repository, options.model, cores=options.cores) as machine:
        subject = await _subject(machine, options, text)
        tallies = [list[Tally]() for _ in settings]
        for number in range(rounds):
            load = replace(options.load, seed=JUDGE_SEED + number)
            for index, setting in enumerate(settings):
                await machine.load(changed(subject, setting))
                found, why = await machine.offered(load.scenario(machine.url, seconds))
                tallies[index].append(found[0])
                objection = objection or why
    merged = [total(each) for each in tallies]
    return [options.load.judged([each])[0] for each in merged], objection


async def measured(folder: Path, model: str, cores: int) -> Profile:
    """Measure what the cases of a model are multiples of."""
    async with serving(folder, model, cores=cores) as machine:
        return await machine.profile(seconds=PROFILE_S, rows=1, instances=1)


def objective_of(case: Case, profile: Profile) -> Objective:
    """Return the objective of a case in milliseconds and calls per second."""
    return Objective(
        percent=99.0,
        bound_ms=max(2.0, round(case.bound * mean_ms(profile.sizes, max(1, profile.max_rows)), 1)),
        rate=max(1.0, round(case.rate * profile.capacity, 1)),
    )


async def compare(case: Case, profile: Profile, folder: Path, args: argparse.Namespace) -> Compared:
    """Let both search, the grid for as long as the tuner took, and judge what they found."""
    objective = objective_of(case, profile)
    options = Options(
        repository=folder,
        model=case.model,
        load=Load(model=case.model, objectives=[objective], arrivals=case.arrivals),
        budget_s=args.budget,
        cores=args.cores,
        most_replicas=1,
    )
    mine: Tuned = await tuned(options, lambda line: _say(f"{case.name}: tuner: {line}"))
    tuner = Side(setting=mine.best.setting, seconds=mine.seconds["all"], runs=mine.trials)
    grid = await searched(options, tuner.seconds, args.run_seconds, args.delays_us)
    _say(f"{case.name}: grid: {grid.runs} runs in {grid.seconds:.0f} s")
    (first, second), objection = await judged(options, [tuner.setting, grid.setting], args.judge_seconds, args.rounds)
    return Compared(
        case=case.name,
        objective=f"{objective}, {case.arrivals}",
        tuner=replace(tuner, goodput=first.goodput, attained=first.attained),
        grid=replace(grid, goodput=second.goodput, attained=second.attained),
        objection=objection,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(found: Sequence[Compared]) -> list[str]:
    """The table, and what it comes to."""
    rows = [
        (
            each.case,
            each.objective,
            *[f"{side.goodput:.1f} ({side.attained:.1%})" for side in (each.tuner, each.grid)],
            *[_shown(side.setting) for side in (each.tuner, each.grid)],
            str(each.grid.runs),
            f"{each.tuner.seconds:.0f}/{each.grid.seconds:.0f}",
            each.verdict,
        )
        for each in found
    ]
    heading = ("case", "objective", "tuner/s", "grid/s", "tuner", "grid", "grid runs", "seconds", "tuner is")
    lines = columns(heading, rows, right=(2, 3, 6, 7))
    lines += [f"{each.case}: not quoted: {each.objection}" for each in found if each.objection]
    counts = Counter([each.verdict for each in found])
    parts = ", ".join([f"{word} in {counts[word]}" for word in ("better", "tie", "worse", "open")])
    return [*lines, f"the tuner's goodput is {parts} of {len(found)} cases; wanted: better in {WANTED:.0%} of them"]


def _shown(setting: Setting) -> str:
    preferred = f" preferred {setting.shown('preferred')}" if setting.preferred else ""
    return f"{setting.engine}, {setting.max_rows} rows, {setting.delay_us} us{preferred}"


def kept(found: Sequence[Compared]) -> bool:
    """Return whether the tuner was better in as many cases as it should be. A tie is none of them."""
    return bool(found) and len([each for each in found if each.verdict == "better"]) >= WANTED * len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one tuning (%(default)s)")
    parser.add_argument("--run-seconds", type=float, default=3.0, help="of one point of the grid (%(default)s)")
    parser.add_argument("--judge-seconds", type=float, default=10.0, help="of one turn of the judge (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each that are judged (%(default)s)")
    parser.add_argument("--delays-us", nargs="+", type=int, default=list(DELAYS_US), help="of the grid (%(default)s)")
    parser.add_argument("--cores", type=int, default=available_cores(), help="of the server (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    found = list[Compared]()
    chosen = [CASES[name] for name in args.cases]
    for name in dict.fromkeys(case.model for case in chosen):
        with tempfile.TemporaryDirectory() as temporary, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            folder = Path(temporary)
            file = write(MODELS[name], folder / "model.onnx")
            models = repository(folder / "models", MODELS[name], file, "onnxruntime", 1)
            profile = runner.run(measured(models, name, args.cores))
            for case in [each for each in chosen if each.model == name]:
                found.append(runner.run(compare(case, profile, models, args)))
                _say(report(found[-1:])[1])
    print("\n".join(report(found)))
    if args.json:
        document = [{**asdict(each), "verdict": each.verdict} for each in found]
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(0 if kept(found) else 1)
