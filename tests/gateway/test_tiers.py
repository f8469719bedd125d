"""The effective tier of a call: by key, route and request, on every kind of call, and what follows it."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import product
from time import monotonic
from typing import Any

import pytest
from grpc import aio
from memory_ledger import MemoryLedger
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_gateway.shared.special import TIER_BYTES
from oriel_policies.documents import compile_documents
from oriel_policies.promise.explain import ExplainedCall, explain

from ..waiting import until
from .grpc_stack import Backend, stack
from .stack import BRONZE, GOLD, Client, Reply, Seen, digest, documents, gateway, upstream

BATCH = "key-batch"
INFER = "/v2/models/digits/infer"
# Beside the tiers gold (band 0) and bronze (band 2) of `documents`; its routes come last.
TIERS = f"""
[tiers.silver]
band = 1
target_ms = 2000
give_up_ms = 50000
[tenants.t]
tier = "gold"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{digest("key-t")}" }}, {{ sha256 = "{digest(BATCH)}", tier = "bronze" }}]
limits = [{{ tier = "bronze", requests_per_day = 2 }}]
"""
ROUTES = """
[[routes]]
model = "m"
headers = { x-team = "blue" }
pool = "p"
tier = "bronze"
[[routes]]
model = "pinned"
pool = "p"
tier = "silver"
[[routes]]
model = "urgent"
pool = "p"
tier = "gold"
above_tenant = true
"""


def files(ports: list[int], **more: Any) -> dict[str, bytes]:
    made = documents(ports, extra=TIERS, **more)
    text = made["all.toml"].decode().replace('models = ["digits"]', 'models = ["*"]')
    return {"all.toml": text.replace("[[routes]]", f"{ROUTES}[[routes]]", 1).encode()}


def reason(reply: Reply) -> tuple[int, str, str]:
    error = json.loads(reply.body)
    if isinstance(error["error"], dict):
        error = {**error["error"], "error": error["error"]["message"]}
    return reply.status, error["reason"], error["error"]


@pytest.mark.parametrize(
    ("key", "target", "asked", "offered"),
    [
        (BRONZE, INFER, "silver", "bronze"),  # above its own
        (BATCH, INFER, "gold", "bronze"),  # the tenant's, but above the key's
        (GOLD, "/v2/models/pinned/infer", "gold", "silver, bronze"),  # above the route's
        (GOLD, INFER, "platinum", "gold, silver, bronze"),  # no tier
        (GOLD, INFER, "", "gold, silver, bronze"),
    ],
)
async def test_asking_for_more_is_refused_with_what_there_is(key: str, target: str, asked: str, offered: str) -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        for _ in range(2):
            reply = await client.ask(target, b"{}", key=key, headers=f"x-request-tier: {asked}\r\n")
            message = f"tier {asked!r} cannot be asked for here; what can: {offered}"
            assert reason(reply) == (403, "tier_not_allowed", message)
        assert not up.seen and (await client.ask(target, b"{}", key=key)).status == 200
        assert core.records.decisions.where(reason="tier_not_allowed", limit=9)[0].tenant is not None


async def test_one_connection_may_ask_for_another_tier_with_each_head() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        for number, (asked, key) in enumerate(
            [
                ("", GOLD),
                ("bronze", GOLD),
                ("bronze", GOLD),
                ("silver", GOLD),
                ("", GOLD),
                ("", BATCH),
                ("bronze", BATCH),
            ]
            * 2
        ):
            lines = f"x-request-tier: {asked}\r\n" if asked else ""
            reply = await client.ask(INFER, b"{}", key=key, headers=f"{lines}x-request-id: r{number}\r\n")
            expected = asked or ("gold" if key == GOLD else "bronze")
            if key == BATCH and reply.status == 429:
                continue  # its tenant may make two calls a day in this tier
            seen = up.seen[-1]
            band = {"gold": "0", "silver": "1", "bronze": "2"}[expected]
            assert (reply.status, seen.get("x-oriel-tier"), seen.get("x-oriel-priority")) == (200, expected, band)
            assert seen.get("x-request-tier") is None, (
                "the next hop gets the tier in headers that only the gateway sends"
            )
            (decided,) = core.records.decisions.of(f"r{number}")
            assert decided.tenant is not None and decided.tenant.tier.name == expected
        served = [decided.tenant for decided in core.records.decisions.where(limit=99) if decided.outcome == "answered"]
        assert len({id(tenant) for tenant in served}) == 4, "there is one object per tenant and tier"


async def test_what_a_client_says_in_our_own_headers_decides_nothing() -> None:
    forged = "x-oriel-tier: gold\r\nx-oriel-priority: 0\r\nx_oriel_tier: gold\r\n"
    async with upstream() as up, gateway(files([up.port])) as (port, _), Client(port) as client:
        for headers in (forged, f"{forged}x-request-tier: bronze\r\n"):
            assert (await client.ask(INFER, b"{}", key=BRONZE, headers=headers)).status == 200
            head = up.seen[-1].head.lower()
            assert up.seen[-1].get("x-oriel-tier") == "bronze" and head.count("tier:") == 1 and "gold" not in head
        twice = "x-request-tier: bronze\r\n" * 2
        assert reason(await client.ask(INFER, b"{}", headers=twice))[:2] == (400, "bad_request")
    async with upstream() as up, gateway(files([up.port])) as (port, _), Client(port) as client:
        hidden = "x-request-tier: bronze\r\nconnection: x-request-tier\r\n"
        assert (await client.ask(INFER, b"{}", headers=hidden)).status == 400


async def test_a_route_that_headers_choose_brings_its_tier_along() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, _), Client(port) as client:
        for team, expected in (("blue", "bronze"), ("red", "gold"), *[("blue", "bronze")] * 4):
            await client.ask("/v2/models/m/infer", b"{}", headers=f"x-team: {team}\r\n")
            assert up.seen[-1].get("x-oriel-tier") == expected
        for model, key, expected in (
            ("pinned", GOLD, "silver"),
            ("pinned", BRONZE, "bronze"),
            ("urgent", BRONZE, "gold"),
        ):
            await client.ask(f"/v2/models/{model}/infer", b"{}", key=key)
            assert up.seen[-1].get("x-oriel-tier") == expected


async def test_deadline_limits_and_counters_are_those_of_the_effective_tier() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        await client.ask("/v2/models/pinned/infer", b"{}")
        assert 8_000 < int(up.seen[-1].get("x-oriel-timeout-ms") or 0) <= 50_000, "silver's give_up_ms, not gold's"
        for key, headers in (("key-t", "x-request-tier: bronze\r\n"), (BATCH, "")):
            assert (await client.ask(INFER, b"{}", key=key, headers=headers)).status == 200
        for key, headers in (("key-t", "x-request-tier: bronze\r\n"), (BATCH, "")):
            assert reason(await client.ask(INFER, b"{}", key=key, headers=headers))[1] == "quota_exceeded"
        assert (await client.ask(INFER, b"{}", key="key-t")).status == 200, "of gold, it has no limit"
        assert core.records.stats.attainment == {
            ("silver", "met"): 1, ("bronze", "met"): 2, ("gold", "met"): 1, ("bronze", "excused"): 2
        }  # fmt: skip


async def test_an_answer_of_a_service_is_kept_for_the_tier_that_got_it() -> None:
    """A service may answer gold with more than bronze, so the tiers share no answer; a model does not see the tier."""

    async def answer(seen: Seen) -> bytes:
        tier = (seen.get("x-oriel-tier") or "").encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(tier), tier)

    kept = '[[routes]]\nKIND = "kept"\npool = "p"\ndeterministic = true\ncache_s = 60.0\n'
    routes = kept.replace("KIND", "service") + kept.replace("KIND", "model")
    async with upstream() as up:
        text = files([up.port])["all.toml"].decode().replace("[[routes]]", f"{routes}[[routes]]", 1)
        async with gateway({"all.toml": text.encode()}) as (port, _), Client(port) as client:
            up.answer = answer
            for target, expected in (
                ("/v1/services/kept", [b"gold", b"bronze"] * 2),
                ("/v2/models/kept/infer", [b"gold"] * 4),
            ):
                tiers = ["gold", "bronze"] * 2
                replies = [await client.ask(target, b"{}", headers=f"x-request-tier: {tier}\r\n") for tier in tiers]
                assert [reply.body for reply in replies] == expected
    assert len(up.seen) == 3


async def test_calls_of_one_tenant_wait_by_the_tier_of_each() -> None:
    order: list[str] = []
    release = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        order.append(seen.get("x-oriel-tier") or "")
        if len(order) == 1:
            await release.wait()
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async with upstream() as up, gateway(files([up.port], max_inflight=1)) as (port, core):
        up.answer = answer
        clients = [Client(port) for _ in range(4)]
        for number, (client, asked) in enumerate(zip(clients, ("gold", "bronze", "silver", "gold"), strict=True)):
            await client.__aenter__()
            client.send(INFER, b"{}", headers=f"x-request-tier: {asked}\r\n")
            await until(lambda number=number: waiting(core) == number and len(order) == 1)  # type: ignore[misc]
        depths = {band: core.pools["p"].admission.queue.depth(band) for band in range(3)}
        assert depths == {0: 1, 1: 1, 2: 1}
        release.set()
        assert [(await client.reply()).status for client in clients] == [200] * 4
        for client in clients:
            await client.__aexit__()
    assert order == ["gold", "gold", "silver", "bronze"]


def waiting(core: Gateway) -> int:
    return len(core.pools["p"].admission.queue)


async def test_what_explain_says_is_what_happens() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        asked_for = (None, "gold", "silver", "bronze", "platinum")
        for key, model, asked in product((GOLD, BRONZE), ("digits", "pinned", "urgent"), asked_for):
            headers = {} if asked is None else {"x-request-tier": asked}
            stored = core.snapshot.keys[bytes.fromhex(digest(key))]
            steps = explain(core.snapshot, stored, ExplainedCall(model=model, headers=headers), now=0.0)
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            reply = await client.ask(f"/v2/models/{model}/infer", b"{}", key=key, headers=lines)
            if steps[-1].refused:
                assert reason(reply)[:2] == (403, steps[-1].refused)
            else:
                said = [step.says for step in steps if step.stage == "tier" and not step.says.startswith("stays")]
                assert up.seen[-1].get("x-oriel-tier") == said[-1].partition(":")[0]


async def test_new_documents_change_the_tier_of_a_key_on_an_open_connection() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        for tier in ("bronze", "silver"):
            text = (
                files([up.port])["all.toml"]
                .decode()
                .replace(f'"{digest(BATCH)}", tier = "bronze"', f'"{digest(BATCH)}", tier = "{tier}"')
            )
            core.adopt(compile_documents({"all.toml": text.encode()}))
            assert (await client.ask(INFER, b"{}", key=BATCH)).status == 200
            assert up.seen[-1].get("x-oriel-tier") == tier


async def test_the_next_hop_gets_the_times_of_a_stream_only_from_tiers_with_a_time_per_token() -> None:
    def paced(ports: list[int]) -> dict[str, bytes]:
        text = documents(ports)["all.toml"]
        return {"all.toml": text.replace(b"[tiers.bronze]", b"[tiers.bronze]\ntoken_ms = 50")}

    forged = "x-oriel-stream: token=1;max=1"
    async with upstream() as up, gateway(paced([up.port])) as (port, _), Client(port) as client:
        for key, expected in ((GOLD, None), (BRONZE, "token=50;max=600000")) * 2:  # the later heads are recognised
            assert (await client.ask(INFER, b"{}", key=key, headers=f"{forged}\r\n")).status == 200
            assert up.seen[-1].get("x-oriel-stream") == expected and "max=1\r" not in up.seen[-1].head
    backend = Backend()
    async with (
        stack(backend, files=lambda port: paced([port])) as (address, _),
        aio.insecure_channel(address) as opened,
    ):
        unary = opened.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for key, expected in ((GOLD, None), (BRONZE, "token=50;max=600000")):
            await unary(message("digits"), metadata=(("x-api-key", key), tuple(forged.split(": "))))
            assert backend.seen[-1][2].get("x-oriel-stream") == expected


@pytest.fixture
async def channel() -> AsyncIterator[tuple[Backend, aio.Channel]]:
    backend = Backend()
    async with (
        stack(backend, files=lambda port: files([port])) as (address, _),
        aio.insecure_channel(address) as opened,
    ):
        yield backend, opened


def message(model: str) -> bytes:
    return bytes(service_pb2.ModelInferRequest(model_name=model).SerializeToString())


async def test_unary_calls_over_grpc(channel: tuple[Backend, aio.Channel]) -> None:
    backend, opened = channel
    unary = opened.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for key, model, asked, tier in [
        (GOLD, "digits", "", "gold"), (GOLD, "digits", "bronze", "bronze"), (BATCH, "digits", "", "bronze"),
        (GOLD, "pinned", "", "silver"), (BRONZE, "pinned", "", "bronze"), (BRONZE, "urgent", "silver", "silver"),
    ]:  # fmt: skip
        metadata = [("x-api-key", key), ("x-oriel-tier", "gold"), *([("x-request-tier", asked)] if asked else [])]
        await unary(message(model), metadata=metadata)
        _, _, seen, remaining_s = backend.seen[-1]
        assert seen["x-oriel-tier"] == tier and "x-request-tier" not in seen
        assert (remaining_s > 8.5) == (tier == "silver"), "the deadline is that of the tier"
    with pytest.raises(aio.AioRpcError) as caught:
        await unary(message("pinned"), metadata=(("x-api-key", GOLD), ("x-request-tier", "gold")))
    assert caught.value.code().name == "PERMISSION_DENIED"
    assert dict(caught.value.trailing_metadata() or ())["x-oriel-reason"] == "tier_not_allowed"


@pytest.mark.parametrize("models", [["urgent", "digits"], ["digits", "urgent"]])
async def test_a_stream_has_one_tier(channel: tuple[Backend, aio.Channel], models: list[str]) -> None:
    """Otherwise a first message for a model of a higher tier would raise all later messages."""
    backend, opened = channel
    call = opened.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    stream = call(metadata=(("x-api-key", BRONZE),))
    for each in (models[0], models[0]):
        await stream.write(message(each))
        await stream.read()
    await stream.write(message(models[1]))
    with pytest.raises(aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code().name == "INVALID_ARGUMENT" and "open another for it" in (caught.value.details() or "")
    assert {seen["x-oriel-tier"] for _, _, seen, _ in backend.seen} == {"gold" if models[0] == "urgent" else "bronze"}
    gold = call(metadata=(("x-api-key", GOLD),))
    for each in ("digits", "urgent"):  # gold serves both models, so one stream may call both
        await gold.write(message(each))
        await gold.read()
    gold.cancel()


CHAT = "/v1/chat/completions"
KEY_T = "key-t"
LIMIT = "limit = { requests_per_s = 0.000001, burst = 5, concurrency = 1, bytes_per_s = 9999 }"


async def ask_chat(client: Client, tier: str | None, key: str = KEY_T, headers: str = "", **more: Any) -> Reply:
    body = {"model": "m", "messages": [], **({} if tier is None else {"service_tier": tier}), **more}
    return await client.ask(CHAT, json.dumps(body).encode(), key=key, headers=headers)


async def test_service_tier_flex_is_the_lowest_tier_and_every_other_value_the_tenants_own() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        for tier, headers, expected in [
            (None, "", "gold"), ("flex", "", "bronze"), ("auto", "", "gold"), ("default", "", "gold"),
            ("priority", "", "gold"), ("auto", "x-request-tier: silver\r\n", "silver"),
            ("default", "x-request-tier: bronze\r\n", "bronze"), ("flex", "x-request-tier: silver\r\n", "bronze"),
        ]:  # fmt: skip
            reply = await ask_chat(client, tier, GOLD, f"{headers}x-request-id: r{tier}-{expected}\r\n")
            seen = up.seen[-1]
            assert (reply.status, seen.get("x-oriel-tier"), seen.get("x-oriel-tenant")) == (200, expected, "g")
            assert json.loads(seen.body).get("service_tier") == tier, "the server gets the body as it was sent"
            assert core.records.decisions.of(f"r{tier}-{expected}")[0].tenant.tier.name == expected  # type: ignore[union-attr]
        for body in (
            b"",
            b'{"service_tier": "flex"',
            b'{"service_tier": ["flex"]}',
            b'["service_tier"]',
            b'"service_tier"',
        ):
            assert (await client.ask(CHAT, body)).status == 200, "whether a body is valid is for the server to judge"
            assert up.seen[-1].get("x-oriel-tier") == "gold"
        assert core.records.stats.attainment["bronze", "met"] == 3


PRIORITY = f"""
[tenants.p]
tier = "silver"
services = ["*"]
models = ["*"]
service_tiers = {{ priority = "gold" }}
keys = [
  {{ sha256 = "{digest("both")}", service_tiers = {{ priority = "gold", flex = "silver" }} }},
  {{ sha256 = "{digest("tenants")}" }},
  {{ sha256 = "{digest("none")}", service_tiers = {{}} }},
  {{ sha256 = "{digest("strict")}", service_tiers = {{ strict = true }} }},
]
limits = [{{ tier = "gold", requests_per_day = 2 }}]
"""


@pytest.mark.parametrize("shared", [False, True])
async def test_a_key_gets_the_service_tiers_of_its_documents_and_is_told_by_which_it_was_served(shared: bool) -> None:
    """Priority that its limits have no room for, or that it may not ask for, is served by the key's own tier."""
    ledger = MemoryLedger(lambda: monotonic() * 1e6).seat("one")
    limiter = SharedLimiter(ledger, budget_s=30.0) if shared else EmbeddedLimiter()
    async with upstream() as up:
        text = files([up.port])["all.toml"].decode() + PRIORITY
        async with gateway({"all.toml": text.encode()}, limiter=limiter) as (port, core), Client(port) as client:
            forged = "x-oriel-service-tier: priority\r\n"
            for key, word, tier, told in [
                ("both", "priority", "gold", "priority"), ("both", "flex", "silver", "flex"),
                ("none", "priority", "silver", "default"), ("none", "flex", "bronze", "flex"),
                ("tenants", "priority", "gold", "priority"), ("tenants", "priority", "silver", "default"),
                ("tenants", "auto", "silver", None), ("tenants", None, "silver", None),
            ]:  # fmt: skip
                reply = await ask_chat(client, word, key, forged)
                seen = up.seen[-1]
                assert (reply.status, seen.get("x-oriel-tier")) == (200, tier)
                assert reply.headers.get("x-oriel-service-tier") == told
                assert seen.get("x-oriel-service-tier") == (told if told != "default" else None)
            asked = len(up.seen)
            status, why, text = reason(await ask_chat(client, "priority", "strict"))
            assert (status, why) == (400, "bad_request") and "ask for 'auto'" in text and len(up.seen) == asked
            assert core.records.stats.attainment["gold", "met"] == 2
            assert not core.clock.young and core.pools["p"].admission.inflight == 0


