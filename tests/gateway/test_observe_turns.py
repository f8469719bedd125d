"""Where the rules of what a gateway observes turn: bounds of names, times in milliseconds, promises kept and broken."""

from types import SimpleNamespace
from typing import Any

import pytest

from oriel_gateway.errors import Outcome
from oriel_gateway.observe import spending as spending_module
from oriel_gateway.observe import usage as usage_module
from oriel_gateway.observe.budgets import BAD, CALLS, SEPARATOR, Budgets
from oriel_gateway.observe.cube import Promises
from oriel_gateway.observe.decisions import Decisions, explain, stages
from oriel_gateway.observe.objectives import EXCUSED, Objectives, result_of
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.observe.records import kept_for
from oriel_gateway.observe.spans import span_count
from oriel_gateway.observe.spending import Spending, _note
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.top_names import OTHER, TopNames
from oriel_gateway.observe.tracing import Mark, new_span
from oriel_gateway.observe.usage import Usage

from .records import mark, record, target

HOUR = 3600


class Named(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


TIER = SimpleNamespace(name="gold", band=0, target_s=2.0)
TENANT: Any = Named(name="a", tier=TIER, caller="", budgets=(), allowances=())
TARGET = target()


def decided(request_id: str = "i", outcome: Outcome = Outcome.ANSWERED, status: int = 200, **more: Any) -> Record:
    facts = {"mark": mark(request_id), "status": status, "received_s": 10.0, "ended_s": 12.0, "opened": True} | more
    return record(facts.pop("tenant", TENANT), facts.pop("target", TARGET), outcome, **facts)


# Names of metrics -----------------------------------------------------------------------------------------------------


def test_names_move_once_a_minute_and_to_a_key_with_more_than_twice_the_traffic() -> None:
    now = [0.0]
    it: TopNames[str] = TopNames(lambda _: OTHER, max_named=1, clock=lambda: now[0])
    it.count("a", "met", 4)
    it.count("b", "met", 3)
    assert set(it.read()) == {"a", OTHER}
    it.count("a", "met", 2)  # 4 and 2 of half the weight before: 2 + 2; b: 1.5 + 6.5
    it.count("b", "met", 6)
    now[0] = 59.0
    assert set(it.read()) == {"a", OTHER}
    now[0] = 60.0
    assert it.read() == {"a": {"met": 6}, OTHER: {"met": 9}}, "7.5 is less than twice 4"
    it.count("b", "met", 1)
    it.count("a", "met", 0)
    now[0] = 120.0  # a: 4 / 2 = 2; b: 7.5 / 2 + 1 = 4.75
    assert it.read() == {"b": {"met": 0}, OTHER: {"met": 10}}
    it.count("b", "late")
    assert it.read()["b"] == {"met": 0, "late": 1}


def test_half_of_the_counted_keys_stay_when_there_are_too_many() -> None:
    now = [0.0]
    it: TopNames[str] = TopNames(lambda _: OTHER, max_named=1, max_counted=6, clock=lambda: now[0])
    for number in range(8):
        it.count(str(number), "met", 8 - number)
    assert set(it._counted) == set("012345") and it._rest == {OTHER: {"met": 3}}
    it.read()
    assert set(it._counted) == set("012") and it._rest == {OTHER: {"met": 15}}
    it.count("9", "met")
    now[0] = 60.0
    it.read()
    assert set(it._counted) == set("0129"), "there is room again"


# Decisions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "count"), [(-1, 1), (0, 1), (1, 1), (2, 2), (100, 100), (101, 100)])
def test_a_question_about_decisions_has_1_to_100_answers(limit: int, count: int) -> None:
    it = Decisions(max_kept=150)
    for number in range(160):
        it.append(decided("same", status=number))
    found = it.where(limit=limit)
    assert [each.status for each in found] == list(range(159, 159 - count, -1))
    assert len(it.of("same")) == 100 and it.of("other") == []
    assert [each.status for each in it.latest(2)] == [158, 159] and len(it.latest(1000)) == 150
    assert len(it.where()) == 20 and len(it.where(tenant="a")) == 20 and it.where(tenant="b") == []
    assert len(it.where(reason="answered")) == 20 and it.where(reason="displaced") == []
    it.append(decided(tenant=None))
    assert it.where(tenant="a")[0].status == 159


REACHED = {"queued_s": 10.5, "permit_s": 11.0, "sent_s": 11.0004, "response_s": 11.5006, "deadline": 13.0}


def test_the_stages_of_a_call_are_told_in_milliseconds_and_add_up() -> None:
    assert stages(decided(**REACHED)) == {
        **{"receive": 500.0, "queue": 500.0, "connect": 0.4, "upstream": 500.2, "answer": 499.4, "total": 2000.0}
    }
    assert stages(decided(sent_s=10.5)) == {"receive": 500.0, "upstream": 1500.0, "total": 2000.0}
    assert stages(decided()) == {"receive": 2000.0, "total": 2000.0}


def test_an_explanation_tells_promise_budget_and_use() -> None:
    found = explain(decided(**REACHED, ahead=0, used="dev=1234567;cpu=7654321;class=h100;tin=3;tout=4"), 100.0004)
    assert (
        found["ended_at"] == 112.0 and found["promise"]["result"] == "met" and found["promise"]["target_ms"] == 2000.0
    )
    assert found["budget_ms"] == {
        **{"arrival": 3000.0, "queue": 2500.0, "permit": 2000.0, "upstream": 1999.6, "answer": 1499.4, "end": 1000.0}
    }
    assert found["used"] == {
        **{"device_ms": 1.235, "device_class": "h100", "cpu_ms": 7.654, "tokens_in": 3, "tokens_out": 4}
    }
    assert found["queue"] == {"ahead_at_arrival": 0} and found["promise"]["excess_ms"] == 0.0
    late = explain(decided(judged=Judged("late", "queue", 0.1234, "queue")), 0.0)
    assert late["promise"]["excess_ms"] == 123.4 and late["promise"]["passed_in"] == "queue"
    assert late["queue"] is None and late["budget_ms"] == {} and late["used"] is None
    assert explain(decided(tenant=None, target=None), 0.0)["promise"] is None


# Promises -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "status", "result"),
    [
        (Outcome.ANSWERED, 499, "excused"),
        (Outcome.ANSWERED, 500, "missed"),
        (Outcome.ANSWERED, 501, "missed"),
        (Outcome.CALLER_LEFT, 500, "excused"),
        (Outcome.QUEUE_FULL, 0, "missed"),
        (Outcome.NOT_FOUND, 0, "excused"),
    ],
)
def test_a_call_is_missed_from_status_500_on(outcome: Outcome, status: int, result: str) -> None:
    assert result_of(outcome, status) == result


