"""One slow model beside healthy ones in a pool: R48, in virtual time."""

import pytest

from .model_shares import House


def slow_for_a_minute(at_s: float) -> float:
    return 2.0 if 5.0 <= at_s < 65.0 else 0.01


@pytest.mark.parametrize("permits", [4, 8, 32])
@pytest.mark.parametrize("per_s", [10.0, 100.0])
@pytest.mark.parametrize("tenant", ["silver", "golden"])
def test_a_model_that_becomes_slow_costs_the_others_no_call(permits: int, per_s: float, tenant: str) -> None:
    """The slow model is offered ten times what the pool can answer."""
    house = House({"quick": lambda _: 0.01, "slow": slow_for_a_minute}, permits=permits)
    house.offer("quick", "golden", per_s, 0.0, 70.0, seed=1)
    house.offer("slow", "golden2" if tenant == "golden" else tenant, 40.0, 0.0, 70.0, seed=2)
    house.clock.run()
    assert house.good("quick", "golden") >= 0.99
    assert house.gate.admission.inflight == 0 and not len(house.gate.admission.queue)


@pytest.mark.parametrize(("permits", "per_s", "seed"), [(4, 100.0, 1), (4, 10.0, 5), (32, 40.0, 1)])
def test_a_pool_that_learns_its_permits_keeps_some_for_the_quick_model(permits: int, per_s: float, seed: int) -> None:
    house = House({"quick": lambda _: 0.01, "slow": slow_for_a_minute}, permits=permits, learns=True)
    house.offer("quick", "golden", per_s, 0.0, 70.0, seed=seed)
    house.offer("slow", "silver", 40.0, 0.0, 70.0, seed=seed + 1)
    house.clock.run()
    assert house.good("quick", "golden") >= 0.99


@pytest.mark.parametrize("learns", [True, False])
def test_a_tenant_with_slow_calls_of_a_service_leaves_permits_to_others(learns: bool) -> None:
    """All calls of a service counted alike: those of the slow tenant held every permit, and gold's came late."""
    house = House({"s golden": lambda _: 0.01, "s silver": slow_for_a_minute}, permits=8, learns=learns)
    house.offer("s", "golden", 10.0, 0.0, 70.0, seed=1)
    house.offer("s", "silver", 20.0, 0.0, 70.0, seed=2)
    house.clock.run()
    assert house.good("s", "golden") >= 0.99
    assert house.gate.admission.inflight == 0 and not len(house.gate.admission.queue)


def test_a_slow_model_alone_has_all_permits() -> None:
    house = House({"quick": lambda _: 0.01, "slow": lambda _: 2.0})
    house.offer("slow", "silver", 40.0, 0.0, 20.0)
    house.clock.run()
    assert house.most["slow"] == 8
    house.offer("quick", "golden", 40.0, house.clock.now() - house.began_s, house.clock.now() - house.began_s + 1.0)
    house.offer("slow", "silver", 40.0, house.clock.now() - house.began_s + 12.0, house.clock.now() + 20.0)
    house.most.clear()
    house.clock.run()
    assert house.most["slow"] == 8, "nobody else has used the pool lately"


def test_models_that_take_as_long_as_one_another_share_nothing_out() -> None:
    house = House({"one": lambda _: 0.2, "other": lambda _: 0.2})
    house.offer("other", "silver", 1.0, 0.0, 10.0)
    house.offer("one", "silver", 100.0, 0.0, 10.0)
    house.clock.run()
    assert house.most["one"] == 8


def test_calls_that_are_held_keep_the_order_of_the_queue() -> None:
    """Those of a more urgent tier come first, and they take places of `max_queue` like all others."""
    house = House({"quick": lambda _: 0.01, "slow": lambda _: 3.0})
    queue = house.gate.admission.queue
    house.call("quick", "golden")
    house.clock.run()
    house.call("slow", "silver")
    house.clock.run()
    for tenant in ("silver", "golden2"):
        for _ in range(9):
            house.call("slow", tenant)
    assert queue.items == 0 and queue.depths() == [(0, 9, 9), (1, 2, 2)] and house.running["slow"] == 7
    assert queue.slots.held == len(queue) == 11 and len(queue.waiting(0)) == 9
    queue.bring_back("slow")
    assert queue.items == 1 and queue.depths() == [(0, 9, 9), (1, 2, 2)] and queue.pop().band == 0  # type: ignore[union-attr]
