"""Properties of what a batcher keeps, against a plain model of the calls that wait."""

from dataclasses import dataclass, field
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.batch import Backlog, BatchBounds, Run, ServiceCurve, WaitUntil, decide
from oriel_policies.waiting.batch_queue import BatchQueue
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue


@dataclass(eq=False)
class Waiting:
    rows: int
    arrived_s: float
    ticket: Ticket = field(init=False)
    waits: bool = True


def batch_queue(max_rows: int = 8, delay_s: float = 0.5) -> BatchQueue[Waiting]:
    queue = SlaQueue(max_items=1000, max_bytes=1 << 20)
    return BatchQueue(queue, BatchBounds(max_rows=max_rows, max_delay_s=delay_s), ServiceCurve())


def arrive(queue: BatchQueue[Waiting], now: float, rows: int, left_s: float) -> Waiting:
    member = Waiting(rows, now)
    member.ticket = Ticket(band=0, tenant="t", deadline=now + left_s, rows=rows, size_bytes=1)
    member.ticket.payload = member
    queue.queue.push(member.ticket)
    queue.rows += rows
    queue.arrived(member)
    return member


def leave(queue: BatchQueue[Waiting], member: Waiting) -> None:
    assert queue.queue.remove(member.ticket)
    member.waits = False
    queue.rows -= member.rows


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 9), st.floats(0.1, 100.0), st.integers(0, 1000)), min_size=1, max_size=60
)


@given(STEPS, st.integers(1, 12), st.sampled_from([0.0, 0.25, 5.0]), st.integers(0, 5))
def test_decisions_are_those_of_the_calls_that_wait_whatever_came_and_left(
    steps: list[tuple[bool, int, float, int]], max_rows: int, delay_s: float, released_rows: int
) -> None:
    queue, there = batch_queue(max_rows, delay_s), list[Waiting]()
    for number, (comes, rows, left_s, which) in enumerate(steps):
        now = number * 0.01
        if comes or not there:
            there.append(arrive(queue, now, rows, left_s))
        else:
            leave(queue, there.pop(which % len(there)))
        assert list(queue.waiting()) == there and queue.rows == sum(each.rows for each in there)
        if not there:
            continue
        tightest_s = min(each.ticket.deadline for each in there)
        expected = Backlog(queue.rows - released_rows, there[0].arrived_s, tightest_s, len(there))
        found = queue.decide(now, tightest_s, released_rows=released_rows)
        assert found == decide(expected, queue.bounds, queue.curve, now)
        if isinstance(found, WaitUntil):
            assert now < found.at_s <= there[0].arrived_s + delay_s, "no call waits longer than the delay allows"
        elif isinstance(found, Run):
            assert found.rows <= max_rows


@given(st.integers(1, 400))
def test_a_call_that_waits_for_long_does_not_keep_those_that_left(count: int) -> None:
    queue = batch_queue(delay_s=1e9)
    first = arrive(queue, 0.0, 1, inf)
    for number in range(count):
        leave(queue, arrive(queue, 1.0 + number, 1, 1.0))
    assert len(queue._arrivals) <= 2 * 2 + 64 and list(queue.waiting()) == [first]


def test_rows_that_are_about_to_come_are_part_of_the_decision() -> None:
    queue = batch_queue(max_rows=8, delay_s=0.0)
    for seconds in (0.01, 0.01, 0.011):
        queue.curve.observe(1, seconds)
        queue.curve.observe(8, seconds)
    arrive(queue, 1.0, 1, 10.0)
    assert queue.decide(1.0, 11.0) == Run(1, "idle_instance")
    assert queue.decide(1.0, 11.0, coming=(7, 1.001, 0.0005)) == WaitUntil(1.001)
