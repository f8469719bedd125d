"""Chooses a setting in virtual time, and explains it: what each change is worth, and what limits now. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from oriel_tools.tune.objective import loss_text, most_lost, number
from oriel_tools.tune.search import Effort, Found, groups_of, put_back, search, simplified
from oriel_tools.tune.setting import Setting, Subject, changes, neighbours
from oriel_tools.tune.trial import Simulator, Trial

MARGIN = 1.1  # factor on the rate: predictions may be off by a tenth
NEARLY = 1.03  # a latency up to this times another one is as good
MISSED = 0.005  # a share of calls that does not count: the same as between two measurements
BUSY = 0.85  # share of busy time from which on executions are the bottleneck
LARGE = 0.25  # part of a latency that is worth naming
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5)  # parts of the rates for which targets are promised


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The worth of some changed fields. without: the simulated result if they are put back. text: the loss."""

    fields: Sequence[str]
    without: Trial
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The tightest targets at a load, in milliseconds: one for each objective; infinite if none can be promised.

    part: factor on all rates. The share of the calls that the objective names keeps the target, with a margin for the
    prediction.
    """

    part: float
    targets_ms: Sequence[float]

    @property
    def kept(self) -> bool:
        return all(each < inf for each in self.targets_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The setting that was chosen, as simulated, beside the present one.

    best: the setting with the lowest latencies, of which only what is needed was chosen. most: the part of the rates up
    to which the chosen setting reaches the objectives. promises: the promises of the chosen setting, by load. limit:
    its kind, and a sentence.
    """

    present: Trial
    chosen: Trial
    best: Trial
    worths: Sequence[Worth]
    most: float
    promises: Sequence[Promise]
    limit: tuple[str, str]
    cut_off: bool


