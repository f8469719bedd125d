"""Allowances on the whole path: what is refused, what is given back, what a client reads, what a restart keeps."""

import asyncio
import dataclasses
import gc
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, time

import pytest

from oriel_gateway.app import _limiter
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_gateway.limits.ledger import MemoryLedger, Presence, Question
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.settings import Settings
from oriel_policies.documents import compile_documents
from oriel_policies.ledger import Answer

from ..waiting import TIMEOUT_S, until
from .fake_transport import core_connections
from .limit_desk import INFER, Desk, on, tenant_t
from .stack import LIMITED, Client, Seen, Upstream, documents, gateway, upstream

NOON = 1_790_000_000.0 // 86400 * 86400 + 43200


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def test_scopes_count_their_own_calls_and_a_refusal_gives_back_what_others_took() -> None:
    desk = Desk(
        "limit = { requests_per_s = 1, burst = 3, concurrency = 10, requests_per_day = 100 }\n"
        'limits = [{ model = "big*", requests_per_s = 1, burst = 1 }, { service = "s", requests_per_s = 1 }]'
    )
    assert desk.take("big1") is not None
    refused = desk.refused("big2")
    assert refused.outcome is Outcome.RATE_LIMITED and "calls of model:big*" in refused.message
    assert dict(refused.headers)["ratelimit"].startswith('"model:big*/requests";r=0;t=1')
    # What "all" had counted for the refused call is back: two of three are left, and nine slots, and 99 calls.
    state = dict(desk.take("small").headers(desk.now))["ratelimit"]
    assert '"concurrency";r=8' in state and '"requests";r=1' in state and '"requests-day";r=98' in state


def test_a_route_has_limits_of_its_own() -> None:
    files = tenant_t('limits = [{ route = "slow", concurrency = 1 }]')
    text = (
        files["all.toml"]
        .decode()
        .replace(
            '[[routes]]\nmodel = "*"',
            '[[routes]]\nmodel = "slow-*"\nname = "slow"\npool = "p"\n[[routes]]\nmodel = "*"',
        )
    )
    desk = Desk("")
    desk.snapshot = compile_documents({"all.toml": text.encode()})
    desk.tenant = desk.snapshot.tenants["t"]
    assert desk.take("fast") is None
    desk.take("slow-a")
    assert desk.refused("slow-b").outcome is Outcome.CONCURRENCY_LIMITED
    assert desk.take("fast") is None


def test_slots_come_back_when_a_call_is_settled() -> None:
    desk = Desk("limit = { concurrency = 2 }")
    first, second = desk.take(), desk.take()
    refused = desk.refused()
    assert refused.outcome is Outcome.CONCURRENCY_LIMITED and refused.retry_after_s == 1
    first.settle(0, True, desk.now)
    first.settle(0, True, desk.now)  # once is enough
    third = desk.take()
    assert desk.refused()
    for grant in (second, third):
        grant.settle(0, True, desk.now)
    assert desk.take() and desk.take() and desk.refused()


def test_bytes_of_answers_are_paid_by_the_calls_after_them() -> None:
    desk = Desk("limit = { bytes_per_s = 1000, bytes_burst = 2000 }")
    grant = desk.take(size=1500)
    grant.move(3000, desk.now)
    refused = desk.refused(size=10)
    assert refused.retry_after_s == 3, "4,500 of 2,000 bytes are used: 10 more fit after 2.51 s"
    assert 'qu="content-bytes"' in dict(refused.headers)["ratelimit-policy"]
    desk.now += 2.6
    assert desk.take(size=10)


def test_a_call_that_never_ran_costs_no_quota_but_its_rate() -> None:
    desk = Desk("limit = { requests_per_day = 2, requests_per_s = 0.001, burst = 3 }", wall=lambda: NOON)
    desk.take().settle(0, False, desk.now)
    desk.take().settle(5, True, desk.now)
    desk.take().settle(5, True, desk.now)
    desk.now += 1e4  # the wall clock stands still: the monotonic one goes on
    refused = desk.refused()
    assert refused.outcome is Outcome.QUOTA_EXCEEDED and refused.retry_after_s == 33200


