"""New documents in a gateway at work: taken whole, without losing a call."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import decoded

from ..waiting import until
from .documents import changed
from .gate import INFER, idle
from .reloading import compile_folder, watched
from .stack import BRONZE, GOLD, LIMITED, Client, Seen, Upstream, digest, documents, gateway, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def test_keys_come_and_go_on_an_open_connection(up: Upstream) -> None:
    files = documents([up.port])
    async with gateway(files) as (port, core), Client(port) as gold, Client(port) as fresh:
        for _ in range(3):  # often enough for the head to be recognised
            assert (await gold.ask(INFER)).status == 200
        assert (await fresh.ask(INFER, key="new")).status == 401
        core.adopt(compile_documents(changed(files, digest(GOLD), digest("new"))))
        reply = await gold.ask(INFER)
        assert reply.status == 401 and "connection" not in reply.headers
        assert (await fresh.ask(INFER, key="new")).status == 200
        core.adopt(compile_documents(files))
        assert (await gold.ask(INFER)).status == 200
        assert (await fresh.ask(INFER, key="new")).status == 401


async def test_a_changed_tier_and_other_models_count_at_once_on_an_open_connection(up: Upstream) -> None:
    files = documents([up.port])
    async with gateway(files) as (port, core), Client(port) as client:
        for _ in range(3):
            assert (await client.ask(INFER, key=BRONZE)).status == 200
        assert up.seen[-1].get("x-oriel-tier") == "bronze"
        core.adopt(compile_documents(changed(files, 'tier = "bronze"', 'tier = "gold"')))
        assert (await client.ask(INFER, key=BRONZE)).status == 200
        assert up.seen[-1].get("x-oriel-tier") == "gold"
        core.adopt(compile_documents(changed(files, 'models = ["digits"]', 'models = ["other"]')))
        assert (await client.ask(INFER, key=BRONZE)).status == 404


async def test_calls_that_run_and_wait_are_answered_across_a_swap(up: Upstream) -> None:
    release = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        await release.wait()
        return await up.ok(seen)

    up.answer = answer
    files = documents([up.port], max_inflight=1)
    async with gateway(files) as (port, core), Client(port) as runs, Client(port) as waits, Client(port) as bronze:
        runs.send(INFER)
        await until(lambda: len(up.seen) == 1)
        waits.send(INFER)
        bronze.send(INFER, key=BRONZE)
        gate = core.pools["p"]
        await until(lambda: len(gate.admission.queue) == 2)
        # The waiting tenants are both gone from the new documents.
        core.adopt(compile_documents(changed(files, digest(GOLD), digest("new"))))
        assert core.pools["p"] is gate and len(gate.admission.queue) == 2
        release.set()
        assert [(await client.reply()).status for client in (runs, waits, bronze)] == [200, 200, 200]
        assert (await runs.ask(INFER)).status == 401
        await until(lambda: idle(core))


async def test_a_pool_that_is_gone_finishes_its_calls_and_is_closed(up: Upstream) -> None:
    release = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        await release.wait()
        return await up.ok(seen)

    up.answer = answer
    files = documents([up.port])
    text = files["all.toml"].decode().replace("[pools.p]", "[pools.q]").replace('pool = "p"', 'pool = "q"')
    async with gateway(files) as (port, core), Client(port) as client:
        client.send(INFER)
        await until(lambda: len(up.seen) == 1)
        old = core.pools["p"]
        core.adopt(compile_documents({"all.toml": text.encode()}))
        await core.close_left_pools()
        assert core.left_pools == [old] and list(core.pools) == ["q"]
        release.set()
        assert (await client.reply()).status == 200
        await until(lambda: old.unused)
        assert len(old.endpoints[0].idle) == 1
        await core.close_left_pools()
        assert core.left_pools == [] and not old.endpoints[0].idle
        assert (await client.ask(INFER)).status == 200
        assert core.pools["q"].endpoints[0].idle


async def test_a_changed_pool_keeps_its_queue_and_the_endpoints_that_stay(up: Upstream) -> None:
    async with upstream() as second:
        files = documents([up.port, second.port], max_inflight=1)
        async with gateway(files) as (port, core), Client(port) as client:
            for _ in range(4):
                assert (await client.ask(INFER)).status == 200
            gate = core.pools["p"]
            stays, goes = gate.endpoints
            core.adopt(compile_documents(documents([up.port], max_inflight=7, max_queue=3)))
            assert core.pools["p"] is gate and list(gate.endpoints) == [stays]
            assert (gate.admission.limit, gate.admission.queue.slots.bound) == (7, 3)
            assert stays.idle and goes.idle
            await core.close_left_pools()
            assert stays.idle and not goes.idle
            seen = len(second.seen)
            for _ in range(4):
                assert (await client.ask(INFER)).status == 200
            assert len(second.seen) == seen


async def test_what_a_tenant_used_of_its_limit_is_not_forgiven(up: Upstream) -> None:
    files = documents([up.port])
    async with gateway(files) as (port, core), Client(port) as client:
        assert [(await client.ask(INFER, key=LIMITED)).status for _ in range(3)] == [200, 200, 429]
        core.adopt(compile_documents(files))
        assert (await client.ask(INFER, key=LIMITED)).status == 429


async def test_thousands_of_tenants_are_let_go_bit_by_bit(up: Upstream, tmp_path: Path) -> None:
    files = documents([up.port])
    lines = [
        json.dumps({"name": f"n{n}", "tier": "gold", "keys": [{"sha256": digest(f"k{n}")}], "models": ["*"]})
        for n in range(3000)
    ]
    files["tenants.ndjson"] = "\n".join(lines).encode()
    async with watched(tmp_path, files) as (_, core, reloader):
        core.adopt(await compile_folder(tmp_path))
        for n in range(3000):
            core.targets.tenant_lines(core.callers.of([("x-api-key", f"k{n}")]).tenant)
        old = core.snapshot
        reloader.request()
        await reloader.poll()
        assert core.snapshot is not old and core.callers.of([("x-api-key", "k7")]).tenant.name == "n7"
        left = [sum(map(len, decoded(old)))]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(sum(map(len, decoded(old))))
        assert max(a - b for a, b in zip(left, left[1:], strict=False)) <= 3000 and len(left) > 3


async def test_no_call_is_lost_while_documents_change_all_the_time(up: Upstream) -> None:
    """Pools come, go and change, as do keys and limits: every call is answered, and all permits and bytes return."""
    swapped, asked = asyncio.Event(), 0

    async def answer(seen: Seen) -> bytes:
        nonlocal asked
        asked += 1
        await swapped.wait()
        return await up.ok(seen)

    up.answer = answer
    files = documents([up.port], max_inflight=3)
    other = files["all.toml"].replace(b"[pools.p]", b"[pools.q]").replace(b'pool = "p"', b'pool = "q"')
    sets = [
        compile_documents(each)
        for each in (
            files,
            {"all.toml": other},
            documents([up.port], max_inflight=1),
            documents([up.port], max_inflight=5, extra='[tenants.more]\ntier = "gold"\n'),
            changed(files, digest(BRONZE), digest("new")),
        )
    ]
    statuses: list[int] = []
    async with gateway(files) as (port, core):

        async def caller(key: str) -> None:
            client = await Client(port).__aenter__()
            for _ in range(40):
                reply = await client.ask(INFER, b"x" * 100, key=key)
                statuses.append(reply.status)
                if reply.headers.get("connection") == "close":  # too many refused keys in a row
                    assert reply.status == 401
                    client.writer.close()
                    client = await Client(port).__aenter__()
            client.writer.close()

        callers = asyncio.gather(*(caller(key) for key in (GOLD, BRONZE) * 4))
        number = 0
        while not callers.done():
            number += 1
            before = asked + len(statuses)
            core.adopt(sets[number % len(sets)])
            await core.close_left_pools()
            swapped.set()  # a call under way is answered although the gateway has other documents
            swapped = asyncio.Event()
            await until(lambda before=before: callers.done() or asked + len(statuses) > before)  # type: ignore[misc]
        swapped.set()
        await callers
        await until(lambda: all(gate.unused for gate in (*core.pools.values(), *core.left_pools)))
        await core.close_left_pools()
        assert core.left_pools == [] and number > 5
    assert len(statuses) == 320 and set(statuses) == {200, 401} and statuses.count(401) < 160
