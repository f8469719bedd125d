"""Learns the concurrency limit of a pool from the latency of its calls. Pure.

Calls beyond what the servers can work on wait inside of them, where they cannot be reordered any more. So the limit
should be the lowest one that costs no throughput.

Theory. By Little's law (1961) a full pool with limit L and mean latency W answers L / W calls per second. If W stays
the same while L grows, there is free capacity; if W grows as L does, the additional calls only wait. TCP Vegas
(Brakmo, Peterson 1995) and Netflix's concurrency-limits (Gradient2) compare W with one unloaded latency. A server that
batches has no such latency, because its latency and its throughput both grow with the batch. So limits are tried one
after the other and compared by L / W. The limits that are tried are the *rungs* of a ladder, about the square root of
two apart. The lowest rung with at least KEEP of the best rate is adopted as the *base*.

Windows. A limit is measured over a *window* of calls that all began under it, after the calls of the limit before had
left. A window counts only if the pool was full all the time: a pool with free permits learns nothing and keeps its
limit. If most calls of a window passed their deadlines in the pool, the limit is halved without comparing rates. A
server that has become slow, or goes on with calls that were given up, could otherwise answer no call in time, and there
would be nothing to learn from.

Search. The search halves the limit first and then goes on halving, or doubles, whichever improves the rate. After that,
windows at the base alternate with windows at a rung beside it, less and less often while no better one is found. The
base windows also show how the pool's speed changes (another mix of calls, other load on the machine). Earlier rates are
scaled by that change, so that rungs are compared under equal conditions. The scatter of the base windows is the margin
within which the lower rung is preferred.

Targets. A higher limit is tried only if answers would still come within `most_s` should the rate not improve, or if the
rungs below have shown free capacity. While a wait in the pool is no longer than HARMLESS_S, as with very quick servers,
the limit rises as far as that allows: the order hardly matters there, and fewer calls have to queue.

Return. The lesson of an incident is unlearned while the pool is not full: every RETURN_S the base rises by one rung,
as far as the limit that a pool begins with. The limit is never below the number of servers, or some would be idle.
"""

from itertools import cycle
from math import inf

KEEP = 0.98  # share of the best rate that is worth keeping with fewer calls in the pool
CLIMB = 1.05  # gain that a doubled limit has to bring
FAST = 1.2  # gain at which a rung beside the base is adopted at once
ROOM = 0.6  # share of the gain of free capacity that counts as free capacity
DOUBT = 0.02  # largest amount subtracted from KEEP
MOOD = 0.6  # a base whose rate falls to this share, or rises to its inverse, starts a new search
WEIGHT = 0.3  # weight of the newest window in the mean of a rung
ENOUGH = 2  # windows before a rung may become the base
REST = 12  # largest number of base windows between two trials of a neighbour
HARMLESS_S = 0.004
LEAST_CALLS = 16
LEAST_S = 0.05
START = 8
RETURN_S = 1.0
_OVER, _FIRST, _BELOW, _UP, _DOWN = range(5)


def ladder(ceiling: int) -> tuple[int, ...]:
    """The limits that are tried, ascending: 1 to `ceiling` in steps of about the square root of two."""
    rungs = {min(ceiling, round(2.0 ** (half / 2.0))) for half in range(2 * ceiling.bit_length() + 1)}
    return tuple(sorted(rungs | {ceiling}))


