"""`oriel simulate serve`: loads in virtual time, through the real queues, limits and batches."""

import json
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_cli.errors import CommandFailed
from oriel_cli.main import main
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.metering.prices import NANO, Price
from oriel_tools.load.command import trace_lines
from oriel_tools.load.generator import schedule
from oriel_tools.load.scenario import Phase, Scenario, Stream, checked
from oriel_tools.simulate.profile import LoopMs, Profile, Size, drawn, mean_ms, read, spread_of
from oriel_tools.simulate.requests import request_of
from oriel_tools.simulate.serve import simulate
from oriel_tools.simulate.virtual import Servers, VirtualLoad

URL = "http://x/v2/models/m/infer"
ALONE = Profile(model="m", max_rows=0, sizes=[Size(rows=1, mean_ms=10.0)])
BATCHED = Profile(model="m", max_rows=16, sizes=[Size(rows=1, mean_ms=10.0), Size(rows=16, mean_ms=25.0)])


def scenario(*streams: dict[str, Any], **phase: Any) -> Scenario:
    found = [Stream(**{"url": URL, **stream}) for stream in streams or ({},)]
    return checked(Scenario(stream=found, phase=[Phase(**{"seconds": 20.0, **phase})]), Path())


def simulated(made: Scenario, profile: Profile = ALONE, **more: Any) -> dict[str, Any]:
    servers = Servers(**{name: more.pop(name) for name in Servers.__slots__ if name in more})
    return simulate(made, {profile.model: profile}, servers, **more)


def spread(profile: Profile, quantiles: list[float]) -> Profile:
    sizes = [msgspec.structs.replace(size, spread=quantiles) for size in profile.sizes]
    return msgspec.structs.replace(profile, sizes=sizes)


def documents(*, inflight: int = 4, limit: str = "", scaling: str = "") -> Snapshot:
    tenants = "".join(
        f'[tenants.{tier}]\ntier = "{tier}"\nmodels = ["*"]\n'
        f'keys = [{{ sha256 = "{sha256(tier.encode()).hexdigest()}" }}]\n{limit if tier == "bronze" else ""}\n'
        for tier in ("gold", "bronze")
    )
    text = f"""
[tiers.gold]
band = 0
target_ms = 100
give_up_ms = 400
[tiers.bronze]
band = 2
target_ms = 1000
give_up_ms = 4000
[pools.p]
discover = "dns:127.0.0.1:1"
max_inflight = {inflight}
learn_concurrency = false
{scaling}
[[routes]]
model = "*"
pool = "p"
{tenants}"""
    return compile_documents({"all.toml": text.encode()})


def test_calls_that_never_meet_take_the_time_of_the_profile() -> None:
    profile = msgspec.structs.replace(ALONE, overhead_ms=2.0, row_ms=1.0)
    document = simulated(scenario({"target_ms": 13.5}, arrivals="uniform", rate=20.0), profile)
    found = document["phases"][0]["tiers"]["load"]
    assert found["scheduled"] == found["good"] == 399 and found["attainment"] == 1.0
    assert found["latency_ms"]["p50"] == pytest.approx(13.0, rel=0.006), "10 ms, 2 beside the batch and 1 for the row"
    assert document["simulation"]["device_s"] == pytest.approx(399 * 0.010)
    assert document["simulation"]["models"]["m"]["sizes"] == {"1": 399}


def test_a_call_that_meets_no_other_takes_three_turns_of_the_event_loop() -> None:
    loop = LoopMs(turn_ms=0.5, call_ms=1.0, batch_ms=0.4)
    document = simulated(scenario({}, arrivals="uniform", rate=20.0), msgspec.structs.replace(ALONE, loop=loop))
    found = document["phases"][0]["tiers"]["load"]["latency_ms"]
    assert found["p50"] == pytest.approx(10.0 + 3 * 0.5 + 1.0 + 0.4, rel=0.006)


def test_a_busy_event_loop_makes_calls_late_that_the_instances_could_answer() -> None:
    """Refusals cost the loop as much as answers: above what it can read, it has no time left for those in time."""
    profile = Profile(model="m", max_rows=16, sizes=[Size(rows=1, mean_ms=1.0), Size(rows=16, mean_ms=4.0)])
    made = scenario({"target_ms": 20.0, "deadline_ms": 20.0}, rate=3000.0, seconds=0.5)
    quick, busy = [
        simulated(made, msgspec.structs.replace(profile, loop=LoopMs(call_ms=call_ms)))["phases"][0]["tiers"]["load"]
        for call_ms in (0.1, 0.5)
    ]
    assert quick["attainment"] > 0.99 and busy["attainment"] < 0.5
    assert busy["latency_ms"]["p50"] > 20.0, "they waited where nobody had read them yet"