def test_computing_is_reserved_by_estimate_and_settled_by_charge() -> None:
    desk = Desk("limit = { compute_ms_per_day = 100 }", wall=lambda: NOON)
    grants = [desk.take() for _ in range(10)]  # 10 ms each until something is known
    assert desk.refused().outcome is Outcome.QUOTA_EXCEEDED, "calls under way have the whole day's share reserved"
    for grant in grants:
        grant.settle(1000, True, desk.now)
    assert '"compute-day";r=8' in dict(desk.take().headers(desk.now))["ratelimit"]  # 100 - 10 - the estimate, 1 to 10
    desk.take().settle(95_000, True, desk.now)
    assert desk.refused().retry_after_s == 43200


@pytest.mark.parametrize("period", ["day", "month"])
def test_what_was_reserved_before_midnight_is_not_given_back_after_it(period: str) -> None:
    """A hundred calls that had waited over midnight and were refused used to buy sixty more of the new day."""
    clock = [100.0]
    last = datetime(2026, 11, 30, 23, 59, 50, tzinfo=UTC).timestamp() - clock[0]
    desk = Desk(
        f"limit = {{ requests_per_{period} = 100, compute_ms_per_{period} = 10000 }}", wall=lambda: last + clock[0]
    )
    waiting = [desk.take() for _ in range(100)]
    desk.now = clock[0] = 112.0
    fresh = [desk.take() for _ in range(60)]
    for grant in waiting:
        grant.settle(0, False, desk.now)
    for grant in fresh[:10]:
        grant.settle(0, False, desk.now)
    state = dict(desk.take().headers(desk.now))["ratelimit"]
    assert f'"requests-{period}";r=49;' in state and f'"compute-{period}";r=9490;' in state
    long = desk.take()
    desk.now = clock[0] = 112.0 + 86400 * 40
    long.settle(2_000_000, True, desk.now)  # what it cost beyond that is paid when it is known
    assert f'"compute-{period}";r=6010;' in dict(desk.take().headers(desk.now))["ratelimit"]


def test_a_reload_forgives_nothing_and_takes_new_numbers_at_once() -> None:
    desk = Desk("limit = { requests_per_s = 0.001, burst = 2 }")
    desk.take(), desk.take()
    desk.load("limit = { requests_per_s = 0.001, burst = 2 }")
    desk.refused()
    desk.load("limit = { requests_per_s = 0.001, burst = 4, concurrency = 1 }")
    desk.take()
    assert desk.refused().outcome is Outcome.CONCURRENCY_LIMITED


@pytest.mark.parametrize(
    "between", ["limit = { requests_per_s = 1000, burst = 9 }", 'limits = [{ model = "x", concurrency = 1 }]']
)
def test_a_bound_that_is_away_for_one_reload_forgives_nothing(between: str) -> None:
    """A month's quota began anew when its line was commented out and put back."""
    limits = "limit = { requests_per_s = 1000, burst = 10, concurrency = 2, requests_per_month = 3 }"
    desk = Desk(limits)
    for _ in range(2):
        desk.take().settle(0, True, desk.now)
    running = desk.take()
    desk.load(between)
    for _ in range(2):
        meanwhile = desk.take()
        if meanwhile is not None:
            meanwhile.settle(0, True, desk.now)
        desk.now += 1.0
    desk.load(limits)
    assert desk.refused().outcome is Outcome.QUOTA_EXCEEDED
    desk.load(limits.replace("= 3 }", "= 9 }"))
    desk.take()
    assert desk.refused().outcome is Outcome.CONCURRENCY_LIMITED
    running.settle(0, True, desk.now)
    desk.take()


