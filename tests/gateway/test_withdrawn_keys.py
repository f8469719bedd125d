"""Keys that documents drop are refused at once, whatever mistakes the documents have."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_gateway.admin.reload import Reloader
from oriel_gateway.app import compiler_of, load
from oriel_gateway.documents.compiler import FolderCompiler
from oriel_gateway.documents.source import FolderSource
from oriel_gateway.settings import Settings

from .gate import INFER
from .reloading import asked, asked_text, write
from .stack import Client, Upstream, digest, documents, gateway, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def test_a_mistake_in_another_file_does_not_keep_a_dropped_key_alive(
    up: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a mistake in any document would keep all old keys in force until an operator has fixed it."""
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
            reloader = Reloader(core, source.stamp, folder.compile, seen=source.stamp())

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
            assert "all that they no longer name is refused from now on, 1 keys in all: key 'k' of one" in caplog.text
            report = await asked(core, "/policies")
            assert (report["withdrawn_keys"], report["adopted"], len(report["mistakes"])) == (1, 1, 1)
            assert "oriel_gateway_policy_withdrawn_keys 1.0" in await asked_text(core, "/metrics")
            in_force = core.snapshot
            write(tmp_path, {"two.toml": keyed["two"] + b"# a remark\n"})
            await reloader.poll()
            assert core.snapshot is in_force, "what is left is not adopted a second time"
            # A file that cannot be read may be half written: it withdraws no key, and keeps no other file's key in
            # force.
            write(tmp_path, {"two.toml": b"[tenants.two\n"})
            await reloader.poll()
            assert await statuses() == (401, 200)
            write(tmp_path, {"one.toml": keyed["one"]})
            await reloader.poll()
            assert await statuses() == (200, 200) and "are back and accepted" in caplog.text
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
    """Documents that are good but for the pool that --endpoint names withdraw keys like any others."""
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
            reloader = Reloader(core, source.stamp, lambda: load(settings, folder), seen=source.stamp())

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
