import asyncio
from collections.abc import Sequence

import pytest

from oriel_logic.client.endpoints import DOWN_MAX_S, DOWN_S, LACKS_S, MAX_LACKING, TRIAL_S, Endpoint, Endpoints
from oriel_logic.client.upstreams import AddressWatch
from oriel_wire.engine.discovery import Address, DiscoveryFailed, DnsDiscovery, ScriptedDiscovery, discovery_of


class Nobody:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def several(count: int, clock: Clock) -> tuple[Endpoints[Nobody], list[Endpoint[Nobody]]]:
    endpoints = Endpoints(Nobody, clock=clock)
    endpoints.replace((f"e{index}", 80) for index in range(count))
    return endpoints, endpoints._endpoints


def test_equals_take_turns() -> None:
    endpoints, each = several(3, Clock())
    picked = [endpoints.pick() for _ in range(6)]
    assert all(picked.count(one) == 2 for one in each)


def test_the_least_loaded_is_picked() -> None:
    endpoints, each = several(3, Clock())
    each[0].outstanding = each[2].outstanding = 1
    assert [endpoints.pick() for _ in range(3)] == [each[1]] * 3


def test_one_that_was_down_is_passed_over_for_a_while() -> None:
    clock = Clock()
    endpoints, each = several(2, clock)
    endpoints.mark_down(each[0])
    assert {endpoints.pick() for _ in range(4)} == {each[1]}
    assert endpoints.pick([each[1]]) is each[0]
    endpoints.mark_up(each[0])
    assert {endpoints.pick() for _ in range(4)} == set(each)


def test_one_call_tries_it_again_and_the_others_wait_for_what_comes_of_it() -> None:
    clock = Clock()
    endpoints, each = several(2, clock)
    endpoints.mark_down(each[0])
    clock.now += DOWN_S
    assert [endpoints.pick() for _ in range(6)].count(each[0]) == 1
    clock.now += TRIAL_S  # nothing came of it
    assert [endpoints.pick() for _ in range(6)].count(each[0]) == 1


def test_it_is_tried_less_and_less_often() -> None:
    clock = Clock()
    endpoints, each = several(2, clock)
    waits = []
    for _ in range(40):
        for _ in range(8):  # calls that find out together
            endpoints.mark_down(each[0])
        waits.append(each[0].down_until - clock.now)
        clock.now = each[0].down_until
        assert [endpoints.pick() for _ in range(3)].count(each[0]) == 1
    assert waits[:3] == [DOWN_S, 2 * DOWN_S, 4 * DOWN_S] and waits[-1] == DOWN_MAX_S


def test_one_that_has_not_the_model_is_passed_over_for_a_second() -> None:
    clock = Clock()
    endpoints, each = several(2, clock)
    endpoints.mark_lacking(each[0], "m")
    assert {endpoints.pick(model="m") for _ in range(4)} == {each[1]}
    assert {endpoints.pick(model="other") for _ in range(4)} == set(each)
    assert endpoints.pick([each[1]], "m") is each[0]
    clock.now += LACKS_S
    assert {endpoints.pick(model="m") for _ in range(4)} == set(each)
    for index in range(3 * MAX_LACKING):
        endpoints.mark_lacking(each[0], str(index))
    assert len(each[0].lacks) <= MAX_LACKING


def test_none_is_left_when_all_were_tried() -> None:
    endpoints, each = several(2, Clock())
    assert endpoints.pick(each) is None
    alone, (one,) = several(1, Clock())
    assert alone.pick() is one and alone.pick([one]) is None
    assert several(0, Clock())[0].pick() is None


async def test_servers_that_leave_end_their_calls_first() -> None:
    endpoints, each = several(2, Clock())
    stays, leaves = each
    leaves.outstanding = stays.outstanding = 1
    endpoints.replace([("e0", 80), ("e9", 80)])
    assert len(endpoints) == 2 and endpoints.pick() is not stays and not leaves.client.closed.is_set()
    leaves.outstanding = 0
    endpoints.replace([("e0", 80)])
    await leaves.client.closed.wait()
    assert endpoints.pick() is stays and not stays.client.closed.is_set()
    await endpoints.close()
    assert stays.client.closed.is_set()


async def test_lookups_go_on_and_a_failing_one_takes_nothing_away() -> None:
    first, second = ScriptedDiscovery([("a", 1)]), ScriptedDiscovery([("b", 1), ("a", 1)])
    told: list[list[Address]] = []
    news = asyncio.Event()

    def found(addresses: Sequence[Address]) -> None:
        told.append(list(addresses))
        news.set()

    watch = AddressWatch([first, second], found)
    await watch.start()
    assert told[-1] == [("a", 1), ("b", 1)]
    news.clear()
    second.error = DiscoveryFailed("no name server")
    first.addresses = (("c", 1),)
    await asyncio.wait_for(news.wait(), 120)
    assert told[-1] == [("c", 1), ("a", 1), ("b", 1)]
    looked = second.lookups
    while second.lookups < looked + 2:
        await asyncio.sleep(0)
    assert told[-1] == [("c", 1), ("a", 1), ("b", 1)]
    await watch.close()


@pytest.mark.parametrize(
    ("host", "looked_up"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("pods.svc", True)]
)
def test_only_names_are_looked_up(host: str, looked_up: bool) -> None:
    assert isinstance(discovery_of((host, 80)), DnsDiscovery) is looked_up