def test_every_call_has_an_end_though_the_event_loop_never_reads_it_in_time() -> None:
    profile = msgspec.structs.replace(ALONE, loop=LoopMs(call_ms=100.0))
    made = scenario({"deadline_ms": 50.0}, rate=100.0, seconds=2.0)
    found = simulated(made, profile)["phases"][0]["tiers"]["load"]
    assert found["failed"]["timed out"] > 100
    assert found["good"] + sum([*found["refused"].values(), *found["failed"].values()]) == found["scheduled"]


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_an_arrival_meets_a_busy_server_as_often_as_queueing_theory_says(load: float) -> None:
    """Of Poisson arrivals at a single server, 1 - load wait for nobody, whatever the service times."""
    made = scenario({"target_ms": 10.001, "deadline_ms": 60_000.0}, rate=100.0 * load, seconds=100.0)
    document = simulated(made)
    assert document["phases"][0]["tiers"]["load"]["attainment"] == pytest.approx(1.0 - load, abs=0.03)
    assert document["simulation"]["utilisation"] == pytest.approx(load, abs=0.03)


def test_batches_grow_with_the_load_and_two_replicas_halve_it() -> None:
    made = scenario({"target_ms": 100.0, "deadline_ms": 400.0}, rate=400.0, seconds=5.0)
    one, two = simulated(made, BATCHED), simulated(made, BATCHED, replicas=2)
    means = [found["simulation"]["models"]["m"] for found in (one, two)]
    assert means[0]["rows"] / means[0]["batches"] > 1.3 * means[1]["rows"] / means[1]["batches"]
    p99s = [found["phases"][0]["tiers"]["load"]["latency_ms"]["p99"] for found in (one, two)]
    assert p99s[1] < p99s[0]
    assert two["simulation"]["utilisation"] < one["simulation"]["utilisation"]


def test_headers_give_a_band_and_a_deadline() -> None:
    made = scenario(
        {"name": "first", "target_ms": 50.0, "headers": {"X-Oriel-Timeout-Ms": "60"}},
        {"name": "second", "target_ms": 50.0, "headers": {"x-oriel-priority": "2"}, "deadline_ms": 60.0, "weight": 2.0},
        rate=150.0,
    )
    tiers = simulated(made)["phases"][0]["tiers"]
    assert tiers["first"]["attainment"] > 0.9 > 0.6 > tiers["second"]["attainment"]
    assert tiers["second"]["refused"]["504 deadline_exceeded"] > 100


def test_the_same_seed_gives_the_same_result_and_the_arrivals_of_a_measured_load() -> None:
    made = scenario({"deadline_ms": 100.0}, arrivals="bursty", rate=120.0)
    assert simulated(made, BATCHED) == simulated(made, BATCHED)
    assert simulated(made, BATCHED)["phases"][0]["all"]["scheduled"] == len(list(schedule(made)))


def test_through_a_gateway_the_urgent_tier_is_in_time_and_limits_refuse() -> None:
    streams = [{"name": tier, "key": tier, "weight": weight} for tier, weight in (("gold", 1.0), ("bronze", 2.0))]
    document = simulated(scenario(*streams, rate=180.0), snapshot=documents())
    tiers = document["phases"][0]["tiers"]
    assert tiers["gold"]["attainment"] > 0.95, "gold alone is 60 of the 100 calls per second that the server takes"
    assert tiers["bronze"]["attainment"] < 0.5 and sum(tiers["bronze"]["refused"].values()) > 1000
    limited = simulated(
        scenario(*streams, rate=90.0), snapshot=documents(limit="limit = { requests_per_s = 10, burst = 1 }")
    )
    refused = limited["phases"][0]["tiers"]["bronze"]["refused"]
    assert set(refused) == {"429 rate_limited"}
    assert limited["phases"][0]["tiers"]["bronze"]["good"] <= 10 * 20 + 1
    assert not limited["phases"][0]["tiers"]["gold"]["refused"]


SCALING = "[pools.p.scaling]\nminimum = 1\nmaximum = 4\nstart_ms = 1000\n"


