"""State of another version: that of form 1 is read for ever, and that of a later form is neither read nor changed."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from oriel_cli.main import main
from oriel_gateway.limits import redis_ledger
from oriel_gateway.limits.ledger import LedgerLost
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.limits.redis_ledger import RedisLedger
from oriel_gateway.observe.budget_file import BudgetFile
from oriel_gateway.observe.objectives import Objectives
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.usage import Usage
from oriel_policies.bounds.ledger import RATE, WINDOW, Ask
from oriel_wire.usage.files import UsageFiles, read_segment, segments

from ..conformance.redis_server import PASSWORD, redis_server, unhurried  # noqa: F401
from .first_forms import OBJECTIVES, QUOTAS, REDIS, USAGE, write_database, write_segment
from .limit_desk import NOON, Desk

FILES = [("quotas.db", QUOTAS), ("objectives.db", OBJECTIVES)]


def keeper(path: Path) -> tuple[QuotaFile | BudgetFile, Stats]:
    stats = Stats(Objectives(clock=lambda: NOON), Usage())
    if path.name == "quotas.db":
        return QuotaFile(path), stats
    return BudgetFile(path, stats, clock=lambda: NOON), stats


@pytest.mark.parametrize("form", [0, 1], ids=["before forms were marked", "form 1"])
async def test_quotas_and_objectives_of_form_1_go_on(tmp_path: Path, form: int) -> None:
    for name, script in FILES:
        write_database(tmp_path / name, script, form=form)
    limits = "limit = { requests_per_day = 9, compute_ms_per_month = 1000 }"
    desk = Desk(limits, file=QuotaFile(tmp_path / "quotas.db"), wall=lambda: NOON)
    state = dict(desk.take().headers(desk.now))["ratelimit"]
    assert '"requests-day";r=6;' in state and '"compute-month";r=983;' in state
    await desk.limiter.close()
    file, stats = keeper(tmp_path / "objectives.db")
    assert isinstance(file, BudgetFile)
    file.open()
    assert stats.objectives.budgets.of_tier("gold", 0.9, NOON)["bad"]["30d"] == 2
    file.close()
    for name, _ in FILES:
        with closing(sqlite3.connect(tmp_path / name)) as database:
            assert database.execute("PRAGMA user_version").fetchone() == (1,)


@pytest.mark.parametrize(("name", "script"), FILES)
async def test_a_database_of_a_later_form_stays_as_it_is(
    tmp_path: Path, name: str, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    write_database(path, script + f"ALTER TABLE {'quotas' if name == 'quotas.db' else 'slots'} ADD extra;", form=2)
    before = path.read_bytes()
    file, _ = keeper(path)
    file.open()
    assert "is of form 2, of a later version of Oriel, and stays as it is" in caplog.text
    await asyncio.gather(*filter(asyncio.iscoroutine, [file.close()]))
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == [name]


def test_usage_that_a_later_version_wrote_is_kept_and_what_cannot_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    added = USAGE.replace(b'"device_ns"', b'"energy_uj":5,"device_ns"') + b'{"kind":"carbon","minute":"x"}\n' + USAGE
    write_segment(tmp_path, "old-00000001", USAGE)
    write_segment(tmp_path, "new-00000001", added)
    (tmp_path / "usage" / "v2").mkdir()
    assert sorted(UsageFiles(tmp_path, "next").recovered) == ["new-00000001", "old-00000001"]
    found = {
        name: [line and (line.kind, line.requests) for _, line in read_segment(path)]
        for name, path in segments(tmp_path)
    }
    start, used, crash = ("start", 0), ("use", 3), ("crash", 0)
    assert found == {"old-00000001": [start, used, crash], "new-00000001": [start, used, None, start, used, crash]}
    export = ["usage", "export", "--state", str(tmp_path), "--from", "2026-09-21", "--to", "2026-09-22"]
    assert main(export) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].startswith("t,m,,2026-09-21,9,")
    assert "1 lines cannot be read and are missing" in err and "usage/v2 is of a later version of Oriel" in err


async def test_records_in_redis_of_form_1_go_on_and_later_ones_are_left_alone() -> None:
    ask = [
        (
            "t",
            [
                Ask(key="requests", kind=RATE, limit=9.0, step=1e6, need=1.0),
                Ask(key="day", kind=WINDOW, limit=9.0, step=0.0),
            ],
        )
    ]
    async with redis_server() as server:
        ledger = RedisLedger(server.url, holder="one", password=PASSWORD)
        for command in REDIS:
            await ledger._redis.execute_command(*command)
        (answer,) = await ledger.ask(ask)
        assert answer is not None and answer[0].granted == 1.0
        sums, _ = await ledger.add_use("2026-09", 0, {}, "", 0)
        assert sums["slo\x1f1789992000\x1f\x1fgold\x1f\x1f+calls"] == 10
        await ledger._redis.set("oriel:form", "2")
        keys = set(await ledger._redis.keys("*"))
        with pytest.raises(LedgerLost, match="are of form 2, of a later version of Oriel"):
            await ledger.hello(1.0)
        for refused in (ledger.ask(ask), ledger.exchange(b""), ledger.add_use("2026-11", 1, {"a": 1}, "", 0)):
            with pytest.raises(LedgerLost, match="--limiter-prefix"):
                await refused
        assert set(await ledger._redis.keys("*")) == keys and await ledger._redis.get("oriel:form") == b"2"
        await ledger._redis.set("oriel:form", str(redis_ledger.FORM))  # the later version has gone
        assert (await ledger.hello(1.0)).gateways == 1
        await ledger.close()
