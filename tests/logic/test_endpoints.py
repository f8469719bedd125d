import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted_discovery import ScriptedDiscovery

from oriel_logic.client.endpoints import DOWN_MAX_S, DOWN_S, LACKS_S, MAX_LACKING, PAUSE_S, TRIAL_S, Endpoint, Endpoints
from oriel_logic.client.upstreams import AddressWatch, Upstreams
from oriel_logic.command import address
from oriel_wire.discovery.discovery import Address, DiscoveryFailed
from oriel_wire.discovery.endpoint_slices import EndpointSlices
from oriel_wire.errors import StartFailed

from ..waiting import until
from ..wire.kubernetes_api import endpoint, kubernetes, piece


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


async def tried(endpoints: Endpoints[Nobody], until: float) -> list[Endpoint[Nobody]]:
    """Return the endpoints that a call tries when none of them runs it, and one asks for an hour."""
    attempts = endpoints.attempts("m", until)
    found = []
    async for one in attempts:
        found.append(one)
        attempts.try_again(3600.0 if one is endpoints._endpoints[0] else 0.0)
    return found


async def test_all_are_tried_again_until_the_deadline_once_one_has_answered() -> None:
    clock = Clock()
    endpoints, each = several(2, clock)
    assert sorted(await tried(endpoints, clock.now + 60), key=each.index) == each
    endpoints.have_answered = True
    found = await tried(endpoints, clock.now + 1.5 * PAUSE_S)  # the second pause is longer
    assert set(found[:2]) == set(found[2:]) == set(each) and len(found) == 4
    assert len(await tried(endpoints, clock.now)) == 2
    for one, tries in ((each[0], 3), (each[1], 2)):  # R9: another call asks for the one that waits
        endpoints.mark_lacking(one, "m")
        assert len(await tried(endpoints, clock.now + 1.5 * PAUSE_S)) == tries


async def test_pods_of_which_there_are_none_for_a_moment_are_waited_for() -> None:
    endpoints, _ = several(1, Clock())
    endpoints.have_answered = True
    endpoints.replace([])
    attempts = endpoints.attempts("m", Clock.now + 60)
    first = asyncio.ensure_future(anext(attempts))
    await asyncio.sleep(0)
    endpoints.replace([("new", 80)])
    assert (await first).address == ("new", 80)
    with pytest.raises(StopAsyncIteration):  # it has answered, and lacks the model
        await anext(attempts)
    await endpoints.close()


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


async def test_the_ready_pods_of_a_kubernetes_service_are_followed(tmp_path: Path) -> None:
    told: list[list[Address]] = []
    async with kubernetes(tmp_path) as (api, where):
        api.put(piece("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)))
        slices = EndpointSlices("inference", 8000, api=lambda: where, wait_s=0.001)
        watch = AddressWatch([slices, ScriptedDiscovery([("b", 1)])], lambda found: told.append(list(found)))
        await watch.start()
        assert told[-1] == [("10.0.0.1", 8000), ("b", 1)]
        api.put(piece("a", endpoint("10.0.0.2")))
        await until(lambda: told[-1] == [("10.0.0.2", 8000), ("b", 1)])
        api.delete("a")
        await until(lambda: told[-1] == [("b", 1)])
        await watch.close()
        await until(lambda: not api.watching)


async def test_a_service_that_is_not_there_yet_fails_calls_and_not_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    upstreams = Upstreams([address("kubernetes:inference.models:8000")])
    await upstreams.start()
    await upstreams.close()
    assert "service inference.models are not known: KUBERNETES_SERVICE_HOST is not set" in caplog.text


@pytest.mark.parametrize("text", ["kubernetes::1", "kubernetes:A:1", "kubernetes:a.b.c:1"])
def test_what_is_no_service_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(StartFailed, match=r"pass --inference kubernetes:SERVICE\[\.NAMESPACE\]:PORT$"):
        address(text)