def test_accounts_are_bounded_and_those_that_owe_are_kept_longest() -> None:
    desk = Desk("limit = { requests_per_s = 1, burst = 1 }", max_accounts=100)
    debtor = desk.tenant
    other = compile_documents(tenant_t("limit = { requests_per_s = 1000, burst = 1 }")).tenants["t"]
    desk.take()
    for number in range(1000):
        desk.now += 0.0005
        tenant = dataclasses.replace(other, name=f"n{number}")
        target = dataclasses.replace(desk.target(), allowances=tenant.allowances)
        desk.limiter.acquire(tenant, target, 0, desk.now)
        assert desk.limiter.accounts <= 100
    desk.tenant = debtor
    desk.refused()


async def test_quotas_outlive_the_account_that_had_to_go(tmp_path: Path) -> None:
    """With more allowances than are remembered, each tenant had its month's quota again whenever its turn came."""
    limits = "limit = { requests_per_month = 3, compute_ms_per_day = 1000 }"
    for file in (None, QuotaFile(tmp_path / "quotas.db")):
        desk = Desk(limits, max_accounts=2, file=file)
        names = [desk.tenant, *(compile_documents(tenant_t(limits)).tenants["t"] for _ in range(3))]
        tenants = [dataclasses.replace(tenant, name=f"n{number}") for number, tenant in enumerate(names)]
        targets = [dataclasses.replace(desk.target(), allowances=tenant.allowances) for tenant in tenants]
        grants = []
        for _ in range(3):
            for tenant, target in zip(tenants, targets, strict=True):
                grants.append(desk.limiter.acquire(tenant, target, 0, desk.now))
                assert desk.limiter.accounts <= 2
        for tenant, target in zip(tenants, targets, strict=True):
            with pytest.raises(Refused, match="3 requests per month"):
                desk.limiter.acquire(tenant, target, 0, desk.now)
        for grant in grants:  # what comes back late comes back to the same count
            assert grant is not None
            grant.settle(0, False, desk.now)
        for tenant, target in zip(tenants, targets, strict=True):
            assert (
                '"requests-month";r=2;'
                in dict(desk.limiter.acquire(tenant, target, 0, 100.0).headers(100.0))["ratelimit"]
            )  # type: ignore[union-attr]
        await desk.limiter.close()


def test_what_is_kept_of_forgotten_quotas_is_bounded() -> None:
    limits = "limit = { requests_per_day = 1 }"
    desk = Desk(limits, max_accounts=2, max_windows=3)
    for number in range(20):
        tenant = dataclasses.replace(compile_documents(tenant_t(limits)).tenants["t"], name=f"n{number}")
        desk.limiter.acquire(tenant, dataclasses.replace(desk.target(), allowances=tenant.allowances), 0, desk.now)
    assert len(desk.limiter._windows) == 3 and desk.limiter.accounts == 2


@pytest.mark.parametrize("wrong", [0.0, NOON - 40 * 86400, NOON + 400 * 86400])
async def test_a_restart_with_a_wrong_clock_forgives_no_quota(tmp_path: Path, wrong: float) -> None:
    """R33: a machine that starts in 1970, or in the future, and hears the right time ten minutes later."""
    limits = "limit = { requests_per_day = 10, requests_per_month = 10 }"
    first = Desk(limits, file=QuotaFile(tmp_path / "quotas.db"), wall=lambda: NOON)
    for _ in range(8):
        first.take().settle(0, True, first.now)
    await first.limiter.close()
    wall = [wrong]
    again = Desk(limits, file=QuotaFile(tmp_path / "quotas.db"), wall=lambda: wall[0])
    allowed = 0
    for second in range(2000):
        again.now += 1.0
        wall[0] = wrong + second if second < 600 else NOON + second
        try:
            again.take().settle(0, True, again.now)
            allowed += 1
        except Refused as refused:
            assert refused.outcome is Outcome.QUOTA_EXCEEDED
    await again.limiter.close()
    ahead = wrong > NOON
    assert allowed == (10 if ahead else 2), "a gateway that was started in the future cannot know: one quota more"
    tomorrow = Desk(limits, file=QuotaFile(tmp_path / "quotas.db"), wall=lambda: NOON + 32 * 86400)
    assert '"requests-month";r=9' in dict(tomorrow.take().headers(tomorrow.now))["ratelimit"], "nobody is locked out"
    await tomorrow.limiter.close()


