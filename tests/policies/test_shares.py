"""Shared budgets: the bound, who is displaced, and that a tenant below its share is never refused."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.shares import Holding, Shares

WEIGHTS = {"a": 1.0, "b": 1.37, "c": 2.11, "d": 0.5}


@dataclass
class Model:
    """The rule of `Shares`, by looking at everything each time. holdings: (units, loose), by arrival.

    weights: of each band's tenants, as of the latest call that was given something.
    """

    bound: int
    spared: int
    floor_share: float
    holdings: dict[Holding, tuple[int, bool]] = field(default_factory=dict)
    weights: dict[tuple[int, str], float] = field(default_factory=dict)

    def held(self) -> int:
        return sum(units for units, _ in self.holdings.values())

    def most(self, band: int, within_floor: bool = False) -> int:
        return self.bound if band == 0 or within_floor else self.bound - self.spared

    def floor(self, bands: int) -> int:
        return int(self.bound * min(self.floor_share, 0.5 / bands))

    def loose(self, band: int) -> int:
        return sum(units for each, (units, loose) in self.holdings.items() if loose and each.band == band)

    def level(self, of: Holding) -> float:
        units = [u for each, (u, _) in self.holdings.items() if (each.band, each.tenant) == (of.band, of.tenant)]
        return sum(units) / self.weights.get((of.band, of.tenant), of.weight)

    def give(self, asking: Holding, units: int) -> None:
        """Add to a holding, nobody displaced. A new one brings its tenant's weight of now."""
        if asking not in self.holdings:
            self.weights[asking.band, asking.tenant] = asking.weight
        held, loose = self.holdings.get(asking, (0, True))
        self.holdings[asking] = (held + units, loose)

    def outcomes(self, asking: Holding, units: int, floor: int) -> set[tuple[Holding, ...] | None]:
        """Return what may happen: who is displaced, or None. Several only where tenants hold equally much."""
        after = Model(self.bound, self.spared, self.floor_share, dict(self.holdings), dict(self.weights))
        _, loose = after.holdings.get(asking, (0, True))
        if self.held() + units <= self.most(asking.band):
            return {()}
        after.give(asking, units)
        return after.displaced(asking, floor, loose and after.loose(asking.band) <= floor)

    def displaced(self, asking: Holding, floor: int, within_floor: bool) -> set[tuple[Holding, ...] | None]:
        if self.held() <= self.most(asking.band, within_floor):
            return {()}
        others = [band for band in range(3) if band > asking.band or (within_floor and band != asking.band)]
        last = max((band for band in others if self.loose(band) > floor), default=asking.band)
        these = [each for each, (_, loose) in self.holdings.items() if loose and each.band == last]
        highest = max((self.level(each) for each in these), default=0.0)
        found: set[tuple[Holding, ...] | None] = set()
        for tenant in {each.tenant for each in these if self.level(each) == highest}:
            loser = [each for each in these if each.tenant == tenant][-1]
            same = last == asking.band and tenant != asking.tenant
            own = (last, tenant) == (asking.band, asking.tenant)
            if loser is asking or (own and not self.holdings[asking][1]) or (same and highest <= self.level(asking)):
                found.add(None)
                continue
            rest = {each: held for each, held in self.holdings.items() if each is not loser}
            further = Model(self.bound, self.spared, self.floor_share, rest, self.weights)
            given = further.displaced(asking, floor, within_floor)
            found |= {None if each is None else (loser, *each) for each in given}
        return found or {None}

    def share(self, of: Holding, floor: int) -> float:
        """Return what the tenant may hold at least, among those of its band that hold something or ask."""
        tenants = {each.tenant for each in self.holdings if each.band == of.band} | {of.tenant}
        urgent = sum(units for each, (units, _) in self.holdings.items() if each.band < of.band)
        kept = sum(min(floor, self.loose(band)) for band in range(of.band + 1, 3))
        weights = {tenant: self.weights.get((of.band, tenant), of.weight) for tenant in tenants}
        if of not in self.holdings:
            weights[of.tenant] = of.weight
        return (self.most(of.band) - urgent - kept) * weights[of.tenant] / sum(weights.values())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "new", "grow", "shrink", "leave", "fix", "fits"]),
        st.integers(0, 2),
        st.sampled_from(sorted(WEIGHTS)),
        st.sampled_from([1.0, 0.2, 3.3]),  # by which a tenant's weight has changed
        st.integers(1, 12),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(4, 40), st.integers(0, 3), st.sampled_from([0.0, 0.05, 0.15, 0.9]), STEPS)
