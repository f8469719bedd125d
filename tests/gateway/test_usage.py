"""What tenants see of their own use and of their limits, and what the gateway writes to the usage ledger."""

import asyncio
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.cube import add_up
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.observe.usage import MAX_CLASSES, Usage

from ..steps import steps
from .records import record, target
from .stack import LIMITED, Client, Seen, documents, gateway, upstream

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)
NEXT_DAY = datetime(2026, 11, 25, 0, 0, 1, tzinfo=UTC)
NEXT_MONTH = datetime(2026, 12, 1, tzinfo=UTC)


def tenant(name: str, caller: str = "") -> Any:
    return SimpleNamespace(name=name, tier=SimpleNamespace(name="gold"), caller=caller)


def note(usage: Usage, who: str, what: str, used: str = "", busy_s: float = 0.0, caller: str = "") -> None:
    count(usage, [call(tenant(who, caller), what, ended_s=2.0 + busy_s, bytes_out=20, used=used)])


def count(usage: Usage, records: list[Record]) -> None:
    usage.count(add_up(records, usage.classes), NOON)


def call(who: Any = None, what: str = "m", outcome: Outcome = Outcome.ANSWERED, **facts: Any) -> Record:
    """Return the record of a call that was sent at second 2 and is answered with status 200."""
    known = {
        "opened": True,
        "status": 200,
        "sent_s": 2.0,
        "ended_s": 3.0,
        "bytes_in": 10,
        "beside": 1,
        "target": target(what),
    } | facts
    return record(who or tenant("a"), known.pop("target"), outcome, **known)


def test_what_answers_said_is_the_tenants_and_what_they_did_not_say_is_estimated() -> None:
    usage = Usage(NOON)
    note(usage, "a", "m", "dev=500;cpu=0;class=h100")
    note(usage, "a", "m", "dev=700;cpu=9;class=h100;tin=3;tout=4")
    note(usage, "a", "theirs", busy_s=0.25)
    note(usage, "b", "m", "dev=1;cpu=0;class=h100")
    note(usage, "a", "m", "dev=999;cpu=0;class=h100", caller="service")
    found = usage.of("a", NOON)
    assert (found["tenant"], found["since"]) == ("a", "2026-11-24T12:00:00Z")
    day = found["day"]
    assert (day["begins"], day["requests"], day["bytes_out"]) == ("2026-11-24T00:00:00Z", 3, 60)
    by_target = {each["target"]: each for each in day["targets"]}
    ours, theirs = by_target["m"], by_target["theirs"]
    assert (ours["device_ns"], ours["cpu_ns"], ours["tokens_out"], ours["estimated"]) == (1200, 9, 4, False)
    assert (theirs["device_ns"], theirs["estimated"]) == (250_000_000, True)
    assert usage.of("nobody", NOON)["month"]["requests"] == 0


BEGUN = {"status": 200, "response_s": 2.1, "answered_s": 2.5}
LEFT, LATE, BROKEN = Outcome.CALLER_LEFT, Outcome.DEADLINE_EXCEEDED, Outcome.UPSTREAM_BROKEN
MISSED = Judged("missed", "execute")


