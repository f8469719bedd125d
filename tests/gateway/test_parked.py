"""Calls that wait while no endpoint is usable: any order of arrivals, departures and displacements."""

from collections.abc import Iterator
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
ARRIVALS = st.tuples(st.just("park"), st.integers(0, 2), st.integers(0, 9))
DEPARTURES = st.tuples(st.just("leave"), st.integers(0, 40), st.just(0))
DISPLACEMENTS = st.tuples(st.just("displace"), st.integers(0, 3), st.just(0))


class Waiter:
    """A call that notes how its wait has ended."""

    def __init__(self, number: int, band: int, size_bytes: int) -> None:
        self.number = number
        self.tenant: Any = SimpleNamespace(tier=TIERS[band])
        self.deadline = self.due_s = 1000.0 + number % 5
        self.size_bytes = size_bytes
        self.ends: list[str] = []

    @property
    def band(self) -> int:
        return int(self.tenant.tier.band)

    def unparked(self) -> None:
        self.ends.append("unparked")

    def displaced(self) -> None:
        self.ends.append("displaced")


def newest_of_the_least_urgent(waiting: list[Waiter], band: int) -> Iterator[Waiter]:
    """Yield the one that a call of `band` displaces, if there is one."""
    lower = [each for each in waiting if each.band > band]
    if lower:
        yield max(lower, key=lambda each: (each.band, each.number))


@given(st.lists(st.one_of(ARRIVALS, ARRIVALS, DEPARTURES, DISPLACEMENTS), max_size=60))
def test_each_wait_ends_once_and_the_newest_of_the_least_urgent_make_room(turns: list[tuple[str, int, int]]) -> None:
    documents, numbers = pool(1), count()
    these = EndpointSet[HttpEndpoint](lambda address: HttpEndpoint(address, documents), [], max_parked=MOST)
    these.demand = PoolDemand(monotonic(), lambda: None)
    waiting: list[Waiter] = []  # by arrival
    left: list[Waiter] = []
    lost: list[Waiter] = []
    for action, number, size in turns:
        if action == "leave":
            if number < len(waiting):
                left.append(waiting.pop(number))
                these.unpark(left[-1])
                these.unpark(left[-1])  # leaving twice changes nothing
        elif action == "displace":
            loser = list(newest_of_the_least_urgent(waiting, number - 1))
            assert these.displace(number - 1) is bool(loser)
            lost += loser
            waiting = [each for each in waiting if each not in loser]
        else:
            one = Waiter(next(numbers), number, size)
            loser = list(newest_of_the_least_urgent(waiting, number)) if len(waiting) == MOST else []
            if len(waiting) == MOST and not loser:
                with pytest.raises(Refused) as refused:
                    these.park(one)
                assert refused.value.outcome is Outcome.QUEUE_FULL
                continue
            these.park(one)
            lost += loser
            waiting = [each for each in (*waiting, one) if each not in loser]
        assert these.parked == len(waiting) <= MOST
        for band in range(-1, 3):
            assert these.displaceable_bytes(band) == sum(each.size_bytes for each in waiting if each.band > band)
        assert these.demand.record(0, monotonic()).held == len(waiting)
        assert all(each.ends == ["displaced"] for each in lost)
        assert not any(each.ends for each in (*waiting, *left))
    these.assign([("127.0.0.1", 1)])  # a server is there
    assert all(each.ends == ["unparked"] for each in waiting) and not these.parked
    assert not any(each.ends for each in left)
    assert these.demand.record(0, monotonic()).held == 0