def test_replicas_follow_the_scaling_table_up_and_down() -> None:
    slow = Profile(model="m", max_rows=0, sizes=[Size(rows=1, mean_ms=50.0)])
    made = scenario({"key": "bronze"}, rate=6.0, seconds=60.0)
    made.phase.append(Phase(name="more", seconds=60.0, rate=50.0))
    made.phase.append(Phase(name="less", seconds=480.0, rate=6.0))
    document = simulated(made, slow, scale="p", snapshot=documents(inflight=16, scaling=SCALING))
    found = document["simulation"]
    numbers, width_s = found["timeline"]["replicas"], found["timeline"]["width_s"]
    assert max(numbers[: int(60 / width_s)]) < max(numbers) == 3 and numbers[-1] < 3
    assert found["replica_seconds"] == pytest.approx(found["mean_replicas"] * 600.0, rel=1e-3)
    fixed = simulated(made, slow, snapshot=documents(inflight=16))
    assert document["phases"][1]["all"]["good"] > 1.3 * fixed["phases"][1]["all"]["good"]
    assert fixed["simulation"]["replica_seconds"] == 600.0 and fixed["simulation"]["timeline"]["replicas"] == []


FROM_ZERO = SCALING.replace("minimum = 1", "minimum = 0") + "hold_ms = 30000\nkeep_alive_ms = 1000\ncall_ms = 10\n"


def test_calls_for_a_pool_at_zero_are_held_until_its_first_replica_is_ready() -> None:
    made = scenario({"key": "bronze", "target_ms": 1100.0}, rate=20.0, seconds=5.0)
    made.phase.append(Phase(name="idle", seconds=60.0, rates={"load": 0.0}))
    document = simulated(made, scale="p", replicas=0, snapshot=documents(scaling=FROM_ZERO))
    found, tier = document["simulation"], document["phases"][0]["tiers"]["load"]
    assert tier["good"] == tier["scheduled"] and 0.5 < tier["latency_ms"]["max"] / 1e3 < 2.5
    assert found["timeline"]["replicas"][-1] == 0 and 20.0 < found["replica_seconds"] < 50.0


def test_a_replica_that_is_lost_is_started_again_and_calls_wait_for_it_meanwhile() -> None:
    made = scenario({"key": "bronze", "target_ms": 200.0}, rate=20.0, seconds=30.0)
    both = documents(scaling=FROM_ZERO.replace("minimum = 0", "minimum = 1"))
    tier = simulated(made, scale="p", crashes=(10,), snapshot=both)["phases"][0]["tiers"]["load"]
    assert tier["good"] == tier["scheduled"] and 0.9 < tier["attainment"] < 0.99


def test_a_pool_that_scales_has_its_minimum_from_the_beginning_and_costs_that() -> None:
    """It began with --replicas, by default 1, and was cheaper than the pool can be."""
    price = Price(name="t4", device_class="cpu", currency="USD", valid_from="2026-01-01", device_hour=NANO)
    made = scenario({"key": "bronze"}, rate=6.0, seconds=60.0)
    scaling = SCALING.replace("minimum = 1", "minimum = 3")
    found = simulated(made, scale="p", snapshot=documents(scaling=scaling), prices=[price])["simulation"]
    assert found["replicas"] == 3 and found["replica_seconds"] >= 3 * 60.0
    assert found["cost"][0]["replicas_per_hour"] >= 3.0


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2**20),
    st.sampled_from(["poisson", "bursty", "ramp"]),
    st.floats(20.0, 400.0),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_every_call_ends_once_and_leaves_nothing_behind(
    seed: int, arrivals: str, rate: float, replicas: int, gateway: bool, scales: bool
) -> None:
    streams = [{"name": tier, "key": tier, "deadline_ms": 150.0} for tier in ("gold", "bronze")]
    made = scenario(*streams, arrivals=arrivals, rate=rate, seconds=1.5)
    made.seed = seed
    profile = msgspec.structs.replace(spread(BATCHED, [0.5, 1.0, 2.0]), instances=2, overhead_ms=1.0)
    load = VirtualLoad(
        made,
        [request_of(stream) for stream in made.stream],
        {"m": profile},
        Servers(replicas=replicas, scale="p" if gateway and scales else ""),
        documents(scaling=SCALING) if gateway else None,
    )
    record = load.run()
    for tally in record.tallies[0]:
        ended = tally.good + sum(tally.refused.values()) + sum(tally.failed.values())
        assert tally.scheduled == tally.sent == ended == tally.latency.count + ended - tally.good
    assert all(not replica.outstanding and not replica.server.waiting for replica in (*load._replicas, *load._stopped))
    if load._gateway is not None:
        gate = load._gateway.pools["p"]
        assert (gate.admission.inflight, len(gate.admission.queue)) == (0, 0)


def test_a_recorded_load_is_replayed_as_it_was(tmp_path: Path) -> None:
    streams = [{"name": "a"}, {"name": "b", "weight": 3.0}]
    made = scenario(*streams, arrivals="bursty", rate=50.0)
    trace = tmp_path / "calls.csv"
    trace.write_text("".join(trace_lines(made, until_s=12.0)))
    again = scenario(*streams, arrivals="trace", trace=str(trace))
    first = [(round(offset, 6), stream) for offset, _, stream in schedule(made) if offset < 12.0]
    assert [(offset, stream) for offset, _, stream in schedule(again)] == first


