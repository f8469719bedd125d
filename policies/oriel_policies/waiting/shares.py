"""Shares one budget of places or bytes among tenants, while more is wanted than there is. Pure.

A *holding* is what one call holds of the budget. It grows as its bytes arrive, and nothing is held by announcement. As
long as there is room, everybody gets what they ask for. When there is none, the one who asks gets it nevertheless if
enough others can be displaced, in this order:

1. Holdings of less urgent bands than the asking one, those of the least urgent band first. A band keeps its floor,
   `floor_share` of the budget, and loses only while it holds more than that which can be displaced.
2. Holdings of more urgent bands, while its own band holds no more than its floor; again the least urgent first, and
   each keeps its own floor.
3. Holdings of its own band.

Inside a band the tenant with the most units per weight loses first, and of its holdings the newest. The asking tenant
counts with what it asks for: when it is the one that has most, it loses its own newest holding, and if that is the one
that asks, or the one that asks is protected, it is refused and nothing changes. So a tenant below its share, which is
its part of the budget by weight among those of its band who hold something, is never refused while somebody of its
band or below it can be displaced.

Ownership: single writer. Each holding leaves exactly once, by `release` or by being displaced. All operations are
O(log n) amortised: an account's entry in the ranking is never lower than its level, and is corrected when it surfaces.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final

_NOBODY: Final[Sequence["Holding"]] = ()
_IDLE: Final = 1024
FLOOR_SHARE: Final = 0.05


class Holding:
    """The units that one call holds. band: 0 is the most urgent. weight: the tenant's share inside its band.

    payload: the caller's own object, never read here.
    """

    __slots__ = ("_account", "band", "payload", "tenant", "units", "weight")

    def __init__(self, band: int, tenant: str, weight: float, payload: Any = None) -> None:
        self.band = band
        self.tenant = tenant
        self.weight = weight
        self.payload = payload
        self.units = 0
        self._account: _Account | None = None

    @property
    def held(self) -> bool:
        """Return whether this holding has a part of its pool's budget, and was not displaced from it."""
        return self._account is not None


class _Account:
    """One tenant in one band. newest: its holdings that can be displaced, by arrival.

    ranked: the level of its entry in the band's ranking, whose number is `entry`; 0 without one.
    weight: the weight of the latest call that was given something. before: the weight until then.
    """

    __slots__ = ("band", "before", "entry", "newest", "ranked", "units", "weight")

    def __init__(self, band: "_Band") -> None:
        self.band = band
        self.newest: dict[Holding, None] = {}
        self.units = 0
        self.weight = self.before = 1.0
        self.ranked = 0.0
        self.entry = 0

    @property
    def level(self) -> float:
        """Return the units that the tenant holds, divided by its weight."""
        return self.units / self.weight


class _Band:
    """The tenants of one band. loose: units of the holdings that can be displaced.

    room: accounts that are kept before those that hold nothing are forgotten.
    """

    def __init__(self) -> None:
        self.accounts: dict[str, _Account] = {}
        self.room = _IDLE
        self.loose = 0
        self.ranking: list[tuple[float, int, _Account]] = []
        self.entered = 0

    def rank(self, account: _Account, level: float) -> None:
        """Enter an account whose level has grown; twice as high, so that one entry covers what comes next."""
        account.ranked = 2.0 * level
        self.entered += 1
        account.entry = self.entered
        heappush(self.ranking, (-account.ranked, self.entered, account))
        if len(self.ranking) > 64 and len(self.ranking) > 4 * len(self.accounts):
            self.ranking = [each for each in self.ranking if each[2].entry == each[1]]
            heapify(self.ranking)

    def newest(self) -> Holding | None:
        """The holding that goes first."""
        ranking = self.ranking
        while ranking:
            key, number, account = ranking[0]
            if account.entry != number:
                heappop(ranking)
            elif not account.newest:
                heappop(ranking)
                account.ranked, account.entry = 0.0, 0
            elif (level := account.level) < -key:
                account.ranked = level
                heapreplace(ranking, (-level, number, account))
            else:
                holding, _ = account.newest.popitem()
                account.newest[holding] = None
                return holding
        return None

    def forget_idle(self) -> None:
        """Drop the accounts that hold nothing, and their entries in the ranking."""
        for each in self.accounts.values():
            if not each.units and not each.newest:
                each.ranked, each.entry = 0.0, 0
        self.ranking = [each for each in self.ranking if each[2].entry == each[1]]
        heapify(self.ranking)
        self.accounts = {tenant: each for tenant, each in self.accounts.items() if each.units or each.newest}
        self.room = max(_IDLE, 2 * len(self.accounts))


