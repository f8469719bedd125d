"""`oriel simulate scale`: the cluster in virtual time, the autoscaler's behaviour, and what the policies reach."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_cli.main import main
from oriel_policies.scaling import PoolScaling
from oriel_tools.simulate.autoscaler import Activation, HorizontalPodAutoscaler
from oriel_tools.simulate.cluster import Cluster
from oriel_tools.simulate.hindsight import hindsight
from oriel_tools.simulate.loads import Load, recorded, synthetic
from oriel_tools.simulate.scale import Tier, changes_of_direction, compare


def cluster(calls: list[tuple[float, int]], *, replicas: int = 1, gateways: int = 0) -> Cluster:
    return Cluster(
        calls,
        [0.5, 30.0],
        ["gold", "bronze"],
        service_s=0.1,
        start_s=20.0,
        replicas=replicas,
        measured_from=0.0,
        gateways=gateways,
    )


def autoscaler(**more: float) -> HorizontalPodAutoscaler:
    return HorizontalPodAutoscaler(
        minimum=1, maximum=50, up_percent=100, up_pods=int(more.get("up_pods", 4)), settle_s=more.get("settle_s", 0.0)
    )


def test_a_replica_serves_one_call_after_the_other_and_drops_what_would_be_late() -> None:
    state = cluster([(0.0, 0)] * 10)
    state.advance(2.0)
    assert (state.met[0], state.lost) == (5, 5), "half a second is time for five of them"
    assert state.busy_s == pytest.approx(0.5) and state.replica_s == pytest.approx(2.0)


def test_the_more_urgent_tier_goes_first() -> None:
    state = cluster([(0.0, 1), (0.0, 1), (0.01, 0), (0.02, 0)])
    state.advance(0.25)
    assert (state.met[0], len(state.waiting[1])) == (2, 1)


def test_a_replica_costs_from_its_order_and_serves_after_its_start() -> None:
    state = cluster([], replicas=1)
    state.scale(3)
    for second in range(1, 31):
        state.advance(float(second))
        assert state.ready == (1 if second < 20 else 3)
    assert state.replica_s == pytest.approx(90.0)
    state.scale(5)
    state.scale(4)
    assert (state.ready, len(state.starting)) == (3, 1)
    state.scale(2)
    assert (state.ready, len(state.starting)) == (2, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 1)), max_size=60), st.integers(0, 4), st.integers(1, 3))
def test_every_call_is_served_lost_or_waiting_and_no_count_is_left(
    calls: list[tuple[float, int]], replicas: int, gateways: int
) -> None:
    state = cluster(sorted(calls), replicas=replicas, gateways=gateways)
    for second in range(1, 60):
        state.advance(float(second))
        waiting = sum(map(len, state.waiting))
        assert sum(state.met) + state.lost + waiting == state.arrived
        assert sum(counter.record(state.now).held for counter in state.counters) == waiting
    state.advance(120.0)
    assert state.arrived == len(calls)
    assert sum(counter.record(120.0).in_flight for counter in state.counters) == 0.0


@pytest.mark.parametrize(
    ("replicas", "value", "after"), [(10, 10.9, 10), (11, 12.0, 11), (11, 12.11, 13), (10, 8.99, 9)]
)
def test_the_autoscaler_ignores_a_tenth(replicas: int, value: float, after: int) -> None:
    assert autoscaler().by_average_value(value, replicas, 0.0) == after


def test_the_autoscaler_rises_by_its_policy_and_falls_to_the_largest_wish_of_the_settling_time() -> None:
    assert autoscaler().by_average_value(40.0, 2, 0.0) == 6
    assert autoscaler().by_average_value(40.0, 10, 0.0) == 20
    settling = autoscaler(settle_s=60.0)
    assert [settling.by_average_value(value, 10, now) for value, now in ((7.0, 0.0), (3.0, 15.0), (3.0, 75.1))] == [
        7,
        7,
        3,
    ]


def test_keda_wakes_a_pool_at_once_and_lets_it_go_after_the_cooldown() -> None:
    activation = Activation(cooldown_s=30.0)
    assert activation.replicas(True, 0, 100) == 1
    assert activation.replicas(False, 4, 125) == 4
    assert activation.replicas(False, 4, 131) == 4, "only at a poll"
    assert activation.replicas(False, 4, 135) == 0


def test_a_rise_after_a_fall_is_a_change_of_direction() -> None:
    assert changes_of_direction([1, 2, 2, 3]) == 0
    assert changes_of_direction([3, 2, 2, 3, 3, 2]) == 2


def test_the_same_seed_gives_the_same_calls() -> None:
    first, again = (synthetic("ramp", [1.0, 1.0], rate=0.1, seed=3) for _ in range(2))
    assert first.calls == again.calls and first.calls != synthetic("ramp", [1.0, 1.0], rate=0.1, seed=4).calls


def test_hindsight_serves_a_load_that_needs_a_replica_at_a_time() -> None:
    """Ten calls per second of 0.1 s for a minute: one replica is enough, if they come evenly."""
    even = recorded("even", [[number / 10.0 for number in range(600)]])
    best = hindsight(cluster(list(even.calls)), 60, minimum=0, maximum=10, miss_share=0.01)
    assert best.lost <= 6 and best.replica_s == pytest.approx(60.0)


def reached(load: Load, gateways: int = 1) -> dict[str, tuple[float, float, int]]:
    pool = PoolScaling(minimum=1, maximum=100, start_s=20.0)
    tiers = [Tier(name="gold", target_s=0.5, share=1.0)]
    results = compare(load, tiers, pool, service_s=0.1, gateways=gateways)
    return {each.policy: (each.attainment["gold"], each.replica_seconds, each.changes) for each in results}


def test_a_ramp_is_served_with_far_fewer_replicas_than_by_concurrency() -> None:
    """The figures of docs/scaling.md, with some room: virtual time and a seed, so they are the same everywhere."""
    found = reached(synthetic("ramp", [1.0], rate=1.0, seed=1))
    attainment, replica_s, _ = found["oriel"]
    assert attainment >= 0.99 and replica_s <= 0.8 * found["concurrency (KPA)"][1]
    assert replica_s <= 1.15 * found["best in hindsight"][1]
    assert attainment > found["rate / 0.7"][0] and attainment > found["CPU 70 %"][0]


@pytest.mark.parametrize(("minimum", "least"), [(0, 0.0), (2, 1.0)])
def test_a_recorded_load_begins_with_the_minimum_of_the_pool(minimum: int, least: float) -> None:
    """It began with enough for its first rate, so that a pool at zero was told to lose nothing."""
    load = recorded("even", [[number / 10.0 for number in range(600)]])
    pool = PoolScaling(minimum=minimum, maximum=100, start_s=20.0)
    results = compare(load, [Tier(name="gold", target_s=0.5, share=1.0)], pool, service_s=0.1, gateways=1)
    for each in results[1:-1]:
        lost_in_the_start = each.attainment["gold"] < 0.7
        assert lost_in_the_start is (not least), each


@pytest.mark.parametrize("load", ["constant", "ramp", "bursts"])
def test_nobody_beats_the_bound_or_does_as_well_as_the_best_for_less(load: str) -> None:
    found = reached(synthetic(load, [1.0], rate=0.2, seed=4))
    bound, best = found.pop("lower bound"), found.pop("best in hindsight")
    assert bound[1] <= best[1]
    for attainment, replica_s, _ in found.values():
        assert attainment < best[0] or replica_s >= best[1]
        assert attainment < 0.99 or replica_s >= bound[1]


def test_several_gateways_order_what_one_would() -> None:
    load = synthetic("ramp", [1.0], rate=0.5, seed=2)
    assert reached(load, 1)["oriel"] == reached(load, 8)["oriel"]


def test_a_recorded_load_is_read_by_tier_and_printed_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "calls.csv"
    trace.write_text("".join(f"{number / 5},{'gold' if number % 2 else 'bronze'}\n" for number in range(300)))
    tiers = ["--tier", "gold:0.5", "--tier", "bronze:20"]
    assert main(["simulate", "scale", "--trace", str(trace), *tiers, "--minimum", "0", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in results][:2] == ["best in hindsight", "oriel"] and len(results) == 6
    assert all(set(each["attainment"]) == {"gold", "bronze"} for each in results)
    assert main(["simulate", "scale", "--trace", str(trace), *tiers]) == 0
    assert "changes of direction" in capsys.readouterr().out


def test_the_pool_and_its_schedule_are_those_of_the_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One call at 07:30 Berlin time, and one at 08:01: on a Monday the window has a replica ready for the second."""
    (tmp_path / "calls").write_text("0\n1860\n")
    (tmp_path / "all.toml").write_text(
        '[pools.p]\ndiscover = "dns:a:1"\n[pools.p.scaling]\nminimum = 0\nmaximum = 3\nstart_ms = 20000\n'
        'keep_alive_ms = 1000\n[[pools.p.scaling.schedule]]\nfrom = "Mon 08:00"\nto = "09:00"\n'
        'zone = "Europe/Berlin"\nminimum = 1\n'
    )
    words = ["simulate", "scale", "--trace", str(tmp_path / "calls"), "--json"]
    words += ["--policies", str(tmp_path), "--pool", "p", "--begins"]
    shares = []
    for begins in ("2026-03-30T05:30", "2026-03-31T05:30"):  # a Monday and a Tuesday, 07:30 in Berlin
        assert main([*words, begins]) == 0
        results = {each["policy"]: each for each in json.loads(capsys.readouterr().out)}
        shares.append(results["oriel"]["attainment"]["gold"])
    assert shares[0] > shares[1]
    assert main(["simulate", "scale", "--policies", str(tmp_path), "--pool", "q"]) == 1
    assert "no pool 'q'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--minimum", "5", "--maximum", "2"], "--minimum"),
        (["--tier", "gold"], "NAME:TARGET_S"),
        (["--tier", "gold:0"], "a target"),
        (["--trace", "/nowhere/calls"], "cannot be read"),
        (["--trace", "x", "--load", "day"], "either"),
        (["--rate", "0"], "--rate"),
        (["--spare", "-1"], "--spare"),
        (["--begins", "monday"], "--begins"),
        (["--begins", "0001-01-01"], "--begins"),
        (["--pool", "p"], "--policies and --pool"),
        (["--policies", "/nowhere", "--pool", "p"], "/nowhere"),
        (["--load", "day", "--rate", "100"], "more than"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "scale", *words]) == 1
    captured = capsys.readouterr()
    assert reason in captured.err and captured.err.count("\n") == 1 and not captured.out