def test_the_command_prints_a_table_or_json_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, prices, page = tmp_path / "p.json", tmp_path / "prices.toml", tmp_path / "page.html"
    profile.write_bytes(msgspec.json.encode(BATCHED))
    prices.write_text('[prices.t4]\nclass = "cpu"\ncurrency = "USD"\nvalid_from = 2026-01-01\ndevice_hour = 0.75\n')
    flags = ["--profile", str(profile), "--rate", "200", "--seconds", "3", "--target-ms", "100", "--replicas", "2"]
    assert main(["simulate", "serve", *flags, "--prices", str(prices), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "2 replicas without a gateway" in text and "1.5 USD an hour for the replicas" in text and "p99 ms" in text
    html = page.read_text()
    assert html.count('<div class="chart"') == 5 and '<table class="bars">' in html
    assert main(["simulate", "serve", *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["simulation"]["replicas"] == 2 and document["simulation"]["cost"] == []


def test_costs_follow_from_the_price_of_the_class() -> None:
    price = Price(name="t4", device_class="cpu", currency="USD", valid_from="2026-01-01", device_hour=NANO)
    document = simulated(scenario({}, arrivals="uniform", rate=50.0), replicas=2, prices=[price])
    (cost,) = document["simulation"]["cost"]
    assert cost["replicas_per_hour"] == 2.0 and cost["replicas"] == pytest.approx(2 * 20 / 3600)
    assert cost["used"] == pytest.approx(document["simulation"]["device_s"] / 3600)
    assert cost["per_million_answers"] == pytest.approx(cost["replicas"] / 999 * 1e6)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        ({"url": "http://x/v1/services/s"}, "only requests to models"),
        ({"url": "http://x/v2/models/other/infer"}, "no profile of model 'other', only of m"),
        ({"rows": 17}, "17 rows are more"),
        ({"headers": {"x-oriel-priority": "256"}}, "0 to 255"),
    ],
)
def test_what_cannot_be_simulated_is_refused(stream: dict[str, Any], why: str) -> None:
    with pytest.raises(CommandFailed, match=why):
        simulated(scenario(stream, rate=1.0), BATCHED)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"model": "m"}', "max_rows"),
        ('{"model": "m", "max_rows": 4, "sizes": []}', "sizes"),
        ('{"model": "m", "max_rows": 4, "sizes": [{"rows": 2, "mean_ms": 1}, {"rows": 1, "mean_ms": 1}]}', "ascend"),
        ('{"model": "m", "max_rows": 4, "sizes": [{"rows": 2, "mean_ms": 1, "spread": [2, 1]}]}', "ascend"),
        ('{"model": "m", "max_rows": 4, "sizes": [{"rows": 2, "mean_ms": 1}], "preferred_rows": [8]}', "at most"),
        ("[", "p.json"),
    ],
)
def test_a_mistake_in_a_profile_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(CommandFailed, match=why):
        read(path)


@given(st.lists(st.floats(0.001, 1000.0), min_size=2, max_size=300))
def test_a_spread_ascends_and_draws_the_mean(samples: list[float]) -> None:
    found = spread_of(samples)
    assert found == sorted(found)
    between = [(one + other) / 2 for one, other in zip(found, found[1:], strict=False)]
    assert sum(between) / len(between) == pytest.approx(1.0, abs=1e-3)


def test_drawn_times_have_the_mean_of_their_size() -> None:
    profile = spread(BATCHED, spread_of([1.0, 1.0, 1.0, 1.5, 3.0]))
    seconds = drawn(profile, Random(1))
    for rows in (1, 7, 16):
        mean_s = sum([seconds(rows) for _ in range(20_000)]) / 20_000
        assert mean_s * 1e3 == pytest.approx(mean_ms(profile.sizes, rows), rel=0.02)
    assert mean_ms(profile.sizes, 32) == pytest.approx(41.0), "on the line of the two largest sizes"


def test_a_load_that_is_too_large_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandFailed, match="at most 5000000"):
        simulated(scenario(rate=1e5, seconds=60.0))
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(ALONE))
    flags = ["--profile", str(path), "--rate", "1"]
    assert main(["simulate", "serve", *flags, "--replicas", "1001"]) == 1
    assert "--replicas must be 1 to 1000" in capsys.readouterr().err
    assert main(["simulate", "serve", *flags, "--scale", "p"]) == 1
    assert "no pool 'p' with a scaling table" in capsys.readouterr().err