class Shares:
    """A budget of `bound` units. held: the sum of all holdings.

    spared: the units that only the band `first`, and more urgent ones, may use, and each band up to its floor.
    floor_share: part of `bound` that each band keeps from the others, rounded down to whole units; less where many
    bands would keep more than half of the budget together.
    """

    def __init__(self, bound: int, *, spared: int = 0, first: int = 0, floor_share: float = FLOOR_SHARE) -> None:
        self.bound = bound
        self.floor_share = floor_share
        self.spared = spared
        self.first = first
        self.held = 0
        self._bands: dict[int, _Band] = {}

    def acquire(self, holding: Holding, units: int) -> Sequence[Holding] | None:
        """Add `units` to a holding. Returns the holdings displaced for it, which hold nothing any more: tell them.

        None: it is refused, and nothing has changed.
        """
        if units <= 0:
            return _NOBODY
        most = self.bound if holding.band <= self.first else self.bound - self.spared
        if self.held + units <= most:
            self._add(holding, units)
            return _NOBODY
        return self._displace(holding, units, most)

    def fits(self, holding: Holding, units: int) -> bool:
        """Return whether `acquire` would give a new holding that many, which it does not keep."""
        displaced = self.acquire(holding, units)
        if displaced is None:
            return False
        self._undo(holding, -1, displaced)
        return True

    def fix(self, holding: Holding) -> None:
        """Protect a holding: it cannot be displaced any more."""
        account = holding._account
        if account is not None and holding in account.newest:
            del account.newest[holding]
            account.band.loose -= holding.units

    def release(self, holding: Holding, units: int = -1) -> None:
        """Take `units` from a holding, or all by default. A holding that was displaced has nothing to give back."""
        account = holding._account
        if account is None:
            return
        count = units
        if 0 <= units < holding.units:
            holding.units -= units
            loose = holding in account.newest
        else:
            count, holding._account = holding.units, None
            loose = account.newest.pop(holding, _NOBODY) is None
        if loose:
            account.band.loose -= count
        account.units -= count
        self.held -= count

    def _add(self, holding: Holding, units: int, *, again: bool = False) -> None:
        """again: it gives back what was displaced, and its weight may have changed since."""
        account = holding._account
        if account is None:
            band = self._bands.get(holding.band)
            if band is None:
                band = self._bands[holding.band] = _Band()
            account = band.accounts.get(holding.tenant)
            if account is None:
                if len(band.accounts) >= band.room:
                    band.forget_idle()
                account = band.accounts[holding.tenant] = _Account(band)
            account.before, account.weight = account.weight, account.weight if again else holding.weight
            account.newest[holding] = None
            holding._account = account
            holding.units = units
            band.loose += units
        else:
            account.before = account.weight
            holding.units += units
            if holding in account.newest:
                account.band.loose += units
        account.units += units
        self.held += units
        if (level := account.units / account.weight) > account.ranked:
            account.band.rank(account, level)

    def _displace(self, holding: Holding, units: int, most: int) -> Sequence[Holding] | None:
        bands, number = self._bands, holding.band
        own_band = bands.get(number) or bands.setdefault(number, _Band())
        floor = int(self.bound * min(self.floor_share, 0.5 / len(bands)))
        last = number + 1  # the most urgent of the other bands that may have to give
        if own_band.loose + units <= floor and (holding._account is None or holding in holding._account.newest):
            most, last = self.bound, 0
        others = [bands[each] for each in sorted(bands, reverse=True) if each >= last and each != number]
        givers = [(each, floor) for each in others if each.loose > floor] + [(own_band, 0)]
        if sum([band.loose for band, _ in givers]) < self.held + units - most:
            return None
        displaced: list[Holding] = []
        self._add(holding, units)
        own = own_band.accounts[holding.tenant]
        for band, kept in givers:
            while self.held > most and band.loose > kept and (loser := band.newest()) is not None:
                account = loser._account
                assert account is not None
                if account is own:
                    if loser is holding or holding not in own.newest:
                        break
                # one that has just as much keeps it, or two tenants would displace each other for ever
                elif band is own.band and account.level <= own.level:
                    break
                self.release(loser)
                displaced.append(loser)
        if self.held <= most:
            return displaced
        self._undo(holding, units, displaced)
        return None

    def _undo(self, holding: Holding, units: int, displaced: Sequence[Holding]) -> None:
        """Take back what was just given; the displaced get what they had, each in its old place by arrival."""
        account = self._bands[holding.band].accounts[holding.tenant]
        self.release(holding, units)
        account.weight = account.before
        if account.level > account.ranked:
            account.band.rank(account, account.level)
        for each in reversed(displaced):
            self._add(each, each.units, again=True)
