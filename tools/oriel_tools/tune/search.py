"""Searches the settings in virtual time: coordinate descent over the fields, from the engines that look best. Pure.

Short trials rank the engines, with the present batching and without delays. Then one field of batching after the other
is moved to the best of its values until none gets better. Chance decides between settings that are nearly equal, so the
best ones are tried again with a longer load, beside the setting that there is now.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oriel_tools.tune.objective import Score
from oriel_tools.tune.setting import ENGINE, Engine, Setting, changes

STARTS = 2  # engines from which the descent begins
FINALISTS = 4
SWEEPS = 3
LEAST_TRIALS = 12  # short ones, which are made on a slow machine too

Try = Callable[[Setting, int], Score]
Near = Callable[[Setting], dict[str, list[Setting]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many calls a trial has: one of many, and one that decides or explains."""

    short: int = 800
    long: int = 3000

    @classmethod
    def within(cls, budget_s: float) -> "Effort":
        """Return the effort that goes with the time for a whole tuning: less in less than a minute."""
        part = min(1.0, budget_s / 60.0)
        return cls(short=max(200, round(cls().short * part)), long=max(500, round(cls().long * part)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The settings that were tried with the long load, the best one first. cut_off: the time was over before the search
    was.
    """

    ranked: Sequence[tuple[Score, Setting]]
    cut_off: bool

    @property
    def setting(self) -> Setting:
        return self.ranked[0][1]

    @property
    def score(self) -> Score:
        return self.ranked[0][0]


class _TimeOver(Exception):
    pass


def search(
    present: Setting,
    engines: Sequence[Engine],
    near: Near,
    attempt: Try,
    has_time: Callable[[], bool],
    effort: Effort,
) -> Found:
    """Return the best setting that was found.

    engines: the engines that were measured, the present one among them. near: the settings that differ in one field, by
    field. attempt: the score of a setting with a load of this number of calls, less is better. has_time: returns True
    while another trial may begin, beyond LEAST_TRIALS and one of the best.
    """
    tried: dict[Setting, Score] = {}

    def short(setting: Setting) -> Score:
        if setting not in tried:
            if len(tried) >= LEAST_TRIALS and not has_time():
                raise _TimeOver
            tried[setting] = attempt(setting, effort.short)
        return tried[setting]

    cut_off = False
    try:
        short(present)
        # A delay that is far too long makes all engines look equal: they are tried without any as well.
        batching = dict.fromkeys([present, replace(present, delay_us=0, preferred=())])
        begun = sorted([each.on(engine) for engine in engines for each in batching], key=short)
        starts = {each.engine: each for each in reversed(begun)}  # engine -> its better start
        for start in sorted(starts.values(), key=short)[:STARTS]:
            _descend(start, near, short)
    except _TimeOver:
        cut_off = True
    ranked = [(attempt(present, effort.long), present)]
    for number, setting in enumerate(sorted(tried, key=lambda each: tried[each])[:FINALISTS]):
        if number and not has_time():
            cut_off = True
            break
        if setting != present:
            ranked.append((attempt(setting, effort.long), setting))
    ranked.sort(key=lambda each: each[0])  # the present one stays before its equals
    return Found(ranked=ranked, cut_off=cut_off)


def _descend(start: Setting, near: Near, score: Callable[[Setting], Score]) -> None:
    """Move one field after the other to its best value until none gets better."""
    best = start
    for _ in range(SWEEPS):
        before = best
        for field in near(best):
            best = min([best, *near(best)[field]], key=score)
        if best == before:
            return


def simplified(
    present: Setting, found: Setting, groups: Sequence[Sequence[str]], worse: Callable[[Setting], bool]
) -> Setting:
    """Return the setting without the changes that bring nothing.

    groups: the fields in which the two differ; those of one group are put back together. worse: returns True if a
    setting is worse than `found` by what counts.
    """
    best = found
    for fields in groups:
        candidate = put_back(best, present, fields)
        if candidate != best and not worse(candidate):
            best = candidate
    return best


def put_back(setting: Setting, present: Setting, fields: Sequence[str]) -> Setting:
    """Return the setting with some fields as they are at present. Preferred sizes that no batch can have are left
    out.
    """
    back = replace(setting, **{field: getattr(present, field) for field in fields})
    return back.with_rows(back.max_rows)


def groups_of(present: Setting, wanted: Setting, engines: Sequence[Engine]) -> list[tuple[str, ...]]:
    """Return the fields in which two settings differ, each by itself if an engine was measured for that, else those of
    the engine together.
    """
    fields = changes(present, wanted)
    of_engine = tuple(field for field in fields if field in ENGINE)
    apart = all(put_back(wanted, present, [field]).engine in engines for field in of_engine)
    others = [(field,) for field in fields if field not in ENGINE]
    return [*([(field,) for field in of_engine] if apart else [of_engine]), *others]
