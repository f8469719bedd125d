"""Who used the devices: shares are the whole, whatever happens to calls and batches."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.app import Unit, open_unit
from oriel_inference.batching.device import Accounts, Devices, UsageLines
from oriel_inference.settings import Settings
from oriel_policies.metering.usage import UsageRow, unbilled_ns
from oriel_wire.usage.files import read_segment, segments

from .bench import Bench, context, spec
from .clients import client_of
from .exposed import read

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"


class Ticks:
    """A clock on which each reading takes 1,000 ns."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns


def rows_of(devices: Devices) -> dict[tuple[str, str], UsageRow]:
    return {(row.key.tenant, row.key.why): row for row in devices.book.rows()}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "leave", "fail", "start", "run", "settle"]),
        st.integers(1, 8),
        st.sampled_from(["a", "b", ""]),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(EVENTS)
def test_what_tenants_and_nobody_are_charged_is_the_time_that_the_device_was_busy(
    events: list[tuple[str, int, str]],
) -> None:
    devices = Devices(now_ns=Ticks())
    bench = Bench(spec(instances=2), devices=devices)
    for event, number, tenant in events:
        if event == "call":
            bench.call(number, tenant=tenant)
        elif event == "leave" and bench.calls:
            bench.leave(number % len(bench.calls))
        elif event == "fail" and bench.calls:
            bench.bad.add(number % len(bench.calls))
        elif event == "start":
            bench.clock.run()
        elif event == "run" and bench.workers.jobs:
            bench.workers.run_next()
        elif event == "settle":
            bench.settle()
    bench.settle()
    busy_ns, charged_ns = devices.host.read()
    assert busy_ns == charged_ns == devices.book.device_ns
    answered = {call.ticket.tenant for number, call in enumerate(bench.calls) if bench.replies[number]}
    assert {row.key.tenant for row in devices.book.rows() if row.device_ns and not row.key.why} <= answered


def test_shares_follow_the_rows_to_the_nanosecond() -> None:
    devices = Devices(now_ns=Ticks())
    bench = Bench(spec(), devices=devices)
    bench.call()
    bench.clock.run()
    first = [bench.call(rows, tenant=tenant) for rows, tenant in ((1, "a"), (2, "b"), (4, "a"))]
    bench.settle()
    assert bench.batches == [1, 7]
    shares = [bench.answer(number).device_ns for number in first]
    assert sum(shares) == 1000 and shares == [143, 286, 571]
    found = rows_of(devices)
    assert (found["a", ""].device_ns, found["b", ""].device_ns) == (714, 286)
    assert found["", "untenanted"].device_ns == 1000


def test_a_caller_that_leaves_while_its_batch_runs_is_not_charged() -> None:
    devices = Devices(now_ns=Ticks())
    bench = Bench(spec(), devices=devices)
    number = bench.call(tenant="a")
    bench.clock.run()
    bench.leave(number)
    bench.settle()
    assert unbilled_ns(devices.book.rows())["left"] == 0  # its row was not executed
    bench = Bench(spec(), devices=devices)
    number = bench.call(tenant="a")
    bench.clock.run()
    bench.workers.run_next()
    bench.leave(number)
    bench.settle()
    assert unbilled_ns(devices.book.rows())["left"] == 1000
    assert rows_of(devices)["a", ""].device_ns == 0


def test_a_failed_batch_is_charged_to_nobody_and_its_good_half_to_its_tenant() -> None:
    devices = Devices(now_ns=Ticks())
    bench = Bench(spec(), devices=devices)
    bench.call()
    bench.clock.run()
    good, bad = bench.call(tenant="a"), bench.call(tenant="b")
    bench.bad.add(bad)
    bench.settle()
    assert bench.answer(good).device_ns == 1000
    assert unbilled_ns(devices.book.rows())["failed"] == 2000  # both together, then the bad one alone
    assert rows_of(devices)["b", ""].device_ns == 0


