"""Budgets of tenants on the whole path: what is spent, shown, and refused once nothing is left."""

import asyncio
import errno
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oriel_gateway import app
from oriel_gateway.admin.console.tenants import tenant_report
from oriel_gateway.admin.metrics import GatewayCollector
from oriel_gateway.app import _remember_use
from oriel_gateway.errors import Outcome
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.observe.spending import MAX_KNOWN, MAX_SHOWN
from oriel_policies.documents import compile_documents
from oriel_policies.metering.budgets import Use
from oriel_wire.usage.ledger import UsageLedger

from ..waiting import until
from .limit_desk import INFER, on, tenant_t
from .openai_answers import CHAT, JSON, chat, streamed, whole
from .stack import Client, Seen, Upstream, gateway, upstream

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


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def budgets(port: int, text: str) -> dict[str, bytes]:
    return on(port, tenant_t(f"budgets = [{text}]\n{PRICES}"))


async def shown(client: Client, path: str = "/v1/usage") -> list[dict[str, Any]]:
    reply = json.loads((await client.ask(path, method="GET", key="key-t")).body)
    return list(reply["budgets"] if path == "/v1/usage" else reply["limits"])


def executed(up: Upstream) -> int:
    """Return how many calls of models there were; a gateway also asks for the documents of its services."""
    return sum(seen.head.startswith(f"POST {INFER} ") for seen in up.seen)


async def used(_: Seen) -> bytes:
    cost = "dev=400000000;cpu=0;class=h100"
    return f"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-oriel-cost: {cost}\r\n\r\nok".encode()


async def test_a_budget_of_money_is_spent_by_prices_and_refuses_when_nothing_is_left(up: Upstream) -> None:
    up.answer = used
    files = budgets(up.port, '{ amount = 1, unit = "EUR", period = "day", warn = 0.5 }')
    async with gateway(files) as (port, core), Client(port) as client:
        for left in ("0.6", "0.2", "0"):
            reply = await client.ask(INFER, b"x", key="key-t")
            assert reply.status == 200 and '"budget-EUR-day";q=1;qu="EUR";w=86400' in reply.headers["ratelimit-policy"]
            (budget,) = await shown(client)
            assert (budget["name"], budget["kind"], budget["unit"]) == ("budget-EUR-day", "budget", "EUR")
            assert (budget["limit"], budget["left"], budget["warn"], budget["stops"]) == ("1", left, 0.5, True)
            (limit,) = await shown(client, "/v1/limits")
            assert 0 <= budget.pop("more_in_s") - limit.pop("more_in_s") < 3600 and limit == budget
            report = tenant_report(core, "t", {})
            assert report is not None
            (line,) = report["limits"]
            assert (line["counts"], line["limit"], line["left"], line["period"]) == ("EUR", 1.0, float(left), "day")
        reply = await client.ask(INFER, b"x", key="key-t")
        error = json.loads(reply.body)
        assert reply.status == 429 and error["reason"] == "budget_spent" and "1 EUR per day" in error["error"]
        assert 1 <= int(reply.headers["retry-after"]) <= 86_401
        assert core.records.stats.refusals == {Outcome.BUDGET_SPENT: 1}
        reply = await client.ask(CHAT, chat(), key="key-t", headers=JSON)
        assert json.loads(reply.body)["error"]["code"] == "insufficient_quota"
        (fill,) = core.spending.fills()
        assert (fill.tenant, fill.budget, round(fill.ratio, 6), fill.warn) == ("t", "budget-EUR-day", 1.2, 0.5)


async def test_tokens_are_spent_by_whole_answers_and_by_streams(up: Upstream) -> None:
    files = budgets(
        up.port, '{ amount = 100, unit = "tokens", period = "day" }, { amount = "0.05", unit = "EUR", stop = false }'
    )
    async with gateway(files) as (port, _), Client(port) as client:
        up.answer = whole
        reply = await client.ask(CHAT, chat(), key="key-t", headers=JSON)
        assert reply.status == 200 and reply.headers["ratelimit"].startswith('"budget-tokens-day";r=100;')
        tokens, money = await shown(client)
        assert (tokens["left"], money["left"]) == ("70", "0.03"), "20 tokens of an answer cost 0.02"

        async def stream(_: Seen) -> bytes:
            return streamed(['{"a": 1}', '{"usage": {"input_tokens": 20, "output_tokens": 60}}', "[DONE]"])

        up.answer = stream
        assert (await client.ask(CHAT, chat(stream=True), key="key-t", headers=JSON)).status == 200
        tokens, money = await shown(client)
        assert (tokens["left"], money["left"], money["stops"]) == ("0", "0", False)
        assert (await client.ask(CHAT, chat(), key="key-t", headers=JSON)).status == 429
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429, "a budget is the tenant's, not a path's"


