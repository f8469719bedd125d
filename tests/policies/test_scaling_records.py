"""The records of demand: what is counted, how records add up, and what happens when a gateway falls silent."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.errors import UnreadableRecords
from oriel_policies.scaling.counter import DemandCounter
from oriel_policies.scaling.published import pack, unpack
from oriel_policies.scaling.records import CLASS_BOUNDS_S, WINDOW_S, PoolRecord, due_by, later

BACKLOG = st.lists(st.integers(0, 50).map(float), min_size=24, max_size=24)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_when_all_calls_are_gone_all_counts_are_zero(data: st.DataObject) -> None:
    counter, waiting, flying, now = DemandCounter(0.0), [], 0, 0.0
    for step in data.draw(st.lists(st.sampled_from(["queue", "leave", "start", "end"]), max_size=60)):
        now += data.draw(st.floats(0.0, 5.0))
        if step == "queue":
            tier = data.draw(st.sampled_from(["gold", "bronze"]))
            waiting.append((tier, now + data.draw(st.floats(-1.0, 400.0))))
            counter.arrived(tier, now)
            counter.queued(*waiting[-1])
        elif step == "leave" and waiting:
            counter.left_queue(*waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        elif step == "start":
            flying += 1
            counter.started()
        elif step == "end" and flying:
            flying -= 1
            counter.finished(now)
        record = counter.record(now)
        assert sum(sum(tier.backlog) for tier in record.tiers.values()) == record.held == len(waiting)
        assert record.in_flight == flying
    for each in waiting:
        counter.left_queue(*each)
    for _ in range(flying):
        counter.finished(now)
    record = counter.record(now + WINDOW_S + 2.0)
    assert record.held == record.in_flight == 0.0
    assert all(not any(tier.backlog) and not any(tier.arrivals) for tier in record.tiers.values())


@given(BACKLOG, st.floats(0.0, 30.0), st.floats(0.0, 5000.0))
def test_a_backlog_that_ages_keeps_its_calls_and_their_order(backlog: list[float], age_s: float, left_s: float) -> None:
    aged = later(backlog, age_s)
    assert abs(sum(aged) - sum(backlog)) < 1e-6 or age_s + left_s > CLASS_BOUNDS_S[-1]
    assert due_by(aged, left_s) >= due_by(backlog, left_s) - 1e-6
    assert min(aged) >= -1e-9


@given(BACKLOG, st.lists(st.floats(0.0, 9000.0), min_size=2, max_size=2))
def test_more_calls_are_due_by_a_later_moment(backlog: list[float], moments: list[float]) -> None:
    early, late = sorted(moments)
    assert 0.0 <= due_by(backlog, early) <= due_by(backlog, late) + 1e-9 <= sum(backlog) + 1e-6


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(40.0, 100.0), st.integers(0, 7), st.floats(0.1, 300.0)), max_size=80),
    st.sampled_from([2, 8]),
)
def test_the_records_of_several_gateways_add_up_to_that_of_one(
    calls: list[tuple[float, int, float]], gateways: int
) -> None:
    alone, shared = DemandCounter(0.0), [DemandCounter(0.0) for _ in range(gateways)]
    for moment, which, left_s in sorted(calls):
        for counter in (alone, shared[which % gateways]):
            counter.arrived("gold", moment)
            counter.queued("gold", moment + left_s)
            counter.executed(1 + which, 0.1, moment)
    one, several = PoolRecord(), PoolRecord()
    one.add(alone.record(100.0))
    for counter in shared:
        several.add(counter.record(100.0))
    assert several.held == one.held and several.idle_s == one.idle_s and several.observed_s == one.observed_s
    assert set(several.curve) == set(one.curve)
    for name, tier in one.tiers.items():
        assert several.tiers[name].arrivals == tier.arrivals and several.tiers[name].backlog == tier.backlog


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["gold", "bronze"]), st.floats(0.0, 100.0)), max_size=30), st.integers(0, 9))
def test_published_records_are_those_that_were_counted(calls: list[tuple[str, float]], running: int) -> None:
    counter = DemandCounter(0.0)
    for tier, moment in sorted(calls, key=lambda call: call[1]):
        counter.arrived(tier, moment)
        counter.queued(tier, moment + 30.0)
    counter.running(running, 100.0)
    counter.executed(4, 0.5, 100.0)
    record = counter.record(101.0)
    read = unpack(pack({"p": record, "empty": PoolRecord()}))
    assert (read["p"].held, read["p"].in_flight, read["p"].curve) == (record.held, record.in_flight, record.curve)
    assert (read["p"].idle_s, read["p"].observed_s) == (record.idle_s, record.observed_s)
    for name, counted in record.tiers.items():
        found = read["p"].tiers[name]
        assert (found.arrivals, found.backlog, found.refused) == (counted.arrivals, counted.backlog, counted.refused)
    assert read["p"].tiers.keys() == record.tiers.keys() and read["empty"].idle_s == float("inf")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        msgspec.msgpack.encode([1, {}]),
        *(
            msgspec.msgpack.encode([2, {"p": pool}])
            for pool in (
                [{"gold": [[1.0], [0.0] * 24, 0.0]}, 0.0, 0.0, 0.0, 0.0, 0, 0.0, {}],
                [{"gold": [[0.0] * 61, [float("nan")] * 24, 0.0]}, 0.0, 0.0, 0.0, 0.0, 0, 0.0, {}],
                [{"gold": [[0.0] * 61, [0.0] * 24, -1.0]}, 0.0, 0.0, 0.0, 0.0, 0, 0.0, {}],
                [{}, float("inf"), 0.0, 0.0, 0.0, 0, 0.0, {}],
                [{}, 0.0, 0.0, 0.0, float("nan"), 0, 0.0, {}],
                [{}, 0.0, 0.0, 0.0, 0.0, -1, 0.0, {}],
                [{}, 0.0, 0.0, 0.0, 0.0, 1, float("inf"), {}],
                [{}, 0.0, 0.0, 0.0, 0.0, 0, 0.0, {0: [1.0, 1.0]}],
                [{}, 0.0, 0.0, 0.0, 0.0, 0, 0.0, {1: [1.0, float("nan")]}],
            )
        ),
    ],
)
def test_records_of_another_form_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableRecords):
        unpack(data)