@pytest.mark.parametrize(
    ("limits", "size", "retry_after_s"),
    [
        ("limit = { requests_per_s = 0.3, burst = 2 }", 0, 4),
        ("limit = { requests_per_s = 50, burst = 2 }", 0, 1),
        ("limit = { bytes_per_s = 10, bytes_burst = 100 }", 77, 6),
        ("limit = { requests_per_day = 2 }", 0, 43200 - 100),
        ("limit = { requests_per_month = 2 }", 0, 9 * 86400 + 43200 - 100),
        ("limit = { compute_ms_per_day = 25 }", 0, 43200 - 100),
        ("limit = { compute_ms_per_month = 25 }", 0, 9 * 86400 + 43200 - 100),
        # Two that refuse at once: whoever came back after the shorter wait was refused again.
        ("limit = { requests_per_s = 0.3, burst = 2, requests_per_day = 2 }", 0, 43200 - 100),
        ('limit = { requests_per_s = 0.3, burst = 2 }\nlimits = [{ model = "m", requests_per_day = 2 }]', 0, 43100),
        ('limit = { bytes_per_s = 1, bytes_burst = 50 }\nlimits = [{ route = "model:*", bytes_per_s = 9 }]', 40, 30),
    ],
)
def test_retry_after_is_true_for_every_kind_of_limit(limits: str, size: int, retry_after_s: int) -> None:
    """The same call passes then, and did not a second before."""
    noon = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp() - 100.0

    def used_up() -> Desk:
        clock = [100.0]
        desk = Desk(limits, wall=lambda: noon + clock[0])
        desk.clock = clock  # type: ignore[attr-defined]
        desk.now = clock[0] = 200.0
        desk.take(size=size)
        if not size:
            desk.take()
        return desk

    refused = used_up().refused(size=size)
    assert refused.retry_after_s == retry_after_s
    assert f";t={retry_after_s}" in dict(refused.headers)["ratelimit"]
    for early_s, passes in ((0.0, True), (1.001, False)):
        desk = used_up()
        desk.now += retry_after_s - early_s
        desk.clock[0] = desk.now  # type: ignore[attr-defined]
        if passes:
            desk.take(size=size)
        else:
            desk.refused(size=size)


async def test_http_tells_what_is_left_and_what_was_refused(up: Upstream) -> None:
    files = on(up.port, tenant_t("limit = { requests_per_day = 2, concurrency = 5 }"))
    async with gateway(files) as (port, core), Client(port) as client:
        left = []
        for _ in range(2):
            reply = await client.ask(INFER, b"x", key="key-t")
            assert reply.status == 200
            left.append(reply.headers["ratelimit"])
            assert '"requests-day";q=2;w=86400' in reply.headers["ratelimit-policy"]
        assert '"requests-day";r=1;t=' in left[0] and '"requests-day";r=0;t=' in left[1]
        reply = await client.ask(INFER, b"x", key="key-t")
        until_midnight = 86400 - time() % 86400
        assert reply.status == 429 and b"quota_exceeded" in reply.body
        assert abs(int(reply.headers["retry-after"]) - until_midnight) <= 2
        assert core.records.stats.refused == {Outcome.QUOTA_EXCEEDED: 1}
        assert (await client.ask("/v2/models/none!", key="key-t")).status == 404, "not counted, not limited"