async def test_priority_is_not_above_the_tier_of_a_route() -> None:
    async with upstream() as up:
        text = files([up.port])["all.toml"].decode() + PRIORITY
        text = text.replace('service = "*"\npool = "p"', 'service = "*"\npool = "p"\ntier = "silver"')
        async with gateway({"all.toml": text.encode()}) as (port, _), Client(port) as client:
            reply = await ask_chat(client, "priority", "both")
            assert reply.headers["x-oriel-service-tier"] == "default" and up.seen[-1].get("x-oriel-tier") == "silver"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limit", ["", LIMIT])
async def test_flex_has_the_deadline_and_the_limits_of_its_tier(limit: str, shared: bool) -> None:
    ledger = MemoryLedger(lambda: monotonic() * 1e6).seat("one")
    limiter = SharedLimiter(ledger, budget_s=30.0) if shared else EmbeddedLimiter()
    async with upstream() as up:
        text = files([up.port])["all.toml"].decode().replace("[tiers.silver]", "[tiers.flex]")
        text = text.replace('tier = "silver"', 'tier = "flex"')
        text = text.replace('limits = [{ tier = "bronze"', f'{limit}\nlimits = [{{ tier = "flex"')
        async with gateway({"all.toml": text.encode()}, limiter=limiter) as (port, core), Client(port) as client:
            for _ in range(2):
                assert (await ask_chat(client, "flex")).status == 200
                assert up.seen[-1].get("x-oriel-tier") == "flex", "a tier of that name is chosen before the lowest tier"
                assert 8_000 < int(up.seen[-1].get("x-oriel-timeout-ms") or 0) <= 50_000
            assert reason(await ask_chat(client, "flex"))[1] == "quota_exceeded"
            for _ in range(3):  # what was refused for one tier has cost the other tier nothing
                assert (await ask_chat(client, "auto")).status == 200
            assert (await ask_chat(client, "auto")).status == (429 if limit else 200)
            assert not core.clock.young and core.pools["p"].admission.inflight == 0


