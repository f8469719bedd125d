"""Calls that wait while no endpoint is usable: any order of arrivals, departures and displacements."""

from collections import Counter
from itertools import count
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet

from .endpoint_pools import pool

MOST = 6
TIERS = [SimpleNamespace(band=band, name=f"t{band}") for band in range(3)]
ARRIVALS = st.tuples(st.just("park"), st.integers(0, 2), st.sampled_from("ab"))
DEPARTURES = st.tuples(st.just("leave"), st.integers(0, 40), st.just(""))


class Waiter:
    """A call that notes how its wait has ended."""

    def __init__(self, number: int, band: int, tenant: str) -> None:
        self.number = number
        self.tenant: Any = SimpleNamespace(tier=TIERS[band], name=tenant, weight=1.0)
        self.deadline = self.due_s = 1000.0 + number % 5
        self.ends: list[str] = []

    @property
    def band(self) -> int:
        return int(self.tenant.tier.band)

    def unparked(self) -> None:
        self.ends.append("unparked")

    def displaced(self) -> None:
        self.ends.append("displaced")


def makes_room(waiting: list[Waiter], coming: Waiter) -> list[Waiter]:
    """Return those that may make room for a call: the newest of a tenant with most, in the least urgent tier."""
    band = max(each.band for each in (*waiting, coming))
    held = Counter(each.tenant.name for each in (*waiting, coming) if each.band == band)
    most = [name for name, count in held.items() if count == max(held.values())]
    if band == coming.band and coming.tenant.name in most:
        return []
    return [[each for each in waiting if (each.band, each.tenant.name) == (band, name)][-1] for name in most]


@given(st.lists(st.one_of(ARRIVALS, ARRIVALS, DEPARTURES), max_size=60))
def test_each_wait_ends_once_and_the_tenant_with_most_makes_room(turns: list[tuple[str, int, str]]) -> None:
    documents, numbers = pool(1), count()
    these = EndpointSet[HttpEndpoint](lambda address: HttpEndpoint(address, documents), [], max_parked=MOST)
    these.demand = PoolDemand(monotonic(), lambda: None)
    waiting: list[Waiter] = []  # by arrival
    left: list[Waiter] = []
    lost: list[Waiter] = []
    for action, number, tenant in turns:
        if action == "leave":
            if number < len(waiting):
                left.append(waiting.pop(number))
                these.unpark(left[-1])
                these.unpark(left[-1])  # leaving twice changes nothing
        else:
            one = Waiter(next(numbers), number, tenant)
            losers = makes_room(waiting, one) if len(waiting) == MOST else []
            if len(waiting) == MOST and not losers:
                with pytest.raises(Refused) as refused:
                    these.park(one)
                assert refused.value.outcome is Outcome.QUEUE_FULL
                continue
            these.park(one)
            lost += (now := [each for each in waiting if each.ends])
            assert len(now) == (len(waiting) == MOST) and set(now) <= set(losers)
            waiting = [each for each in (*waiting, one) if each not in now]
        assert these.parked == len(waiting) <= MOST
        assert these.demand.record(0, monotonic()).held == len(waiting)
        assert all(each.ends == ["displaced"] for each in lost)
        assert not any(each.ends for each in (*waiting, *left))
    these.assign([("127.0.0.1", 1)])  # a server is there
    assert all(each.ends == ["unparked"] for each in waiting) and not these.parked
    assert not any(each.ends for each in left)
    assert these.demand.record(0, monotonic()).held == 0