async def test_a_slot_is_held_to_the_last_byte_and_by_nobody_who_left(up: Upstream) -> None:
    gate = asyncio.Event()

    async def answer(_: Seen) -> bytes:
        await gate.wait()
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    up.answer = answer
    files = on(up.port, tenant_t("limit = { concurrency = 1 }"))
    async with gateway(files) as (port, _), Client(port) as one, Client(port) as two:
        one.send(INFER, b"x", key="key-t")
        async with asyncio.timeout(60):
            await until(lambda: up.seen)
        assert (reply := await two.ask(INFER, b"x", key="key-t")).status == 429
        assert b"concurrency_limited" in reply.body and reply.headers["retry-after"] == "1"
        one.writer.close()
        gate.set()

        async def let_through() -> bool:
            return (await two.ask(INFER, b"x", key="key-t")).status == 200

        await until(let_through)


async def test_bytes_both_ways_are_counted(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1388\r\n" + bytes(5000) + b"\r\n0\r\n\r\n"

    up.answer = answer
    files = on(up.port, tenant_t("limit = { bytes_per_s = 1000, bytes_burst = 10000 }"))
    async with gateway(files) as (port, _), Client(port) as client:
        body = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: key-t\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(body.encode() + b"1388\r\n" + bytes(5000) + b"\r\n0\r\n\r\n")
        assert (await client.reply()).status == 200
        assert (await client.ask(INFER, bytes(1000), key="key-t")).status == 429


async def test_a_streamed_answer_is_counted_as_it_passes(up: Upstream) -> None:
    more = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await more.wait()
        writer.write(b"1388\r\n" + bytes(5000) + b"\r\n")
        await reader.read()  # until the gateway leaves: the stream goes on
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    files = on(server.sockets[0].getsockname()[1], tenant_t("limit = { bytes_per_s = 10, bytes_burst = 1000 }"))
    async with gateway(files) as (port, core), Client(port) as client:
        client.send(INFER, b"x", key="key-t")
        await client.reader.readuntil(b"\r\n\r\n1\r\nx\r\n")
        target = core.targets.of_line(core.snapshot.tenants["t"], b"l", "POST", INFER, "")
        assert core.limiter.acquire(core.snapshot.tenants["t"], target, 10, monotonic())
        more.set()
        await client.reader.readexactly(5000)
        with pytest.raises(Refused):  # while the stream goes on
            core.limiter.acquire(core.snapshot.tenants["t"], target, 10, monotonic())
    server.close()
    await server.wait_closed()


async def test_the_charge_a_server_reports_is_what_the_quota_pays(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-oriel-cost-us: 400000\r\n\r\nok"

    up.answer = answer
    files = on(up.port, tenant_t("limit = { compute_ms_per_day = 1000 }"))
    async with gateway(files) as (port, _), Client(port) as client:
        left = []
        for _ in range(2):
            reply = await client.ask(INFER, b"x", key="key-t")
            left.append(int(reply.headers["ratelimit"].split(";r=")[1].split(";")[0]))
        assert left == [990, 200], "10 ms are reserved at first, then 400 were paid and 400 are expected"
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429


async def test_quotas_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "quotas.db"
    limits = "limit = { requests_per_day = 3, compute_ms_per_month = 1000 }"
    desk = Desk(limits, file=QuotaFile(path, save_s=0.01), wall=lambda: NOON)
    desk.take().settle(7000, True, desk.now)
    async with asyncio.timeout(60):  # killed without a word: only what the timer saved is there
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
    """Half a million counters take half a second, in which the first limited call used to hold up all others."""
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


async def test_an_unlimited_tenant_meets_no_limiter(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert isinstance(core, Gateway)
        reply = await client.ask(INFER, b"x")
        assert reply.status == 200 and "ratelimit" not in reply.headers
        assert (await client.ask(INFER, b"x", key=LIMITED)).headers["ratelimit"] == '"requests";r=1;t=2'


class Thinking:
    """A ledger that answers on a signal."""

    def __init__(self) -> None:
        self.behind = MemoryLedger(lambda: time() * 1e6).seat("one")
        self.go = asyncio.Event()
        self.asked = 0

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.asked += len(questions)
        await self.go.wait()
        return await self.behind.ask(questions)

    async def hello(self, share: float) -> Presence:
        return Presence(1)

    async def close(self) -> None:
        pass


async def test_the_body_is_collected_while_the_limiter_thinks(up: Upstream) -> None:
    ledger = Thinking()
    files = on(up.port, tenant_t("limit = { requests_per_s = 0.001, burst = 2 }"))
    limiter = SharedLimiter(ledger, budget_s=30.0)
    async with gateway(files, limiter=limiter) as (port, core), Client(port) as one, Client(port) as two:
        one.send(INFER, b"whole", key="key-t")
        two.writer.write(f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: key-t\r\n".encode())
        two.writer.write(b"content-length: 200000\r\n\r\n" + bytes(199_000))
        await until(lambda: ledger.asked >= 2)
        await until(lambda: {connection.call.body_bytes for connection in core_connections(core)} == {5, 199_000})
        assert not up.seen
        ledger.go.set()
        assert (await one.reply()).status == 200
        two.writer.write(bytes(1000))
        assert (await two.reply()).status == 200
        assert [len(seen.body) for seen in up.seen] == [5, 200_000]
        ledger.go.clear()
        two.send(INFER, b"x", key="key-t")  # over the limit: known only when the ledger has said so
        async with asyncio.timeout(60):
            await until(lambda: ledger.asked >= 3)
        ledger.go.set()
        reply = await two.reply()
        assert reply.status == 429 and int(reply.headers["retry-after"]) > 900 and "x-request-id" in reply.headers
        assert (await two.ask(INFER, b"x", key="key-t")).status == 429, "the connection goes on"


async def test_who_leaves_or_expires_while_the_limiter_thinks_holds_nothing(up: Upstream) -> None:
    ledger = Thinking()
    files = on(up.port, tenant_t("limit = { concurrency = 1 }"))
    async with gateway(files, limiter=SharedLimiter(ledger, budget_s=30.0)) as (port, core):
        async with Client(port) as gone, Client(port) as late:
            gone.send(INFER, b"x", key="key-t")
            late.send(INFER, b"x", key="key-t", headers="x-request-timeout-ms: 20\r\n")
            reply = await late.reply()
            assert reply.status == 504, reply.body
        ledger.go.set()
        async with Client(port) as client:

            async def let_through() -> bool:
                return (await client.ask(INFER, b"x", key="key-t")).status == 200

            await until(let_through)
        assert len(up.seen) == 1 and core.pools["p"].admission.inflight == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_a_limited_call_leaves_nothing_for_the_garbage_collector(up: Upstream, shared: bool) -> None:
    files = on(up.port, tenant_t("limit = { concurrency = 5, requests_per_s = 1000 }"))
    ledger = MemoryLedger(lambda: time() * 1e6).seat("one")
    limiter = SharedLimiter(ledger, budget_s=5.0) if shared else EmbeddedLimiter()
    async with gateway(files, limiter=limiter) as (port, _), Client(port) as client:
        for collected in (False, True):
            if collected:
                gc.collect()
                gc.disable()
            try:
                for _ in range(30):
                    await client.ask(INFER, b"x", key="key-t")
                assert not collected or gc.collect() < 30
            finally:
                gc.enable()


async def test_a_quota_file_is_not_closed_under_a_write(tmp_path: Path) -> None:
    """SQLite dies of it, and the gateway with it."""
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
    desk.take()  # while the first is being written
    closing = asyncio.ensure_future(desk.limiter.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    assert writing == [1, 0, 1, 0]
    with sqlite3.connect(tmp_path / "quotas.db") as database:
        assert database.execute("SELECT used FROM quotas").fetchall() == [(2,)]
    database.close()
