"""`oriel state`: what a gateway has counted goes on elsewhere, once, and nothing is guessed."""

import asyncio
import gzip
import tarfile
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

import msgspec
import pytest

from oriel_cli.main import main
from oriel_gateway import backup
from oriel_gateway.limits.meters import QuotaRow
from oriel_gateway.limits.quota_file import SCHEMA
from oriel_gateway.limits.redis_ledger import RedisLedger
from oriel_gateway.observe import budget_file
from oriel_gateway.state_file import StateFile, read_copy
from oriel_policies.bounds.calendar import Period, window_number
from oriel_policies.bounds.ledger import WINDOW, Ask
from oriel_wire.usage.files import UsageFiles
from oriel_wire.usage.lines import UsageLine

from ..conformance.redis_server import PASSWORD, redis_server, unhurried  # noqa: F401
from ..waiting import until
from .limit_desk import INFER, on, tenant_t
from .process import gateway_process
from .stack import Client, digest, upstream

LIMITS = "limit = { requests_per_month = 9000 }"
REDIS_PARTS = (backup.QUOTAS, backup.SUMS)
MINUTE = "2026-11-24T17:05"
PUT = "INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?)"


@pytest.fixture(autouse=True)
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORIEL_LIMITER", raising=False)


async def state(*words: object) -> int:
    return await asyncio.to_thread(main, ["state", *map(str, words)])


def rows(path: Path, part: str) -> list[list[object]]:
    found = dict(backup._read(path)).get(part, b"")
    return [msgspec.json.decode(line) for line in found.splitlines()]


def kept_objectives(folder: Path) -> None:
    file = StateFile(folder / budget_file.NAME, budget_file.SCHEMA, holds="objectives")
    file.open(lambda database: None)
    file.close()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_quotas_and_bill_of_a_gateway_go_on_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ORIEL_STATE", raising=False)
    one, two = tmp_path / "one", tmp_path / "two"
    running, stopped = tmp_path / "running.tar.gz", tmp_path / "stopped.tar.gz"
    for folder in (one, two):
        folder.mkdir()
    async with upstream() as up:
        documents = on(up.port, tenant_t(LIMITS))
        async with gateway_process(one, documents) as it, Client(it.port) as client:
            for _ in range(3):
                assert (await client.ask(INFER, b"x", key="key-t")).status == 200

            async def saved() -> bool:
                running.unlink(missing_ok=True)
                return await state("export", running, "--state", one / "state") == 0 and any(
                    row[-1] == 3 for row in rows(running, backup.QUOTAS)
                )

            await until(saved)
        assert await state("export", stopped, "--state", one / "state") == 0
        assert rows(stopped, backup.QUOTAS) == rows(running, backup.QUOTAS)
        for _ in range(2):  # the second time changes nothing
            assert await state("import", stopped, "--state", two / "state") == 0
        bills = []
        for folder in (one, two):
            capsys.readouterr()
            assert main(["usage", "export", "--state", str(folder / "state"), "--format", "cloudevents"]) == 0
            bills.append(capsys.readouterr().out)
        assert bills[0] == bills[1] != ""
        again = tmp_path / "again.tar.gz"
        assert await state("export", again, "--state", two / "state") == 0
        parts = [dict(backup._read(each)) for each in (stopped, again)]
        manifests = [each.pop(backup.MANIFEST) for each in parts]
        assert parts[0] == parts[1] and b"key-t" not in manifests[0]
        async with gateway_process(two, documents) as it, Client(it.port) as client:
            answer = await client.ask(INFER, b"x", key="key-t")
            assert '"requests-month";r=8996;' in (answer.headers["ratelimit"])
    plain = gzip.decompress(stopped.read_bytes())
    assert b"key-t" not in plain and digest("key-t").encode() not in plain
    assert stopped.stat().st_mode & 0o77 == 0


def quota(used: int, *, number: int = 24_320, tenant: str = "t") -> QuotaRow:
    return QuotaRow(tenant, "requests-month", "month", number, used)


def tarred(
    path: Path, parts: Iterable[tuple[str, bytes]], *, form: int = 1, manifest: backup.Manifest | None = None
) -> Path:
    """Write a file of these parts, with their manifest or another one."""
    found = backup.Manifest(form=form, oriel="0.9.0", at="then")
    with tarfile.open(path, "w:gz") as tar:
        for name, data in parts:
            backup._add(tar, found, name, data)
        backup._add(tar, found, backup.MANIFEST, msgspec.json.encode(manifest or found))
    return path


def packed(path: Path, *rows: QuotaRow, **more: bytes) -> Path:
    """Write a file of these quotas and further parts."""
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    return tarred(path, [(backup.QUOTAS, lines), *more.items()])