def ended(outcome: Outcome, status: int = 0, *, give_s: float = 8.0, answered_s: float = 12.0) -> Record:
    facts = {"queued_s": 10.0, "permit_s": 10.0, "sent_s": 10.0, "deadline": 10.0 + give_s, "answered_s": answered_s}
    return decided(outcome=outcome, status=status, **facts)


@pytest.mark.parametrize(("give_s", "excused"), [(1.9, True), (1.99999, True), (2.0 - 1e-7, False), (2.0, False)])
@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.DEADLINE_EXCEEDED, 504),
        (Outcome.DEADLINE_TOO_SHORT, 0),
        (Outcome.INFEASIBLE, 0),
        (Outcome.ANSWERED, 504),
    ],
)
def test_a_deadline_of_the_client_before_the_target_breaks_no_promise(
    outcome: Outcome, status: int, give_s: float, excused: bool
) -> None:
    found = Objectives().judge(ended(outcome, status, give_s=give_s), TENANT.tier, "/v2/m")
    assert (found is EXCUSED) is excused and found.result == ("excused" if excused else "missed")


@pytest.mark.parametrize("status", [400, 499, 500])
def test_an_error_is_no_late_answer(status: int) -> None:
    found = Objectives().judge(ended(Outcome.ANSWERED, status, give_s=0.1, answered_s=15.0), TENANT.tier, "/v2/m")
    assert found.result == ("missed" if status == 500 else "excused")
    assert Objectives().judge(ended(Outcome.ANSWERED, 399, answered_s=15.0), TENANT.tier, "/v2/m").result == "late"


