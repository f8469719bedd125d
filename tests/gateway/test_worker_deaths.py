"""Workers of a gateway when one of them dies, cannot start or learns alone, and when all of them end."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from oriel_gateway.admin.merged import one_value
from oriel_wire.observe import exposition
from oriel_wire.usage.files import lines_since

from ..waiting import until
from .documents import changed
from .process import gateway_process
from .special_routes import answering, ok
from .stack import LIMITED, Client, Seen, documents, upstream
from .worker_stack import BURST, CLIENTS, INFER, admin, clients, files, metrics, workers_of

SPLIT = """
[pools.canary]
endpoints = ["127.0.0.1:{port}"]
probe = ""
[[routes]]
name = "d"
model = "*"
split = [{{ pool = "p", weight = 50 }}, {{ pool = "canary", weight = 50 }}]
split_by = "request"
rollback = {{ canary = "canary", min_calls = 20, compare_percent = 0.0 }}
"""


async def test_a_canary_that_one_worker_rolls_back_gets_no_calls_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path / "state"))
    async with AsyncExitStack() as stack:
        good, bad = await stack.enter_async_context(upstream()), await stack.enter_async_context(upstream())
        bad.answer = answering(ok(b"{}", status="500 Broken"))
        route = '[[routes]]\nmodel = "*"\npool = "p"\n'
        split = changed(documents([good.port]), route, SPLIT.format(port=bad.port))
        process = await stack.enter_async_context(gateway_process(tmp_path, split, "--workers", "2"))
        callers = await stack.enter_async_context(clients(process.port))
        numbers = iter(range(10**6))

        async def call(client: Client) -> None:
            await client.ask(INFER, b"x", headers=f"x-request-id: r{next(numbers)}\r\n")

        async def rolled_back() -> bool:
            await call(callers[0])  # one connection: one worker judges
            return any("canary_rolled_back{" in name and value for name, value in (await metrics(process)).items())

        async def is_left() -> bool:
            before = len(bad.seen)
            for client in callers:
                await call(client)
            return len(bad.seen) == before

        await until(rolled_back)
        judged = len(bad.seen)
        await until(is_left)
        assert len(bad.seen) - judged < 20, "the other worker did not have to judge by itself"
        for each in await until(lambda: list((tmp_path / "state").glob("canaries-*/*.json"))):
            each.unlink()  # as where the folder cannot be written
        for worker in workers_of(process):
            os.kill(worker, signal.SIGKILL)
            await until(lambda: len(_listening(process.port)) == 1)
            await until(lambda: len(_listening(process.port)) == 2)
        before = len(bad.seen)
        async with clients(process.port) as fresh:
            for client in fresh:
                await call(client)
        assert len(bad.seen) == before


async def test_quotas_and_use_of_workers_go_on_after_a_restart(tmp_path: Path) -> None:
    words = "--workers", "2", "--quota-file", str(tmp_path / "quotas.db"), "--usage", str(tmp_path / "usage")
    async with upstream() as up:
        limit = f"limit = {{ requests_per_s = 0.001, burst = {BURST} }}"
        quota = changed(files(up.port), limit, "limit = { requests_per_day = 9 }")
        for calls, allowed in ((6, 6), (6, 3)):
            statuses = []
            async with gateway_process(tmp_path, quota, *words) as process:
                for _ in range(calls):
                    async with Client(process.port) as client:
                        statuses.append((await client.ask(INFER, b"x", key=LIMITED)).status)
            assert statuses == [200] * allowed + [429] * (calls - allowed)
    lines = lines_since(tmp_path / "usage", "2000-01-01")
    assert sum(line.requests for line in lines if line.kind == "seen") == 9, "nothing is lost, nothing counts twice"


async def test_calls_go_to_the_others_while_a_worker_cannot_start(tmp_path: Path) -> None:
    async with upstream() as up, gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
        before = await until(lambda: len(found := workers_of(process)) == 2 and found)
        async with clients(process.port) as callers:
            for client in callers:
                assert (await client.ask(INFER, b"x")).status == 200
        counted = _calls(await metrics(process))
        assert counted == CLIENTS
        (tmp_path / "policies" / "all.toml").write_bytes(b"no document")
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(_listening(process.port)) == 1)
        for _ in range(3):
            async with clients(process.port) as callers, asyncio.timeout(60):
                for client in callers:
                    assert (await client.ask(INFER, b"x")).status == 200
        assert (await admin(process, "/health/ready")).json() == {"ready": True}
        assert _calls(await metrics(process)) == 4 * CLIENTS
        (tmp_path / "policies" / "all.toml").write_bytes(files(up.port)["all.toml"])
        await until(lambda: len(_listening(process.port)) == 2)
        assert _calls(await metrics(process)) == 4 * CLIENTS, "counts never fall, also when the next worker serves"


def _calls(found: dict[str, float]) -> float:
    return sum(value for name, value in found.items() if "request_duration_seconds_count" in name and "2xx" in name)


async def test_connections_are_refused_and_none_hangs_once_workers_drain(tmp_path: Path) -> None:
    async with upstream() as up, gateway_process(tmp_path, files(up.port), "--workers", "2") as process:
        go_on = asyncio.Event()

        async def late(seen: Seen) -> bytes:
            await go_on.wait()
            return await up.ok(seen)

        up.answer = late
        await until(lambda: len(_listening(process.port)) == 2)
        async with clients(process.port, 4) as callers, asyncio.TaskGroup() as group:
            calls = [group.create_task(client.ask(INFER, b"x")) for client in callers]
            await until(lambda: up.seen)
            os.kill(process.pid, signal.SIGTERM)

            def held() -> set[str]:
                folder = Path(f"/proc/{process.pid}/fd")
                return {name.removeprefix("socket:[").removesuffix("]") for name in map(_target, folder.iterdir())}

            await until(lambda: not held() & _listening(process.port))
            assert _listening(process.port), "a worker takes calls until those that it has are answered"
            go_on.set()
        assert [(await call).status for call in calls] == [200] * len(calls)


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


async def _refusal(folder: Path, content: bytes, **variables: str) -> str:
    (folder / "all.toml").write_bytes(content)
    code = "import sys; from oriel_cli.main import main; sys.exit(main())"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "gateway", "--policies", str(folder), "--workers", "2"),
        *("--http-port", "0", "--grpc-port", "0", "--admin-port", "0"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )
    _, text = await process.communicate()
    assert process.returncode == 2
    return text.decode()


async def test_what_workers_cannot_do_is_refused_at_the_start(tmp_path: Path) -> None:
    plain = documents([1])
    sequences = changed(
        plain, 'model = "*"\npool = "p"\n', 'name = "s"\nmodel = "*"\npool = "p"\nsticky = "sequence"\n'
    )
    text = await _refusal(tmp_path, sequences["all.toml"])
    assert "routes.s.sticky: a sequence's steps may reach any of several workers: serve it with --workers 1" in text
    far = tmp_path / ("x" * 100)
    far.mkdir()
    text = await _refusal(tmp_path, plain["all.toml"], TMPDIR=str(far))
    assert "set TMPDIR to another folder" in text and "Traceback" not in text


def test_counts_of_a_worker_that_has_ended_stay_without_its_gauges() -> None:
    text = (
        '# HELP a Calls of a counter\n# TYPE a counter\na_total{x="b # c"} 3.0\n# HELP g gauge\n# TYPE g gauge\ng 7.0\n'
    )
    whole = exposition.merged([text, exposition.counts(text)], one_value)
    assert 'a_total{x="b # c"} 6.0\n' in whole and "\ng 7.0\n" in whole
