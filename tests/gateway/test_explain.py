"""What operators can read: decisions, queues, metrics, the access log, and who may ask for them."""

import json
import re
from pathlib import Path

import pytest
from grpc import aio
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from oriel_gateway.admin.guard import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, admin_token
from oriel_gateway.errors import Outcome
from oriel_gateway.observe.access_log import AccessLog
from oriel_gateway.observe.decisions import explain, stages
from oriel_policies.documents import compile_documents
from oriel_wire.errors import StartFailed
from oriel_wire.observe.telemetry import Histogram

from ..waiting import until
from .grpc_stack import Backend, infer, stack
from .operators import admin, decision, held
from .records import mark, record
from .stack import BRONZE, GOLD, LIMITED, Client, Seen, documents, gateway, upstream

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOKEN = "an-operators-token"


async def test_an_answered_call_is_explained() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask("/v2/models/digits/infer", b"12345", headers="x-request-id: mine\r\n")
        assert reply.status == 200
        said = await decision(core, "mine")
        assert (said["tenant"], said["tier"], said["band"]) == ("g", "gold", 0)
        assert (said["target"], said["pool"], said["side"]) == ("model:digits", "p", None)
        assert (said["reason"], said["status"], said["bytes_in"], said["bytes_out"]) == ("answered", 200, 5, 2)
        assert said["endpoint"] == f"127.0.0.1:{up.port}" and said["tried"] == [] and said["queue"] is None
        budget = said["budget_ms"]
        assert 8000 == budget["arrival"] >= budget["permit"] >= budget["upstream"] >= budget["answer"] >= budget["end"]
        took = said["stages_ms"]
        assert sum(took.values()) - took["total"] == pytest.approx(took["total"], abs=0.01)
        assert said["trace_id"] in reply.headers["traceresponse"]
        await client.ask("/v2/models/digits/infer", headers="x-request-id: mine\r\n")
        async with admin(core) as operator:
            both = (await operator.get("/decisions/mine")).json()["decisions"]
            assert [one["bytes_in"] for one in both] == [0, 5], "a repeated id returns both calls, the latest first"
            assert (await operator.get("/decisions/never")).status_code == 404


async def test_refusals_of_every_stage_are_explained_and_carry_timing_and_reason() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core):

        async def asks(request_id: str, target: str, body: bytes = b"", **more: str | None) -> tuple[int, str]:
            more["headers"] = f"x-request-id: {request_id}\r\n" + (more.get("headers") or "")
            async with Client(port) as client:
                reply = await client.ask(target, body, **more)
            error = json.loads(reply.body)
            reason = error.get("reason") or error["error"]["reason"]
            assert reply.headers["server-timing"].startswith("gateway-queue;dur="), reply.headers
            assert reply.headers["x-request-id"] == request_id
            said = await decision(core, request_id)
            assert (said["reason"], said["status"]) == (reason, reply.status) and said["cause"]
            return reply.status, reason

        infer = "/v2/models/digits/infer"
        assert await asks("a", infer, key=None) == (401, "unauthenticated")
        assert await asks("b", infer, headers="x-api-key: other\r\n") == (400, "ambiguous_credentials")
        assert await asks("c", "/v2/models/hidden/infer", key=BRONZE) == (404, "not_found")
        assert await asks("d", "/v1/services/digits", method="DELETE") == (405, "method_not_allowed")
        assert await asks("e", infer, bytes(1_000_001)) == (413, "too_large")
        assert await asks("f", infer, headers="x-request-timeout-ms: soon\r\n") == (400, "bad_request")
        for number in range(3):
            async with Client(port) as client:
                await client.ask(infer, key=LIMITED, headers=f"x-request-id: l{number}\r\n")
        assert (await decision(core, "l2"))["reason"] == "rate_limited"
        async with held(up):
            late = await asks("g", infer, headers="x-request-timeout-ms: 30\r\n")
        assert late == (504, "deadline_exceeded")
        async with admin(core) as operator:
            found = (await operator.get("/decisions", params={"tenant": "g", "reason": "too_large"})).json()
            assert [one["request_id"] for one in found["decisions"]] == ["e"]
            assert len((await operator.get("/decisions?limit=3")).json()["decisions"]) == 3
            assert (await operator.get("/decisions?limit=many")).status_code == 400


async def test_upstreams_that_cannot_be_reached_are_named_as_tried() -> None:
    async with gateway(documents([1])) as (port, core), Client(port) as client:
        await core.endpoint_watch.close()  # so that the call is the first request to the endpoint
        headers = "x-request-id: r\r\nx-request-timeout-ms: 100\r\n"
        reply = await client.ask("/v2/models/digits/infer", headers=headers)
        said = await decision(core, "r")
        assert reply.status == said["status"] == 502 and said["reason"] == "upstream_unreachable"
        assert said["tried"] == ["127.0.0.1:1"] and said["endpoint"] is None
    async with gateway(documents(list(range(1, 11)))) as (port, core), Client(port) as client:
        await core.endpoint_watch.close()
        await client.ask("/v2/models/digits/infer", headers=headers)
        assert len(set((await decision(core, "r"))["tried"])) == 8