class LearnedLimit:
    """A learned limit. `limit` is between 1 and `ceiling`; read it after every call of a method. Single writer.

    most_s: the longest time that answers may take while higher limits are tried; a part of the tightest target.
    """

    def __init__(self, ceiling: int, *, start: int = START, most_s: float = inf) -> None:
        self._rungs = ladder(max(1, ceiling))
        self._most_s = most_s
        self._harmless_s = min(HARMLESS_S, most_s / 5.0)
        self._start = self._base = max(index for index, rung in enumerate(self._rungs) if rung <= max(1, start))
        self._floor = 0  # the lowest rung that may be the limit
        self._returned_s = 0.0  # when the base rose last because the pool was not full
        self._tried = self._base
        self._rates = [0.0] * len(self._rungs)
        self._seen = [0] * len(self._rungs)
        self._step = _FIRST  # the search's current step
        self._doubt = 0.0
        self._offsets = cycle((1, -1, 1, -1, 2, -1, 1, -2))
        self._side = 0
        self._rest = 1
        self._rested = 0
        self._mood = 1.0  # rate of the latest base window relative to the earlier mean
        self._moody = 0
        self.limit = self._rungs[self._base]
        self._from = 0.0
        self._settling = True
        self._count = self._good = self._late = 0
        self._sum_s = 0.0
        self._took_s = 0.0  # seconds that the latest call took

    @property
    def base(self) -> int:
        """The adopted limit; `limit` differs from it while another one is tried."""
        return self._rungs[self._base]

    def calm(self) -> None:
        """Record that the pool had a free permit: the current window is void, and nothing is tried while no call waits.

        Before a quick server this can happen all the time. The limit then rises by one rung, if that is harmless.
        """
        if 0.0 < 2.0 * self._took_s <= self._harmless_s and self._base + 1 < len(self._rungs):
            self._move(self._base + 1, self._from)
        elif self._tried != self._base and not self._step:
            self._try(self._base, self._from)
        else:
            self._begin(self._from)

    def keep_at_least(self, servers: int) -> None:
        """Keep the limit at or above the number of servers, as far as the ceiling allows."""
        self._floor = next((index for index, rung in enumerate(self._rungs) if rung >= servers), len(self._rungs) - 1)
        if self._tried < self._floor or self._base < self._floor:
            self._restart(self._from)

    @property
    def lowered(self) -> bool:
        """Return whether the adopted limit is below the one that a pool begins with."""
        return self._base < self._start

    def has_room(self, now: float) -> None:
        """Record that a call ended while none waited."""
        if self._base < self._start and now - max(self._returned_s, self._from) >= RETURN_S:
            self._returned_s = now
            self._base += 1
            self._restart(now)

    def note_finished(self, took_s: float, now: float, *, good: bool = True, late: bool = False) -> bool:
        """Record a call that had its permit for `took_s` until `now`, while others waited. True if `limit` has
        changed.

        good: False if the server refused it or it was given up: it used capacity without being answered.
        late: its deadline passed in the pool. If most calls of a window are late, the limit is too high.
        """
        self._took_s = took_s
        began = now - took_s
        if began < self._from:
            return False
        if self._settling:
            # The calls that run now began under this limit, but beside calls that did not: only the next ones count.
            self._settling = False
            self._from = now
            return False
        self._count += 1
        self._good += good
        self._late += late
        self._sum_s += took_s
        if self._count < max(LEAST_CALLS, 2 * self.limit) or now - self._from < LEAST_S:
            return False
        before = self.limit
        if 2 * self._late > self._count:
            self._base = min(self._base, self._tried) - 2
            self._restart(now)
        elif self._good:
            self._window(self.limit * self._good / max(self._sum_s, 1e-9), now)
        else:
            self._begin(now)
        return self.limit != before

    # Windows ---------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._from = now
        self._settling = True
        self._count = self._good = self._late = 0
        self._sum_s = 0.0

    def _try(self, index: int, now: float) -> None:
        self._tried = index
        self.limit = self._rungs[index]
        self._begin(now)

    def _move(self, index: int, now: float) -> None:
        self._base = max(index, self._floor)
        self._rest, self._rested = 1, 0
        self._try(self._base, now)

    def _window(self, rate: float, now: float) -> None:
        if self._step:
            self._search(rate, now)
        elif self._tried == self._base:
            self._held(rate, now)
        else:
            self._tried_beside(rate, now)

    def _search(self, rate: float, now: float) -> None:
        tried, step = self._tried, self._step
        best = max(self._rates)
        self._rates[tried], self._seen[tried] = rate, ENOUGH
        if step == _FIRST:
            self._step = _BELOW if tried else _UP
        elif step == _BELOW:
            self._step = _UP if rate < KEEP * best else _DOWN
        elif rate < (CLIMB if step == _UP else KEEP) * best:
            self._step = _OVER
        if self._step == _DOWN or (self._step == _UP and step == _UP):
            self._base = tried
        index = self._base + (2 if self._step == _UP else -2)
        if self._step == _UP:
            index = min(index, len(self._rungs) - 1)
        elif self._base > self._floor:
            index = max(index, self._floor)
        if self._step == _OVER or index < self._floor or self._seen[index] or not self._worth(index):
            self._step = _OVER
            self._move(self._lowest(), now)
        else:
            self._try(index, now)

    def _worth(self, index: int) -> bool:
        """Return whether a rung may be tried: it endangers no target, or there is free capacity."""
        rungs, rates, base = self._rungs, self._rates, self._base
        if index <= base or not rates[base] or rungs[index] / rates[base] <= self._most_s:
            return True
        below = [(rungs[base] / rungs[i], rates[base] / rates[i]) for i in range(base) if rates[i]]
        return any(brought >= 1.0 + ROOM * (more - 1.0) for more, brought in below)

    def _held(self, rate: float, now: float) -> None:
        known = self._rates[self._base] or rate
        self._mood = rate / known
        self._doubt += WEIGHT * (min(DOUBT, abs(self._mood - 1.0)) - self._doubt)
        if not MOOD < self._mood < 1.0 / MOOD:
            self._moody += 1
            if self._moody < 2:
                self._begin(now)
            else:
                self._restart(now)
            return
        self._moody = 0
        change = 1.0 + WEIGHT * (self._mood - 1.0)
        self._rates = [each * change for each in self._rates]
        self._rates[self._base] = self._rates[self._base] or rate
        self._seen[self._base] = max(self._seen[self._base], ENOUGH)
        self._rested += 1
        if self._rested < self._rest:
            self._begin(now)
            return
        beside = self._base + (self._side or next(self._offsets))
        self._side = 0
        if self._floor <= beside < len(self._rungs) and self._worth(beside):
            self._rested = 0
            self._try(beside, now)
        else:
            self._begin(now)

    def _tried_beside(self, rate: float, now: float) -> None:
        tried, base = self._tried, self._base
        rate /= self._mood  # normalised to the conditions of the other measurements
        known = self._rates[tried]
        self._rates[tried] = known + WEIGHT * (rate - known) if known else rate
        self._seen[tried] += 1
        if tried > base and rate > FAST * self._rates[base]:
            self._seen[tried] = ENOUGH
            self._side = 1
            self._move(tried, now)
            return
        found = self._lowest()
        if found != base:
            self._move(found, now)
        else:
            self._rest = min(2 * self._rest, REST)
            self._try(base, now)

    def _restart(self, now: float) -> None:
        """Forget all rungs and search from the base."""
        self._rates = [0.0] * len(self._rungs)
        self._seen = [0] * len(self._rungs)
        self._step = _FIRST
        self._moody = 0
        self._move(self._base, now)

    def _lowest(self) -> int:
        """The lowest rung that reaches KEEP of the best rate; the base stays for slightly less."""
        known = [index for index, seen in enumerate(self._seen) if seen >= ENOUGH]
        best = max([self._rates[index] for index in known], default=0.0)
        enough = (KEEP - self._doubt) * best
        lowest = next((index for index in known if self._rates[index] >= enough), self._base)
        harmless = self._harmless_s * best
        if harmless >= self._rungs[min(lowest + 1, len(self._rungs) - 1)]:
            return max(index for index, rung in enumerate(self._rungs) if rung <= harmless)
        if lowest > self._base and self._rates[self._base] >= enough - 0.02 * best:
            return self._base
        return lowest
