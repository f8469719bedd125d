"""Each request that has ended is added up once: metrics, use, promises and the console agree about any of them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_gateway.admin.console.recent import Recent
from oriel_gateway.errors import Outcome
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.cube import add_up
from oriel_gateway.observe.decisions import Decisions
from oriel_gateway.observe.objectives import CAUSE, RESULTS, Objectives
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.usage import Usage

from .records import record, target

TIERS = [SimpleNamespace(name=name, target_s=target_s) for name, target_s in (("gold", 0.5), ("bronze", 5.0))]
TENANTS: list[Any] = [
    *[SimpleNamespace(name=name, tier=tier, caller="", budgets=()) for name, tier in zip("ab", TIERS, strict=True)],
    SimpleNamespace(name="a", tier=TIERS[0], caller="service", budgets=()),
]
TARGETS = [target("m"), target("n"), target("list", pool="q", executes=False)]
ENDS = (Outcome.ANSWERED, Outcome.CALLER_LEFT, Outcome.DEADLINE_EXCEEDED, Outcome.UPSTREAM_BROKEN, Outcome.DISPLACED)
REFUSALS = (Outcome.RATE_LIMITED, Outcome.QUEUE_FULL, Outcome.NOT_FOUND)
USED = ("", "dev=7;cpu=3;class=h100", "dev=5;cpu=1;class=cpu;tin=2;tout=9", "tin=3;tout=4", "trailer;tin=1;tout=1", "?")


@st.composite
def ended(draw: Any) -> Record:
    """Return the record of any request; it is not judged yet."""
    begun_s = draw(st.floats(100.0, 130.0))
    took = draw(st.lists(st.floats(0.001, 3.0), min_size=5, max_size=5))
    if draw(st.booleans()):
        tenant = draw(st.sampled_from([None, *TENANTS[:2]]))
        of = None if tenant is None else draw(st.sampled_from([None, *TARGETS]))
        outcome = draw(st.sampled_from(REFUSALS if tenant is not None else (Outcome.UNAUTHENTICATED,)))
        return record(tenant, of, outcome, received_s=begun_s, ended_s=begun_s, status=STATUS[outcome])
    outcome = draw(st.sampled_from(ENDS))
    made = record(
        draw(st.sampled_from(TENANTS)), draw(st.sampled_from(TARGETS)), outcome, received_s=begun_s, opened=True
    )
    reached = draw(st.integers(0, 4))
    at_s = begun_s
    for name, step_s in zip(("queued_s", "permit_s", "sent_s", "response_s")[:reached], took, strict=False):
        at_s += step_s
        setattr(made, name, at_s)
    made.ended_s = made.answered_s = at_s + took[4]
    made.deadline = begun_s + draw(st.sampled_from([0.2, 60.0]))
    made.ahead = draw(st.sampled_from([-1, 0, 3])) if reached else -1
    answers = [0, 200, 304, 404, 500] if reached == 4 else [0]
    made.status = draw(st.sampled_from(answers)) if outcome is Outcome.ANSWERED else STATUS.get(outcome, 0)
    made.bytes_in, made.bytes_out = draw(st.integers(0, 9)), draw(st.integers(0, 9)) * (reached == 4)
    made.used, made.beside = draw(st.sampled_from(USED)), draw(st.integers(0, 3))
    made.protocol = draw(st.sampled_from(["http", "grpc"]))
    return made


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(ended(), max_size=40), max_size=4))
def test_metrics_use_promises_and_console_agree_for_any_requests(batches: list[list[Record]]) -> None:
    objectives = Objectives()
    stats = Stats(objectives, Usage())
    recent = Recent(Decisions(), 0, 130.0)
    stats.readers.append(recent.count)
    for batch in batches:
        for each in batch:
            if each.opened:
                late = each.ended_s - each.received_s > each.tenant.tier.target_s  # type: ignore[union-attr]
                if late or each.status >= 400 or each.outcome is not Outcome.ANSWERED:
                    tenant: Any = each.tenant
                    each.judged = objectives.judge(each, tenant.tier, each.target.route)  # type: ignore[union-attr]
            elif each.tenant is not None:
                each.judged = objectives.refused(each.outcome, each.tenant, 9.0)
        stats.recent += batch
        stats.count()
    recent.update(130.0)
    every = [each for batch in batches for each in batch]
    opened = [each for each in every if each.opened]
    of_tenants = [each for each in every if each.tenant is not None]

    series = stats.series
    assert stats.finished_count == len(every)
    assert sum(sum(each.counts) for each in series.values()) == len(opened)
    assert sum(stats.refusals.values()) == len(every) - len(opened)
    assert sum(each.bytes_out for each in series.values()) == sum(each.bytes_out for each in opened)
    assert sum(sum(each.counts) for each in stats.waits.values()) == sum(each.ahead >= 0 for each in opened)

    by_tier: Counter[tuple[str, str]] = Counter(stats.objectives.attainment)
    assert sum(by_tier.values()) == len(of_tenants)
    pairs = objectives.pairs.read()
    for (tier, result), count in by_tier.items():
        assert getattr(recent.tiers[tier], result) == count
        assert sum(counts.get(result, 0) for key, counts in pairs.items() if key[1] == tier) == count
    tenants = objectives.tenants.read()
    for name, tally in recent.tenants.items():
        assert {result: getattr(tally, result) for result in RESULTS if getattr(tally, result)} == tenants[name]
    targets = [each for each in of_tenants if each.target is not None]
    assert sum(tally.calls for tally in recent.targets.values()) == len(targets)
    causes = sum(count for counts in pairs.values() for name, count in counts.items() if name.startswith(CAUSE))
    assert causes == by_tier["gold", "late"] + by_tier["gold", "missed"] + (
        by_tier["bronze", "late"] + by_tier["bronze", "missed"]
    )

    answered = [each for each in opened if each.outcome is Outcome.ANSWERED and each.status < 400]
    in_metrics = sum(sum(each.counts) for key, each in series.items() if key[3] == "answered" and key[4] < 4)
    assert in_metrics == len(answered) == sum(tally.met + tally.late for tally in recent.tiers.values())
    lines = stats.usage.added("2026-11-24T12:00")
    own = [each for each in answered if each.tenant is not None and not each.tenant.caller]
    billed = [line for line in lines if line.kind == "use"]
    seen = [line for line in lines if line.kind == "seen" and line.why != "left"]
    assert sum(line.requests for line in billed) == sum(line.requests for line in seen) == len(own)
    assert sum(line.bytes_out for line in billed) == sum(each.bytes_out for each in own)
    shown = [stats.usage.of(name)["day"] for name in "ab"]
    cut_off = sum(line.requests for line in lines if line.why == "left")
    assert sum(each["requests"] for each in shown) == len(own) + cut_off
    for counter in ("device_ns", "cpu_ns", "tokens_in", "tokens_out"):
        assert sum(each[counter] for each in shown) == sum(
            getattr(line, counter) for line in lines if line.kind == "seen"
        )


@given(st.lists(ended(), max_size=60), st.integers(1, 60))
def test_it_makes_no_difference_how_many_are_added_up_at_a_time(records: list[Record], size: int) -> None:
    whole, parts = Usage(), Usage()
    whole.count(add_up(records, whole.classes))
    for start in range(0, len(records), size):
        parts.count(add_up(records[start : start + size], parts.classes))
    for name in "ab":
        assert parts.of(name)["day"]["requests"] == whole.of(name)["day"]["requests"]
        assert parts.of(name)["month"]["tokens_out"] == whole.of(name)["month"]["tokens_out"]
        assert parts.of(name)["day"]["device_ns"] == whole.of(name)["day"]["device_ns"]
