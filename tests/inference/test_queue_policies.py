"""A model's queue policies: timeouts, REJECT and DELAY, queue sizes per priority level, and ordered answers."""

import pytest

from oriel_inference.errors import ConfigInvalid, DeadlineExceeded, QueueFull, QueueTimeout
from oriel_inference.model import QueuePolicy, QueueRules
from oriel_inference.repository.config import parse, validate
from oriel_inference.repository.queueing import queue_rules

from .bench import Bench, spec

FILE = "double/config.pbtxt"


# --- how long a request may wait ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "timeout_s", "expected"),
    [
        (QueuePolicy(), None, (60.0, None)),
        (QueuePolicy(), 2.0, (2.0, None)),
        (QueuePolicy(allow_override=True), 2.0, (2.0, None)),
        (QueuePolicy(), 99.0, (60.0, None)),
        (QueuePolicy(timeout_s=5.0), None, (60.0, 5.0)),
        (QueuePolicy(timeout_s=5.0), 2.0, (60.0, 5.0)),
        (QueuePolicy(timeout_s=5.0, allow_override=True), 2.0, (60.0, 2.0)),
        (QueuePolicy(timeout_s=5.0, allow_override=True), 9.0, (60.0, 5.0)),
    ],
)
def test_a_policy_with_a_timeout_rules_over_the_requests_own(
    policy: QueuePolicy, timeout_s: float | None, expected: tuple[float, float | None]
) -> None:
    assert policy.limits(0.0, 60.0, timeout_s) == expected


def busy(**queue: object) -> Bench:
    """A bench whose only instance runs call 0 until the test says otherwise."""
    bench = Bench(spec(alone=True, **queue))  # type: ignore[arg-type]
    bench.call()
    bench.clock.run()
    return bench


def test_rejected_at_its_timeout_though_its_deadline_is_far() -> None:
    bench = busy()
    number = bench.call(give_up_s=0.1)
    bench.clock.advance(0.099)
    assert not bench.replies[number]
    bench.clock.advance(0.002)
    assert isinstance(bench.error(number), QueueTimeout)
    assert bench.error(number).message == "Request timeout expired"
    bench.settle()
    assert bench.batches == [1]


def test_delayed_call_waits_behind_those_that_have_not_timed_out_and_runs_in_the_end() -> None:
    bench = busy()
    delayed = bench.call(timeout_s=30, give_up_s=0.1, delays=True)
    bench.clock.advance(0.2)
    others = [bench.call(timeout_s=60) for _ in range(3)]
    bench.settle()
    assert bench.order == [0, *others, delayed]
    assert bench.answer(delayed)


def test_delayed_call_keeps_its_level_and_its_tier() -> None:
    bench = busy(priority_levels=2, default_priority=2)
    delayed = bench.call(give_up_s=0.1, delays=True, level=1)
    lower_tier = bench.call(band=1, level=1)
    bench.clock.advance(0.2)
    same, lower = bench.call(level=1), bench.call(level=2)
    bench.settle()
    assert bench.order == [0, same, delayed, lower, lower_tier]


def test_delayed_call_is_still_bound_by_its_deadline_and_frees_its_place() -> None:
    bench = busy(policy=QueuePolicy(max_items=1))
    delayed = bench.call(timeout_s=1, give_up_s=0.1, delays=True)
    bench.clock.advance(0.5)
    assert isinstance(bench.error(bench.call()), QueueFull)
    bench.clock.advance(0.6)
    assert isinstance(bench.error(delayed), DeadlineExceeded)
    accepted = bench.call()
    bench.settle()
    assert bench.answer(accepted)
    assert bench.batches == [1, 1]


@pytest.mark.parametrize(("late_s", "waits"), [(0.125, True), (0.875, True), (1.0, False), (2.0, False)])
def test_delayed_call_that_is_found_at_its_deadline_is_refused_at_once(late_s: float, waits: bool) -> None:
    """The loop may have been held from before its timeout until then."""
    bench = busy()
    delayed = bench.call(timeout_s=1.0, give_up_s=0.125, delays=True)
    bench.clock._now += late_s
    bench.clock.run()
    assert bench.batcher.pending == waits
    if waits:
        assert not bench.replies[delayed]
        bench.clock.advance(1.0 - late_s)
        assert isinstance(bench.error(delayed), DeadlineExceeded)
    else:
        assert isinstance(bench.error(delayed), QueueTimeout)


def test_delayed_call_whose_caller_leaves_is_gone() -> None:
    bench = busy()
    delayed = bench.call(give_up_s=0.1, delays=True)
    bench.clock.advance(0.2)
    bench.leave(delayed)
    bench.settle()
    assert bench.batches == [1] and bench.replies[delayed] == []


# --- places per level ---------------------------------------------------------------------------------------------


def test_each_level_has_its_own_places() -> None:
    bench = busy(
        policy=QueuePolicy(max_items=2), by_level={1: QueuePolicy(max_items=1)}, priority_levels=2, default_priority=2
    )
    first = bench.call(level=1)
    refused = bench.error(bench.call(level=1))
    assert isinstance(refused, QueueFull) and "full for priority 1" in refused.message
    second, third = bench.call(level=2), bench.call(level=2)
    assert isinstance(bench.error(bench.call(level=2)), QueueFull)
    bench.leave(first)
    again = bench.call(level=1)
    bench.settle()
    assert bench.order[-3:] == [again, second, third]
    for level in (1, 2, 2):
        bench.call(level=level)  # every place is free again
    bench.settle()
    assert len(bench.order) == 9


