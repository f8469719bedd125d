"""Decides what is measured: which setting next, and which one was the best. Pure.

A simulation is only as good as its profiles, so its choice is measured. If that does not reach the objectives, the
simulation is corrected by what was measured and asked again, until a setting reaches them, no other one is worth
measuring, or the time is over. The best one and the present one are then measured again, because the best of several
measurements was lucky as well.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from oriel_tools.tune.objective import Reached, Score, score
from oriel_tools.tune.setting import Setting

TURNS = 2  # at least, of the winner and of the present setting each
NOISE = 0.005  # a share of calls by which two measurements may differ
NOISY = 1.1  # and a factor between two latencies


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


def contest(
    present: Setting,
    first: Sequence[Setting],
    again: Callable[[], Sequence[Setting]],
    left: Callable[[], int],
) -> Generator[Setting, Measured, Setting]:
    """Yield settings to be measured for one turn each; is sent what all turns of that setting came to.

    Returns the best one: another than the present one, if any other was measured. first: settings to begin with, the
    preferred one first; the others are only measured if it does not reach the objectives. again: names further ones by
    what was measured, the most promising one first. left: the turns for which there is time; those that confirm are
    made in any case.
    """
    found: dict[Setting, Measured] = {}
    turns: Counter[Setting] = Counter()
    waiting, exhausted = list(dict.fromkeys(first)), False  # exhausted: `again` has named nothing new
    wanted = [waiting[0], present]
    while True:
        for setting in dict.fromkeys(wanted):
            found[setting] = yield setting
            turns[setting] += 1
        best = min([each for each in found if each != present] or [present], key=lambda each: found[each].score)
        needed = sum([max(0, TURNS - turns[each]) for each in {best, present}])
        if not found[best].met and left() > needed:
            waiting = [each for each in waiting if each not in found]
            if not waiting and not exhausted:
                waiting = [each for each in again() if each not in found]
                exhausted = not waiting
            if waiting:
                # The others are dropped: the next search knows more than the one that named them.
                wanted, waiting = waiting[:1], []
                continue
        wanted = [each for each in (present, best) if turns[each] < TURNS]
        if not wanted:
            return best


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
