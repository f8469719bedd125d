"""The rules of the embedded limiter: what is counted, refused, returned and kept."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_policies.documents import compile_documents

from .limit_desk import NOON, Desk, tenant_t


def test_scopes_count_their_own_calls_and_a_refusal_gives_back_what_others_took() -> None:
    desk = Desk(
        "limit = { requests_per_s = 1, burst = 3, concurrency = 10, requests_per_day = 100 }\n"
        'limits = [{ model = "big*", requests_per_s = 1, burst = 1 }, { service = "s", requests_per_s = 1 }]'
    )
    assert desk.take("big1") is not None
    refused = desk.refused("big2")
    assert refused.outcome is Outcome.RATE_LIMITED and "calls of model:big*" in refused.message
    assert dict(refused.headers)["ratelimit"].startswith('"model:big*/requests";r=0;t=1')
    # The scope "all" has returned what the refused call had taken: two of three calls, nine slots and 99 calls are
    # left.
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


def test_a_call_that_never_ran_costs_no_quota_but_its_rate() -> None:
    desk = Desk("limit = { requests_per_day = 2, requests_per_s = 0.001, burst = 3 }", wall=lambda: NOON)
    desk.take().settle(0, False, desk.now)
    desk.take().settle(5, True, desk.now)
    desk.take().settle(5, True, desk.now)
    desk.now += 1e4  # only the monotonic clock goes on; the wall clock stands still
    refused = desk.refused()
    assert refused.outcome is Outcome.QUOTA_EXCEEDED and refused.retry_after_s == 33200


def test_computing_is_reserved_by_estimate_and_settled_by_charge() -> None:
    desk = Desk("limit = { compute_ms_per_day = 100 }", wall=lambda: NOON)
    grants = [desk.take() for _ in range(10)]  # 10 ms are reserved for each call while no cost is known
    assert desk.refused().outcome is Outcome.QUOTA_EXCEEDED, "calls under way have reserved the whole day's quota"
    for grant in grants:
        grant.settle(1000, True, desk.now)
    # 100 ms less 10 that were charged, less the estimate, which is 1 to 10
    assert '"compute-day";r=8' in dict(desk.take().headers(desk.now))["ratelimit"]
    desk.take().settle(95_000, True, desk.now)
    assert desk.refused().retry_after_s == 43200


@pytest.mark.parametrize("period", ["day", "month"])
def test_what_was_reserved_before_midnight_is_not_given_back_after_it(period: str) -> None:
    """Otherwise calls that were refused after midnight would add to the quota of the new day."""
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
    long.settle(2_000_000, True, desk.now)  # the rest of its cost is charged when it is known
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
    """A quota goes on, and does not begin anew, when its line was missing from one version of the documents."""
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
    """More accounts than the limiter remembers: an account that was dropped goes on with the quota it had used."""
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
        for grant in grants:  # what is returned late is returned to the same count
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
    desk = Desk(limits, max_accounts=2, file=QuotaFile(None, max_rows=3))
    for number in range(20):
        tenant = dataclasses.replace(compile_documents(tenant_t(limits)).tenants["t"], name=f"n{number}")
        desk.limiter.acquire(tenant, dataclasses.replace(desk.target(), allowances=tenant.allowances), 0, desk.now)
    assert len(desk.limiter._file._known) == 3 and desk.limiter.accounts == 2


@pytest.mark.parametrize("wrong", [0.0, NOON - 40 * 86400, NOON + 400 * 86400])
async def test_a_restart_with_a_wrong_clock_forgives_no_quota(tmp_path: Path, wrong: float) -> None:
    """R33: a machine starts with its clock at 1970, or in the future, and gets the right time ten minutes later."""
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
    assert allowed == (10 if ahead else 2), (
        "a gateway that starts with a clock in the future cannot know it, so one more quota is possible"
    )
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
        # Two limits refuse the call at once: the longer wait is reported, because the other one would not suffice.
        ("limit = { requests_per_s = 0.3, burst = 2, requests_per_day = 2 }", 0, 43200 - 100),
        ('limit = { requests_per_s = 0.3, burst = 2 }\nlimits = [{ model = "m", requests_per_day = 2 }]', 0, 43100),
        ('limit = { bytes_per_s = 1, bytes_burst = 50 }\nlimits = [{ route = "model:*", bytes_per_s = 9 }]', 40, 30),
    ],
)
def test_retry_after_is_true_for_every_kind_of_limit(limits: str, size: int, retry_after_s: int) -> None:
    """The same call passes after that time, and does not pass a second earlier."""
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
