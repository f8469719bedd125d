"""New documents in a gateway at work: taken whole, without losing a connection, a call or a count."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from oriel_gateway.admin.app import admin_app
from oriel_gateway.app import compiler_of, load
from oriel_gateway.core import Gateway
from oriel_gateway.documents import compiler
from oriel_gateway.documents.compiler import FolderCompiler, compile_folder
from oriel_gateway.documents.reload import CALM_S, Reloader
from oriel_gateway.documents.source import FolderSource, Stamp
from oriel_gateway.settings import Settings
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.documents.packed import decoded
from oriel_policies.errors import BadDocument

from ..waiting import TIMEOUT_S, until
from .documents import changed
from .gate import INFER, idle
from .stack import BRONZE, GOLD, LIMITED, Client, Seen, Upstream, digest, documents, gateway, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        beside = folder / f".{name}"
        beside.write_bytes(data)
        os.replace(beside, folder / name)


@asynccontextmanager
async def watched(folder: Path, files: dict[str, bytes], **more: float) -> AsyncIterator[tuple[int, Gateway, Reloader]]:
    """A gateway on the documents of a folder: its port, its core, and what reloads them."""
    write(folder, files)
    source = FolderSource(folder)
    async with gateway(files) as (port, core):
        yield port, core, Reloader(core, source, lambda: compile_folder(folder), seen=source.stamp(), **more)


async def test_keys_come_and_go_on_an_open_connection(up: Upstream) -> None:
    files = documents([up.port])
    async with gateway(files) as (port, core), Client(port) as gold, Client(port) as fresh:
        for _ in range(3):  # long enough for the head to be recognised
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
            assert (gate.admission.limit, gate.admission.queue.max_items) == (7, 3)
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


async def test_the_folder_is_watched_and_a_bad_document_keeps_the_old(
    up: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = documents([up.port])
    async with watched(tmp_path, files) as (port, core, reloader), Client(port) as client:
        before = core.snapshot
        await reloader.poll()
        assert core.snapshot is before and core.documents.adopted == 1
        write(tmp_path, changed(files, digest(GOLD), digest("new")))
        await reloader.poll()
        assert (await client.ask(INFER)).status == 401 and (await client.ask(INFER, key="new")).status == 200
        assert [len(d) for d in decoded(core.snapshot)] == [1, 1]  # of three tenants, the one that called

        write(tmp_path, {"bad.toml": b"[tiers.silver]\nband = 1\ntarget_s = 1\n"})
        in_force = core.snapshot
        await reloader.poll()
        assert core.snapshot is in_force and (await client.ask(INFER, key="new")).status == 200
        reason = "bad.toml: tiers.silver.target_s: there is no field 'target_s' here, did you mean 'target_ms'?"
        assert reason in caplog.text
        report = await asked(core, "/policies")
        assert report["mistakes"][0] == dict(zip(("file", "path", "reason"), reason.split(": ", 2), strict=True))
        assert (report["adopted"], report["refused"], report["tenants"]) == (2, 1, 3)
        metrics = (await asked_text(core, "/metrics")).splitlines()
        assert "oriel_gateway_policy_mistakes 2.0" in metrics
        assert 'oriel_gateway_policy_reloads_total{result="refused"} 1.0' in metrics

        (tmp_path / "bad.toml").unlink()
        await reloader.poll()
        assert core.documents.mistakes == () and core.documents.adopted == 3


async def asked_text(core: Gateway, path: str) -> str:
    """What the admin port answers, without a socket."""
    sent: list[dict] = []  # type: ignore[type-arg]

    async def receive() -> dict:  # type: ignore[type-arg]
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        sent.append(message)

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await admin_app(core)({**scope, "client": ("127.0.0.1", 1)}, receive, send)
    return b"".join(message.get("body", b"") for message in sent).decode()


async def asked(core: Gateway, path: str) -> dict:  # type: ignore[type-arg]
    answer: dict = json.loads(await asked_text(core, path))  # type: ignore[type-arg]
    return answer


async def test_sighup_reads_again_what_looks_unchanged(up: Upstream, tmp_path: Path) -> None:
    async with watched(tmp_path, documents([up.port])) as (_, core, reloader):
        before = core.snapshot
        running = asyncio.ensure_future(reloader.run())
        reloader.request()
        await until(lambda: core.snapshot is not before)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert core.documents.adopted == 2


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
            core.targets.tenant_lines(core.identify([("x-api-key", f"k{n}")]).tenant)
        old = core.snapshot
        reloader.request()
        await reloader.poll()
        assert core.snapshot is not old and core.identify([("x-api-key", "k7")]).tenant.name == "n7"
        left = [sum(map(len, decoded(old)))]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(sum(map(len, decoded(old))))
        assert max(a - b for a, b in zip(left, left[1:], strict=False)) <= 3000 and len(left) > 3


async def test_documents_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match=r"no \.toml document"):
        await compile_folder(tmp_path)
    with pytest.raises(BadDocument, match="cannot be read"):
        await compile_folder(tmp_path / "missing")
    (tmp_path / "a.toml").write_bytes(b"x = 1\n" * 3_000_000)
    with pytest.raises(BadDocument, match="larger than"):
        await compile_folder(tmp_path)
    assert FolderSource(tmp_path / "missing").stamp() == ()


async def test_too_many_documents_are_refused(tmp_path: Path) -> None:
    for number in range(257):
        (tmp_path / f"{number}.toml").touch()
    with pytest.raises(BadDocument, match="more than 256 documents"):
        await compile_folder(tmp_path)


async def test_a_compiler_that_hangs_or_dies_is_named_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, documents([1]))
    with FolderCompiler(tmp_path, timeout_s=0.001) as folder, pytest.raises(BadDocument, match="took more than"):
        await folder.compile()
    monkeypatch.setattr(compiler, "CHILD", "oriel_gateway.no_such_module")
    with pytest.raises(BadDocument, match="ended with code 1: .*No module named"):
        await compile_folder(tmp_path)
    monkeypatch.setattr(compiler, "CHILD", "this")  # writes something else
    with pytest.raises(BadDocument, match="cannot be read"):
        await compile_folder(tmp_path)


async def test_reloading_that_is_cancelled_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, documents([1]))
    real = compiler._start
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any) -> "subprocess.Popen[bytes]":
        started.append(real(*args))
        return started[0]

    monkeypatch.setattr(compiler, "_start", start)
    compiling = asyncio.ensure_future(compile_folder(tmp_path))
    await until(lambda: started)
    compiling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compiling
    await until(lambda: started[0].returncode is not None)  # the thread that waits for it collects it
    monkeypatch.undo()
    assert (await compile_folder(tmp_path)).tenants["g"].name == "g"


async def test_a_compiler_whose_reload_is_cancelled_while_no_thread_is_free_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for it was dropped before it began, and the killed process stayed."""
    write(tmp_path, documents([1]))
    real = compiler._start
    started: list[subprocess.Popen[bytes]] = []
    blocks, free = threading.Event(), threading.Event()
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)

    def block() -> None:
        blocks.set()
        free.wait()

    def start(*args: Any) -> "subprocess.Popen[bytes]":
        started.append(real(*args))
        threads.submit(block)
        return started[0]

    monkeypatch.setattr(compiler, "_start", start)
    compiling = asyncio.ensure_future(compile_folder(tmp_path))
    await until(lambda: blocks.is_set() and threads._work_queue.qsize() == 1)  # the wait for the compiler
    compiling.cancel()
    await asyncio.sleep(0)
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await compiling
    await until(lambda: started[0].returncode is not None)


