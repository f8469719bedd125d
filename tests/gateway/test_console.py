"""The console of the admin port: its files, the streams, and what it tells of a gateway and of one tenant."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.console import reading
from oriel_gateway.admin.console.live import MAX_VIEWERS, Live, Source
from oriel_gateway.admin.console.pages import PATHS, POLICY
from oriel_gateway.admin.console.reports import Report, Reports
from oriel_gateway.admin.external_scaler import ExternalScaler
from oriel_gateway.admin.troubles import ENDS_SOON_S, troubles
from oriel_gateway.command import trace_link
from oriel_gateway.core import Gateway
from oriel_gateway.limits import SharedLimiter
from oriel_gateway.observe.record import Judged
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.model_locations import ABSENT_S
from oriel_policies.upstreams.ejection import Cause
from oriel_wire.errors import StartFailed
from oriel_wire.usage.lines import LedgerCounts

from ..conformance.memory_ledger import MemoryLedger
from ..waiting import until
from .cold_pools import cold
from .records import record, target
from .stack import BRONZE, LIMITED, Client, Seen, documents, gateway, upstream

TOKEN = "an-operators-token"
INFER = "/v2/models/digits/infer"


@asynccontextmanager
async def operator(core: Gateway, token: str | None = None, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(admin_app(core, token=token, **more), client=("127.0.0.1", 50000))  # type: ignore[arg-type]  # ASGI
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8082") as client:
        yield client


# The files ------------------------------------------------------------------------------------------------------


async def test_the_files_need_no_token_and_say_nothing_but_whether_data_does() -> None:
    async with gateway(documents([1])) as (_, core), operator(core, TOKEN) as client:
        for path in PATHS:
            answer = await client.get(path, headers={"accept-encoding": "identity"})
            assert answer.status_code == 200 and answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            compressed = await client.get(path, headers={"accept-encoding": "gzip"})
            assert compressed.headers["content-encoding"] == "gzip" and compressed.text == answer.text
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content
            for secret in (TOKEN, "bronze", "limited"):
                assert secret not in answer.text
        assert 'data-token="needed"' in (await client.get("/console")).text
        assert (await client.get("/console/live")).status_code == 401
        assert (await client.get("/console/tenants/g")).status_code == 401
        async with operator(core) as without:
            assert 'data-token="none"' in (await without.get("/console")).text


@pytest.mark.parametrize("path", [*PATHS, "/console/live", "/console/tenants/g"])
async def test_nothing_but_get_is_served(path: str) -> None:
    async with gateway(documents([1])) as (_, core), operator(core) as client:
        for method in ("POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET"), method


async def test_all_files_together_are_small() -> None:
    async with gateway(documents([1])) as (_, core), operator(core) as client:
        size = 0
        for path in PATHS:
            async with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
                body = b"".join([piece async for piece in answer.aiter_raw()])
            size += len(body)
            assert gzip.decompress(body)
        assert size <= 60 * 1024


# The streams ----------------------------------------------------------------------------------------------------


class Numbers(Source):
    """Counts its snapshots."""

    def __init__(self) -> None:
        self.made = 0
        self.rests = 0

    def snapshot(self) -> bytes:
        self.made += 1
        return b'{"n":%d}' % self.made

    async def ask(self) -> None:
        await asyncio.Event().wait()

    def rest(self) -> None:
        self.rests += 1


class Viewer:
    """One stream, driven as a server drives an application. stuck: while it is cleared nothing is taken."""

    def __init__(self, live: Live) -> None:
        self.events: list[bytes] = []
        self.status = 0
        self.ended = False
        self.left = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        self.task = asyncio.create_task(live({"type": "http", "method": "GET"}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("more_body"):
            self.events.append(message["body"])
        else:
            self.ended = True

    @property
    def data(self) -> list[bytes]:
        return [part for each in self.events for part in each.split(b"\n\n") if part.startswith(b"data: ")]


async def test_all_viewers_get_the_same_snapshots_and_none_is_made_without_one() -> None:
    source = Numbers()
    live = Live(source, second_s=0.001)
    assert source.made == 0
    first, second = Viewer(live), Viewer(live)
    await until(lambda: len(first.data) >= 4 and len(second.data) >= 4)
    numbers = {each for viewer in (first, second) for each in viewer.data}
    assert len(numbers) <= source.made == live.made, "each is made once"
    for viewer in (first, second):
        viewer.left.set()
        await viewer.task
    assert live.viewers == 0 and source.rests == 1
    made = source.made
    third = Viewer(live)
    await until(lambda: third.data)
    assert third.data[0] == b'data: {"n":%d}' % (made + 1), "none was made meanwhile, and a new viewer waits for none"
    third.left.set()
    await third.task


async def test_a_ninth_viewer_is_refused_and_has_a_place_when_another_leaves() -> None:
    live = Live(Numbers(), second_s=0.001)
    viewers = [Viewer(live) for _ in range(MAX_VIEWERS)]
    await until(lambda: all(viewer.data for viewer in viewers))
    refused = Viewer(live)
    await refused.task
    assert refused.status == 503
    viewers[0].left.set()
    await viewers[0].task
    taken = Viewer(live)
    await until(lambda: taken.data)
    live.close()
    await asyncio.gather(*[viewer.task for viewer in (*viewers, taken)])
    assert taken.ended and all(viewer.ended for viewer in viewers[1:]), "streams end when the gateway stops"
    late = Viewer(live)
    await late.task
    assert late.status == 503


async def test_a_viewer_that_takes_nothing_is_cut_and_a_slow_one_gets_the_latest() -> None:
    live = Live(Numbers(), second_s=0.001, stall_s=0.05)
    stuck, slow = Viewer(live), Viewer(live)
    await until(lambda: stuck.data and slow.data)
    stuck.takes.clear()
    await stuck.task
    assert not stuck.ended, "its server aborts the connection"
    slow.left.set()
    await slow.task


async def test_a_comment_keeps_a_silent_stream_open() -> None:
    live = Live(Numbers(), second_s=3600.0, comment_s=0.01)
    viewer = Viewer(live)
    await until(lambda: sum(each.count(b": ") - each.count(b"data: ") for each in viewer.events) >= 3)
    assert len(viewer.data) == 1
    viewer.left.set()
    await viewer.task


# A gateway with calls -------------------------------------------------------------------------------------------


async def test_a_snapshot_tells_of_tiers_pools_models_tenants_and_misses() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        source = Source(core)
        for number in range(3):
            await client.ask(INFER, b"{}", headers=f"x-request-id: r{number}\r\n")
        await client.ask(INFER, b"{}", key=BRONZE)
        for _ in range(4):
            async with Client(port) as limited:
                await limited.ask(INFER, key=LIMITED)
        said = json.loads(source.snapshot())
        tiers = {row["tier"]: row for row in said["tiers"]}
        assert (tiers["gold"]["met"], tiers["bronze"]["met"], tiers["gold"]["waiting"]) == (5, 1, 0)
        assert (tiers["gold"]["attainment"]["5m"], tiers["gold"]["budget_left"]) == (1.0, 1.0)
        (pool,) = said["pools"]
        assert (pool["pool"], pool["inflight"], pool["endpoints"]) == ("p", 0, {"unknown": 1})
        (target,) = said["targets"]
        assert (target["kind"], target["name"], target["met"]) == ("model", "digits", 6) and target["p50_ms"] > 0
        tenants = {row["tenant"]: row for row in said["tenants"]}
        assert tenants["limited"]["refused"] == 2 and tenants["g"]["met"] == 3
        assert [(row["tenant"], row["result"], row["reason"]) for row in said["calls"]] == [
            ("limited", "refused", "rate_limited")
        ] * 2
        assert json.loads(source.snapshot())["rates"] == {"met": 0.0, "late": 0.0, "missed": 0.0, "excused": 0.0}


def test_a_server_with_two_ports_is_one_in_the_worse_state() -> None:
    def pool(*states: str) -> Any:
        hosts = ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3")
        members = [SimpleNamespace(address=(host, 1), state=state) for host, state in zip(hosts, states, strict=False)]
        return SimpleNamespace(members=members)

    gate: Any = SimpleNamespace(endpoints=pool("ready", "ready", "ready", "ejected:errors"), grpc=pool())
    assert reading._endpoints(gate) == {"ready": 3, "ejected": 1}
    gate.grpc = pool("unknown", "unreachable", "ready")
    assert reading._endpoints(gate) == {"ready": 2, "unreachable": 1, "ejected": 1}


async def test_two_calls_before_the_first_answer_do_not_spend_a_budget() -> None:
    """Somebody who polls until the platform is up was shown a tier whose budget of 30 days is spent."""
    async with gateway(documents([1])) as (_, core):
        budgets = core.records.stats.objectives.budgets
        for bad in (2, 8):
            budgets.add(("g", "gold", "digits"), time(), bad, bad, {})
            left = reading.promises(core, time())["gold"]["budget_left"]
            assert (left is None) == (bad == 2)


async def test_replicas_are_shown_of_pools_that_something_scales() -> None:
    async with gateway(cold("start_ms = 60000")) as (_, core):
        (pool,) = json.loads(Source(core).snapshot())["pools"]
        assert "wanted" not in pool
        ExternalScaler(core.scaled)
        (pool,) = json.loads(Source(core).snapshot())["pools"]
        assert pool["wanted"] is not None


async def test_ejected_servers_and_those_that_come_and_go_are_named() -> None:
    async with gateway(documents([1, 2, 3])) as (_, core):
        these = core.pools["p"].endpoints
        assert json.loads(Source(core).snapshot())["troubles"] == []
        these.eject(these[0], Cause.STUCK, monotonic())
        for _ in range(3):
            for reach in (Reach.READY, Reach.NOT_READY):
                these.note_reach(these[1], reach)
        these.withhold(these[2], "slow", Cause.LATENCY, monotonic())
        named = ["p: 127.0.0.1:1 is ejected (stuck)", "p: 127.0.0.1:2 was lost 3 times in the last minute"]
        named.append("p: 127.0.0.1:3 gets no calls for 1 of its models, as 'slow'")
        assert json.loads(Source(core).snapshot())["troubles"] == named
        transport = httpx.ASGITransport(admin_app(core))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as admin:
            assert (await admin.get("/decisions")).json()["troubles"] == named
            assert 'oriel_gateway_models_withheld{pool="p"} 1.0' in (await admin.get("/metrics")).text
        assert these[2].withheld(monotonic() + ABSENT_S) == {}


async def test_a_ledger_that_does_not_answer_is_named() -> None:
    limiter = SharedLimiter(MemoryLedger(lambda: 0.0).seat("g"))
    async with gateway(documents([1]), limiter=limiter) as (_, core):
        assert troubles(core) == []
        limiter.ledger_client.replicas = 3  # whose calls the longer windows have
        transport = httpx.ASGITransport(admin_app(core))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as admins:
            assert (await admins.get("/slo")).json()["gateways"] == json.loads(Source(core).snapshot())["gateways"] == 3
        for _ in range(5):
            limiter.ledger_client._breaker.record_failure(monotonic())
        assert troubles(core) == ["Redis does not answer: each gateway admits its share of the limits"]


async def test_a_certificate_that_ends_and_a_disk_that_is_full_are_named() -> None:
    usage, certificates = LedgerCounts(), SimpleNamespace(expires_at=time() + ENDS_SOON_S + 60)
    async with gateway(documents([1])) as (_, core):
        assert json.loads(Source(core, certificates, usage).snapshot())["troubles"] == []  # type: ignore[arg-type]
        certificates.expires_at, usage.write_error = 86400.0, "/state (No space left on device)"
        async with operator(core, certificates=certificates, usage=usage) as client:
            expired, full = (await client.get("/decisions")).json()["troubles"]
        assert expired.startswith("the certificate of the public ports expired at 1970-01-02 00:00 UTC: from")
        assert full.endswith("its lines wait in memory: /state (No space left on device)")
        certificates.expires_at = time() + 7200.0
        assert "expires at" in troubles(core, certificates)[0]  # type: ignore[arg-type]


async def test_servers_are_asked_for_batches_version_provider_and_artefact() -> None:
    counts = iter([(10, 5), (40, 15), (8, 4)])
    versions: list[dict[str, Any]] = []

    async def answer(seen: Seen) -> bytes:
        if not seen.head.startswith("GET /v2/models/digits/stats"):
            return await up.ok(seen)
        rows, batches = next(counts, (0, 0))
        stats = {"version": "3", "inference_count": str(rows), "execution_count": batches, "last_inference": 7}
        found = versions or ([{"version": "2", "last_inference": 3}, stats] if rows else [])
        body = json.dumps({"model_stats": found}).encode()
        provider = b"x-oriel-provider: CPUExecutionProvider\r\nx-oriel-artefact: building\r\n"
        return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (provider, len(body), body)

    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        up.answer = answer
        await client.ask(INFER, b"{}")
        decided = core.records.decisions.latest(1)[0].target
        reports = Reports()
        for rows in (2.0, 3.0, 2.0, 2.0):
            # since its start, since the time before, after a restart of the server, and after an answer without a model
            await reports.ask([decided], core.pools)
            expected = Report(version="3", provider="CPUExecutionProvider", artefact="building", rows=rows)
            assert reports.targets == {"model:digits": expected}
        versions[:] = [{"version": "4", "last_inference": 9}]
        await reports.ask([decided], core.pools)
        assert reports.targets["model:digits"].was == "3"
        versions.append({"version": "5", "last_inference": 10})
        await reports.ask([decided], core.pools)
        assert reports.targets["model:digits"].was == "", "both run: calls are divided between them"
        await reports.ask([], core.pools)
        assert reports.targets == {}


async def test_a_tenants_usual_rate_is_that_of_the_hour_before_the_last_minutes() -> None:
    async with gateway(documents([1])) as (_, core):
        (tier,) = [each.name for each in core.snapshot.tiers.values()][:1]
        budgets = core.records.stats.objectives.budgets
        for at, calls in ((time() - 1800.0, 66), (time(), 5000)):
            for name in ("model:a", "model:b"):
                budgets.add(("t", tier, name), at, calls, 0, {})
        assert Source(core)._usual("t") == pytest.approx(2 * 66 / 3300.0)


@pytest.mark.parametrize(
    ("described", "version"),
    [
        ({"version": "1", "release": 4}, "1"),
        ({"version": "3", "versions": [{"version": "2", "weight": 9}, {"version": "3", "weight": 1}]}, "2, 3"),
        ({"version": "3", "versions": [{"version": "2", "weight": 0}, {"version": "3", "weight": 1}]}, "3"),
    ],
)
async def test_logic_servers_are_asked_for_the_versions_of_services(described: dict[str, Any], version: str) -> None:
    async def answer(seen: Seen) -> bytes:
        if not seen.head.startswith("GET /v1/services/resize HTTP"):
            return await up.ok(seen)
        body = json.dumps({"name": "resize", "state": "ready", **described}).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        up.answer = answer
        await client.ask("/v1/services/resize", b"{}")
        decided = core.records.decisions.latest(1)[0].target
        reports = Reports()
        await reports.ask([decided], core.pools)
        assert reports.targets == {"service:resize": Report(version=version)}


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ('{"cache":0.5,"calls":{"0":[2,1,0],"7":[1,1,1],"2":[0,3,4]}}', {"gold": [2, 1, 0], "bronze": [0, 3, 4]}),
        ('{"cache":0.5,"calls":{"0":[2,1]}}', None),
        ("", None),
    ],
)
async def test_pools_show_the_calls_of_their_language_models(told: str, shown: dict[str, list[int]] | None) -> None:
    async def answer(seen: Seen) -> bytes:
        if seen.head.startswith("GET /v2/health/ready HTTP"):
            return f"HTTP/1.1 200 OK\r\nx-oriel-language: {told}\r\ncontent-length: 0\r\n\r\n".encode()
        return b"HTTP/1.1 200 OK\r\nx-oriel-cost: dev=5;cpu=0;class=cpu;tin=30;tout=60\r\ncontent-length: 0\r\n\r\n"

    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        up.answer = answer
        source = Source(core)
        source.snapshot()
        await client.ask("/v1/chat/completions", b"{}")
        await source._reports.ask([], core.pools)
        found = json.loads(source.snapshot())
        (pool,) = found["pools"]
        assert pool.get("language") == (None if shown is None else {"cache": 0.5, "calls": shown})
        gold = next(each for each in found["tiers"] if each["tier"] == "gold")
        assert gold["tokens_s"] == pytest.approx(90 / found["covers_s"], rel=0.01)
        assert "tokens_s" not in next(each for each in found["tiers"] if each["tier"] == "bronze")


async def test_pools_show_the_tokens_that_a_server_made_since_it_was_asked_before() -> None:
    made = [0]

    async def answer(_: Seen) -> bytes:
        told = json.dumps({"cache": 0.5, "calls": {}, "made": made[0]})
        return f"HTTP/1.1 200 OK\r\nx-oriel-language: {told}\r\ncontent-length: 0\r\n\r\n".encode()

    async with upstream() as up, gateway(documents([up.port])) as (_, core):
        up.answer = answer
        source = Source(core)
        for made[0], is_shown in ((1000, False), (1500, True), (3, False)):  # the last one was started anew
            await source._reports.ask([], core.pools)
            (pool,) = json.loads(source.snapshot())["pools"]
            assert (pool["language"].get("tokens_s", 0) > 0) == is_shown


async def test_a_stream_with_slow_tokens_shows_how_much_longer_they_took() -> None:
    async with gateway(documents([1])) as (_, core):
        slow = record(core.snapshot.tenants["g"], target(), status=200, answered_s=1.01, ended_s=9.0)
        slow.judged = Judged("late", "tokens", 0.4, "tokens")
        row = reading._call(slow, reading.Moment(now=9.0, wall=9.0, since_s=None))
        assert (row["result"], row["over_ms"]) == ("late", 400.0)


PRICES = """
[prices.base]
currency = "EUR"
valid_from = 2026-01-01
million_tokens_out = 1000
[prices.h100]
class = "h100"
currency = "EUR"
valid_from = 2026-01-01
device_hour = "3600"
"""


async def test_calls_and_tenants_show_what_they_used_and_what_it_costs() -> None:
    async def answer(_: Seen) -> bytes:
        cost = "dev=400000000;cpu=2000000;class=h100;tin=3;tout=100"
        return f"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-oriel-cost: {cost}\r\n\r\nok".encode()

    async with upstream() as up, gateway(documents([up.port], extra=PRICES)) as (port, core), Client(port) as client:
        await client.ask(INFER, b"{}", headers="x-request-id: unreported\r\n")
        up.answer = answer
        for _ in range(2):
            await client.ask(INFER, b"{}", headers="x-request-id: r\r\n")
        async with operator(core) as reader:
            call, _ = (await reader.get("/decisions/r")).json()["decisions"]
            used = {"device_ms": 400.0, "device_class": "h100", "cpu_ms": 2.0, "tokens_in": 3, "tokens_out": 100}
            assert call["used"] == used and call["cost"] == {"EUR": "0.500000000"}
            (other,) = (await reader.get("/decisions/unreported")).json()["decisions"]
            assert other["used"] is None and other["cost"] is None
            today = (await reader.get("/console/tenants/g")).json()["today"]
            assert (today["cpu_ms"], today["tokens_in"], today["tokens_out"]) == (4.0, 6, 200)
            assert today["device_ms"] >= 800.0 and today["cost"] == {"EUR": "1.000000000"}
            nothing = (await reader.get("/console/tenants/b")).json()["today"]
            assert nothing["device_ms"] == 0.0 and nothing["cost"] == {"EUR": "0.000000000"}


async def test_a_tenants_limits_are_told_with_what_is_left_and_what_would_apply_to_a_call() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), operator(core) as client:
        before = (await client.get("/console/tenants/limited")).json()
        assert [(each["name"], each["left"], each["limit"]) for each in before["limits"]] == [("requests", 2, 2)]
        async with Client(port) as caller:
            await caller.ask(INFER, key=LIMITED)
        said = (await client.get("/console/tenants/limited", params={"model": "digits"})).json()
        assert [each["left"] for each in said["limits"]] == [1]
        assert ["identify", "tier", "allow", "limit", "route", "pool"] == [each["stage"] for each in said["steps"]]
        refused = (await client.get("/console/tenants/b", params={"model": "hidden"})).json()
        assert refused["steps"][-1]["refused"] == "not_found"
        assert (await client.get("/console/tenants/nobody")).status_code == 404


@pytest.mark.parametrize(
    "link", ["traces.example.com/{trace_id}", "javascript:{trace_id}", "https://traces.example.com/"]
)
def test_a_link_that_is_none_is_refused_at_the_start(link: str) -> None:
    with pytest.raises(StartFailed, match="ORIEL_TRACE_URL"):
        trace_link(link)


async def test_a_link_to_the_trace_is_in_each_decision_if_one_is_configured() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        await client.ask(INFER, b"{}", headers="x-request-id: r\r\n")
        async with operator(core, trace_url="https://traces.example.com/t/{trace_id}") as reader:
            (said,) = (await reader.get("/decisions/r")).json()["decisions"]
            assert said["trace_url"] == f"https://traces.example.com/t/{said['trace_id']}"
        async with operator(core) as reader:
            assert "trace_url" not in (await reader.get("/decisions/r")).json()["decisions"][0]