async def test_flex_is_read_of_a_body_that_comes_late_and_in_pieces() -> None:
    async with upstream() as up, gateway(files([up.port])) as (port, core), Client(port) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY_T}\r\n"
        client.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        # The deadline of its own tier is being watched.
        await until(lambda: bool(core.pools["p"].calls) and not core.clock.young)
        for piece in (b'{"service_', b'tier": "fl', b'ex"}'):
            client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.writer.write(b"0\r\n\r\n")
        assert (await client.reply()).status == 200 and up.seen[-1].get("x-oriel-tier") == "bronze"
        await until(lambda: not len(core.clock))
        large = b" " * TIER_BYTES
    text = files([1])["all.toml"].decode().replace("max_body_bytes = 1000000", "max_body_bytes = 10000000")
    async with upstream() as up:
        text = text.replace('"127.0.0.1:1"', f'"127.0.0.1:{up.port}"')
        async with gateway({"all.toml": text.encode()}) as (port, _), Client(port) as client:
            assert (await client.ask(CHAT, b'{"service_tier": "flex"}' + large)).status == 200
            assert up.seen[-1].get("x-oriel-tier") == "gold", "a larger body is not read for it"


@pytest.mark.parametrize("limits", ["", 'limits = [{ tier = "bronze", requests_per_day = 1 }]\n'])
async def test_flex_is_no_way_around_the_list_of_models(limits: str) -> None:
    async with upstream() as up:
        text = files([up.port])["all.toml"].decode()
        text += f"""
[tenants.listed]
tier = "gold"
models = ["m"]
services = ["*"]
keys = [{{ sha256 = "{digest("key-listed")}" }}]
{limits}"""
        async with gateway({"all.toml": text.encode()}) as (port, _), Client(port) as client:
            body = b'{"model": "other", "messages": [], "service_tier": "flex"}'
            json_type = "content-type: application/json\r\n"
            for _ in range(2):
                assert (await client.ask(CHAT, body, key="key-listed", headers=json_type)).status == 404
            assert not up.seen
            allowed = await client.ask(CHAT, body.replace(b"other", b"m"), key="key-listed", headers=json_type)
            assert allowed.status == 200, "what was refused for its model has used up nothing of the tier's limit"
            assert up.seen[-1].get("x-oriel-tier") == "bronze"