@pytest.mark.parametrize(
    ("how", "requests", "device_ns"),
    [
        ({"outcome": LEFT}, 1, 500_000_000),
        ({"outcome": LEFT, **BEGUN}, 1, 500_000_000),
        ({"outcome": LEFT, **BEGUN, "used": "dev=7;cpu=0;class=h100"}, 1, 7),
        ({"outcome": LEFT, **BEGUN, "status": 503}, 0, 0),  # an error of its server
        ({"outcome": LEFT, "sent_s": 0.0}, 0, 0),
        (
            {"outcome": LATE, "status": 504, "judged": Judged("excused")},
            1,
            500_000_000,
        ),  # it allowed less than its tier
        ({"outcome": LATE, "status": 504, "judged": MISSED}, 0, 0),
        ({"outcome": LATE, **BEGUN, "judged": MISSED}, 1, 500_000_000),
        ({"outcome": BROKEN, **BEGUN, "judged": MISSED}, 0, 0),
        ({"outcome": LEFT, **BEGUN, "protocol": "grpc", "answered_s": 2.1}, 1, 0),  # a stream, which may have idled
    ],
)
def test_what_a_client_cuts_off_is_its_own_and_what_a_server_breaks_off_is_not(
    how: dict[str, Any], requests: int, device_ns: int
) -> None:
    usage = Usage(NOON)
    count(usage, [call(**{"status": 0, "ended_s": 2.5, "answered_s": 2.5} | how)])
    day = usage.of("a", NOON)["day"]
    assert (day["requests"], day["device_ns"], day["bytes_in"]) == (requests, device_ns, 10 * requests)
    lines = usage.added("2026-11-24T12:00")
    assert {(line.kind, line.why, line.estimated) for line in lines} == (
        {("seen", "left", True)} if requests else set()
    )
    again = Usage(NOON)
    again.read_ledger(lines, NOON)
    assert again.of("a", NOON)["day"]["device_ns"] == device_ns


@pytest.mark.parametrize(("status", "requests"), [(200, 1), (399, 1), (400, 0), (500, 0)])
@pytest.mark.parametrize("used", ["dev=7;cpu=0;class=h100", ""])
def test_errors_are_charged_to_nobody(status: int, requests: int, used: str) -> None:
    usage = Usage(NOON)
    count(usage, [call(status=status, bytes_out=20, used=used)])
    day = usage.of("a", NOON)["day"]
    assert (day["requests"], day["bytes_out"]) == (requests, 20 * requests)
    assert (day["device_ns"] > 0) is bool(requests)
    assert bool(usage.added("2026-11-24T12:00")) is bool(requests)


@pytest.mark.parametrize(
    ("change", "device_ns"),
    [
        ({}, 250_000_000),  # a quarter of the second, because four calls were in flight
        ({"sent_s": 0.0}, 0),  # another call's answer
        ({"target": target("m", executes=False)}, 0),  # metadata
        ({"used": "nonsense"}, 250_000_000),
        ({"beside": 0}, 1_000_000_000),
    ],
)
def test_only_what_was_executed_is_estimated(change: dict[str, Any], device_ns: int) -> None:
    """Lists and metadata were charged as device time: 265 of them spent a budget of one device second."""
    usage = Usage(NOON)
    count(usage, [call(**{"beside": 4} | change)])
    (shown,) = usage.of("a", NOON)["day"]["targets"]
    assert (shown["requests"], shown["bytes_in"], shown["device_ns"]) == (1, 10, device_ns)
    assert shown["estimated"] is bool(device_ns)


@pytest.mark.parametrize(
    ("used", "device_ns", "tokens"),
    [
        ("trailer", 500_000_000, 0),  # its server would have reported the cost behind the last piece
        ("trailer;tin=3;tout=4", 500_000_000, 4),  # and the gateway read tokens meanwhile
        ("tin=3;tout=4", 500_000_000, 4),
        ("dev=0;cpu=0;class=", 0, 0),
    ],
)
def test_a_stream_that_is_cut_off_before_its_cost_came_is_estimated(used: str, device_ns: int, tokens: int) -> None:
    usage = Usage(NOON)
    count(usage, [call(outcome=LEFT, response_s=2.1, answered_s=2.5, ended_s=2.5, used=used)])
    day = usage.of("a", NOON)["day"]
    assert (day["device_ns"], day["tokens_out"]) == (device_ns, tokens)
    usage = Usage(NOON)
    count(usage, [call(outcome=LEFT, target=target("m", executes=False), response_s=2.1)])
    assert usage.of("a", NOON)["day"]["device_ns"] == 0