def test_counts_of_a_key_tell_causes_of_what_counts_and_none_of_what_is_excused() -> None:
    counts = Promises()
    for judged in (Judged("late", "queue"), Judged("late", "queue"), Judged("missed", "loop"), EXCUSED, EXCUSED):
        counts.broke(judged)
    counts.add(counts)
    assert (counts.met, counts.late, counts.missed, counts.excused) == (0, 4, 2, 4)
    assert counts.causes == {"queue": 4, "loop": 2}


@pytest.mark.parametrize(
    ("judged", "outcome", "why"),
    [
        (None, Outcome.ANSWERED, ""),
        (EXCUSED, Outcome.ANSWERED, ""),
        (Judged("late"), Outcome.ANSWERED, "sla"),
        (Judged("missed"), Outcome.ANSWERED, "error"),
        (Judged("missed"), Outcome.UPSTREAM_BROKEN, "error"),
        (Judged("missed"), Outcome.QUEUE_FULL, "sla"),
        (Judged("late"), Outcome.UPSTREAM_BROKEN, "sla"),
    ],
)
def test_a_trace_is_kept_for_a_broken_promise_or_a_failed_server(
    judged: Judged | None, outcome: Outcome, why: str
) -> None:
    assert kept_for(decided(outcome=outcome, judged=judged)) == why


# Histories of 30 days -------------------------------------------------------------------------------------------------


def sums(*counts: tuple[int, str, int], key: tuple[str, str, str] = ("a", "gold", "m")) -> dict[str, int]:
    return {SEPARATOR.join(("slo", str(hour_s), *key, counter)): value for hour_s, counter, value in counts}


NOW = 1000 * 24 * HOUR + HOUR // 2
THIS = NOW - HOUR // 2


def month_of(it: Budgets) -> tuple[int, int]:
    found, count = it.of_pairs({"gold": 0.9}, NOW)
    assert count == len(found)
    return (0, 0) if not found else (found[0][1]["calls"]["30d"], found[0][1]["bad"]["30d"])


@pytest.mark.parametrize(
    ("hour_s", "known"),
    [
        (THIS, True),
        (THIS + HOUR, True),
        (THIS + 2 * HOUR, False),
        (NOW - 30 * 24 * HOUR - 1, False),
        (THIS - 29 * 24 * HOUR, True),
    ],
)
def test_sums_of_other_gateways_count_within_30_days_and_an_hour_ahead(hour_s: int, known: bool) -> None:
    it = Budgets()
    it.take_over(sums((hour_s, CALLS, 5), (hour_s, BAD, 2)), NOW, whole=False)
    assert month_of(it) == ((5, 2) if known else (0, 0))


def test_sums_that_no_gateway_wrote_count_for_nothing() -> None:
    it = Budgets()
    good = sums((THIS, CALLS, 5))
    (name,) = good
    for odd in (f"{name}{SEPARATOR}x", name.replace("slo", "x"), name.replace(str(THIS), "x"), "slo", ""):
        it.take_over({odd: 5}, NOW, whole=False)
    it.take_over({name: 0}, NOW, whole=False)
    it.take_over({name: -1}, NOW, whole=False)
    assert month_of(it) == (0, 0)
    it.take_over(good, NOW, whole=False)
    it.take_over(sums((THIS, "queue", 1)), NOW, whole=False)
    ((_, found),), _ = it.of_pairs({"gold": 0.9}, NOW)
    assert (found["calls"]["30d"], found["causes"]) == (5, {"queue": 1})