def test_copies_and_repeats_of_the_gateway_are_not_charged() -> None:
    devices = Devices(now_ns=Ticks())
    accounts = Accounts(devices, "m", "1", devices.host)
    for unbilled in ("shadow", "repeat"):
        assert accounts.of(context("a", unbilled=unbilled)).key.why == unbilled
    assert accounts.of(context("a")) is accounts.of(context("a"))
    assert accounts.of(context("a")).key.why == ""


def test_the_lines_of_the_ledger_say_what_was_used_and_for_how_long_the_device_was_watched() -> None:
    ticks = Ticks()
    devices = Devices({"host": "c7i"}, now_ns=ticks)
    bench = Bench(spec(), devices=devices)
    lines = UsageLines(devices, ticks)
    bench.call(tenant="a")
    bench.clock.run()
    (device,) = lines.added("2026-11-24T17:05")
    bench.settle()
    use, after = lines.added("2026-11-24T17:05")
    assert (use.tenant, use.tier, use.target, use.device_class, use.device_ns) == ("a", "gold", "double", "c7i", 1000)
    assert (after.kind, device.busy_ns + after.busy_ns, after.open_ns) == ("device", 1000, 0)
    assert after.wall_ns > after.busy_ns


async def test_an_answer_says_to_trusted_peers_what_it_used_and_the_metrics_add_it_up(unit: Unit) -> None:
    headers = {"x-oriel-tenant": "acme", "x-oriel-tier": "gold"}
    async with client_of(unit.http_port) as http:
        answers = [await http.post(INFER, json=ONES, headers=headers) for _ in range(3)]
        shadow = await http.post(INFER, json=ONES, headers={**headers, "x-oriel-unbilled": "shadow"})
    costs = [dict(part.split("=") for part in answer.headers["x-oriel-cost"].split(";")) for answer in answers]
    assert all(cost["class"] == "cpu" and cost["cpu"] == "0" and int(cost["dev"]) > 0 for cost in costs)
    assert "x-oriel-cost" in shadow.headers
    found = await read(unit)
    labels = {"tenant": "acme", "tier": "gold", "target": "double", "class": "cpu"}
    assert found.value("oriel_usage_device_seconds_total", **labels) == pytest.approx(
        sum(int(cost["dev"]) for cost in costs) / 1e9, abs=1e-12
    )
    assert found.value("oriel_usage_unbilled_device_seconds_total", why="shadow") > 0
    assert found.value("oriel_usage_unbilled_device_seconds_total", why="warmup") > 0
    assert found.value("oriel_usage_unreconciled_ratio", unit="inference") == 0


async def test_a_server_records_what_was_used_and_loses_nothing_at_its_stop(repository: Path, tmp_path: Path) -> None:
    settings = Settings(repositories=(repository,), http_port=0, grpc_port=0, metrics_port=0, usage_folder=tmp_path)
    async with open_unit(settings) as unit, client_of(unit.http_port) as http:
        answers = [await http.post(INFER, json=ONES, headers={"x-oriel-tenant": "acme"}) for _ in range(5)]
        sizes = sum(len(answer.content) for answer in answers)
        used_ns = sum(int(answer.headers["x-oriel-cost"].split(";")[0][4:]) for answer in answers)
    lines = [line for _, path in segments(tmp_path) for _, line in read_segment(path) if line is not None]
    mine = [line for line in lines if line.tenant == "acme"]
    assert sum(line.device_ns for line in mine) == used_ns
    assert (sum(line.requests for line in mine), sum(line.rows for line in mine)) == (5, 5)
    assert sum(line.bytes_out for line in mine) == sizes
    assert sum(line.bytes_in for line in mine) == 5 * len(json.dumps(ONES, separators=(",", ":")))
    busy_ns = sum(line.busy_ns for line in lines)
    assert busy_ns == sum(line.device_ns for line in lines) and busy_ns < sum(line.wall_ns for line in lines)
    assert {line.kind for line in lines} == {"start", "use", "device", "stop"}