@pytest.mark.parametrize(
    ("used", "device_ns", "tokens"),
    [
        ("trailer", 250_000_000, 0),
        ("trailer;tin=3;tout=4", 250_000_000, 4),
        ("dev=0;cpu=0;class=", 0, 0),  # its server says that nothing was executed
    ],
)
def test_a_stream_whose_trailers_were_lost_is_estimated_but_not_billed(used: str, device_ns: int, tokens: int) -> None:
    """It counted as one that had cost nothing: behind a proxy without trailers no budget was ever spent."""
    usage = Usage(NOON)
    note(usage, "a", "m", used, busy_s=0.25)
    day = usage.of("a", NOON)["day"]
    assert (day["requests"], day["device_ns"], day["tokens_out"]) == (1, device_ns, tokens)
    written = [line for line in usage.added("2026-11-24T12:00") if line.kind == "use"]
    assert [(line.requests, line.device_ns, line.tokens_out) for line in written] == [(1, 0, 0)], (
        "its server records it"
    )


def test_days_and_months_begin_at_midnight_utc() -> None:
    usage = Usage(NOON)
    note(usage, "a", "m", "dev=500;cpu=0;class=h100")
    later = usage.of("a", NEXT_DAY)
    assert (later["day"]["device_ns"], later["month"]["device_ns"]) == (0, 500)
    assert usage.of("a", NEXT_MONTH)["month"]["device_ns"] == 0


def test_the_ledger_gets_bytes_and_estimates_and_a_restarted_gateway_its_own_notes() -> None:
    usage = Usage(NOON)
    note(usage, "a", "m", "dev=500;cpu=0;class=h100")
    note(usage, "a", "theirs", busy_s=1e-6)
    lines = usage.added("2026-11-24T12:00")
    use = [line for line in lines if line.kind == "use"]
    assert sum(line.requests for line in use) == 2 and sum(line.bytes_in for line in use) == 20
    assert [(line.target, line.device_ns) for line in use if line.device_ns] == [("theirs", 1000)]
    assert all(line.estimated for line in use if line.device_ns)
    again = Usage(NEXT_DAY)
    again.read_ledger(lines, NEXT_DAY)
    found = again.of("a", NEXT_DAY)
    assert found["since"] == "2026-11-24T12:00:00Z"
    assert (found["month"]["device_ns"], found["month"]["requests"], found["day"]["requests"]) == (1500, 2, 0)
    assert usage.added("2026-11-24T12:01") == []


def test_what_many_tenants_used_earlier_costs_the_ledger_nothing_later() -> None:
    """With 100,000 tenants it looked at 200,000 rows each second, used or not."""
    usage = Usage(NOON)
    took = []
    for _ in range(2):
        for number in range(300 if not took else 1):
            note(usage, f"t{number}", "m", "dev=500;cpu=0;class=h100")
        with steps() as counted:
            assert usage.added("2026-11-24T12:00")
        took.append(counted.count)
    assert took[1] < took[0] / 100
    assert usage.of("t299", NOON)["month"]["device_ns"] == 500


def test_device_time_is_known_by_class_in_a_batch_of_several_and_after_a_restart() -> None:
    usage = Usage(NOON)
    who, what = tenant("a"), target("m")
    costs = ["dev=5;cpu=1;class=h100", "dev=7;cpu=1;class=cpu", "dev=11;cpu=1;class=h100", "dev=0;cpu=1;class=l4"]
    count(usage, [call(who, target=what, used=used) for used in costs])
    note(usage, "a", "theirs", busy_s=1e-6)
    expected = {"h100": 16, "cpu": 7, "": 1000}
    day, (use,) = usage.today("a", NOON)
    assert (day, use.device_ns, use.cpu_ns) == ("2026-11-24", expected, 4)
    lines = [line for line in usage.added("2026-11-24T12:00") if line.kind == "seen"]
    assert sum(line.device_ns for line in lines) == 1023 and sum(line.requests for line in lines) == 5
    again = Usage(NOON)
    again.read_ledger(lines, NOON)
    assert again.today("a", NOON)[1] == [use]
    assert not any(again.today("a", NEXT_DAY)[1][0].device_ns.values())