def test_of_whole_sums_only_what_is_not_known_is_added() -> None:
    it = Budgets()
    it.take_over(sums((THIS, CALLS, 5), (THIS, BAD, 2)), NOW, whole=False)
    it.take_over(sums((THIS, CALLS, 9), (THIS, BAD, 1)), NOW, whole=True)
    assert month_of(it) == (9, 2)
    it.take_over(sums((THIS - HOUR, CALLS, 3)), NOW, whole=True)
    assert month_of(it) == (12, 2)


# Budgets of tenants ---------------------------------------------------------------------------------------------------


def test_of_too_many_tenants_the_one_that_has_spent_least_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spending_module.MAX_KNOWN == 500 and spending_module.MAX_SHOWN == 50
    monkeypatch.setattr(spending_module, "MAX_KNOWN", 2)
    shares: dict[str, float] = {}
    for name, share in (("a", 0.5), ("b", 0.2), ("c", 0.9), ("a", 0.1), ("d", 0.3)):
        _note(shares, name, share)
    assert shares == {"c": 0.9, "d": 0.3}


@pytest.mark.parametrize(
    ("lefts", "told"),
    [
        ([21.0], []),
        ([20.0], ["is spent to 80%"]),
        ([0.1], ["is spent to 100%"]),
        ([0.0], ["is spent: its calls are refused"]),
        ([20.0, 20.0, 5.0, 0.0, -1.0], ["is spent to 80%", "is spent: its calls are refused"]),
        ([20.0, 21.0, 20.0], ["is spent to 80%"] * 2),
    ],
)
def test_a_warning_and_the_end_of_a_budget_are_logged_once(
    lefts: list[float], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    left = [100.0]
    bound = SimpleNamespace(name="b", limit=100, budget=SimpleNamespace(warn=0.8, stop=True))
    limiter: Any = SimpleNamespace(remaining=lambda *of: [(bound, left[0], 0.0)])
    tenant: Any = SimpleNamespace(name="a", allowances=[SimpleNamespace(budgets=(1,), tokens=None)])
    it = Spending(limiter, SimpleNamespace(tenants={"a": tenant}))  # type: ignore[arg-type]
    for left[0] in lefts:
        it._report(tenant)
    assert [each.getMessage().removeprefix("tenant a: b ") for each in caplog.records] == told
    (fill,) = it.fills()
    assert fill.ratio == pytest.approx(1.0 - lefts[-1] / 100) and it._fullest == {"a": fill.ratio}


# Use ------------------------------------------------------------------------------------------------------------------


def test_tenants_and_their_targets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usage_module.MAX_ROWS == 100_000
    monkeypatch.setattr(usage_module, "MAX_ROWS", 2)
    usage = Usage()
    usage.month()
    for name in ("a", "b", "c"):
        usage._note((name, "model", "m", "t", False), {"requests": 1}, {})
    assert [usage.of(name)["month"]["requests"] for name in ("a", "b", "c")] == [1, 1, 0]
    for number in range(1, 1003):
        usage._note(("a", "model", f"m{number}", "t", False), {"requests": 1}, {})
    targets = usage.of("a")["month"]["targets"]
    assert len(targets) == 1001 and [each["requests"] for each in targets if each["target"] == "other"] == [3]
    assert usage.of("a")["month"]["requests"] == 1003


def test_sums_of_other_gateways_are_of_this_month_and_of_their_day() -> None:
    usage = Usage()
    day = usage.today("a")[0]
    month, other = day[:7], f"{day[:7]}-{'02' if day[8:] == '01' else '01'}"
    for name, value in (
        ((day, "a", "model", "m", "t", "0", "", "requests"), 1),
        ((other, "a", "model", "m", "t", "0", "", "requests"), 2),
        (("2001-01-01", "a", "model", "m", "t", "0", "", "requests"), 4),
        ((day, "a", "model", "m", "t", "0", "h100", "device_ns"), 8),
        ((day, "a", "model", "m", "t", "1", "", "requests"), 16),
        ((day, "a", "model", "m", "t", "0", "", "evil"), 32),
        ((day, "a", "model", "m", "t", "0", "requests"), 64),
    ):
        usage.take_over({SEPARATOR.join(name): value}, whole=False)
    found = usage.of("a")
    assert (found["day"]["requests"], found["month"]["requests"], found["day"]["device_ns"]) == (17, 19, 8)
    assert [each["estimated"] for each in found["day"]["targets"]] == [False, True]
    assert usage._uses("a", month=False)[0].device_ns == {"h100": 8} and month == usage.month()
    usage.take_over(
        {SEPARATOR.join((day, "b", "model", "m", "t", "0", "", "requests")): 3, "since": 86_400}, whole=True
    )
    assert usage.of("a")["month"]["requests"] == 0 and usage.of("b")["since"] == "1970-01-02T00:00:00Z"


# Counts of calls ------------------------------------------------------------------------------------------------------


def test_calls_are_counted_by_the_first_digit_of_their_status_and_waits_apart() -> None:
    stats = Stats(Objectives(), Usage())
    for status, ahead, more in (
        (199, -1, {}),
        (200, 0, {"queued_s": 10.25, "permit_s": 10.75, "sent_s": 10.75, "response_s": 11.0}),
        (299, 3, {"queued_s": 11.0}),
        (300, -1, {"sent_s": 10.5}),
    ):
        stats.recent.append(decided(status=status, ahead=ahead, bytes_in=2, bytes_out=3, **more))
    assert stats.finished_count == 4
    found = {key[4]: series for key, series in stats.series.items()}
    assert {digit: sum(series.counts) for digit, series in found.items()} == {1: 1, 2: 2, 3: 1}
    assert (found[2].total, found[2].bytes_in, found[2].bytes_out) == (4.0, 4, 6)
    assert (found[2].upstream.total, sum(found[2].upstream.counts), sum(found[3].upstream.counts)) == (0.25, 1, 0)
    (waits,) = stats.waits.values()
    assert (waits.total, sum(waits.counts)) == (1.5, 2)
    away: dict[str, Any] = {"outcome": Outcome.RATE_LIMITED, "opened": False}
    stats.recent += [decided(judged=EXCUSED, **away), decided(tenant=None, target=None, **away)]
    assert stats.finished_count == 6 and stats.refusals == {Outcome.RATE_LIMITED: 2}
    for reason in ("full", "full", "down"):
        stats.spilled("r", "p", "q", reason)
    assert stats.spills == {("r", "p", "q", "full"): 2, ("r", "p", "q", "down"): 1}


# Traces ---------------------------------------------------------------------------------------------------------------


def test_a_mark_keeps_the_latest_eight_attempts() -> None:
    ids = Mark("i", "1" * 32, "2" * 16, "3" * 16)
    ids.parent = "f"
    where: Any = SimpleNamespace(host="h", port=1)
    spans = [ids.onward]
    for number in range(9):
        ids.attempted(where, float(number), number + 0.5, "503")
        spans.append(ids.onward)
    assert [attempt.start_s for attempt in ids.attempts] == list(range(1, 9))
    assert [attempt.span for attempt in ids.attempts] == spans[1:9] and len(set(spans)) == 10
    assert (ids.trace_id, ids.span_id, ids.parent_id) == (int("1" * 32, 16), int("2" * 16, 16), 15)
    assert ids.forward_id == int(spans[-1], 16) and Mark("i", "1", "2", "3").parent_id == 0
    assert ids.traceparent() == f"00-{'1' * 32}-{spans[-1]}-02"
    assert ids.traceresponse() == f"00-{'1' * 32}-{'2' * 16}-02"
    assert span_count(decided(mark=ids)) == 9 and span_count(decided(mark=ids, permit_s=1.0, ahead=0)) == 11


def test_the_id_of_a_span_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from oriel_gateway.observe import tracing

    for bits, found in ((0, "0" * 15 + "1"), (1, "0" * 15 + "1"), (2**64 - 1, "f" * 16)):
        monkeypatch.setattr(tracing, "random_bits", lambda size, bits=bits: bits)
        assert new_span() == found
