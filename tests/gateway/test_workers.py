"""Worker processes behind one gateway: they share limits and one admin port, and the parent replaces a dead one."""

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

from oriel_cli.watch.top import snapshots

from ..waiting import until
from .documents import changed
from .process import gateway_process
from .stack import GOLD, LIMITED, Client, digest, documents, upstream
from .worker_stack import BURST, CLIENTS, INFER, admin, clients, files, metrics, workers_of


async def test_two_workers_share_a_limit_exactly_and_show_one_gateway(tmp_path: Path) -> None:
    async with upstream() as up, gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
        statuses: Counter[int] = Counter()
        async with clients(process.port) as callers:

            async def calls(client: Client) -> None:
                for _ in range(5):
                    statuses[(await client.ask(INFER, b"x", key=LIMITED)).status] += 1

            await asyncio.gather(*map(calls, callers))
            assert statuses == {200: BURST, 429: 5 * CLIENTS - BURST}
            for client in callers:
                assert (await client.ask(INFER, b"x")).status == 200
        found = await metrics(process)
        assert found["oriel_gateway_limiter_replicas"] == 2
        answered = [
            value for name, value in found.items() if "request_duration_seconds_count" in name and "2xx" in name
        ]
        assert sum(answered) == BURST + CLIENTS == sum(INFER in each.head for each in up.seen)
        assert found['oriel_gateway_permits{pool="p"}'] == 8, "the parts of the workers are the whole pool"
        decisions = (await admin(process, "/decisions?limit=20")).json()["decisions"]
        assert len(decisions) == 20 and decisions == sorted(decisions, key=lambda each: -each["ended_at"])
        one = (await admin(process, f"/decisions/{decisions[10]['request_id']}")).json()["decisions"]
        assert [each["request_id"] for each in one] == [decisions[10]["request_id"]]
        assert (await admin(process, "/queues")).json()["p"]["permits"] == 8
        usage = (await admin(process, "/console/tenants/limited")).json()
        assert usage["limits"][0]["limit"] == BURST


async def test_a_killed_worker_is_replaced_while_the_other_serves(tmp_path: Path) -> None:
    async with upstream() as up, gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
        before = await until(lambda: len(found := workers_of(process)) == 2 and found)
        async with clients(process.port) as callers:
            statuses = [(await client.ask(INFER, b"x", key=LIMITED)).status for client in callers[: BURST // 2]]
            assert statuses == [200] * (BURST // 2)
            os.kill(before[1], signal.SIGKILL)

            async def survives(client: Client) -> bool:
                try:
                    return (await client.ask(INFER, b"x")).status == 200
                except (OSError, asyncio.IncompleteReadError):
                    return False

            left = [await survives(client) for client in callers]
            assert any(left) and not all(left), "the connections of the other worker go on"
        after = await until(lambda: len(found := workers_of(process)) == 2 and found)
        assert before[0] in after and before[1] not in after
        async with clients(process.port) as callers:  # some of these waited for the new worker
            statuses = [(await client.ask(INFER, b"x", key=LIMITED)).status for client in callers]
        assert statuses[-1] == 429 and statuses.count(200) <= BURST - BURST // 2, "nothing is granted twice"
        assert (await admin(process, "/health/ready")).json() == {"ready": True}


async def test_workers_end_with_their_parent_however_it_ends(tmp_path: Path) -> None:
    async with upstream() as up:
        for number in (signal.SIGKILL, signal.SIGTERM):
            async with gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
                workers = await until(lambda process=process: len(found := workers_of(process)) == 2 and found)
                os.kill(process.pid, number)
                await until(lambda workers=workers: not any(Path(f"/proc/{each}").exists() for each in workers))


async def test_documents_come_into_force_in_all_workers_at_once(tmp_path: Path) -> None:
    async with upstream() as up, gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
        async with clients(process.port) as callers:
            assert {(await client.ask(INFER, b"x")).status for client in callers} == {200}
            new = changed(files(up.port), "[tenants.g]\n", "[tenants.g]\nweight = 2\n")
            new = changed(new, digest(GOLD), digest("another"))
            (tmp_path / "policies" / "all.toml").write_bytes(new["all.toml"])

            async def statuses() -> list[int]:
                return await asyncio.gather(*[_status(client) for client in callers])

            seen = [await statuses()]
            while 200 in seen[-1]:
                seen.append(await statuses())
            mixed = [each for each in seen if len(set(each)) > 1]
            assert len(mixed) <= 3, "workers adopt within a few turns of their loops"
            for before, after in pairwise(seen):
                assert all(old == 200 or new == old for old, new in zip(before, after, strict=True)), "none goes back"


async def _status(client: Client) -> int:
    return (await client.ask(INFER, b"x")).status


async def test_a_pool_with_fewer_permits_than_workers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_bytes(documents([1], max_inflight=1)["all.toml"])
    code = "import sys; from oriel_cli.main import main; sys.exit(main())"
    words = ("gateway", "--policies", str(tmp_path), "--http-port", "0", "--grpc-port", "0", "--admin-port", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *words, "--workers", "2"), stderr=asyncio.subprocess.PIPE
    )
    _, text = await process.communicate()
    assert process.returncode == 2
    assert b"pools.p.max_inflight: 1 cannot be divided among 2 workers: raise it or lower --workers" in text


async def test_the_console_shows_the_calls_of_all_workers(tmp_path: Path) -> None:
    async with upstream() as up, gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
        stream = snapshots(f"http://127.0.0.1:{process.admin_port}")
        async with clients(process.port) as callers, aclosing(stream):
            await anext(stream)
            for client in callers:
                assert (await client.ask(INFER, b"x", key="no key")).status == 401
                assert (await client.ask(INFER, b"x")).status == 200
            async for snapshot in stream:
                gold = next(row for row in snapshot["tiers"] if row["tier"] == "gold")
                if gold["met"] == CLIENTS:
                    break
            assert snapshot["gateways"] == 2 and snapshot["pools"][0]["permits"] == 8
            assert [row["tenant"] for row in snapshot["tenants"]] == ["g"]
