"""One tuning from beginning to end: profiles are measured, settings simulated, and the best one measured."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from oriel_tools.simulate.profile import Profile
from oriel_tools.tune.calibration import profiles
from oriel_tools.tune.config_text import MAX_BYTES
from oriel_tools.tune.contest import Measured, contest, is_confirmed
from oriel_tools.tune.correction import corrected, factors_text
from oriel_tools.tune.machine import Machine, serving
from oriel_tools.tune.options import Clock, Options, Say
from oriel_tools.tune.plan import Plan, explained, planned, replanned
from oriel_tools.tune.search import Effort
from oriel_tools.tune.setting import CONFIG_FILE, Engine, Setting, Subject, changed
from oriel_tools.tune.trial import Simulator
from oriel_tools.tune.turns import Turns
from oriel_wire.errors import BadMessage, StartFailed
from oriel_wire.v2.metadata import parse_config_text

CALIBRATION, SEARCH, EXPLANATION = 0.3, 0.15, 0.05  # parts of the budget; measuring settings takes the rest
AGAIN = 0.04  # of the budget, for each search with corrected profiles

Serve = Callable[..., AbstractAsyncContextManager[Machine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result. text: of the configuration with the chosen setting. confirmed: whether that is recommended.

    measured: everything that was measured, in this order. slowdowns: how many times as long as the profiles say
    everything takes, by which the plan is corrected; empty if it is not.
    """

    options: Options
    subject: Subject
    profiles: Mapping[Engine, Profile]
    plan: Plan
    present: Measured
    chosen: Measured
    text: str
    confirmed: bool
    measured: Sequence[Measured]
    slowdowns: Mapping[Engine, float]
    trials: int
    seconds: Mapping[str, float]

    @property
    def best(self) -> Measured:
        """The setting that is recommended, which may be the present one."""
        return self.chosen if self.confirmed else self.present


def read_text(repository: Path, model: str) -> str:
    """Return the text of a model's configuration; "" if there is none. Raises StartFailed."""
    folder, file = repository / model, repository / model / CONFIG_FILE
    if not model or model in (".", "..") or "/" in model or not folder.is_dir():
        raise StartFailed(f"{repository} has no model {model[:128]!r}")
    if not file.exists():
        return ""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise StartFailed(f"{file}: at most {MAX_BYTES >> 20} MiB")
        text = file.read_bytes().decode()  # not with universal newlines: the text is patched
        parse_config_text(text)
    except OSError as refused:
        raise StartFailed(f"{file}: cannot be read ({refused.strerror})") from refused
    except UnicodeDecodeError as wrong:
        raise StartFailed(f"{file}: is not text in UTF-8") from wrong
    except BadMessage as bad:
        raise StartFailed(f"{file}: {bad.message}") from bad
    return text


async def tuned(
    options: Options, say: Say, *, serve: Serve = serving, clock: Clock = monotonic, effort: Effort | None = None
) -> Tuned:
    """Tune a model. Raises StartFailed and CommandFailed.

    serve, clock, effort: replaced where a server is made up, in a time of its own.
    """
    began, effort = clock(), effort or Effort.within(options.budget_s)
    text = read_text(options.repository, options.model)
    say(f"starting a server with {options.model}")
    async with serve(options.repository, options.model, cores=options.cores) as machine:
        completed = await machine.completed()
        subject = Subject(
            model=options.model, text=text, completed=completed, cores=options.cores, replicas=options.replicas
        )
        subject.check()
        most_rows = max(1, completed.max_batch_size)
        if options.load.rows > most_rows:
            raise StartFailed(f"--rows: the model takes 1 to {most_rows}")
        found = await profiles(machine, subject, options, CALIBRATION * options.budget_s, say, clock)
        calibrated = clock()
        simulator = Simulator(options.load, found)
        end = calibrated + SEARCH * options.budget_s
        plan = planned(
            simulator,
            subject,
            most_replicas=options.most_replicas,
            has_time=lambda: clock() < end,
            effort=effort,
            say=say,
        )
        say(f"{simulator.trials} settings tried in virtual time{', until the time was over' if plan.cut_off else ''}")
        searched = clock()
        turns = Turns(machine, subject, options, began + (1.0 - EXPLANATION) * options.budget_s, say, clock)
        outcome = await confirm(turns, simulator, plan, effort)
    ended = clock()
    return Tuned(
        options=options,
        subject=subject,
        profiles=found,
        plan=outcome.plan,
        present=outcome.present,
        chosen=outcome.chosen,
        text=changed(subject, outcome.plan.chosen.setting),
        confirmed=is_confirmed(outcome.present, outcome.chosen),
        measured=turns.all(),
        slowdowns=outcome.slowdowns,
        trials=outcome.trials,
        seconds={
            "calibration": calibrated - began,
            "search": searched - calibrated,
            "measurement": ended - searched,
            "all": ended - began,
        },
    )


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What the measurements led to. slowdowns: see `Tuned`."""

    plan: Plan
    present: Measured
    chosen: Measured
    slowdowns: Mapping[Engine, float] = field(default_factory=dict)
    trials: int = 0


async def confirm(turns: Turns, simulator: Simulator, plan: Plan, effort: Effort) -> _Outcome:
    """Measure the chosen setting and the present one. As long as none reaches the objectives and there is time, correct
    the simulator by what was measured, search again and measure what was found.
    """
    subject, budget_s = turns.subject, turns.options.budget_s
    present, names = subject.present, {subject.present: "present", plan.chosen.setting: "chosen"}
    slowdowns: dict[Engine, float] = {}
    simulators = [simulator]

    def again() -> list[Setting]:
        slowdowns.update(turns.slowdowns(simulator))
        simulators.append(corrected(simulator, slowdowns))
        end = turns.clock() + AGAIN * budget_s
        planned_so = [each for each in turns.all() if each.setting.replicas == plan.chosen.setting.replicas]
        start = min(planned_so, key=lambda each: each.score).setting
        found = replanned(simulators[-1], subject, start, has_time=lambda: turns.clock() < end, effort=effort)
        turns.say(f"searched again, with all times multiplied by {factors_text(slowdowns)}")
        return found

    course = contest(present, [plan.chosen.setting, plan.best.setting], again, lambda: turns.left)
    wanted = next(course)
    while True:
        await turns.add(wanted, names.get(wanted, "another one"))
        try:
            wanted = course.send(turns.measured(wanted))
        except StopIteration as ended:
            best: Setting = ended.value
            break
    if best != plan.chosen.setting or slowdowns:
        plan = explained(simulators[-1], subject, best, best, effort, cut_off=plan.cut_off)
    return _Outcome(
        plan=plan,
        present=turns.measured(present),
        chosen=turns.measured(best),
        slowdowns=slowdowns,
        trials=sum([each.trials for each in simulators]),
    )
