"""Bounded concurrency and the deadline wheel."""

from math import nextafter

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.admission import Admission, Charges
from oriel_policies.waiting.deadlines import DeadlineWheel
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue


def admission(limit: int) -> Admission:
    return Admission(limit=limit, queue=SlaQueue(max_items=10, max_bytes=10**6))


def test_nobody_overtakes_a_waiting_ticket() -> None:
    gate = admission(1)
    assert gate.acquire() and not gate.acquire()
    waiting = Ticket(band=2, tenant="a", deadline=9.0)
    gate.queue.push(waiting)
    assert gate.next_admitted() is None
    gate.release(0.1)
    assert not gate.acquire()
    assert gate.next_admitted() is waiting and gate.inflight == 1


@given(st.lists(st.sampled_from(["enter", "wait", "next", "leave"]), max_size=200), st.integers(1, 4))
def test_permits_are_conserved(steps: list[str], limit: int) -> None:
    gate, held = admission(limit), 0
    for step in steps:
        if step == "enter":
            held += gate.acquire()
        elif step == "wait":
            gate.queue.push(Ticket(band=0, tenant="a", deadline=1.0))
        elif step == "next":
            held += gate.next_admitted() is not None
        elif held:
            gate.release(0.01)
            held -= 1
        assert gate.inflight == held <= limit


def test_retry_after_is_one_to_sixty_seconds() -> None:
    gate = admission(1)
    assert gate.retry_after_s() == 1
    for _ in range(400):
        gate.release(1000.0)
    assert gate.retry_after_s() == 60


def test_charges_follow_what_calls_cost_and_stay_bounded() -> None:
    charges = Charges(max_keys=10)
    assert charges.estimate("r", "t") == charges.default_s
    for _ in range(100):
        charges.learn("r", "t", 2.0)
    assert abs(charges.estimate("r", "t") - 2.0) < 1e-6
    for n in range(100):
        charges.learn("r", str(n), 1.0)
    assert len(charges._known) == 10


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.booleans()), max_size=60), st.lists(st.floats(0.0, 0.7), max_size=40)
)
def test_nothing_expires_early_and_nothing_is_forgotten(items: list[tuple[float, bool]], steps: list[float]) -> None:
    wheel: DeadlineWheel[int] = DeadlineWheel(0.005)
    start = 50.0
    watched = {}
    for number, (after, discard) in enumerate(items):
        slot = wheel.add(number, start + after, start)
        if discard:
            wheel.discard(number, slot)
        else:
            watched[number] = start + after
    assert len(wheel) == len(watched)
    now = start
    for step in [*steps, 20.0]:
        now += step
        for number in wheel.due(now):
            assert watched.pop(number) <= now
        assert not [d for d in watched.values() if d < now - 0.011]
        assert len(wheel) == len(watched)
    assert not watched


@given(st.integers(0, 10**6), st.floats(0.0, 20.0), st.sampled_from([0.005, 0.001, 0.25]))
def test_an_item_is_kept_until_the_moment_of_its_deadline_and_no_tick_longer_than_one(
    ticks: int, after_s: float, resolution_s: float
) -> None:
    """Looked at right before its deadline, at it, and a tick later; the times between are as good as these."""
    start = 50.0 + ticks * resolution_s
    deadline = start + after_s
    wheel: DeadlineWheel[str] = DeadlineWheel(resolution_s)
    wheel.add("call", deadline, start)
    if (before := nextafter(deadline, 0.0)) >= start:
        assert wheel.due(before) == []
    assert wheel.due(deadline) + wheel.due(deadline + resolution_s * 1.001) == ["call"]


@given(st.integers(1, 10**6), st.integers(0, 1000))
def test_a_deadline_on_a_tick_is_not_over_one_tick_early(start: int, after: int) -> None:
    """Ticks of a quarter of a second, which floats hold exactly."""
    wheel: DeadlineWheel[str] = DeadlineWheel(0.25)
    wheel.add("call", (start + after) / 4, start / 4)
    assert not any(wheel.due((start + tick) / 4) for tick in range(after + 1))
    assert wheel.due((start + after + 1) / 4) == ["call"]