async def test_only_some_of_many_mistakes_are_logged(
    up: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path, documents([up.port])) as (_, core, reloader):
        wrong = "".join(f"[tiers.t{number}]\nband = 999\ntarget_ms = 1\n" for number in range(300))
        write(tmp_path, {"wrong.toml": wrong.encode()})
        await reloader.poll()
        assert len(core.documents.mistakes) == 100
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 11 and errors[-1].startswith("and 90 more mistakes")


async def test_a_source_that_fails_does_not_end_the_watching(up: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FolderSource):
        polls = 0

        def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
            self.polls += 1
            raise RuntimeError("a bug")

    source = Broken(Path("nowhere"))
    async with gateway(documents([up.port])) as (_, core):
        reloader = Reloader(core, source, lambda: compile_folder(Path("nowhere")), seen=())
        running = asyncio.ensure_future(reloader.run())
        for polls in (1, 2):
            reloader.request()
            await until(lambda polls=polls: source.polls >= polls)  # type: ignore[misc]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "polling for new policies failed" in caplog.text


async def test_no_call_is_lost_while_documents_change_all_the_time(up: Upstream) -> None:
    """Pools that come, go and change, other keys, other limits: every call is answered, and everything given back."""
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
            swapped.set()  # what was under way is answered by a gateway with other documents
            swapped = asyncio.Event()
            await until(lambda before=before: callers.done() or asked + len(statuses) > before)  # type: ignore[misc]
        swapped.set()
        await callers
        await until(lambda: all(gate.unused for gate in (*core.pools.values(), *core.left_pools)))
        await core.close_left_pools()
        assert core.left_pools == [] and number > 5
    assert len(statuses) == 320 and set(statuses) == {200, 401} and statuses.count(401) < 160