@pytest.mark.parametrize(("sizes", "expected"), [((0, 0), 0), ((3, 0), 0), ((3, 4), 7)])
def test_the_servers_bound_stays_unless_every_level_has_one(sizes: tuple[int, int], expected: int) -> None:
    by_level = {1: QueuePolicy(max_items=sizes[0]), 2: QueuePolicy(max_items=sizes[1])}
    assert QueueRules(by_level=by_level, priority_levels=2, default_priority=1).max_items == expected


# --- every model has a queue --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"alone": True}, {"alone": True, "max_rows": 0}])
def test_bounds_deadline_and_priority_hold_whatever_the_scheduler(kind: dict[str, object]) -> None:
    bench = Bench(spec(**kind, policy=QueuePolicy(max_items=3), priority_levels=2, default_priority=2))  # type: ignore[arg-type]
    first = bench.call()
    bench.clock.run()
    for _ in range(3):
        bench.call(level=1, timeout_s=1.0)
    assert isinstance(bench.error(bench.call(level=1)), QueueFull)
    bench.clock.advance(1.001)  # on time while the first still runs
    assert all(isinstance(bench.error(number), DeadlineExceeded) for number in (1, 2, 3))
    late, early = bench.call(level=2), bench.call(level=1)
    rejected = bench.call(level=2, give_up_s=0.5)
    bench.clock.advance(0.6)
    assert isinstance(bench.error(rejected), QueueTimeout)
    assert bench.order[:4] == [4, 1, 2, 3]
    bench.settle()
    assert bench.order[-3:] == [first, early, late]


# --- preserve_ordering --------------------------------------------------------------------------------------------


def ordered(instances: int = 2, **more: object) -> Bench:
    return Bench(spec(alone=True, instances=instances, preserve_ordering=True, **more))  # type: ignore[arg-type]


def test_answer_waits_for_the_one_before_it() -> None:
    bench = ordered()
    first, second = bench.call(), bench.call()
    bench.clock.run()
    bench.workers.jobs.reverse()
    bench.workers.run_next()
    bench.clock.run()
    assert bench.order == []
    bench.settle()
    assert bench.order == [first, second]
    assert int(bench.answer(second).outputs[0][0, 0]) == 2 * second


def test_order_of_service_is_order_of_arrival_whatever_the_deadlines() -> None:
    bench = ordered(instances=1)
    numbers = [bench.call(timeout_s=seconds) for seconds in (9, 5, 7)]
    bench.settle()
    assert bench.order == numbers


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_who_leaves_or_expires_holds_nobody_up(how: str) -> None:
    bench = ordered()
    first, second = bench.call(timeout_s=0.5), bench.call()
    bench.clock.run()
    bench.workers.jobs.reverse()
    bench.workers.run_next()
    bench.clock.run()
    assert bench.order == []
    if how == "leaves":
        bench.leave(first)
        assert bench.order == [second]
    else:
        bench.clock.advance(0.51)
        assert isinstance(bench.error(first), DeadlineExceeded)
        assert bench.order == [first, second]
    bench.settle()
    assert len(bench.order) == len(set(bench.order))


def test_decoupled_model_with_order_runs_one_request_after_the_other() -> None:
    bench = Bench(spec(alone=True, instances=3, decoupled=True, preserve_ordering=True))
    bench.call()
    bench.call()
    bench.clock.run()
    assert len(bench.workers.jobs) == 1


# --- configuration ------------------------------------------------------------------------------------------------


def rules(text: str) -> QueueRules:
    config = parse(f'backend: "onnxruntime" {text}', FILE)
    validate(config, "double", FILE)
    return queue_rules(config)


def test_policies_come_from_the_configuration_also_without_a_batch_dimension() -> None:
    found = rules("""
        dynamic_batching {
          priority_levels: 3 default_priority_level: 2
          default_queue_policy { default_timeout_microseconds: 5000 timeout_action: DELAY max_queue_size: 7 }
          priority_queue_policy { key: 3 value { default_timeout_microseconds: 100 allow_timeout_override: true } }
        }""")
    assert found.of(1) == QueuePolicy(max_items=7, timeout_s=0.005, delays=True)
    assert found.of(3) == QueuePolicy(timeout_s=0.0001, allow_override=True)
    assert (found.priority_levels, found.default_priority) == (3, 2)
    assert rules("").of(0) == QueuePolicy()
    # without a timeout there is nothing after which to delay
    assert not rules("dynamic_batching { default_queue_policy { timeout_action: DELAY } }").policy.delays


LEVELS = "priority_levels: 2 default_priority_level: 1"


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("priority_queue_policy { key: 1 value { } }", "priority_queue_policy[1]", "needs priority_levels"),
        (LEVELS + " priority_queue_policy { key: 3 value { } }", "priority_queue_policy[3]", "outside 1 to"),
        (LEVELS + " priority_queue_policy { key: 0 value { } }", "priority_queue_policy[0]", "outside 1 to"),
        ("priority_levels: 300 default_priority_level: 1", "priority_levels", "at most 256"),
        ("priority_levels: 2 default_priority_level: 3", "default_priority_level", "between 1 and"),
        ("preserve_ordering: true " + LEVELS, "preserve_ordering", "only one priority level"),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 }",
            "preserve_ordering",
            "DELAY",
        ),
    ],
)
def test_policies_that_contradict_themselves_are_refused_by_field(text: str, field: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        rules(f"max_batch_size: 8 dynamic_batching {{ {text} }}")
    assert f"dynamic_batching.{field}" in refused.value.reason and reason in refused.value.reason