def test_classes_of_devices_that_servers_name_are_bounded() -> None:
    usage = Usage(NOON)
    for number in range(MAX_CLASSES + 9):
        note(usage, "a", "m", f"dev=1;cpu=0;class=c{number}")
    _, (use,) = usage.today("a", NOON)
    assert len(use.device_ns) == MAX_CLASSES + 1 and use.device_ns[""] == 9


async def test_tenants_see_their_own_use_and_limits_with_their_key() -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-oriel-cost: dev=500;cpu=0;class=cpu\r\n\r\nok"

    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        up.answer = answer
        for key in (LIMITED, None):
            reply = await client.ask("/v2/models/digits/infer", b"abc", **({"key": key} if key else {}))
            assert reply.status == 200 and "x-oriel-cost" not in reply.headers
        asked = len(up.seen)
        used = await client.ask("/v1/usage", method="GET", key=LIMITED)
        found = json.loads(used.body)
        assert used.headers["cache-control"] == "private, no-store"
        assert (found["tenant"], found["day"]["requests"], found["month"]["device_ns"]) == ("limited", 1, 500)
        assert [(each["target"], each["bytes_in"]) for each in found["day"]["targets"]] == [("digits", 3)]
        limits = json.loads((await client.ask("/v1/limits", method="GET", key=LIMITED)).body)
        (rate,) = limits["limits"]
        assert (limits["tenant"], limits["tier"]) == ("limited", "gold")
        assert (rate["name"], rate["kind"], rate["unit"], rate["limit"]) == ("requests", "rate", "requests", 2)
        assert rate["left"] in (1, 2)
        for path in ("/v1/usage", "/v1/limits"):
            assert (await client.ask(path, method="GET", key=None)).status == 401
            assert (await client.ask(path, b"x", key=LIMITED)).status == 405
        assert len(up.seen) == asked  # they are the gateway's own


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
STREAMED = EVENTS + b"trailer: x-oriel-cost\r\n\r\n"
COSTED = b"5\r\ndata:\r\n0\r\nx-oriel-cost-us: 7\r\nx-oriel-cost: dev=500;cpu=2;class=h100;tin=3;tout=4\r\n\r\n"


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_streams_cost_is_read_from_its_trailers_and_no_client_sees_it(at_once: bool) -> None:
    """It was estimated beside what its servers had recorded, and its tokens were not counted."""
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAMED + COSTED if at_once else STREAMED)
        if not at_once:
            await go.wait()
            writer.write(COSTED)
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        async with gateway(documents([address[1]])) as (port, core), Client(port) as client:
            client.send("/v2/models/digits/generate_stream", headers="connection: close\r\n")
            head = await client.reader.readuntil(b"\r\n\r\n")
            go.set()
            raw = head + await client.reader.read()
            assert raw.endswith(b"data:" if at_once else b"data:\r\n0\r\n\r\n")
            assert b"x-oriel" not in raw and b"trailer" not in raw
            core.records.stats.count()
            (mine,) = core.records.stats.usage.of("g")["day"]["targets"]
            assert (mine["device_ns"], mine["cpu_ns"], mine["tokens_out"], mine["estimated"]) == (500, 2, 4, False)


def test_each_line_of_the_ledger_and_each_month_has_only_its_own_calls() -> None:
    usage, who, same = Usage(NOON), tenant("a"), target("m")

    def served(now: datetime) -> list[tuple[str, int]]:
        usage.count(add_up([call(who, target=same)], usage.classes), now)
        return [(line.kind, line.requests) for line in usage.added("2026-11-24T12:00")]

    for now in (NOON, NOON, NEXT_DAY, NEXT_MONTH):
        assert served(now) == served(now) == [("use", 1), ("use", 0), ("seen", 1)]
    assert usage.of("a", NEXT_MONTH)["month"]["requests"] == 2
