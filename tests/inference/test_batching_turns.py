"""Where the small rules of the batcher turn: short batches, useful sizes, places per level, answers in order, what is
counted and logged.
"""

import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from oriel_inference.batching.assemble import concatenate
from oriel_inference.batching.device import Device
from oriel_inference.batching.queue_policies import AnswerLine, LevelBounds
from oriel_inference.batching.running import Running
from oriel_inference.batching.service_times import ServiceTimes
from oriel_inference.batching.statistics import Responses, Statistics
from oriel_inference.batching.verbose import log_batch
from oriel_inference.batching.wait_estimate import WaitEstimate
from oriel_inference.errors import DeadlineExceeded
from oriel_policies.waiting.batch import BatchBounds, ServiceCurve
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue

from .bench import Bench, spec


def times(*known: int, inline_s: float = 0.001, **more: Any) -> ServiceTimes:
    """Return service times of batches of at most 32 rows. known: sizes that took a millisecond per row."""
    curve = ServiceCurve()
    for rows in known:
        curve.observe(rows, rows * 1e-3)
    return ServiceTimes(BatchBounds(max_rows=32, **more), curve, inline_s)


class Sent(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.mark.parametrize(("samples", "short"), [(7, False), (8, True), (9, True)])
def test_a_batch_is_short_after_8_samples(samples: int, short: bool) -> None:
    it = times()
    for _ in range(samples):
        it.ran(1, 0.0005)
    assert it.is_short(1) is short and not it.is_short(2)


@pytest.mark.parametrize(("seconds", "short"), [(0.00099, True), (0.001, False), (0.0011, False)])
def test_a_batch_is_short_below_the_bound(seconds: float, short: bool) -> None:
    it = times()
    for _ in range(8):
        it.ran(1, seconds)
    assert it.is_short(1) is short


@pytest.mark.parametrize(("seconds", "batches"), [(0.005, 0), (0.0050001, 32)])
def test_a_batch_that_held_the_loop_for_5_ms_sends_the_next_32_to_threads(seconds: float, batches: int) -> None:
    it = times()
    for _ in range(8):
        it.ran(1, 0.0005)
    it.went_to_a_thread()
    it.ran_inline(seconds)
    for _ in range(batches):
        assert not it.is_short(1)
        it.went_to_a_thread()
    assert it.is_short(1)


def usual(it: ServiceTimes, left_s: float) -> None:
    for _ in range(2000):
        it.queued(1, left_s, 1.0)


@pytest.mark.parametrize(("left_s", "useful"), [(1e-6, 32), (0.0159, 7), (0.0161, 8), (0.0181, 9), (1.0, 32)])
def test_a_batch_of_the_useful_size_takes_half_of_the_time_that_callers_give(left_s: float, useful: int) -> None:
    """It is computed with the 16th batch. Where no size is quick enough, the largest is as good as any."""
    it = times(*range(1, 17), 32)
    it.queued(1, left_s, 1.0)
    for _ in range(15):
        it.ran(32, 0.032)
    assert it.useful_rows == 32
    it.ran(32, 0.032)
    assert it.useful_rows == useful
    owned = times(*range(1, 17), 32, preferred_rows=(4, 8))
    owned.queued(1, left_s, 1.0)
    for _ in range(20):
        owned.ran(32, 0.032)
    assert owned.useful_rows == 32, "preferred sizes are the owner's"


def test_the_useful_size_is_computed_with_each_16th_batch_and_the_256th_is_free() -> None:
    it = times(*range(1, 17), 32)
    it.queued(1, 0.0161, 1.0)
    found: dict[int, int] = {}
    for number in range(1, 274):
        it.useful_rows = 5
        it.ran(32, 0.032)
        if it.useful_rows != 5:
            found[number] = it.useful_rows
    each = [number for start in range(16, 273, 16) for number in (start, start + 1)]
    assert found == {number: 32 if number == 256 else 8 for number in each}


# Levels ---------------------------------------------------------------------------------------------------------------


def call(name: str = "a", *, level: int = 1, band: int = 0, tenant: str = "t", admitted: bool = False) -> Any:
    ticket = Ticket(band=band, tenant=tenant, deadline=9.0)
    ticket.admitted = admitted
    return Sent(name=name, level=level, ticket=ticket, deadline=9.0, inputs={"x": 1}, rows=1, started_s=0.0)


def test_a_level_has_its_places_per_tier_and_a_level_without_a_bound_has_any_number() -> None:
    sizes = {1: 2, 2: 0}
    rules = SimpleNamespace(levels=range(1, 3), of=lambda level: SimpleNamespace(max_items=sizes[level]))
    it = LevelBounds(cast(Any, rules))
    assert [it.join(call()) for _ in range(3)] == [True, True, False]
    assert it.join(call(band=1)) and it.join(call(admitted=True))
    assert all(it.join(call(level=level)) for level in (2, 3) for _ in range(5))
    it.leave(call(admitted=True))
    assert not it.join(call()), "an admitted call has taken no place"
    it.leave(call())
    assert [it.join(call()) for _ in range(2)] == [True, False]


# Answers in order -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None], list[bool]]] = []

    def call_at(self, at_s: float, late: Callable[[], None]) -> Any:
        cancelled: list[bool] = []
        self.timers.append((at_s, late, cancelled))
        return SimpleNamespace(cancel=lambda: cancelled.append(True))


class Line:
    def __init__(self) -> None:
        self.clock = Clock()
        self.heard: list[tuple[str, Any]] = []
        self.it = AnswerLine(
            cast(Any, self.clock), lambda each, answer: self.heard.append((cast(Any, each).name, answer)), self.fail
        )

    def fail(self, each: Any, error: Exception) -> None:
        assert isinstance(error, DeadlineExceeded) and error.stage == "order"
        self.heard.append((each.name, type(error)))
        self.it.remove(each)


def test_answers_wait_for_the_calls_before_them_of_their_tier_and_tenant() -> None:
    line = Line()
    first, second, third = (call(name) for name in "abc")
    other, tier = call("d", tenant="u"), call("e", band=1)
    for each in (first, second, third, other, tier):
        line.it.join(each)
    line.it.deliver(third, cast(Any, 3))
    line.it.deliver(second, cast(Any, 2))
    assert line.heard == [] and second.inputs == {} and first.inputs
    for each in (other, tier):
        line.it.deliver(each, cast(Any, 0))
    line.it.deliver(first, cast(Any, 1))
    assert line.heard == [("d", 0), ("e", 0), ("a", 1), ("b", 2), ("c", 3)]
    assert all(cancelled for _, _, cancelled in line.clock.timers) and not line.it._lines


def test_an_answer_that_reaches_its_deadline_in_the_line_is_late() -> None:
    line = Line()
    first, second, third = (call(name) for name in "abc")
    for each in (first, second, third):
        line.it.join(each)
    for each in (second, third):
        line.it.deliver(each, cast(Any, each.name))
    (at_s, late, _), _ = line.clock.timers
    assert at_s == 9.0
    late()
    assert line.heard == [("b", DeadlineExceeded)]
    line.it.remove(second)
    line.it.remove(call("unknown", tenant="nobody"))
    line.it.remove(first)
    assert line.heard[1:] == [("c", "c")] and not line.it._lines


# Expected waits -------------------------------------------------------------------------------------------------------


def estimate(*, ahead: int = 0, idle: int = 0, running: Any = (), max_rows: int = 4, now: float = 10.0) -> float | None:
    curve = ServiceCurve()
    for _ in range(20):
        curve.observe(4, 0.4)
    queue = SlaQueue(max_items=1, max_bytes=0)
    if ahead:
        queue.push(Ticket(band=0, tenant="", deadline=99.0, rows=ahead))
    clock = SimpleNamespace(now=lambda: now)
    it = WaitEstimate(queue, curve, [object()] * idle, running, max_rows=max_rows, slots=2, clock=cast(Any, clock))
    return it.wait_s(0)


def batch(started_s: float, rows: int = 4) -> Running:
    call = SimpleNamespace(rows=rows, started_s=started_s, finished=True)
    nothing = cast(Any, None)
    return Running(cast(Any, [call]), nothing, nothing, nothing)


def test_a_new_call_waits_for_what_is_before_it_and_for_the_rest_of_what_runs() -> None:
    """An instance computes ten rows a second."""
    assert estimate(idle=1) == 0.0
    assert estimate(idle=1, ahead=5) == pytest.approx(0.5)
    assert estimate(running=[batch(10.0)]) == pytest.approx(0.4)
    assert estimate(running=[batch(9.9)]) == pytest.approx(0.3)
    assert estimate(running=[batch(9.6)]) == estimate(running=[batch(5.0)]) == 0.0
    assert estimate(running=[batch(9.8), batch(9.8)], ahead=4) == pytest.approx(0.4), "two instances"
    assert estimate(running=[batch(9.8)] * 3, ahead=4) == pytest.approx(0.5), "cores for two of three instances"
    assert estimate(idle=1, running=[batch(9.8)], ahead=4) == pytest.approx(0.2)


def test_while_every_instance_is_away_a_new_call_waits_as_for_one() -> None:
    """An instance that is neither idle nor runs a batch comes back: a Python model starts again, for example."""
    assert estimate(ahead=5) == pytest.approx(0.5)
    assert estimate() == 0.0


# Joining arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 2, 6), (1, 2, 6), (2, 3, 5), (3, 5, 6), (0, 3, 4)])
def test_requests_that_are_consecutive_rows_of_an_array_are_joined_where_they_are(cuts: tuple[int, ...]) -> None:
    whole = np.arange(18, dtype=np.int64).reshape(6, 3).copy()
    parts = [{"x": whole[start:stop]} for start, stop in itertools.pairwise(cuts)]
    joined = concatenate(parts, spec().inputs, batched=True)["x"]
    assert np.shares_memory(joined, whole)
    np.testing.assert_array_equal(joined, whole[cuts[0] : cuts[-1]])


# What is counted and logged -------------------------------------------------------------------------------------------


def test_a_batch_is_released_for_its_reason_and_one_of_a_model_without_batching_because_it_is_alone() -> None:
    alone, full = Bench(spec(alone=True)), Bench(spec(max_rows=2))
    for _ in range(3):
        alone.call()
        full.call()
    for bench in (alone, full):
        bench.settle()
    assert alone.batcher.statistics.releases == {"alone": 3}
    assert full.batcher.statistics.releases == {"full": 1, "idle_instance": 1}


def test_the_first_response_is_counted_in_milliseconds_since_the_request_arrived() -> None:
    statistics = Statistics()
    responses = Responses(statistics, 2.0)
    for now in (2.5, 4.0):
        responses.sent(now, 0.25, 0.125)
    counted = statistics.first_response
    assert (counted.total, counted.buckets()[:2]) == (500.0, [("100.0", 0), ("500.0", 1)]) and counted.count == 1
    first, second = statistics.responses
    for response in (first, second):
        found = (response.infer.ns, response.output.ns, response.success.ns)
        assert found == (250_000_000, 125_000_000, 375_000_000)


def test_an_execution_is_charged_to_its_calls_or_counted_for_the_reason_that_nobody_is() -> None:
    device = Device("host", "cpu", now_ns=itertools.count(1000, 1000).__next__)
    assert device.end(device.start()) == 1000
    assert device.end(device.start(), "failed") == 0
    assert device.end(device.start(), "probe") == 0
    device.write_off(300, "failed")
    assert device.take_unbilled() == {"failed": 1300, "probe": 1000}
    assert not device.take_unbilled() and device.read()[1] == 3000


def test_a_batch_is_logged_with_the_time_that_its_most_urgent_call_has_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oriel_inference.batching.verbose")
    calls = [SimpleNamespace(deadline=at_s, request_id=name) for at_s, name in ((7.25, "a"), (6.5, ""), (9.0, "c"))]
    log_batch(spec(), cast(Any, calls), 5, "full", 6.0)
    log_batch(spec(), [], 0, "delay", 6.0)
    assert caplog.messages == [
        "model double version 1: batch of 3 requests, 5 rows (full), 500.0 ms left: a - c",
        "model double version 1: batch of 0 requests, 0 rows (delay), 0.0 ms left: ",
    ]
