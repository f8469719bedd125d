"""One tuning from beginning to end: profiles are measured, settings simulated, and the best one measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from oriel_cli.errors import CommandFailed
from oriel_cli.load.tally import Tally, total
from oriel_cli.simulate.profile import Profile
from oriel_cli.tune.config_text import MAX_BYTES
from oriel_cli.tune.machine import Machine, profile_s, seconds_within, serving
from oriel_cli.tune.objective import Reached, Score, score
from oriel_cli.tune.plan import Plan, explained, planned
from oriel_cli.tune.search import Effort
from oriel_cli.tune.setting import CONFIG_FILE, Engine, Setting, Subject, changed, engines
from oriel_cli.tune.trial import WARM_UP, Load, Simulator
from oriel_wire.errors import BadMessage, StartFailed
from oriel_wire.v2.metadata import parse_config_text

CALIBRATION, SEARCH, MEASUREMENT = 0.35, 0.15, 0.35  # parts of the budget; explaining the result takes the rest
TURNS = 2  # of the winner and of the present setting each
LEAST_TURN_S, MOST_TURN_S = 1.0, 60.0
LEAST_PROFILE_S, WELL_S, MOST_PROFILE_S = 0.05, 0.2, 2.0
NOISE = 0.005  # a share of calls by which two measurements may differ
NOISY = 1.1  # and a factor between two latencies

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is tuned, for what, and with which means. providers: as of `engines`."""

    repository: Path
    model: str
    load: Load
    budget_s: float
    cores: int
    replicas: int = 1
    most_replicas: int = 8
    providers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a setting got of the load when it was sent. objection: why it must not be quoted; "" if it may be.

    A generator that lags only makes it worse, because latencies count from when a call should have been sent.
    """

    setting: Setting
    reached: Sequence[Reached]
    objection: str = ""

    @property
    def met(self) -> bool:
        return all(each.met for each in self.reached)

    @property
    def score(self) -> Score:
        return score(self.reached)

    @property
    def goodput(self) -> float:
        return sum([each.goodput for each in self.reached])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result. text: of the configuration with the chosen setting. confirmed: whether that is recommended."""

    options: Options
    subject: Subject
    profiles: Mapping[Engine, Profile]
    plan: Plan
    present: Measured
    chosen: Measured
    text: str
    confirmed: bool
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


async def tuned(options: Options, say: Say) -> Tuned:
    """Tune a model. Raises StartFailed and CommandFailed."""
    began = monotonic()
    text = read_text(options.repository, options.model)
    say(f"starting a server with {options.model}")
    async with serving(options.repository, options.model, cores=options.cores) as machine:
        completed = await machine.completed()
        subject = Subject(
            model=options.model, text=text, completed=completed, cores=options.cores, replicas=options.replicas
        )
        subject.check()
        most_rows = max(1, completed.max_batch_size)
        if options.load.rows > most_rows:
            raise StartFailed(f"--rows: the model takes 1 to {most_rows}")
        profiles = await _profiles(machine, subject, options, say)
        calibrated = monotonic()
        simulator, effort = Simulator(options.load, profiles), Effort.within(options.budget_s)
        end = calibrated + SEARCH * options.budget_s
        plan = planned(
            simulator,
            subject,
            most_replicas=options.most_replicas,
            has_time=lambda: monotonic() < end,
            effort=effort,
            say=say,
        )
        say(f"{simulator.trials} settings tried in virtual time{', until the time was over' if plan.cut_off else ''}")
        searched = monotonic()
        plan, present, chosen = await confirm(machine, subject, options, simulator, plan, effort, say)
    ended = monotonic()
    return Tuned(
        options=options,
        subject=subject,
        profiles=profiles,
        plan=plan,
        present=present,
        chosen=chosen,
        text=changed(subject, plan.chosen.setting),
        confirmed=is_confirmed(present, chosen),
        trials=simulator.trials,
        seconds={
            "calibration": calibrated - began,
            "search": searched - calibrated,
            "measurement": ended - searched,
            "all": ended - began,
        },
    )


def affordable(budget_s: float, wanted: int, max_rows: int, rows: int) -> tuple[int, float]:
    """Return how many engines are measured within a time, and how long each turn of their profiles is.

    As many of those that are wanted as can be measured well, at least one.
    """
    for count in range(wanted, 0, -1):
        seconds = seconds_within(budget_s / count, max_rows, rows)
        if seconds >= WELL_S or count == 1:
            return count, min(MOST_PROFILE_S, max(LEAST_PROFILE_S, seconds))
    return 1, LEAST_PROFILE_S


