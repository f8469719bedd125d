"""Whether the promise of a tier was kept, why not, and that the counts of 30 days survive a restart."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.budget_file import BudgetFile
from oriel_gateway.observe.budgets import Budgets
from oriel_gateway.observe.objectives import CAUSE, EXCUSED, Objectives
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.usage import Usage

from .operators import admin, decision, held
from .records import record
from .stack import BRONZE, LIMITED, Client, Seen, documents, gateway, upstream

NOW = 1_800_000_000.0
INFER = "/v2/models/digits/infer"


def tight(ports: list[int], **options: Any) -> dict[str, bytes]:
    """Documents whose targets no call of these tests can meet, and deadlines that none passes by itself."""
    return {
        name: text.replace(b"target_ms = 2000", b"target_ms = 1\ngive_up_ms = 60000")
        for name, text in documents(ports, **options).items()
    }


def answer_late(timing: str) -> Any:
    """An upstream that answers 20 ms after it was asked and says where the time went."""

    async def answer(_: Seen) -> bytes:
        until_s = monotonic() + 0.02
        while monotonic() < until_s:
            await asyncio.sleep(0)
        return f"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nserver-timing: {timing}\r\n\r\nok".encode()

    return answer


# An hour, which is made as long as it can have been: all of the time until the answer, however busy the machine is.
HOUR = "3600000"


@pytest.mark.parametrize(
    ("timing", "cause"),
    [
        (f"logic;dur={HOUR}, logic-wait;dur={HOUR}", "logic_wait"),
        ("logic;dur=0.001", "network"),
    ],
)
async def test_a_late_call_names_its_cause_in_decision_metric_and_report(timing: str, cause: str) -> None:
    async with (
        upstream() as up,
        gateway(tight([up.port])) as (port, core),
        Client(port) as client,
        admin(core) as admins,
    ):
        up.answer = answer_late(timing)
        for number in range(100):  # on a busy machine any other place may take longer
            await client.ask(INFER, b"x", headers=f"x-request-id: late-{number}\r\n")
            found = await decision(core, f"late-{number}")
            await admins.get("/metrics")  # names are given by the first scrape, and a cause appears as 0 first
            if found["stages_ms"].get("upstream", 0.0) > found["stages_ms"]["total"] / 2 and number > 1:
                break
        promise, total = found["promise"], found["stages_ms"]["total"]
        assert (promise["result"], promise["cause"], promise["passed_in"] != "") == ("late", cause, True)
        assert promise["excess_ms"] > 0 and promise["target_ms"] == 1
        assert sum(promise["places_ms"].values()) == pytest.approx(total, rel=0.01, abs=0.02)
        bad = await scraped(admins, "oriel_gateway_slo_bad_total")
        assert sum(value for labels, value in bad.items() if dict(labels)["cause"] == cause) >= 1
        report = (await admins.get("/slo")).json()
        (gold,) = [tier for tier in report["tiers"] if tier["tier"] == "gold"]
        assert gold["causes"][cause] >= 1 and gold["bad"]["5m"] == gold["calls"]["30d"] == number + 1
        assert gold["budget_left"] == pytest.approx(-99.0) and gold["attainment"]["1h"] == 0.0
        (target,) = report["targets"]
        assert (target["tenant"], target["tier"], target["target"]) == ("g", "gold", "model:digits")
        assert (await admins.get("/slo?tenant=nobody")).json()["targets"] == []
        assert (await admins.get("/slo?limit=0")).status_code == 400


async def scraped(admins: httpx.AsyncClient, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    text = (await admins.get("/metrics")).text
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_a_full_queue_is_the_cause_of_a_refusal_and_limits_are_the_callers_own() -> None:
    async with (
        upstream() as up,
        gateway(documents([up.port], max_inflight=1, max_queue=1)) as (port, core),
        Client(port) as one,
        Client(port) as two,
        Client(port) as three,
    ):
        async with held(up):
            calls = [asyncio.ensure_future(each.ask(INFER, b"x", key=BRONZE)) for each in (one, two)]
            while core.pools["p"].admission.queue.items < 1:
                await asyncio.sleep(0)
            assert (await three.ask(INFER, b"x", key=BRONZE)).status == 503
        await asyncio.gather(*calls)
        for _ in range(3):
            await three.ask(INFER, b"x", key=LIMITED)
        objectives = core.records.stats.objectives
        assert objectives.attainment["bronze", "missed"] == 1 and objectives.attainment["gold", "excused"] == 1
        objectives.tenants.read()
        counted = objectives.pairs.read()
        assert (
            counted["b", "bronze", "model:digits"].get(CAUSE + "queue", 0) == 0
        )  # it was counted before it had a name
        assert counted["other", "bronze", "other"][CAUSE + "queue"] == 1


GOLD: Any = SimpleNamespace(name="gold", target_s=0.5)


def call(outcome: Outcome, **times: float) -> Record:
    at = {"received_s": 10.0, "deadline": 12.0, "answered_s": 12.0, "ended_s": 12.0}
    return record(SimpleNamespace(name="t", tier=GOLD), None, outcome, **at | times)


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (call(Outcome.DEADLINE_EXCEEDED), "body"),
        (call(Outcome.DEADLINE_EXCEEDED, queued_s=10.1), "queue"),
        (call(Outcome.DEADLINE_EXCEEDED, queued_s=10.1, permit_s=10.2), "endpoint"),
        (call(Outcome.DEADLINE_EXCEEDED, queued_s=10.1, permit_s=10.2, sent_s=10.3), "upstream"),
        (call(Outcome.UPSTREAM_UNREACHABLE, queued_s=10.1), "endpoint"),
        (call(Outcome.UPSTREAM_BROKEN, queued_s=10.1, permit_s=10.2, sent_s=10.3), "upstream_error"),
        (call(Outcome.SERVER_STOPPING, queued_s=10.1), "refused"),
        (call(Outcome.INFEASIBLE, queued_s=10.1), "queue"),
    ],
)
def test_a_missed_call_is_lost_where_it_never_left_or_by_its_reason(ended: Record, cause: str) -> None:
    judged = Objectives().judge(ended, GOLD, "model:m")
    assert (judged.result, judged.cause) == ("missed", cause)
    ended.deadline = 10.4  # the client's own
    excused = ended.outcome in (Outcome.DEADLINE_EXCEEDED, Outcome.INFEASIBLE)
    assert (Objectives().judge(ended, GOLD, "model:m") is EXCUSED) == excused


@pytest.mark.parametrize(("left_s", "result"), [(0.4, "excused"), (0.5, "missed")])
def test_a_refusal_for_a_deadline_before_the_target_costs_no_budget(left_s: float, result: str) -> None:
    tenant: Any = SimpleNamespace(name="t", tier=GOLD)
    assert Objectives().refused(Outcome.INFEASIBLE, tenant, left_s).result == result


@pytest.mark.parametrize(("stood_still_s", "cause"), [(0.0, "body"), (0.5, "body"), (1.2, "loop")])
def test_a_loop_that_stood_still_itself_is_the_cause_and_not_the_client(stood_still_s: float, cause: str) -> None:
    objectives = Objectives()
    objectives.stood_still_s = lambda began_s, ended_s: stood_still_s
    assert objectives.judge(call(Outcome.DEADLINE_EXCEEDED), GOLD, "model:m").cause == cause
    waits = call(Outcome.DEADLINE_EXCEEDED, queued_s=10.1)
    assert objectives.judge(waits, GOLD, "model:m").cause == "queue"


def test_a_deadline_that_passed_in_a_server_that_tells_where_names_that_place() -> None:
    ended = call(Outcome.ANSWERED, queued_s=10.0, permit_s=10.0, sent_s=10.0, response_s=12.0)
    ended.status, ended.timing = 504, "logic;dur=1990, logic-wait;dur=1900"
    assert Objectives().judge(ended, GOLD, "service:s")[:2] == ("missed", "logic_wait")


# The history ---------------------------------------------------------------------------------------------------


def counted(stats: Stats, met: int, missed: int, *, tenant: str = "a") -> None:
    cell = stats._objectives.counts(tenant, "gold", "model:m")
    cell.met += met
    cell.missed += missed
    stats.objectives.flush()


async def test_budgets_survive_a_restart_and_a_kill_loses_only_what_was_not_written(tmp_path: Path) -> None:
    path, now = tmp_path / "state" / "objectives.db", [NOW]
    stats = Stats(Objectives(clock=lambda: now[0]), Usage())
    file = BudgetFile(path, stats, clock=lambda: now[0])
    file.open()
    counted(stats, 900, 100)
    await file.save()
    assert path.stat().st_mode & 0o77 == 0
    now[0] += 86400
    counted(stats, 500, 0)
    running = asyncio.ensure_future(file.run())
    await asyncio.sleep(0)
    running.cancel()  # the gateway stops: the rest is written
    await asyncio.wait((running,))
    again = Stats(Objectives(clock=lambda: now[0]), Usage())
    with closing(BudgetFile(path, again, clock=lambda: now[0])) as reader:
        reader.open()
    budgets = again.objectives.budgets
    assert budgets.remaining("gold", 0.9, now[0]) == pytest.approx(1 - (100 / 1500) / 0.1)
    ((key, figures),), found = budgets.of_pairs({"gold": 0.9}, now[0])
    assert key == ("a", "gold", "model:m") and found == 1
    assert (figures["calls"]["30d"], figures["bad"]["30d"], figures["bad"]["1h"]) == (1500, 100, 0)


async def test_what_is_too_old_is_neither_read_nor_kept(tmp_path: Path) -> None:
    path, now = tmp_path / "objectives.db", [NOW]
    stats = Stats(Objectives(clock=lambda: now[0]), Usage())
    file = BudgetFile(path, stats, clock=lambda: now[0])
    file.open()
    counted(stats, 1, 1)
    await file.save()
    now[0] += 31 * 86400
    counted(stats, 1, 0)
    await file.save()
    assert file._file is not None and file._file.database is not None
    rows = file._file.database.execute("SELECT total, bad FROM slots").fetchall()
    file.close()
    assert rows == [(1, 0)] * 4  # two widths, of the tier and of the pair
    assert stats.objectives.budgets.remaining("gold", 0.9, now[0]) == 1.0


async def test_a_second_process_counts_in_memory_and_a_damaged_file_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "objectives.db"
    first, second = (Stats(Objectives(), Usage()) for _ in range(2))
    owner = BudgetFile(path, first)
    owner.open()
    counted(first, 1, 0)
    await owner.save()
    other = BudgetFile(path, second)
    other.open()
    assert "another process uses objectives.db" in caplog.text and not second.objectives.budgets.keeps
    counted(second, 1, 0)
    await other.save()
    owner.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE slots SET total = 'many'")
    database.close()
    with closing(BudgetFile(path, second)) as third:
        third.open()
    assert "moved aside" in caplog.text and second.objectives.budgets.keeps


def test_histories_are_bounded_and_a_tier_has_every_call() -> None:
    budgets = Budgets(max_pairs=3)
    budgets.keeps = True
    for number in range(10):
        budgets.add((f"t{number}", "gold", "m"), NOW + number, 10, 1, {"queue": 1})
    listed, found = budgets.of_pairs({"gold": 0.9}, NOW + 60)
    assert found == 4 and {key[0] for key, _ in listed} == {"t0", "t1", "t2", "other"}
    assert budgets.of_tier("gold", 0.9, NOW + 60)["calls"]["5m"] == 100
    budgets.add(("late", "gold", "m"), NOW + 7200, 10, 10, {})
    assert {key[0] for key, _ in budgets.of_pairs({"gold": 0.9}, NOW + 7200)[0]} == {"t1", "t2", "late", "other"}
    dropped, rows = budgets.take_unsaved()
    assert dropped == [("t0", "gold", "m")]
    budgets.give_back(dropped, rows)
    assert budgets.take_unsaved() == (dropped, rows)
    assert budgets.of_tier("gold", 0.9, NOW + 7200 + 3700)["causes"] == {}


def test_counts_beyond_the_bound_are_those_of_the_others() -> None:
    objectives = Objectives(max_keys=3)
    for number in range(6):
        objectives.counts(f"t{number}", "gold", "m").met += 1
    objectives.flush()
    assert objectives.attainment == {("gold", "met"): 6} and not objectives._counts
    assert objectives.budgets.of_tier("gold", 0.9, time())["calls"]["5m"] == 6
    listed, _ = objectives.budgets.of_pairs({"gold": 0.9}, time())
    assert {key[0]: each["calls"]["5m"] for key, each in listed} == {"t0": 1, "t1": 1, "t2": 1, "other": 3}