def test_shares_agree_with_a_model_that_looks_at_everything(bound: int, spared: int, floor_share: float, steps) -> None:
    shares = Shares(bound, spared=spared, floor_share=floor_share)
    model, ends = Model(bound, spared, floor_share), Counter[Holding]()
    everybody: list[Holding] = []
    bands = set[int]()  # that have ever asked
    for action, band, tenant, changed, units, pick in steps:
        present = list(model.holdings)
        if action in ("new", "fits") or not present:
            holding = Holding(band, tenant, WEIGHTS[tenant] * changed)
        else:
            holding = present[pick % len(present)]
        held, loose = model.holdings.get(holding, (0, True))
        if action not in ("leave", "fix") and not (action == "shrink" and held):  # with nothing held, it asks
            bands.add(holding.band)
        floor = model.floor(len(bands)) if bands else 0
        if action == "leave":
            shares.release(holding)
            ends[holding] += model.holdings.pop(holding, None) is not None
        elif action == "shrink" and held:
            count = min(units, held)
            shares.release(holding, count)
            model.holdings[holding] = (held - count, loose)
            if held == count:
                del model.holdings[holding]
                ends[holding] += 1
        elif action == "fix":
            shares.fix(holding)
            if held:
                model.holdings[holding] = (held, False)
        elif action == "fits":
            expected = {each is not None for each in model.outcomes(holding, units, floor)}
            assert shares.fits(holding, units) in expected
        else:
            expected = model.outcomes(holding, units, floor)
            all_loose = all(loose for _, loose in model.holdings.values())
            of_tenant = [
                u
                for each, (u, _) in model.holdings.items()
                if (each.band, each.tenant) == (holding.band, holding.tenant)
            ]
            below = (sum(of_tenant) + units) < model.share(holding, floor) - 1e-9
            within_floor = loose and model.loose(holding.band) + units <= floor
            displaced = shares.acquire(holding, units)
            assert (None if displaced is None else tuple(displaced)) in expected
            assert displaced is not None or not (all_loose and ((below and not spared) or within_floor))
            if displaced is not None:
                everybody.append(holding)
                for each in displaced:
                    ends[each] += 1
                    del model.holdings[each]
                model.give(holding, units)
        assert shares.held == model.held() <= bound
        assert all(each.held for each in model.holdings)
    assert all(ends[each] + (each in model.holdings) == 1 for each in everybody)


def test_many_bands_keep_half_of_the_budget_together_at_most() -> None:
    shares = Shares(1000)
    for band in range(1, 101):
        for _ in range(10):
            assert shares.acquire(Holding(band, "t", 1.0), 1) == ()
    taken = [shares.acquire(Holding(0, "gold", 1.0), 1) is not None for _ in range(700)]
    assert taken.index(False) == 600, "each of the others keeps four"


def test_a_refused_call_leaves_the_weight_of_its_tenant_as_it_was() -> None:
    shares = Shares(4)
    for tenant in "aabb":
        shares.acquire(Holding(1, tenant, 1.0), 1)
    lighter, other = Holding(1, "a", 0.5), Holding(1, "b", 1.0)
    assert shares.acquire(lighter, 1) is None and not shares.fits(other, 1)
    assert shares.fits(Holding(1, "a", 9.0), 1) and shares.acquire(other, 1) is None, "both hold their share"


def test_the_work_per_newcomer_does_not_grow_with_the_tenants_that_hold() -> None:
    """Counted in new entries of the ranking, which stays bounded by the tenants."""
    entries = []
    for count in (100, 1000):
        shares = Shares(2 * count)
        for index in range(2 * count):
            shares.acquire(Holding(1, f"t{index % count}" if index % 2 else "hog", 1.0), 1)
        band = shares._bands[1]
        before = band.entered
        for index in range(50):
            assert shares.acquire(Holding(1, f"new{index}", 1.0), 1)
        entries.append((band.entered - before, len(band.ranking) <= 64 + 4 * len(band.accounts)))
    assert entries[0] == entries[1] == (50, True)


def test_a_tenant_that_held_nothing_for_a_while_is_found_again_by_the_little_it_holds() -> None:
    """While it held nothing, another search passed it over."""
    shares = Shares(2)
    a, c, urgent = Holding(1, "a", 2.0), Holding(1, "c", 4.0), Holding(0, "b", 1.0)
    assert shares.acquire(a, 1) == () and shares.acquire(c, 1) == ()
    shares.release(a)
    assert shares.acquire(urgent, 2) == [c]
    shares.release(urgent)
    again, later = Holding(1, "a", 2.0), Holding(0, "b", 1.0)
    assert shares.acquire(again, 1) == () and shares.acquire(later, 2) == [again]