async def _profiles(machine: Machine, subject: Subject, options: Options, say: Say) -> dict[Engine, Profile]:
    """Measure the profiles of as many engines as the time allows, the present one first."""
    wanted, budget_s, rows = engines(subject, options.providers), CALIBRATION * options.budget_s, options.load.rows
    max_rows = subject.present.max_rows
    count, seconds = affordable(budget_s, len(wanted), max_rows, rows)
    began, found = monotonic(), dict[Engine, Profile]()
    for engine in wanted[:count]:
        if found and monotonic() + profile_s(seconds, max_rows, rows) > began + 1.2 * budget_s:
            break
        # Without delays: batches of all sizes are to be seen, and no answer is to wait for one.
        setting = replace(subject.present.on(engine), delay_us=0, preferred=())
        try:
            await machine.load(changed(subject, setting))
            most = engine.instances if subject.on_device else max(1, subject.cores // engine.threads)
            profile = await machine.profile(seconds=seconds, rows=rows, instances=min(engine.instances, most))
        except CommandFailed as failed:
            if not found:
                raise
            say(f"{engine}: left out: {failed}")
            continue
        found[engine] = profile
        say(f"{engine}: about {profile.capacity:.0f} rows per second")
    if len(found) < len(wanted):
        say(f"{len(wanted) - len(found)} of {len(wanted)} choices of instances and threads were not measured")
    return found


class _Turns:
    """Measures settings in turns. seconds: of one turn."""

    def __init__(self, machine: Machine, subject: Subject, options: Options, seconds: float, say: Say) -> None:
        self._machine = machine
        self._subject = subject
        self._options = options
        self._seconds = seconds
        self._say = say
        self._tallies: dict[Setting, list[Sequence[Tally]]] = {}
        self._objections: dict[Setting, str] = {}

    def count(self, setting: Setting) -> int:
        return len(self._tallies.get(setting, ()))

    async def add(self, setting: Setting, name: str) -> None:
        """Send the load to a setting. The first turn of each setting has the same arrivals, and so has the second."""
        await self._machine.load(changed(self._subject, setting))
        load = self._options.load
        load = replace(load, seed=load.seed + self.count(setting))
        found, objection = await self._machine.offered(
            load.scenario(self._machine.url, self._seconds, part=1.0 / setting.replicas)
        )
        self._tallies.setdefault(setting, []).append(found)
        self._objections[setting] = self._objections.get(setting, "") or objection
        calls = sum([each.scheduled for each in found])
        self._say(f"measured {name}: {sum([each.kept for each in found])} of {calls} calls in time")

    def measured(self, setting: Setting) -> Measured:
        """Return what all turns of a setting come to."""
        turns = self._tallies[setting]
        tallies = [total(each) for each in zip(*turns, strict=True)]
        return Measured(
            setting=setting,
            reached=self._options.load.judged(tallies, len(turns) * self._seconds, part=1.0 / setting.replicas),
            objection=self._objections[setting],
        )


async def confirm(
    machine: Machine, subject: Subject, options: Options, simulator: Simulator, plan: Plan, effort: Effort, say: Say
) -> tuple[Plan, Measured, Measured]:
    """Measure the chosen setting and the present one in turns.

    If the smallest change does not reach the objectives when it is measured, the best setting is measured as well, and
    chosen if it is better.
    """
    present, chosen, best = subject.present, plan.chosen.setting, plan.best.setting
    turn_s = MEASUREMENT * options.budget_s / (2 * TURNS)
    seconds = min(MOST_TURN_S, max(LEAST_TURN_S, turn_s / (1.0 + WARM_UP)))
    turns = _Turns(machine, subject, options, seconds, say)
    await turns.add(chosen, "present" if chosen == present else "chosen")
    if best not in (chosen, present) and not turns.measured(chosen).met:
        await turns.add(best, "best")
        if turns.measured(best).score < turns.measured(chosen).score:
            plan, chosen = explained(simulator, subject, best, best, effort, cut_off=plan.cut_off), best
    while min(turns.count(present), turns.count(chosen)) < TURNS:
        for setting, name in ((present, "present"), (chosen, "chosen")):
            if turns.count(setting) < TURNS:
                await turns.add(setting, name)
    return plan, turns.measured(present), turns.measured(chosen)


def is_confirmed(present: Measured, chosen: Measured) -> bool:
    """Return whether the measurements speak for the chosen setting: it is not worse than the present one by more than
    chance may do. One with fewer replicas has to reach the objectives, or miss them where the present one does too.
    """
    if chosen.setting == present.setting:
        return True
    if chosen.setting.replicas < present.setting.replicas:
        return chosen.met or not present.met
    (missing, ratio), (missing_now, ratio_now) = chosen.score, present.score
    if max(missing, missing_now) > NOISE:
        return missing <= missing_now + NOISE
    return chosen.setting.replicas > present.setting.replicas or ratio <= ratio_now * NOISY
