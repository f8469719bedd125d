"""Budgets of tenants on the whole path: what is spent, shown, and refused once nothing is left."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oriel_gateway.admin.budget_metrics import BudgetCollector
from oriel_gateway.app import _remember_use
from oriel_gateway.errors import Outcome
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.observe.spending import MAX_KNOWN, MAX_SHOWN
from oriel_policies.documents import compile_documents
from oriel_policies.metering.budgets import Use
from oriel_wire.engine.usage_ledger import UsageLedger

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
            assert await shown(client, "/v1/limits") == [budget]
        reply = await client.ask(INFER, b"x", key="key-t")
        error = json.loads(reply.body)
        assert reply.status == 429 and error["reason"] == "budget_spent" and "1 EUR per day" in error["error"]
        assert 1 <= int(reply.headers["retry-after"]) <= 86_401
        assert core.records.stats.refused == {Outcome.BUDGET_SPENT: 1}
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
        assert (await client.ask(CHAT, chat(), key="key-t", headers=JSON)).status == 200
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


async def test_a_restarted_gateway_knows_what_was_spent_by_the_usage_ledger(up: Upstream) -> None:
    up.answer = used
    files = budgets(up.port, '{ amount = 1, unit = "EUR" }, { amount = "0.5", unit = "EUR", period = "day" }')
    async with gateway(files) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
        before = await shown(client)
        day = core.records.stats.usage.of("t")["day"]["begins"][:10]
        lines = core.records.stats.usage.added(f"{day}T12:00")
        assert [line.device_class for line in lines if line.device_ns] == ["h100"]
    async with gateway(files) as (port, again), Client(port) as client:
        again.spending.restore(lines, day)
        after = await shown(client)
        assert [each["left"] for each in after] == [each["left"] for each in before] == ["0.6", "0.1"]
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
        await shown(client)
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429


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
        families = {family.name: family for family in BudgetCollector(core).collect()}
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


async def test_a_budget_outlives_a_ledger_that_has_left_the_machine(up: Upstream, tmp_path: Path) -> None:
    up.answer = used
    files = budgets(up.port, '{ amount = "0.4", unit = "EUR" }')
    async with life(files, tmp_path, quotas=True) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 200
    shutil.rmtree(tmp_path / "usage")
    async with life(files, tmp_path, quotas=True) as client:
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429