async def test_a_budget_that_stops_nothing_is_only_told(up: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    up.answer = used
    files = budgets(up.port, '{ amount = 1, unit = "device_seconds", stop = false }')
    async with gateway(files) as (port, core), Client(port) as client:
        for _ in range(4):
            reply = await client.ask(INFER, b"x", key="key-t")
            assert reply.status == 200 and "ratelimit" not in reply.headers
            core.records.stats.count()
        told = [record.getMessage() for record in caplog.records if "budget" in record.getMessage()]
        assert told == [
            "tenant t: budget-device_seconds-month is spent to 80%",
            "tenant t: budget-device_seconds-month is spent",
        ]


async def test_a_client_that_leaves_spends_what_has_passed_of_its_answer(up: Upstream) -> None:
    """It could read a whole stream but its end, and spend nothing."""

    async def stream(_: Seen) -> bytes:
        event = b'data: {"a": 1}\n\n'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + b"%x\r\n%b\r\n" % (len(event), event) * 8  # and no end

    up.answer = stream
    files = budgets(up.port, '{ amount = 1000, unit = "tokens" }, { amount = 1, unit = "device_seconds" }')
    body = chat(stream=True, text="x" * 400)
    async with gateway(files) as (port, core), Client(port) as client:
        async with Client(port) as leaving:
            leaving.send(CHAT, body, key="key-t", headers=JSON)
            await leaving.reader.readuntil(b"data: ")

        async def spent() -> bool:
            tokens, device = await shown(client)
            prompt = -(-len(body) // 4)
            return 1000 - int(tokens["left"]) in range(prompt, prompt + 9) and float(device["left"]) < 1.0

        await until(spent)
        used = json.loads((await client.ask("/v1/usage", method="GET", key="key-t")).body)
        (target,) = used["day"]["targets"]
        assert target["estimated"] and target["requests"] == 1 and target["tokens_in"] == -(-len(body) // 4)
        lines = core.records.stats.usage.added("2026-11-24T12:00")
        assert {(line.kind, line.why) for line in lines} == {("seen", "left")}, "the servers record it themselves"


async def test_a_call_that_is_cut_off_costs_what_its_class_of_device_costs(up: Upstream) -> None:
    up.answer = used
    never = asyncio.Event()
    files = budgets(up.port, '{ amount = 1000, unit = "EUR" }')
    async with gateway(files) as (port, _), Client(port) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
        ((paid, *_),) = [(float(each["left"]), each) for each in await shown(client)]
        assert paid == 999.6

        async def silent(_: Seen) -> bytes:
            await never.wait()
            return b""

        up.answer = silent
        async with Client(port) as leaving:
            leaving.send(INFER, b"x", key="key-t")
            await until(lambda: executed(up) == 2)

        async def spent() -> bool:
            return float((await shown(client))[0]["left"]) < paid

        await until(spent)


async def test_a_reload_keeps_what_was_spent(up: Upstream) -> None:
    up.answer = used
    text = '{ amount = 1, unit = "EUR" }'
    async with gateway(budgets(up.port, text)) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
        core.records.stats.count()
        core.adopt(compile_documents(budgets(up.port, '{ amount = "0.4", unit = "EUR" }')))
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429


async def test_only_the_fullest_budgets_have_series(up: Upstream) -> None:
    names = [f"n{number}" for number in range(MAX_KNOWN + 5)]
    extra = "\n".join(f'[tenants.{n}]\ntier = "gold"\nbudgets = [{{ amount = 1000, unit = "tokens" }}]' for n in names)
    files = {"all.toml": budgets(up.port, '{ amount = 1, unit = "EUR" }')["all.toml"] + extra.encode()}
    async with gateway(files) as (_, core):
        for number, name in enumerate(names):
            core.spending.add(core.snapshot.tenants[name], Use(tokens_in=number), "2026-11-24")
        families = {family.name: family for family in GatewayCollector(core).collect()}
        samples = families["oriel_gateway_budget_spent_ratio"].samples
        assert len(samples) == MAX_SHOWN and len(core.spending._fullest) == MAX_KNOWN
        assert samples[0].labels == {"tenant": names[-1], "budget": "budget-tokens-month"}
        assert round(samples[0].value, 6) == (len(names) - 1) / 1000
        assert {sample.value for sample in families["oriel_gateway_budget_warn_ratio"].samples} == {0.8}
        assert {sample.value for sample in families["oriel_gateway_budget_stops"].samples} == {1}


@asynccontextmanager
async def life(files: dict[str, bytes], folder: Path, *, quotas: bool) -> AsyncIterator[Client]:
    """A client of a gateway with its usage ledger, and with a quota file if `quotas`, until the gateway ends."""
    file = QuotaFile(folder / "quotas.db") if quotas else None
    if file is not None:
        await file.prepare()
    async with gateway(files, limiter=EmbeddedLimiter(file=file)) as (port, core), Client(port) as client:
        ledger = UsageLedger(folder, "gateway", lambda minute: core.records.stats.usage.added(minute))
        await _remember_use(ledger, core)
        yield client
        await ledger.close()


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, False), (False, True), (True, False)])
async def test_what_was_spent_is_known_after_a_restart_and_counted_once(
    up: Upstream, tmp_path: Path, before: bool, after: bool
) -> None:
    """By the quota file, or without one in either life of the gateway by the usage ledger."""
    up.answer = used
    files = budgets(up.port, '{ amount = 1, unit = "EUR" }, { amount = "0.7", unit = "EUR", period = "day" }')
    async with life(files, tmp_path, quotas=before) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200  # nobody reads the counters before the end
    async with life(files, tmp_path, quotas=after) as client:
        assert [each["left"] for each in await shown(client)] == ["0.6", "0.3"]
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
    async with life(files, tmp_path, quotas=after) as client:
        assert [each["left"] for each in await shown(client)] == ["0.2", "0"]
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429


async def test_a_gateway_serves_although_the_use_before_its_start_cannot_be_read(
    up: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(app, "lines_since", unreadable)
    async with life(budgets(up.port, '{ amount = 1, unit = "EUR" }'), tmp_path, quotas=False) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
    assert "because it cannot be read" in caplog.text and "Too many open files" in caplog.text


async def test_a_budget_outlives_a_ledger_that_has_left_the_machine(up: Upstream, tmp_path: Path) -> None:
    up.answer = used
    files = budgets(up.port, '{ amount = "0.4", unit = "EUR" }')
    async with life(files, tmp_path, quotas=True) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
    shutil.rmtree(tmp_path / "usage")
    async with life(files, tmp_path, quotas=True) as client:
        assert [each["left"] for each in await shown(client)] == ["0"], "before its first call too"
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429