async def test_compiling_needs_no_place_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    write(tmp_path, documents([1]))
    monkeypatch.setattr(compiler.tempfile, "TemporaryFile", full)
    if hasattr(os, "memfd_create"):
        assert len((await compile_folder(tmp_path)).tenants) == 3
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(BadDocument, match="no place to compile to: Read-only"):
        await compile_folder(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(BadDocument, match="cannot be started: No such file"):
        await compile_folder(tmp_path)


class Moving:
    """A source whose stamp changes a given number of times."""

    def __init__(self, changes: int) -> None:
        self.changes = changes
        self.number = 0

    def read(self) -> dict[str, bytes]:
        raise AssertionError("the builder reads")

    def stamp(self) -> Stamp:
        self.number += self.changes > 0
        self.changes -= 1
        return (("all.toml", self.number, 0, 0),)


@pytest.mark.parametrize("bad", [False, True])
async def test_what_changes_while_it_is_compiled_is_not_taken(bad: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A tenant file that was being written used to be in force in parts: whoever was not in it yet was a stranger."""
    files = documents([1])
    half = compile_documents(changed(files, digest(GOLD), digest("new")))
    whole = compile_documents(files)
    async with gateway(files) as (_, core):
        source = Moving(4)

        async def build() -> Snapshot:
            if source.changes > 0 and bad:
                raise BadDocument("all.toml", "", "not TOML")
            return half if source.changes > 0 else whole

        reloader, before = Reloader(core, source, build, seen=()), core.snapshot
        await reloader.poll()
        assert core.snapshot is before and not core.documents.mistakes and not caplog.records
        await reloader.poll()
        assert core.snapshot is before
        await reloader.poll()
        assert core.snapshot is whole
        await reloader.poll()
        assert core.documents.adopted == 2, "it is not taken twice"


async def test_a_source_that_never_holds_still_is_taken_after_a_while() -> None:
    files = documents([1])
    async with gateway(files) as (_, core):
        clock = [100.0]

        async def build() -> Snapshot:
            return compile_documents(files)

        reloader = Reloader(core, Moving(10**6), build, seen=(), now=lambda: clock[0])
        for passed_s, adopted in ((0.0, 1), (CALM_S - 0.1, 1), (0.2, 2), (0.5, 3)):
            clock[0] += passed_s
            await reloader.poll()
            assert core.documents.adopted == adopted


async def test_a_compiler_whose_start_is_cancelled_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, documents([1]))
    real = compiler._start
    started: list[subprocess.Popen[bytes]] = []
    entered, go = threading.Event(), threading.Event()

    def start(*args: Any) -> "subprocess.Popen[bytes]":
        entered.set()
        go.wait(TIMEOUT_S)
        started.append(real(*args))
        return started[0]

    monkeypatch.setattr(compiler, "_start", start)
    running = asyncio.ensure_future(compile_folder(tmp_path))
    await asyncio.to_thread(entered.wait, TIMEOUT_S)
    running.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert started[0].returncode is not None


async def test_many_tenants_are_not_left_out_by_a_copy_that_stalls(tmp_path: Path) -> None:
    """Compiling what changed takes less time than a network may stall in the middle of a file."""
    lines = [json.dumps({"name": f"n{n}", "tier": "gold", "models": ["*"]}) for n in range(300)]
    whole = documents([1]) | {"tenants.ndjson": "\n".join(lines).encode()}
    async with watched(tmp_path, whole, shrunk_s=0.05) as (_, core, reloader):
        half = b"\n".join(whole["tenants.ndjson"].split(b"\n")[:150])
        for data, tenants in ((half, 303), (whole["tenants.ndjson"], 303), (half, 153)):
            (tmp_path / "tenants.ndjson").write_bytes(data)
            looking = asyncio.ensure_future(reloader.poll())
            if tenants == 303 and data is half:
                compiling = reloader._build

                async def then_more(compiling=compiling) -> Snapshot:  # type: ignore[no-untyped-def]
                    snapshot = await compiling()
                    asyncio.get_running_loop().call_later(
                        0.01, (tmp_path / "tenants.ndjson").write_bytes, whole["tenants.ndjson"]
                    )
                    return snapshot  # type: ignore[no-any-return]

                reloader._build = then_more
                await looking
                reloader._build = compiling
            await looking
            assert len(core.snapshot.tenants) == tenants, "what holds still is taken"


async def test_a_key_of_many_is_revoked_and_rotated_without_compiling_the_others(tmp_path: Path) -> None:
    """A hundred thousand tenants used to be compiled for each: 2 to 7 s in which a revoked key went on to be served."""
    lines = [
        json.dumps({"name": f"n{n}", "tier": "gold", "keys": [{"sha256": digest(f"k{n}")}], "models": ["*"]})
        for n in range(200)
    ]
    write(tmp_path, documents([1]) | {"tenants.ndjson": "\n".join(lines).encode()})
    with FolderCompiler(tmp_path) as folder:
        whole = await folder.compile()
        lines[7] = lines[7].replace(digest("k7"), digest("new"))
        write(tmp_path, {"tenants.ndjson": "\n".join(lines).encode()})
        first = await folder.compile()
        lines.append("{")
        write(tmp_path, {"tenants.ndjson": "\n".join(lines).encode()})
        with pytest.raises(BadDocument, match="tenants.ndjson:201: not JSON"):
            await folder.compile()
        lines[-1] = ""
        write(tmp_path, {"tenants.ndjson": "\n".join(lines[100:]).encode()})
        second = await folder.compile()
    old, new, last = (sha256(key.encode()).digest() for key in ("k7", "new", "k199"))
    assert old in whole.keys and old not in first.keys and first.keys[new].tenant.name == "n7"
    assert new not in second.keys and second.keys[last].tenant.name == "n199" and len(second.tenants) == 103
    assert old in whole.keys  # what is in force stays whole until it is let go


async def test_a_compiler_that_dies_of_what_was_before_begins_from_nothing(tmp_path: Path) -> None:
    write(tmp_path, documents([1]))
    with FolderCompiler(tmp_path) as folder:
        await folder.compile()
        assert folder._last is not None
        os.truncate(folder._last.fileno(), 9)
        with pytest.raises(BadDocument, match="ended with code 1: .*not a packed snapshot"):
            await folder.compile()
        assert len((await folder.compile()).tenants) == 3


async def test_a_mistake_in_another_file_does_not_keep_a_dropped_key_alive(
    up: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any bad document kept every key of the last good ones in force until an operator had fixed it."""
    base = documents([up.port])["all.toml"].decode()
    tenant = {name: f'[tenants.{name}]\ntier = "gold"\nmodels = ["*"]\n' for name in ("one", "two")}
    key = 'keys = [{{ sha256 = "{}", name = "k" }}]\n'
    keyed = {name: (text + key.format(digest(name))).encode() for name, text in tenant.items()}
    good = {"all.toml": base.encode(), "one.toml": keyed["one"], "two.toml": keyed["two"]}
    write(tmp_path, good)
    source = FolderSource(tmp_path)
    with FolderCompiler(tmp_path) as folder:
        await folder.compile()
        async with gateway(good) as (port, core), Client(port) as one, Client(port) as two:
            reloader = Reloader(core, source, folder.compile, seen=source.stamp())

            async def statuses() -> tuple[int, int]:
                return (await one.ask(INFER, key="one")).status, (await two.ask(INFER, key="two")).status

            for _ in range(3):
                assert await statuses() == (200, 200)
            write(tmp_path, {"bad.toml": b"[tiers.silver]\nband = 1\n", "new.toml": tenant["one"].encode()})
            await reloader.poll()
            assert await statuses() == (200, 200) and core.documents.withdrawn_keys == 0
            write(tmp_path, {"one.toml": tenant["one"].encode()})
            (tmp_path / "new.toml").unlink()
            await reloader.poll()
            assert await statuses() == (401, 200)
            assert "what they drop is refused from now on, 1 keys in all: key 'k' of one" in caplog.text
            report = await asked(core, "/policies")
            assert (report["withdrawn_keys"], report["adopted"], len(report["mistakes"])) == (1, 1, 1)
            assert "oriel_gateway_policy_withdrawn_keys 1.0" in await asked_text(core, "/metrics")
            in_force = core.snapshot
            write(tmp_path, {"two.toml": keyed["two"] + b"# a remark\n"})
            await reloader.poll()
            assert core.snapshot is in_force, "what is left is not taken again"
            # A file that cannot be read may be half written: it withdraws nothing, and keeps nobody else's key.
            write(tmp_path, {"two.toml": b"[tenants.two\n"})
            await reloader.poll()
            assert await statuses() == (401, 200)
            write(tmp_path, {"one.toml": keyed["one"]})
            await reloader.poll()
            assert await statuses() == (200, 200) and "there again" in caplog.text
            (tmp_path / "two.toml").unlink()
            await reloader.poll()
            assert await statuses() == (200, 401)
            (tmp_path / "bad.toml").unlink()
            await reloader.poll()
            assert await statuses() == (200, 401)
            assert (core.documents.withdrawn_keys, core.documents.adopted) == (0, 2)


@pytest.mark.parametrize("lines", [0, 50])
async def test_a_pool_of_the_command_line_that_is_gone_does_not_keep_a_dropped_key_alive(
    up: Upstream, tmp_path: Path, lines: int
) -> None:
    """Documents that were good but for the pool that --endpoint names withdrew nothing, nor did any after them."""
    base = documents([up.port])["all.toml"].decode()
    tenant = {name: f'[tenants.{name}]\ntier = "gold"\nmodels = ["*"]\n' for name in ("one", "two")}
    key = 'keys = [{{ sha256 = "{}", name = "k" }}]\n'
    good = {f"{name}.toml": (text + key.format(digest(name))).encode() for name, text in tenant.items()}
    good["all.toml"] = base.encode()
    if lines:
        rows = [json.dumps({"name": f"n{n}", "tier": "gold", "models": ["*"]}) for n in range(lines)]
        good["tenants.ndjson"] = "\n".join(rows).encode()
    write(tmp_path, good)
    source = FolderSource(tmp_path)
    settings = Settings(policies=tmp_path, endpoints={"p": (("127.0.0.1", up.port),)})
    with compiler_of(settings, tmp_path) as folder:
        await load(settings, folder)
        async with gateway(good) as (port, core), Client(port) as one, Client(port) as two:
            reloader = Reloader(core, source, lambda: load(settings, folder), seen=source.stamp())

            async def statuses() -> tuple[int, int]:
                return (await one.ask(INFER, key="one")).status, (await two.ask(INFER, key="two")).status

            assert await statuses() == (200, 200)
            renamed = base.replace("[pools.p]", "[pools.q]").replace('pool = "p"', 'pool = "q"').encode()
            write(tmp_path, {"all.toml": renamed, "one.toml": tenant["one"].encode()})
            await reloader.poll()
            assert await statuses() == (401, 200)
            assert "no pool is named 'p', only q: add [pools.p]" in str(core.documents.mistakes[0])
            write(tmp_path, {"two.toml": tenant["two"].encode()})
            await reloader.poll()
            assert await statuses() == (401, 401)
            write(tmp_path, good)
            await reloader.poll()
            assert await statuses() == (200, 200) and core.documents.withdrawn_keys == 0