async def test_who_did_not_execute_a_call_is_told_beside_who_answered_it() -> None:
    full = b'{"error": "full", "reason": "queue_full"}'
    asked: list[int] = []

    async def answer(seen: Seen) -> bytes:
        asked.append(int((seen.get("host") or "").rpartition(":")[2]))
        if len(asked) > 1:
            return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        return b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n%b" % (len(full), full)

    async with upstream() as one, upstream() as other, gateway(documents([one.port, other.port])) as (port, core):
        await core.endpoint_watch.close()  # so that no probe is counted as a call
        one.answer = other.answer = answer
        async with Client(port) as client:
            reply = await client.ask("/v2/models/digits/infer", b"x", headers="x-request-id: r\r\n")
        said = await decision(core, "r")
        assert reply.status == said["status"] == 200 and sorted(asked) == sorted((one.port, other.port))
        assert said["tried"] == [f"127.0.0.1:{asked[0]}"] and said["endpoint"] == f"127.0.0.1:{asked[1]}"


async def test_waiting_calls_are_listed_and_the_place_in_the_queue_is_kept() -> None:
    async with upstream() as up, gateway(documents([up.port], max_inflight=1)) as (port, core), held(up) as go:
        clients = [Client(port) for _ in range(4)]
        queue = core.pools["p"].admission.queue
        for number, client in enumerate(clients):
            await client.__aenter__()
            key = GOLD if number < 3 else BRONZE
            client.send("/v2/models/digits/infer", b"x", key=key, headers=f"x-request-id: r{number}\r\n")
            await until(lambda number=number: core.pools["p"].admission.inflight and len(queue) == number)
        async with admin(core) as operator:
            pool = (await operator.get("/queues")).json()["p"]
            text = (await operator.get("/metrics")).text
        assert pool["waiting"] == {"gold": 2, "bronze": 1} and pool["inflight"] == pool["permits"] == 1
        assert [(line["tenant"], line["waiting"]) for line in pool["tenants"]] == [("g", 2), ("b", 1)]
        assert pool["oldest_ms"]["gold"] >= pool["tenants"][0]["oldest_ms"] - 1 > -1 and pool["more_tenants"] == 0
        assert 'oriel_gateway_waiting{pool="p",tier="bronze"} 1.0' in text
        go.set()
        for client in clients:
            assert (await client.reply()).status == 200
            await client.__aexit__()
        ahead = [(await decision(core, f"r{number}"))["queue"] for number in range(4)]
        assert ahead == [None, *({"ahead_at_arrival": places} for places in (0, 1, 2))]
        assert core.records.stats.waits["p", "gold"].count == 2 and core.records.stats.waits["p", "bronze"].count == 1


async def test_what_waits_is_listed_when_its_band_or_its_pool_has_gone() -> None:
    """Calls wait in the band they were queued in, so they must be listed even if a reload has moved their tier
    elsewhere.
    """
    async with upstream() as up, gateway(documents([up.port], max_inflight=1)) as (port, core), held(up) as go:
        clients = [await Client(port).__aenter__() for _ in range(3)]
        queue = core.pools["p"].admission.queue
        for number, client in enumerate(clients):
            client.send("/v2/models/digits/infer", b"x", key=BRONZE)
            await until(lambda number=number: core.pools["p"].admission.inflight and len(queue) == number)
        text = documents([up.port], max_inflight=1)["all.toml"].replace(b"band = 2", b"band = 7")
        core.adopt(compile_documents({"all.toml": text}))
        async with admin(core) as operator:
            pool = (await operator.get("/queues")).json()["p"]
            metrics = (await operator.get("/metrics")).text
            text = text.replace(b"[pools.p]", b"[pools.q]").replace(b'"p"', b'"q"')
            core.adopt(compile_documents({"all.toml": text}))
            left = (await operator.get("/queues")).json()["p (not in the documents any more)"]
        assert pool["waiting"] == left["waiting"] == {"gold": 0, "bronze": 0, "former band 2": 2}
        assert pool["tenants"][0]["waiting"] == left["tenants"][0]["waiting"] == 2
        assert 'oriel_gateway_waiting{pool="p",tier="former band 2"} 2.0' in metrics
        go.set()
        for client in clients:
            assert (await client.reply()).status == 200
            client.writer.close()


