"""Quotas are kept in a file over a restart; the file has one owner and a bound."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_gateway.app import _limiter
from oriel_gateway.errors import Outcome
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.settings import Settings

from ..waiting import TIMEOUT_S, until
from .limit_desk import NOON, Desk
from .stack import Upstream, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def test_quotas_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "quotas.db"
    limits = "limit = { requests_per_day = 3, compute_ms_per_month = 1000 }"
    desk = Desk(limits, file=QuotaFile(path, save_s=0.01), wall=lambda: NOON)
    desk.take().settle(7000, True, desk.now)
    async with asyncio.timeout(60):  # killed: only what the timer has saved is in the file
        await until(lambda: path.exists() and _rows(path))
    assert path.stat().st_mode & 0o77 == 0
    desk.take().settle(0, True, desk.now)
    await desk.limiter.close()
    again = Desk(limits, file=QuotaFile(path), wall=lambda: NOON)
    state = dict(again.take().headers(again.now))["ratelimit"]
    assert '"requests-day";r=0;' in state and '"compute-month";r=98' in state
    assert again.refused().outcome is Outcome.QUOTA_EXCEEDED
    await again.limiter.close()
    tomorrow = Desk(limits, file=QuotaFile(path), wall=lambda: NOON + 86400)
    assert '"requests-day";r=2;' in dict(tomorrow.take().headers(tomorrow.now))["ratelimit"]
    await tomorrow.limiter.close()


async def test_a_quota_file_is_read_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read half a million counters takes half a second, in which no call may wait for it."""
    path = tmp_path / "quotas.db"
    settings = Settings(policies=tmp_path, quota_file=path)
    await (await _limiter(settings)).close()
    assert not path.exists(), "nothing has a quota yet"
    await make_file(path)
    limiter = await _limiter(settings)
    monkeypatch.setattr(QuotaFile, "_read", None)
    desk = Desk("limit = { requests_per_day = 3 }")
    limiter.acquire(desk.tenant, desk.target(), 0, 1.0)
    await limiter.close()


async def make_file(path: Path) -> None:
    desk = Desk("limit = { requests_per_day = 3 }", file=QuotaFile(path))
    desk.take()
    await desk.limiter.close()


def _rows(path: Path) -> list[tuple[object, ...]]:
    with open(path.with_name(path.name + "-wal"), "rb") as file:
        return [(1,)] if b"requests-day" in file.read() else []


async def test_a_damaged_quota_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "quotas.db"
    path.write_bytes(b"no database at all" * 500)
    desk = Desk("limit = { requests_per_day = 3 }", file=QuotaFile(path), wall=lambda: NOON)
    desk.take()
    assert "moved aside" in caplog.text and len(list(tmp_path.glob("quotas.db.corrupt-*"))) == 1
    await desk.limiter.close()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT used FROM quotas").fetchall() == [(1,)]
    database.close()


async def test_a_quota_file_has_one_owner_and_a_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "quotas.db"
    limits = "limit = { requests_per_day = 3 }"
    first = Desk(limits, file=QuotaFile(path, max_rows=1), wall=lambda: NOON)
    first.take()
    second = Desk(limits, file=QuotaFile(path), wall=lambda: NOON)
    second.take()
    assert "another process" in caplog.text
    await second.limiter.close()
    await first.limiter.close()
    with sqlite3.connect(path) as database:
        database.executemany("INSERT INTO quotas VALUES (?, 'requests-day', 'day', 99999, 1)", [("x",), ("y",)])
    database.close()
    third = Desk(limits, file=QuotaFile(path, max_rows=1), wall=lambda: NOON)
    third.take()
    await third.limiter.close()
    with sqlite3.connect(path) as database:
        assert len(database.execute("SELECT * FROM quotas").fetchall()) == 1
    database.close()


async def test_a_quota_file_is_not_closed_under_a_write(tmp_path: Path) -> None:
    """SQLite crashes the whole process if its file is closed during a write."""
    entered, go = threading.Event(), threading.Event()
    writing: list[int] = []

    class Held(QuotaFile):
        def _write(self, rows: list[tuple[str, str, str, int, int]]) -> None:
            writing.append(writing[-1] + 1 if writing else 1)
            entered.set()
            go.wait(TIMEOUT_S)
            super()._write(rows)
            writing.append(writing[-1] - 1)

    desk = Desk("limit = { requests_per_day = 9 }", file=Held(tmp_path / "quotas.db", save_s=0.0), wall=lambda: NOON)
    desk.take()
    await asyncio.to_thread(entered.wait, TIMEOUT_S)
    desk.take()  # during the write of the first change
    closing = asyncio.ensure_future(desk.limiter.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    assert writing == [1, 0, 1, 0]
    with sqlite3.connect(tmp_path / "quotas.db") as database:
        assert database.execute("SELECT used FROM quotas").fetchall() == [(2,)]
    database.close()