def planned(
    simulator: Simulator,
    subject: Subject,
    *,
    most_replicas: int,
    has_time: Callable[[], bool],
    effort: Effort,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Search the smallest change with which the objectives are reached by as few replicas as possible, or else the best
    setting, at a rate with a margin.
    """
    present, long = subject.present, effort.long
    found = _searched(simulator, subject, 1, has_time, effort)
    trial, cut_off = simulator.trial(found.setting, long, MARGIN), found.cut_off
    say(f"1 replica, at {MARGIN:g} times the rate: {_results(trial)}")
    while not trial.met and trial.setting.replicas < most_replicas:
        part = simulator.most(trial.setting, effort.short, steps=6)
        if not part:
            break
        replicas = max(trial.setting.replicas + 1, ceil(trial.setting.replicas / part))
        found = _searched(simulator, subject, min(most_replicas, replicas), has_time, effort, trial.setting)
        trial, cut_off = simulator.trial(found.setting, long, MARGIN), cut_off or found.cut_off
        say(f"{trial.setting.replicas} replicas: {_results(trial)}")
    if not trial.met and trial.setting.replicas < present.replicas:
        found = _searched(simulator, subject, present.replicas, has_time, effort, trial.setting)
        trial, cut_off = simulator.trial(found.setting, long, MARGIN), cut_off or found.cut_off
    while trial.met and trial.setting.replicas > 1:
        fewer = simulator.trial(replace(trial.setting, replicas=trial.setting.replicas - 1), long, MARGIN)
        if not fewer.met:
            break
        trial = fewer
    simple = _smallest(simulator, subject, trial, long)
    return explained(simulator, subject, simple, trial.setting, effort, cut_off=cut_off)


def _smallest(simulator: Simulator, subject: Subject, best: Trial, calls: int) -> Setting:
    """Return the setting without the changes that are not needed for what it reaches."""
    present = subject.present
    groups = groups_of(present, best.setting, list(simulator.profiles))
    # Replicas cost money: they stay as few as they are.
    groups = [fields for fields in groups if fields != ("replicas",)]
    simple = simplified(present, best.setting, groups, lambda each: _worse(simulator, best, each, calls))
    # A field that has to change anyway is better removed than given some other value.
    for field in ("delay_us", "preferred"):
        removed = replace(simple, delay_us=0) if field == "delay_us" else replace(simple, preferred=())
        if field in changes(present, simple) and not _worse(simulator, best, removed, calls):
            simple = removed
    return simple


def explained(
    simulator: Simulator, subject: Subject, chosen: Setting, best: Setting, effort: Effort, *, cut_off: bool
) -> Plan:
    """Return the plan with this choice."""
    trial = simulator.trial(chosen, effort.long)
    return Plan(
        present=simulator.trial(subject.present, effort.long),
        chosen=trial,
        best=simulator.trial(best, effort.long),
        worths=worths(simulator, subject.present, trial, effort.long),
        most=simulator.most(chosen, 2 * effort.short),
        promises=promises(simulator, chosen, 2 * effort.short),
        limit=limit(simulator, trial, subject),
        cut_off=cut_off,
    )


def _searched(
    simulator: Simulator,
    subject: Subject,
    replicas: int,
    has_time: Callable[[], bool],
    effort: Effort,
    begin: Setting | None = None,
) -> Found:
    """Search with a fixed number of replicas. begin: a setting that was good with another number."""
    start = replace(begin or subject.present, replicas=replicas)
    load = simulator.load
    return search(
        start,
        list(simulator.profiles),
        lambda setting: neighbours(setting, subject, rows=simulator.least_rows(setting), bound_ms=load.bound_ms),
        lambda setting, calls: simulator.trial(setting, calls, MARGIN).score,
        has_time,
        effort,
    )


def _worse(simulator: Simulator, than: Trial, setting: Setting, calls: int) -> bool:
    """Return whether a setting does not do for what another one does: reach the objectives, or be as good as it is."""
    if setting.engine not in simulator.profiles:
        return True
    found = simulator.trial(setting, calls, MARGIN)
    return not found.met if than.met else clearly_worse(found.score, than.score)


def clearly_worse(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether a score is worse than another by more than chance may do."""
    if max(one[0], other[0]) > MISSED:
        return one[0] > other[0] + MISSED
    return bool(one[0]) > bool(other[0]) or one[1] > other[1] * NEARLY


def worths(simulator: Simulator, present: Setting, chosen: Trial, calls: int) -> list[Worth]:
    """Return what each changed field is worth: what is lost if only this field is put back to its present value."""
    found = []
    for fields in groups_of(present, chosen.setting, list(simulator.profiles)):
        without = simulator.trial(put_back(chosen.setting, present, fields), calls)
        text = loss_text(*most_lost(chosen.reached, without.reached))
        found.append(Worth(fields=fields, without=without, text=text))
    return found


def promises(simulator: Simulator, setting: Setting, calls: int) -> list[Promise]:
    """Return the tightest target that each tier can be promised, at some loads of all tiers together."""
    found = []
    for part in LOADS:
        trial = simulator.trial(setting, calls, part * MARGIN)
        found.append(Promise(part=part, targets_ms=[each.latency_ms for each in trial.reached]))
    return found


def limit(simulator: Simulator, chosen: Trial, subject: Subject) -> tuple[str, str]:
    """Return the bottleneck now: a word, and a sentence."""
    setting, load = chosen.setting, simulator.load
    quickest_ms = min([simulator.alone_ms(setting.on(engine)) for engine in simulator.profiles])
    if quickest_ms > load.bound_ms:
        return "bound", (
            f"a request that meets no other takes {quickest_ms:.1f} ms at best: no setting that was measured reaches "
            f"{number(load.bound_ms)} ms"
        )
    busy = f"executions run for {chosen.utilisation:.0%} of the time, {chosen.rows_per_batch:.1f} rows each"
    if chosen.utilisation >= BUSY:
        if not subject.on_device and setting.instances * setting.threads >= subject.cores:
            return "cores", f"the {subject.cores} cores are busy: {busy}"
        return "device", f"the {setting.instances} instances are busy: {busy}"
    slowest = max(chosen.reached, key=lambda each: each.ratio)
    if setting.delay_us / 1e3 > LARGE * slowest.latency_ms:
        return "delay", (f"calls wait up to {setting.delay_us / 1e3:g} ms for others that fill their batch: {busy}")
    alone_ms = simulator.alone_ms(setting)
    return "queue", (
        f"calls that come close together wait for one another: a request alone takes {alone_ms:.1f} ms, and {busy}"
    )


def _results(trial: Trial) -> str:
    texts = [f"{each.objective.tier}: {each}" if each.objective.tier else str(each) for each in trial.reached]
    return "; ".join(texts)