def kept(folder: Path) -> list[tuple[object, ...]]:
    return read_copy(folder / "quotas.db", "quotas")


async def test_counters_that_are_ahead_are_set_back_only_if_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    assert await state("import", packed(tmp_path / "a", quota(5), quota(7, tenant="u")), "--state", here) == 0
    behind = packed(tmp_path / "b", quota(4), quota(8, tenant="u"), quota(9, tenant="new"))
    before = tree(here)
    assert await state("import", behind, "--state", here) == 2
    assert "1 counters here are ahead" in capsys.readouterr().err and tree(here) == before
    assert await state("import", behind, "--state", here, "--replace") == 0
    assert kept(here) == [quota(9, tenant="new"), quota(4), quota(8, tenant="u")]
    assert await state("import", packed(tmp_path / "c", quota(99, number=24_319)), "--state", here) == 0
    assert quota(4) in kept(here), "the month before is over"


async def test_a_file_that_is_damaged_or_of_a_later_version_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = packed(tmp_path / "good", quota(5))
    whole = good.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped").write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    (tmp_path / "text").write_bytes(b"no archive")
    packed(tmp_path / "path", **{"usage/v1/../../../quotas.db": b""})
    edited = dict(backup._read(good))
    manifest = msgspec.json.decode(edited.pop(backup.MANIFEST), type=backup.Manifest)
    edited[backup.QUOTAS] = edited[backup.QUOTAS].replace(b"24320,5", b"24320,0")
    tarred(tmp_path / "edited", edited.items(), manifest=manifest)
    tarred(tmp_path / "later", [("heat.ndjson", b"")], form=2)
    for name, says in {
        **dict.fromkeys(("cut", "flipped", "text", "gone", "path"), "is damaged"),
        "edited": "is damaged, and nothing was imported: quotas.ndjson",
        "later": "is of form 2, and this version of Oriel reads form 1: import it with Oriel 0.9.0",
    }.items():
        assert await state("import", tmp_path / name, "--state", tmp_path / "here") == 2
        assert says in capsys.readouterr().err, name
    assert not (tmp_path / "here").exists()


async def test_a_folder_in_use_is_not_imported_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = StateFile(tmp_path / "quotas.db", SCHEMA, holds="quotas")
    with closing(owner):
        owner.open(lambda database: None)
        assert await state("import", packed(tmp_path / "a", quota(5)), "--state", tmp_path) == 2
    assert "quotas.db cannot be used (see above): stop its gateway" in capsys.readouterr().err and kept(tmp_path) == []


async def test_an_export_neither_replaces_a_file_nor_comes_out_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = packed(tmp_path / "there", quota(5))
    before = file.read_bytes()
    assert await state("import", file, "--state", tmp_path / "here") == 0
    assert await state("export", file, "--state", tmp_path / "here") == 2
    assert "File exists" in capsys.readouterr().err and file.read_bytes() == before
    assert await state("export", tmp_path / "new", "--state", tmp_path / "mistyped") == 2
    assert "there is nothing to export in" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert await state("export", tmp_path / "new", "--limiter", "redis://127.0.0.1:99999/0") == 2
    assert "the state cannot be exported: Port out of range" in capsys.readouterr().err


def test_a_copy_is_whole_while_a_gateway_writes(tmp_path: Path) -> None:
    """Each transaction sets two rows to one number, and pages move from SQLite's log into the file all the time."""
    file, stop = StateFile(tmp_path / "quotas.db", SCHEMA, holds="quotas"), Event()
    file.open(lambda database: None)
    assert file.database is not None
    file.database.execute("PRAGMA wal_autocheckpoint = 2")
    file.database.execute("PRAGMA synchronous = OFF")

    def write() -> None:
        for number in range(10**9):
            if stop.is_set():
                return
            new = [quota(number), quota(number, tenant="u" * 5000)]
            file.change(lambda database, new=new: database.executemany(PUT, new))  # type: ignore[misc]

    writer = Thread(target=write)
    writer.start()
    try:
        found = {tuple(row[-1] for row in kept(tmp_path)) for _ in range(30)}
    finally:
        stop.set()
        writer.join()
        file.close()
    assert len(found) > 1 and all(len(set(each)) <= 1 for each in found), found


