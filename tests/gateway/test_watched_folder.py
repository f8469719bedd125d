"""A folder of documents is watched: a change is taken once no file changes any more; mistakes keep what is in force."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_gateway.admin.reload import CALM_S, Reloader
from oriel_gateway.documents.source import FolderSource
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.documents.packed import decoded
from oriel_policies.errors import BadDocument

from ..waiting import until
from .documents import changed
from .gate import INFER
from .reloading import Moving, asked, asked_text, compile_folder, watched, write
from .stack import GOLD, Client, Upstream, digest, documents, gateway, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


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
        # of three tenants only the one that called is decoded
        assert [len(d) for d in decoded(core.snapshot)] == [1, 1]

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


async def test_sighup_reads_again_what_looks_unchanged(up: Upstream, tmp_path: Path) -> None:
    async with watched(tmp_path, documents([up.port])) as (_, core, reloader):
        before = core.snapshot
        running = asyncio.ensure_future(reloader.run())
        reloader.request()
        await until(lambda: core.snapshot is not before)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert core.documents.adopted == 2


async def test_only_some_of_many_mistakes_are_logged(
    up: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path, documents([up.port])) as (_, core, reloader):
        wrong = "".join(f"[tiers.t{number}]\nband = 999\ntarget_ms = 1\n" for number in range(300))
        write(tmp_path, {"wrong.toml": wrong.encode()})
        await reloader.poll()
        assert len(core.documents.mistakes) == 100
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 11 and errors[-1].startswith("the policies on disk have 90 more mistakes")


async def test_a_source_that_fails_does_not_end_the_watching(up: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FolderSource):
        polls = 0

        def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
            self.polls += 1
            raise RuntimeError("a bug")

    source = Broken(Path("nowhere"))
    async with gateway(documents([up.port])) as (_, core):
        reloader = Reloader(core, source.stamp, lambda: compile_folder(Path("nowhere")), seen=())
        running = asyncio.ensure_future(reloader.run())
        for polls in (1, 2):
            reloader.request()
            await until(lambda polls=polls: source.polls >= polls)  # type: ignore[misc]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "polling for new policies failed" in caplog.text


@pytest.mark.parametrize("bad", [False, True])
async def test_what_changes_while_it_is_compiled_is_not_taken(bad: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A tenant file that is still being written must not come into force: tenants not yet in it would be unknown."""
    files = documents([1])
    half = compile_documents(changed(files, digest(GOLD), digest("new")))
    whole = compile_documents(files)
    async with gateway(files) as (_, core):
        source = Moving(4)

        async def build() -> Snapshot:
            if source.changes > 0 and bad:
                raise BadDocument("all.toml", "", "not TOML")
            return half if source.changes > 0 else whole

        reloader, before = Reloader(core, source.stamp, build, seen=()), core.snapshot
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

        reloader = Reloader(core, Moving(10**6).stamp, build, seen=(), now=lambda: clock[0])
        for passed_s, adopted in ((0.0, 1), (CALM_S - 0.1, 1), (0.2, 2), (0.5, 3)):
            clock[0] += passed_s
            await reloader.poll()
            assert core.documents.adopted == adopted


async def test_many_tenants_are_not_left_out_by_a_copy_that_stalls(tmp_path: Path) -> None:
    """To compile what changed takes less time than a network may pause in the middle of a file."""
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
            assert len(core.snapshot.tenants) == tenants, "a folder that does not change is taken"
