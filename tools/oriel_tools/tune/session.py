"""One tuning from beginning to end: profiles are measured, settings simulated, and the best one measured."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from oriel_tools.simulate.profile import Profile
from oriel_tools.tune.calibration import profiles
from oriel_tools.tune.config_text import MAX_BYTES
from oriel_tools.tune.machine import Machine, serving
from oriel_tools.tune.options import Clock, Options, Say
from oriel_tools.tune.plan import Plan, explained, planned
from oriel_tools.tune.search import Effort
from oriel_tools.tune.setting import CONFIG_FILE, Engine, Setting, Subject, changed
from oriel_tools.tune.trial import Simulator
from oriel_tools.tune.turns import Measured, is_confirmed, measure
from oriel_wire.errors import BadMessage, StartFailed
from oriel_wire.v2.metadata import parse_config_text

CALIBRATION, SEARCH, EXPLANATION = 0.3, 0.15, 0.05  # parts of the budget; measuring settings takes the rest

Serve = Callable[..., AbstractAsyncContextManager[Machine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result. text: the text of the configuration with the chosen setting. confirmed: True if that is recommended.

    measured: everything that was measured, the present setting first.
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
        settings = [subject.present, plan.chosen.setting, plan.best.setting]
        left_s = began + (1.0 - EXPLANATION) * options.budget_s - searched
        outcomes = await measure(machine, subject, options, settings, left_s, say)
    chosen = winner(plan.chosen.setting, outcomes)
    if chosen.setting != plan.chosen.setting:
        plan = explained(simulator, subject, chosen.setting, chosen.setting, effort, cut_off=plan.cut_off)
    ended = clock()
    return Tuned(
        options=options,
        subject=subject,
        profiles=found,
        plan=plan,
        present=outcomes[0],
        chosen=chosen,
        text=changed(subject, chosen.setting),
        confirmed=is_confirmed(outcomes[0], chosen),
        measured=outcomes,
        trials=simulator.trials,
        seconds={
            "calibration": calibrated - began,
            "search": searched - calibrated,
            "measurement": ended - searched,
            "all": ended - began,
        },
    )


def winner(planned: Setting, measured: Sequence[Measured]) -> Measured:
    """Return the setting that the measurements decide for: the smallest change if it reaches the objectives when it is
    measured, else the change that came nearest to them.

    planned: the smallest change that should do by the search, or the present setting. measured: the present one first.
    """
    (found,) = [each for each in measured if each.setting == planned]
    return found if found.met else min(measured[1:] or measured, key=lambda each: each.score)