async def test_streams_are_timed_until_their_first_byte_and_carry_timing() -> None:
    async def stream(_: Seen) -> bytes:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + b"5\r\nfirst\r\n" + b"6\r\nsecond\r\n0\r\n\r\n"

    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        up.answer = stream
        reply = await client.ask("/v2/models/digits/generate_stream", b"{}", headers="x-request-id: s\r\n")
        assert reply.body == b"firstsecond" and "gateway-upstream;dur=" in reply.headers["server-timing"]
        assert (await decision(core, "s"))["bytes_out"] == 11


async def test_grpc_calls_are_explained_and_their_refusals_carry_timing_and_reason() -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        await infer(address, "digits", GOLD, extra={"x-request-id": "one"})
        said = await decision(core, "one")
        assert (said["protocol"], said["method"], said["reason"]) == ("grpc", "ModelInfer", "answered")
        assert said["endpoint"].startswith("127.0.0.1:") and said["bytes_in"] and said["bytes_out"]
        with pytest.raises(InferenceServerException):
            await infer(address, "hidden", BRONZE, extra={"x-request-id": "two"})
        assert (await decision(core, "two"))["reason"] == "not_found"
        with pytest.raises(InferenceServerException):
            await infer(address, "broken", GOLD, extra={"x-request-id": "three"})
        failed = await decision(core, "three")
        assert failed["status"] == 400 and failed["tried"] == [] and failed["endpoint"] == said["endpoint"]
        assert core.records.stats.attainment == {("gold", "met"): 1, ("bronze", "excused"): 1, ("gold", "excused"): 1}
        async with aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                b"", metadata=(("x-request-id", "four"),)
            )
            trailers = {str(key): value for key, value in await call.trailing_metadata()}
        assert trailers["x-oriel-reason"] == "unauthenticated" and "gateway-queue" in str(trailers["server-timing"])


async def test_the_token_guards_what_names_tenants_and_nothing_else() -> None:
    async with gateway(documents([1])) as (_, core), admin(core, TOKEN) as client:
        await until(lambda: core.ready)
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for path in ("/queues", "/decisions", "/decisions/x", "/policies", "/nowhere"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
                refused = await client.get(path, headers=headers)
                assert refused.status_code == 401 and TOKEN not in refused.text
        authorised = {"authorization": f"Bearer {TOKEN}"}
        assert (await client.get("/queues", headers=authorised)).status_code == 200
        assert (await client.get("/nowhere", headers=authorised)).status_code == 404
        twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
        assert (await client.get("/queues", headers=twice)).status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8082", "10.0.0.1", "127.0.0.1.evil.example", "", "[::1"]
)
async def test_without_a_token_a_page_under_another_name_reads_nothing(host: str) -> None:
    """DNS rebinding: a web page can have its own name resolve to 127.0.0.1, and then send requests to this machine."""
    async with gateway(documents([1])) as (_, core), admin(core) as client:
        for path in ("/queues", "/decisions", "/policies"):
            refused = await client.get(path, headers={"host": host})
            assert refused.status_code == 401 and "loopback" in refused.text
        assert (await client.get("/metrics", headers={"host": host})).status_code == 200
        for own in ("localhost:8082", "127.0.0.1", "[::1]:8082"):
            assert (await client.get("/queues", headers={"host": own})).status_code == 200
        for limit in ("0", "101", "-1", "1e1"):
            assert (await client.get("/decisions", params={"limit": limit})).status_code == 400


@pytest.mark.parametrize(
    "name", ["x-forwarded-for", "X-Forwarded-Proto", "forwarded", "via", "x-real-ip", "x-envoy-attempt-count"]
)
async def test_without_a_token_a_proxy_on_this_machine_is_not_this_machine(name: str) -> None:
    """A sidecar connects from 127.0.0.1 whoever called it, and passes on the Host that its caller wrote."""
    async with gateway(documents([1])) as (_, core), admin(core) as client:
        for path in ("/queues", "/decisions", "/policies"):
            refused = await client.get(path, headers={"host": "localhost:8082", name: "10.0.0.7"})
            assert refused.status_code == 401
        assert (await client.get("/metrics", headers={name: "10.0.0.7"})).status_code == 200
    async with gateway(documents([1])) as (_, core), admin(core, TOKEN) as client:
        sent = {"authorization": f"Bearer {TOKEN}", name: "10.0.0.7"}
        assert (await client.get("/queues", headers=sent)).status_code == 200


@pytest.mark.parametrize("peer", ["10.0.0.7", "fd00::7", "192.168.1.2", None])
async def test_without_a_token_nobody_elsewhere_reads_the_pages_whatever_they_call_them(peer: str | None) -> None:
    """A pod's port is open to its neighbours, which may send `host: localhost`."""
    async with gateway(documents([1])) as (_, core), admin(core, peer=peer) as client:
        for path in ("/queues", "/decisions", "/policies"):
            assert (await client.get(path, headers={"host": "localhost:8082"})).status_code == 401
        for path in ("/health/live", "/metrics"):
            assert (await client.get(path)).status_code == 200


def test_a_wide_admin_port_has_to_have_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    assert admin_token("127.0.0.1") is admin_token("::1") is admin_token("localhost") is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "admin.example"):
        with pytest.raises(StartFailed, match=TOKEN_VARIABLE):
            admin_token(host)
        assert admin_token(host, pages="loopback") is None
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    assert admin_token("0.0.0.0") == admin_token("127.0.0.1") == TOKEN
    for bad in ("", "short", "ü" * 20, "x" * 5000):
        file.write_text(bad)
        with pytest.raises(StartFailed) as said:
            admin_token("127.0.0.1")
        assert str(tmp_path) not in str(said.value) and (not bad or bad not in str(said.value))
    file.unlink()
    with pytest.raises(StartFailed, match="cannot be read"):
        admin_token("127.0.0.1")
    monkeypatch.setenv(TOKEN_VARIABLE, "y" * 16)
    assert admin_token("0.0.0.0") == "y" * 16


