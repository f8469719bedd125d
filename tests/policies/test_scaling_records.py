"""The records of demand: what is counted, how records add up, and what happens when a gateway falls silent."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.errors import UnreadableRecords
from oriel_policies.scaling.counter import DemandCounter
from oriel_policies.scaling.members import Members, State
from oriel_policies.scaling.published import pack, unpack
from oriel_policies.scaling.records import CLASS_BOUNDS_S, WINDOW_S, PoolRecord, due_by, later
from oriel_policies.scaling.service import service_time

BACKLOG = st.lists(st.integers(0, 50).map(float), min_size=24, max_size=24)


def counted(arrivals: list[float], *, until: float = 100.0) -> PoolRecord:
    counter = DemandCounter(0.0)
    for moment in arrivals:
        counter.arrived("gold", moment)
    return counter.record(until)


def test_arrivals_are_counted_by_age_and_leave_the_window() -> None:
    record = counted([1.0, 40.0, 98.2, 98.9, 99.5, 100.0])
    arrivals = record.tiers["gold"].arrivals
    assert (arrivals[0], arrivals[1], arrivals[2], arrivals[60], sum(arrivals)) == (1.0, 1.0, 2.0, 1.0, 5.0)


def test_a_refused_call_is_counted_as_demand() -> None:
    counter = DemandCounter(0.0)
    counter.arrived("gold", 1.0)
    counter.refused("gold", 1.0)
    tier = counter.record(1.5).tiers["gold"]
    assert sum(tier.arrivals) == 1.0 and tier.refused == 1.0


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
            counter.left(*waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        elif step == "start":
            flying += 1
            counter.started()
        elif step == "end" and flying:
            flying -= 1
            counter.ended(now)
        record = counter.record(now)
        assert sum(sum(tier.backlog) for tier in record.tiers.values()) == record.held == len(waiting)
        assert record.in_flight == flying
    for each in waiting:
        counter.left(*each)
    for _ in range(flying):
        counter.ended(now)
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


def waiting_record() -> PoolRecord:
    counter = DemandCounter(0.0)
    counter.arrived("gold", 99.0)
    counter.queued("gold", 400.0)
    return counter.record(100.0)


def test_the_backlog_of_a_silent_gateway_counts_for_ten_seconds_and_the_gateway_is_forgotten_after_a_minute() -> None:
    members = Members(95.0)
    members.read({"a": (waiting_record(), 0.0), "b": (waiting_record(), 0.0)}, 100.0)
    assert (members.demand(100.0).total.held, members.demand(100.0).state) == (2.0, State.COMPLETE)
    for now in range(101, 225):
        members.read({"a": (waiting_record(), 0.0), "b": (waiting_record(), now - 100.0)}, now)
        demand = members.demand(now)
        assert demand.total.held == (2.0 if now <= 110 else 1.0)
        if now < 160:
            assert demand.state is (State.COMPLETE if now <= 110 else State.PARTIAL)


def test_after_a_gateway_is_gone_the_sum_is_partial_until_its_traffic_is_seen_elsewhere() -> None:
    members = Members(95.0)
    members.read({"a": (waiting_record(), 0.0), "b": (waiting_record(), 0.0)}, 100.0)
    for now in range(101, 170):
        members.read({"a": (waiting_record(), 0.0)}, float(now))
        assert members.demand(float(now)).state is (State.PARTIAL if now < 161 else State.COMPLETE)


def test_without_any_reading_for_a_minute_nothing_is_available() -> None:
    members = Members(95.0)
    members.read({"a": (waiting_record(), 0.0)}, 100.0)
    states = [members.demand(now).state for now in (105.0, 115.0, 159.0, 160.0)]
    assert states == [State.COMPLETE, State.PARTIAL, State.PARTIAL, State.UNAVAILABLE]
    members.read({"a": (waiting_record(), 0.0)}, 300.0)
    assert members.demand(300.0).state is State.PARTIAL


def test_a_window_is_continuous_when_it_was_seen_whole_and_nobody_was_lost_in_it() -> None:
    members, continuous = Members(0.0), []
    for now in range(1, 200):
        records = {"a": (counted([], until=now + 100.0), 0.0)}
        if now < 80:
            records["b"] = (counted([], until=now), 0.0)
        members.read(records, float(now))
        continuous.append(members.demand(float(now)).continuous)
    changes = [now for now, (before, after) in enumerate(pairwise(continuous), 2) if before is not after]
    assert continuous[0] is False and changes == [60, 80, 140]


def test_the_planned_batch_is_the_largest_that_takes_half_the_target() -> None:
    curve = {1: (10.0, 0.5), 4: (10.0, 1.0), 16: (10.0, 3.0)}
    planned = service_time(curve, 0.5)
    assert planned is not None and (planned.device_s, planned.latency_s) == (0.025, 0.1)
    urgent = service_time(curve, 0.05)
    assert urgent is not None and (urgent.device_s, urgent.latency_s) == (0.05, 0.05)
    assert service_time({}, 1.0) is None


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
    for name, tier in record.tiers.items():
        found = read["p"].tiers[name]
        assert (found.arrivals, found.backlog, found.refused) == (tier.arrivals, tier.backlog, tier.refused)
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
