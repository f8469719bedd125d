"""Decides which models are in memory: admits loads within a budget, and names the models that make room. Pure.

Rules.
1. The plan never exceeds a budget: a load starts when the bytes of everything that loads, is loaded or is still
   leaving, together with its own, fit on every device that it needs. Loads start in the order of their requests. A load
   needs up to twice its bytes until it ends: beside others it starts only if there is room for that, too.
2. The bytes of an evicted model are free when its share is released, not before.
3. The value of a model is the number of calls that it would get while it stays, max(young_s, young_loads x load_s), at
   its rate of calls over the last `lately_s`. Calls that were refused count, too. A model that was not called for that
   long has no value.
4. Those with the lowest value per byte go first, and only for a load that is worth more than all that go for it: its
   own value, and one for the call that asks for it. Models that are worth less than one call go in the order of their
   rate over `rate_s` x load_s / bytes.
5. A model is never evicted while it is leased, loads, is pinned, or is younger than young_loads x load_s. While it is
   younger than young_s its value counts YOUNG_FACTOR times, and YOUNG_CALLS more: a few calls do not begin a ring of
   loads, but the first models after a start give way to more popular ones soon.
6. If too little could go, nothing goes: the load is refused, with the seconds after which it may be asked for again.

The size of a model is measured after its load and may be larger than what was planned. Then `excess` names what has to
go; until that has gone, nothing starts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import exp, inf

YOUNG_S = 60.0
YOUNG_LOADS = 10.0
YOUNG_FACTOR = 2.0
YOUNG_CALLS = 10.0
LATELY_S = 60.0
RATE_S = 3600.0
RETRY_S = 1.0

Leased = Callable[[str], bool]


class ShareState(Enum):
    """The purpose of the bytes of a share."""

    WAITING = "waiting"  # for what leaves
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


class MemoryShare:
    """The memory of one load of one model. Single writer: `ModelMemory`.

    sizes: device -> bytes.
    since_s: the time when it was loaded.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], *, pinned: bool) -> None:
        self.name = name
        self.sizes = dict(sizes)
        self.pinned = pinned
        self.state = ShareState.WAITING
        self.since_s = 0.0
        self.load_s = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The decision about one load.

    starts: True if it may start now.
    victims: shares to evict for it; they leave from now on.
    refused: True if there is no room for it; then its share is gone.
    retry_s: seconds until there may be room, None if no wait can help.
    """

    starts: bool = False
    victims: tuple[MemoryShare, ...] = ()
    refused: bool = False
    retry_s: float | None = None


class _Rate:
    """Calls per second, smoothed exponentially over `over_s`."""

    def __init__(self, over_s: float, now: float) -> None:
        self._over_s = over_s
        self._calls_s = 0.0
        self._at_s = now

    def add(self, calls: int, now: float) -> None:
        passed_s = now - self._at_s
        if passed_s <= 0.0:
            self._calls_s += calls / self._over_s
            return
        kept = exp(-passed_s / self._over_s)
        # As if the calls had come at equal distances.
        self._calls_s = self._calls_s * kept + calls / passed_s * (1.0 - kept)
        self._at_s = now

    def at(self, now: float) -> float:
        return self._calls_s * exp(-max(0.0, now - self._at_s) / self._over_s)


class _Use:
    """The use of one model.

    lately, usual: recent and usual rate of its calls, for rules 3 and 4 of this module. called_s: the time when the
    latest of them came.
    load_s: seconds of its latest load, 0 before the first.
    """

    def __init__(self, lately_s: float, usual_s: float, now: float) -> None:
        self.lately = _Rate(lately_s, now)
        self.usual = _Rate(usual_s, now)
        self.called_s = now
        self.load_s = 0.0


class ModelMemory:
    """The shares of memory of all models on all devices.

    budgets: device -> bytes. A device without a budget is not bounded.
    young_s, young_loads: a model is young for the longer of young_s and that many times its load.
    lately_s, rate_s: the times over which rates of calls are smoothed, for values and for the order of rule 4.
    """

    def __init__(
        self,
        budgets: Mapping[str, int],
        *,
        young_s: float = YOUNG_S,
        young_loads: float = YOUNG_LOADS,
        lately_s: float = LATELY_S,
        rate_s: float = RATE_S,
    ) -> None:
        self.budgets = dict(budgets)
        self._young_s = young_s
        self._young_loads = young_loads
        self._lately_s = lately_s
        self._rate_s = rate_s
        self._shares: list[MemoryShare] = []  # in the order of their requests
        self._uses: dict[str, _Use] = {}

    def shares(self, name: str = "") -> list[MemoryShare]:
        """The shares of one model, or of all, in the order of their requests."""
        return [each for each in self._shares if name in ("", each.name)]

    def used_bytes(self, device: str) -> int:
        """The bytes on a device that load, are loaded, or have not left yet."""
        return _total(self._shares, device, without=ShareState.WAITING)

    def request(self, name: str, sizes: Mapping[str, int], *, pinned: bool = False) -> MemoryShare:
        """Make a share for a load; `plan` says when it may start."""
        share = MemoryShare(name, {device: max(0, size) for device, size in sizes.items()}, pinned=pinned)
        self._shares.append(share)
        return share

    def called(self, name: str, calls: int, now: float) -> None:
        """Record calls of a model since the last time, answered or refused; the latest of them came at `now`."""
        if calls:
            use = self._use(name, now)
            use.lately.add(calls, now)
            use.usual.add(calls, now)
            use.called_s = max(now, use.called_s)

    def forget(self, name: str) -> None:
        """Drop the use of a model that does not exist any more."""
        self._uses.pop(name, None)

    def plan(self, share: MemoryShare, now: float, leased: Leased) -> MemoryPlan:
        """Judge a waiting load: start it, evict for it, or refuse it. Called again whenever a share has been released.

        leased: returns whether a model has calls, or is needed by a load.
        """
        ahead = self._shares[: self._shares.index(share) + 1]
        later = self._shares[len(ahead) :]
        ahead += [each for each in later if each.state is not ShareState.WAITING]
        lacking = {
            device: lack
            for device, size in share.sizes.items()
            if size and (lack := _total(ahead, device, without=ShareState.LEAVING) - self._budget(device)) > 0
        }
        victims: list[MemoryShare] = []
        if lacking:
            victims = self._victims(lacking, now, leased)
            if not victims or self.worth(share, now) <= sum([self.loss(each, now) for each in victims]):
                self._shares.remove(share)
                return MemoryPlan(refused=True, retry_s=self._retry_s(lacking, now))
            for victim in victims:
                victim.state = ShareState.LEAVING
        loading = [each for each in ahead if each.state is ShareState.LOADING]
        twice = [*loading, share] if loading else []
        starts = all(
            _total(ahead, device) + _total(twice, device) <= self._budget(device)
            for device, size in share.sizes.items()
            if size
        )
        if starts:
            share.state = ShareState.LOADING
        return MemoryPlan(starts=starts, victims=tuple(victims))

    def loaded(self, share: MemoryShare, sizes: Mapping[str, int], load_s: float, now: float) -> None:
        """Record the end of a load, with the measured bytes."""
        share.state = ShareState.LOADED
        share.sizes = dict(sizes)
        share.load_s = self._use(share.name, now).load_s = load_s
        share.since_s = now

    def grow(self, name: str, sizes: Mapping[str, int]) -> bool:
        """Add to the bytes of a loaded model if they fit beside everything else; return whether they did. Negative
        bytes, of what was added before, always fit.
        """
        share = next((each for each in self._shares if each.name == name and each.state is ShareState.LOADED), None)
        if share is None:
            return not self.budgets
        held = self._shares
        if any(size > 0 and _total(held, device) + size > self._budget(device) for device, size in sizes.items()):
            return False
        for device, size in sizes.items():
            share.sizes[device] = max(0, share.sizes.get(device, 0) + size)
        return True

    def resize(self, share: MemoryShare, sizes: Mapping[str, int]) -> dict[str, int]:
        """Replace what a load is planned to need by what it is known to need, before it takes that.

        Returns device -> the bytes that are lacking there; if there are any, nothing has changed.
        """
        others = [each for each in self._shares if each is not share and each.state is not ShareState.WAITING]
        lacking = {
            device: int(lack)
            for device, size in sizes.items()
            if size and (lack := _total(others, device) + size - self._budget(device)) > 0
        }
        if not lacking:
            share.sizes = {device: max(0, size) for device, size in sizes.items()}
        return lacking

    def excess(self, now: float, leased: Leased) -> list[MemoryShare]:
        """Places to evict because measured sizes exceed a budget; they leave from now on. As many as may go."""
        found: list[MemoryShare] = []
        for device, budget in self.budgets.items():
            held = [each for each in self._shares if each.state in (ShareState.LOADING, ShareState.LOADED)]
            over = _total(held, device) - budget
            if over > 0:
                victims = self._victims({device: over}, now, leased) or self._evictable((device,), now, leased)
                for victim in victims:
                    victim.state = ShareState.LEAVING
                found += victims
        return found

    def vacate(self, share: MemoryShare) -> None:
        """Record that a share is given up for another reason than an eviction."""
        share.state = ShareState.LEAVING

    def release(self, share: MemoryShare) -> None:
        """Record that the bytes of a share are free. A second call does nothing."""
        if share in self._shares:
            self._shares.remove(share)

    def worth(self, share: MemoryShare, now: float) -> float:
        """The calls that a load would serve, by rules 3 and 4; infinite if it is pinned."""
        return inf if share.pinned else 1.0 + self._value(share.name, now)

    def loss(self, share: MemoryShare, now: float) -> float:
        """The calls that a loaded model would not serve if it went, by rules 3 and 5."""
        value = self._value(share.name, now)
        return value if now - share.since_s >= self._young_s else YOUNG_FACTOR * value + YOUNG_CALLS

    def evictable_in_s(self, share: MemoryShare, now: float) -> float:
        """Seconds until a share may go for a load that is worth more; infinite while it is pinned or not loaded."""
        if share.pinned or share.state is not ShareState.LOADED:
            return inf
        return max(0.0, share.since_s + self._young_loads * share.load_s - now)

    def _value(self, name: str, now: float) -> float:
        use = self._use(name, now)
        stays_s = max(self._young_s, self._young_loads * use.load_s)
        return use.lately.at(now) * stays_s if now - use.called_s < stays_s else 0.0

    def _order(self, share: MemoryShare, now: float) -> tuple[float, float]:
        size, use = max(1, sum(share.sizes.values())), self._use(share.name, now)
        usual = min(use.usual.at(now), 1.0 / max(now - use.called_s, 1e-9))
        return max(1.0, self.loss(share, now)) / size, usual * share.load_s / size

    def _use(self, name: str, now: float) -> _Use:
        use = self._uses.get(name)
        if use is None:
            use = self._uses[name] = _Use(self._lately_s, self._rate_s, now)
        return use

    def _budget(self, device: str) -> float:
        return self.budgets.get(device, inf)

    def _evictable(self, devices: Iterable[str], now: float, leased: Leased) -> list[MemoryShare]:
        found = [
            each
            for each in self._shares
            if self.evictable_in_s(each, now) <= 0.0
            and any(each.sizes.get(device) for device in devices)
            and not leased(each.name)
        ]
        return sorted(found, key=lambda each: self._order(each, now))

    def _victims(self, lacking: Mapping[str, float], now: float, leased: Leased) -> list[MemoryShare]:
        """The cheapest shares that give the lacking bytes; none if there are too few."""
        chosen: list[MemoryShare] = []
        for each in self._evictable(lacking, now, leased):
            if _covers(chosen, lacking):
                break
            if any(each.sizes.get(device) and _total(chosen, device) < lack for device, lack in lacking.items()):
                chosen.append(each)
        if not _covers(chosen, lacking):
            return []
        for each in reversed(chosen.copy()):  # a large one at the end may do without small ones before it
            rest = [other for other in chosen if other is not each]
            if _covers(rest, lacking):
                chosen = rest
        return chosen

    def _retry_s(self, lacking: Mapping[str, float], now: float) -> float | None:
        """Seconds until enough shares may go for one call, if nothing is called until then; leases count as RETRY_S."""
        waits: list[tuple[float, MemoryShare]] = []
        for each in self._shares:
            if each.pinned or each.state is ShareState.LEAVING:
                continue
            stays_s = max(self._young_s, self._young_loads * each.load_s)
            last_s = max(each.since_s, self._use(each.name, now).called_s)
            left_s = stays_s + (last_s - now if each.state is ShareState.LOADED else 0.0)
            waits.append((max(left_s, RETRY_S), each))
        chosen: list[MemoryShare] = []
        for wait_s, each in sorted(waits, key=lambda wait: wait[0]):
            chosen.append(each)
            if _covers(chosen, lacking):
                return wait_s
        return None


def _total(shares: Iterable[MemoryShare], device: str, *, without: ShareState | None = None) -> int:
    return sum([each.sizes.get(device, 0) for each in shares if each.state is not without])


def _covers(shares: list[MemoryShare], lacking: Mapping[str, float]) -> bool:
    return all(_total(shares, device) >= lack for device, lack in lacking.items())