# --- decisions and the access log by themselves --------------------------------------------------------------------


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_can_be_explained(outcome: Outcome) -> None:
    refused = record(None, None, outcome, mark=mark("r"), ended_s=3.0)
    assert explain(refused, 100.0)["reason"] == outcome.value
    assert explain(refused, 100.0)["ended_at"] == 103.0 and stages(refused) == {"receive": 2000.0, "total": 2000.0}
    assert explain(refused, 0.0)["budget_ms"] == {}


async def test_the_access_log_has_a_line_for_every_end_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    async with upstream() as up, gateway(documents([up.port])) as (port, core):
        core.records.access_log = AccessLog(str(path), delay_s=60.0)
        async with Client(port) as client:
            await client.ask("/v2/models/digits/infer", b"payload", headers="x-request-id: r1\r\n")
            await client.ask("/v2/models/digits/infer", key="wrong-secret", headers="x-request-id: r2\r\n")
        async with Client(port) as client:
            client.writer.write(b"GET / HTTP/1.1\r\nbad header\r\n\r\n")
            await client.reply()
        async with held(up), Client(port) as client:
            client.send("/v2/models/digits/infer", b"x", headers="x-request-id: r4\r\n")
            await until(lambda: len(up.seen) == 2)
        await until(lambda: core.records.stats.attainment.get(("gold", "excused")))
        core.records.access_log.close()
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    found = [(line["request_id"], line["status"], line["reason"], line["tenant"]) for line in lines]
    assert found[0] == ("r1", 200, "answered", "g") and found[1] == ("r2", 401, "unauthenticated", "")
    assert found[2][1:] == (400, "bad_request", "") and found[3][::3] == ("r4", "g")
    assert lines[3]["reason"] == "client_left" and lines[0]["bytes_in"] == 7 and lines[0]["target"] == "model:digits"
    assert lines[0]["stages_ms"]["total"] >= lines[0]["stages_ms"]["upstream"]
    assert not [word for word in (GOLD, "wrong-secret", "payload", "Bearer", "127.0.0.1") if word in text]


async def test_a_disk_that_is_stuck_costs_lines_and_no_request(tmp_path: Path) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        core.records.access_log = AccessLog(str(tmp_path / "log"), max_queued=2, delay_s=60.0)
        for _ in range(5):
            assert (await client.ask("/v2/models/digits/infer")).status == 200
        async with admin(core) as operator:
            assert "oriel_gateway_access_log_dropped_total 3.0" in (await operator.get("/metrics")).text
        core.records.access_log.close()


# --- the pages ------------------------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return name -> (type, labels) from the gateway's table in docs/metrics-gateway.md."""
    page = (DOCS / "metrics-gateway.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    return {
        row[1].strip("`"): (row[2], set(re.findall(r"`(\w+)`", row[4])))
        for row in rows
        if len(row) > 5 and row[1].startswith("`oriel_")
    }


async def test_the_page_names_every_metric_with_type_and_labels() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        await client.ask("/v2/models/digits/infer", b"x")
        await client.ask("/v2/models/digits/infer", key=None)
        core.records.stats.waits["p", "gold"] = Histogram()
        core.tokens_refused["expired"] = 1
        async with admin(core) as operator:
            text = (await operator.get("/metrics")).text
    table = documented()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert table.get(name, "not on the page")[0] == family.type, name
        assert labels <= table[name][1], name
        if labels:
            assert labels == table[name][1], name
