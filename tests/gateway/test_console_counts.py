"""The bounded snapshot of the console, and the counts in it."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_gateway.admin.console.recent import BOUNDS_MS, MAX_KEYS, OTHER, WINDOW_S, Recent, Tally
from oriel_gateway.admin.console.reports import Report
from oriel_gateway.admin.console.snapshot import MAX_BYTES, SECTIONS, snapshot
from oriel_gateway.admin.console.suspects import suspects
from oriel_gateway.errors import Outcome
from oriel_gateway.observe.cube import add_up
from oriel_gateway.observe.decisions import Decisions
from oriel_gateway.observe.objectives import EXCUSED, result_of
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.observe.tracing import Mark
from oriel_policies.documents import compile_documents

from .records import record, target
from .stack import documents

NAMES = st.one_of(st.text(max_size=300), st.just("<img src=x onerror=alert(1)>"), st.just('"\\\x00' * 60))
VALUES = st.one_of(NAMES, st.integers(-(10**15), 10**15), st.floats(allow_nan=False, allow_infinity=False), st.none())
ROWS = st.lists(st.dictionaries(NAMES, st.one_of(VALUES, st.dictionaries(NAMES, VALUES, max_size=9)), max_size=14))


# The snapshot ---------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    head=st.dictionaries(NAMES, VALUES, max_size=20),
    sections=st.fixed_dictionaries(dict.fromkeys(SECTIONS, ROWS)),
    copies=st.integers(1, 100),
)
def test_a_snapshot_is_bounded_whatever_is_in_it(
    head: dict[str, Any], sections: dict[str, list[dict[str, Any]]], copies: int
) -> None:
    many = {name: rows * copies for name, rows in sections.items()}
    totals = {name: len(rows) for name, rows in many.items()}
    made = snapshot(head, many, totals)
    assert len(made) <= MAX_BYTES
    said = json.loads(made)
    for name, (_, most) in SECTIONS.items():
        assert len(said[name]) <= most and len(said[name]) + said["more"][name] == totals[name]


def test_rows_that_fit_are_all_there_in_their_order_and_no_more_are_read_than_are_shown() -> None:
    def endless() -> Any:
        number = 0
        while True:
            yield {"tenant": f"t{number}"}
            number += 1

    rows = [{"pool": f"pool-{number}", "inflight": number} for number in range(20)]
    said = json.loads(snapshot({"at": 1.5}, {"pools": rows, "tenants": endless()}, {"pools": 20, "tenants": 10**6}))
    assert said["pools"] == rows and said["at"] == 1.5 and said["more"]["pools"] == 0
    assert len(said["tenants"]) == SECTIONS["tenants"][1]
    assert said["more"]["tenants"] == 10**6 - len(said["tenants"])


# Counts and names -------------------------------------------------------------------------------------------------

KEPT = compile_documents(documents([1]))
GOLD_TENANT, BRONZE_TENANT = KEPT.tenants["g"], KEPT.tenants["b"]


def decision(ended_s: float, tenant: Any, outcome: Outcome, took_s: float) -> Record:
    mark = Mark("r", "0" * 32, "1" * 16, "2" * 16)
    status = 200 if outcome is Outcome.ANSWERED else 503
    judged = None
    if outcome is not Outcome.ANSWERED:
        judged = None if tenant is None else Judged(result_of(outcome, status), "queue")
    elif tenant is not None and took_s > tenant.tier.target_s:
        judged = Judged("late", "model")
    times = {"received_s": ended_s - took_s, "answered_s": ended_s, "ended_s": ended_s}
    return record(tenant, None, outcome, mark=mark, status=status, judged=judged, **times)


ENDED = st.tuples(
    st.floats(0.0, 200.0),
    st.sampled_from([GOLD_TENANT, BRONZE_TENANT, None]),
    st.sampled_from([Outcome.ANSWERED, Outcome.QUEUE_FULL, Outcome.RATE_LIMITED, Outcome.UPSTREAM_BROKEN]),
    st.sampled_from([0.1, 3.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    ended=st.lists(ENDED, max_size=60), looked=st.lists(st.floats(0.0, 400.0), max_size=8), first=st.floats(0.0, 100.0)
)
def test_the_counts_are_those_of_the_calls_of_the_window(
    ended: list[tuple[float, Any, Outcome, float]], looked: list[float], first: float
) -> None:
    calls = sorted(ended, key=lambda each: each[0])
    decisions = Decisions()
    done = 0

    def reach(now: float) -> list[Record]:
        nonlocal done
        before = done
        while done < len(calls) and calls[done][0] <= now:
            decisions.append(decision(*calls[done]))
            done += 1
        return decisions.latest(done - before)

    reach(first)
    recent = Recent(decisions, done, first)
    for now in sorted([first, *looked]):
        recent.count(add_up(reach(now), {}))
        recent.update(now)
    now = max([first, *looked])
    known = [each for each in calls[:done] if each[1] is not None]
    inside = [each for each in known if each[0] > now - WINDOW_S]
    counted = sum(tally.calls for tally in recent.tenants.values())
    # whole slices leave the window, so that a call may be counted for up to one slice longer
    assert len(inside) <= round(counted) <= len([each for each in known if each[0] > now - WINDOW_S - 10.0])
    assert round(sum(tally.calls for tally in recent.tiers.values())) == round(counted)
    late = [
        each
        for each in calls[:done]
        if each[1:3] != (None, Outcome.ANSWERED) and (each[2] is not Outcome.ANSWERED or each[3] > 2)
    ]
    assert [each.ended_s for each in recent.bad] == [each[0] for each in reversed(late)][: len(recent.bad)]


def test_tenants_beyond_the_bound_count_together() -> None:
    recent = Recent(Decisions(), 0, 0.0)
    tenants = [replace(GOLD_TENANT, name=f"t{number}") for number in range(MAX_KEYS + 50)]
    recent.count(add_up([decision(1.0, tenant, Outcome.ANSWERED, 0.1) for tenant in tenants], {}))
    recent.update(2.0)
    assert recent.fresh.met == MAX_KEYS + 50
    assert len(recent.tenants) == MAX_KEYS + 1 and recent.tenants[OTHER].met == 50
    recent.update(100.0)
    assert not recent.tenants and not recent.tiers and not recent.of_tenant


def test_names_that_clients_invent_count_together_until_one_is_answered_well() -> None:
    recent, ended = Recent(Decisions(), 0, 0.0), {"ended_s": 1.0, "opened": True}
    for status, names in ((200, ["m"]), (404, ["m", *"abcdefgh"])):
        facts: dict[str, Any] = {**ended, "status": status, "judged": EXCUSED if status == 404 else None}
        recent.count(add_up([record(GOLD_TENANT, target(name), **facts) for name in names], {}))
    assert {name: tally.calls for name, tally in recent.targets.items()} == {"model:m": 2, OTHER: 8}
    assert list(recent.of_target) == ["model:m"]


def test_quantiles_are_within_a_bucket() -> None:
    tally = Tally()
    assert tally.quantile_ms(0.5) is None
    tally.durations = [0] * (len(BOUNDS_MS) + 1)
    tally.durations[30] = 99
    tally.durations[60] = 1
    half, most = tally.quantile_ms(0.5), tally.quantile_ms(0.999)
    assert half is not None and most is not None
    assert BOUNDS_MS[29] <= half <= BOUNDS_MS[30] and BOUNDS_MS[59] <= most <= BOUNDS_MS[60]


def bad(tenant: Any, cause: str, count: int, name: str = "model:rank") -> list[Record]:
    facts: dict[str, Any] = {"ended_s": 1.0, "status": 200, "judged": Judged("late", cause, 0.9)}
    return [record(tenant, target(name, route=name), **facts) for _ in range(count)]


def test_a_slow_model_and_a_tenant_that_fills_the_queue_are_named() -> None:
    recent = Recent(Decisions(), 0, 0.0)
    recent.count(add_up(bad(GOLD_TENANT, "model", 10) + bad(GOLD_TENANT, "queue", 20), {}))
    slow = (
        "model:rank is slow: 10 of the latest 30 late or missed calls lost their time in model, 0.9 s more than usual"
    )
    usual = {"b": 0.25}.__getitem__
    assert list(suspects(recent, 2.0, {}, usual)) == [slow], "a tenant that is alone is not blamed"
    for was, said in (("2", f"{slow}; version 3 has taken the place of 2"), ("", slow)):
        assert list(suspects(recent, 2.0, {"model:rank": Report(version="3", was=was)}, usual)) == [said]
    recent.count(add_up(bad(BRONZE_TENANT, "queue", 60), {}))
    said = "calls wait in the queue, and 67% of all calls are of tenant b: 1 a second, 0.25 in the hour before"
    assert list(suspects(recent, 2.0, {}, usual)) == [said]
    assert not list(suspects(recent, 2.0 + WINDOW_S, {}, usual))