async def test_segments_are_imported_once_and_one_that_grows_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, file = tmp_path / "one", tmp_path / "two", tmp_path / "file"
    crashed = UsageFiles(one, "crashed")
    crashed.append(MINUTE, [UsageLine(minute=MINUTE, unit="gateway", tenant="t", target="m", requests=1)])
    assert crashed._file is not None
    crashed._file.close()
    sealed = UsageFiles(tmp_path / "other", "sealed")
    sealed.append(MINUTE, [UsageLine(minute=MINUTE, unit="gateway", tenant="t", target="m", requests=2)])
    sealed.seal()
    (tmp_path / "other/usage/v1/2026-11-24").rename(one / "usage/v1/2026-11-24")
    grows = UsageFiles(tmp_path / "third", "grows")
    grows.append(MINUTE, [UsageLine(minute=MINUTE, unit="gateway", requests=4)])
    (tmp_path / "third/usage/v1/open/grows-00000001.ndjson").rename(one / "usage/v1/open/grows-00000001.ndjson")
    assert await state("export", file, "--state", one) == 0
    grows._file = grows._file.close()  # type: ignore[union-attr]
    assert "not in it: 1 segments" in capsys.readouterr().err
    assert await state("import", file, "--state", two) == 0
    UsageFiles(two, "next")  # seals what the crash left
    before = tree(two)
    assert await state("import", file, "--state", two) == 0
    assert tree(two) == before
    assert main(["usage", "export", "--state", str(two), "--from", "2026-11-24", "--format", "ndjson"]) == 0
    assert '"requests": 3' in capsys.readouterr().out.replace('":3', '": 3')


async def test_quotas_and_sums_in_redis_go_to_another_one_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORIEL_LIMITER_PASSWORD", PASSWORD)
    now = datetime.now(UTC)
    month, number = f"{now:%Y-%m}", window_number(Period.MONTH, now.timestamp())
    used = Ask(key="requests-month", kind=WINDOW, limit=99.0, step=1.0, need=5.0, number=number)
    async with redis_server() as server:
        ledgers = [RedisLedger(server.url, holder="g", password=PASSWORD, prefix=each) for each in ("a.:", "b:")]
        await ledgers[0].ask([("t", [used])])
        await ledgers[0]._redis.hset("a.:{t}other", "period", "month")  # no gateway wrote it
        await ledgers[0].add_use(month, 1, {"calls": 7}, "", 1000)
        words = ("--state", tmp_path, "--limiter", server.url, "--limiter-prefix")
        assert await state("export", tmp_path / "file", *words, "a.:") == 0
        for _ in range(2):
            assert await state("import", tmp_path / "file", *words, "b:") == 0
        assert await ledgers[1].quotas() == [quota(5, number=number)] == await ledgers[0].quotas()
        sums, _ = await ledgers[1].add_use(month, 0, {}, "", 0)
        assert (sums["calls"], sums["since"]) == (7, 1000)
        await ledgers[1].ask([("t", [used])])
        await ledgers[1].add_use(month, 1, {"calls": 2}, "", 0)
        assert await state("import", tmp_path / "file", *words, "b:") == 2
        assert "1 counters here are ahead" in capsys.readouterr().err
        assert await state("import", tmp_path / "file", *words, "b:", "--replace") == 0
        assert await ledgers[1].quotas() == [quota(5, number=number)]
        assert (await ledgers[1].add_use(month, 0, {}, "", 0))[0]["calls"] == 9
        assert await state("import", tmp_path / "file", "--state", tmp_path / "folder") == 0
        assert kept(tmp_path / "folder") == [quota(5, number=number)], "from Redis into a folder"
        for ledger in ledgers:
            await ledger.close()
    assert PASSWORD.encode() not in gzip.decompress((tmp_path / "file").read_bytes())


async def test_with_redis_alone_no_folder_is_read_or_written_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator's own machine has a folder too: of `oriel up`, whose bill is none of the region's."""
    monkeypatch.setenv("ORIEL_LIMITER_PASSWORD", PASSWORD)
    monkeypatch.delenv("ORIEL_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    one, file = tmp_path / "one", tmp_path / "file"
    for folder in (one, tmp_path / "home/oriel"):
        usage = UsageFiles(folder, "sealed")
        usage.append(MINUTE, [UsageLine(minute=MINUTE, unit="gateway", requests=2)])
        usage.seal()
        kept_objectives(folder)
    before = tree(tmp_path / "home")
    async with redis_server() as server:
        limiter = ("--limiter", server.url)
        assert await state("export", file, "--state", one, *limiter) == 0
        capsys.readouterr()
        assert await state("import", file, *limiter) == 0
        assert (
            "; left out: objectives or segments of usage, 2 parts (--state DIR takes them)" in capsys.readouterr().err
        )
        assert tree(tmp_path / "home") == before
        assert await state("export", tmp_path / "alone", *limiter) == 0
        assert {name for name, _ in backup._read(tmp_path / "alone")} == {*REDIS_PARTS, backup.MANIFEST}
        monkeypatch.setenv("ORIEL_STATE", str(tmp_path / "two"))  # as in a gateway's container
        assert await state("import", file, *limiter) == 0
        assert "left out" not in capsys.readouterr().err
        assert {Path(name).name for name in tree(tmp_path / "two")} >= {"objectives.db", "sealed-00000001.ndjson.gz"}
