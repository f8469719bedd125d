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
from oriel_gateway.pools.endpoint_state import HttpEndpoint, Reach
from oriel_gateway.pools.endpoints import UNPARKED_AT_ONCE, EndpointSet

from ..waiting import until
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


async def test_the_most_urgent_calls_go_on_first_and_the_loop_can_send_them_before_the_others() -> None:
    documents = pool(1)
    these = EndpointSet[HttpEndpoint](lambda address: HttpEndpoint(address, documents), [], max_parked=1000)
    waiters = [Waiter(number, number % 2, 1) for number in range(4 * UNPARKED_AT_ONCE)]
    for each in waiters:
        these.park(each)
    these.assign([("127.0.0.1", 1)])
    first = [each for each in waiters if each.ends]
    assert len(first) == UNPARKED_AT_ONCE and all(each.band == 0 for each in first)
    gone = next(each for each in waiters if not each.ends)
    these.unpark(gone)  # its client leaves between two turns of the loop
    await until(lambda: these.parked == 0)
    assert [each for each in waiters if each.ends != ["unparked"]] == [gone]


async def test_calls_that_have_not_gone_on_yet_wait_again_when_the_last_endpoint_fails() -> None:
    documents = pool(1)
    these = EndpointSet[HttpEndpoint](lambda address: HttpEndpoint(address, documents), [], max_parked=1000)
    waiters = [Waiter(number, 0, 1) for number in range(2 * UNPARKED_AT_ONCE)]
    for each in waiters:
        these.park(each)
    these.assign([("127.0.0.1", 1)])
    these.note_reach(these.members[0], Reach.UNREACHABLE)
    assert these.parked == UNPARKED_AT_ONCE
    these.note_reach(these.members[0], Reach.READY)
    await until(lambda: these.parked == 0)
    assert all(each.ends == ["unparked"] for each in waiters)
