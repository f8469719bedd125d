"""When a canary is rolled back: intervals, verdicts, and the documents that configure them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.documents import compile_documents
from oriel_policies.errors import BadDocument
from oriel_policies.promise.explain import ExplainedCall, explain
from oriel_policies.quality.canary import MIN_COMPARED, SLOTS, CanaryWatch, Rollback, Verdict, least_difference, wilson

RULE = Rollback(canary="canary")


@given(st.integers(1, 10_000), st.data())
def test_an_interval_holds_its_share_and_narrows_with_more_calls(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    low, high = wilson(count, total)
    assert 0.0 <= low <= count / total + 1e-12 and count / total - 1e-12 <= high <= 1.0
    wider = wilson(10 * count, 10 * total)
    assert wider[1] - wider[0] <= high - low + 1e-12


def test_intervals_of_known_shares() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 100) == pytest.approx((0.0, 3.29**2 / (100 + 3.29**2)))
    low, high = wilson(50, 100)
    assert (low + high) / 2 == pytest.approx(0.5)


@given(st.integers(1, 2000), st.integers(1, 2000), st.data())
def test_a_difference_with_confidence_is_less_than_the_one_seen(one: int, other: int, data: st.DataObject) -> None:
    bad, other_bad = data.draw(st.integers(0, one)), data.draw(st.integers(0, other))
    found = least_difference(bad, one, other_bad, other)
    assert -1.0 - 1e-9 <= found <= bad / one - other_bad / other + 1e-12
    if bad < one:
        assert found <= least_difference(bad + 1, one, other_bad, other) + 1e-9, "more bad calls, a larger difference"


def replay(watch: CanaryWatch, calls: list[tuple[bool, str]]) -> Verdict | None:
    return next((found for canary, result in calls if (found := watch.finished(canary=canary, result=result))), None)


RESULTS = st.sampled_from(("met", "late", "missed"))


@given(st.lists(st.tuples(st.booleans(), RESULTS), max_size=400))
def test_nothing_is_judged_before_both_sides_have_enough_calls(calls: list[tuple[bool, str]]) -> None:
    watch = CanaryWatch(Rollback(canary="canary", min_calls=20))
    verdict, seen = None, [0, 0]
    for canary, result in calls:
        verdict = verdict or watch.finished(canary=canary, result=result)
        seen[canary] += 1
        if min(seen) < 20:
            assert verdict is None and watch.verdict is None
    assert watch.verdict == verdict


@pytest.mark.parametrize(("result", "reason"), [("missed", "errors"), ("late", "attainment")])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_canary_whose_calls_all_go_wrong_is_rolled_back_soon(result: str, reason: str, share: float) -> None:
    source = random.Random(1)
    watch = CanaryWatch(RULE)
    calls = ((canary, result if canary else "met") for canary in iter(lambda: source.random() < share, None))
    verdict = replay(watch, [next(calls) for _ in range(5000)])
    assert verdict is not None and verdict.reason == reason
    canary, other = watch.counts
    assert min(canary.calls, other.calls) <= RULE.min_calls + 30


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from((0.0, 0.01, 0.1, 0.5, 1.0)))
def test_a_canary_as_good_or_bad_as_the_other_side_stays(seed: int, bad: float) -> None:
    source = random.Random(seed)
    calls = [(source.random() < 0.1, "late" if source.random() < bad else "met") for _ in range(4000)]
    assert replay(CanaryWatch(RULE), calls) is None


def test_trouble_on_both_sides_is_no_reason_and_a_worse_canary_is() -> None:
    source = random.Random(4)

    def calls(canary_bad: float) -> list[tuple[bool, str]]:
        sides = [source.random() < 0.2 for _ in range(6000)]
        return [(each, "missed" if source.random() < (canary_bad if each else 0.3) else "met") for each in sides]

    assert replay(CanaryWatch(RULE), calls(0.3)) is None
    assert replay(CanaryWatch(RULE), calls(0.6)) is not None


def test_a_canary_that_was_good_for_long_is_judged_by_its_latest_calls() -> None:
    watch = CanaryWatch(RULE)
    assert replay(watch, [(number % 2 == 0, "met") for number in range(100_000)]) is None
    verdict = replay(watch, [(number % 2 == 0, "missed" if number % 2 == 0 else "met") for number in range(200)])
    assert verdict is not None
    canary, other = watch.counts
    assert max(canary.calls, other.calls) <= SLOTS * (RULE.min_calls + 1)


def test_a_verdict_is_final() -> None:
    watch = CanaryWatch(RULE)
    assert replay(watch, [(False, "met")] * 200 + [(True, "missed")] * 200) is not None
    verdict, counts = watch.verdict, watch.counts
    assert replay(watch, [(True, "met")] * 1000 + [(True, "missed")] * 1000) is None
    assert watch.compared(0.0) is None
    assert (watch.verdict, watch.counts) == (verdict, counts)


@pytest.mark.parametrize(("share", "rolled_back"), [(1.0, False), (0.95, False), (0.8, True), (0.0, True)])
def test_agreement_is_judged_from_enough_answers_on(share: float, rolled_back: bool) -> None:
    watch = CanaryWatch(RULE)
    for number in range(1000):
        verdict = watch.compared(1.0 if number % 100 < share * 100 else 0.0)
        assert verdict is None or number + 1 >= MIN_COMPARED
    assert (watch.verdict is not None) == rolled_back
    if watch.verdict is not None:
        assert watch.verdict.reason == "agreement"


def test_agreement_counts_only_where_it_is_wanted() -> None:
    watch = CanaryWatch(Rollback(canary="canary", agreement=0.0))
    assert [watch.compared(0.0) for _ in range(500)] == [None] * 500


# --- documents ----------------------------------------------------------------------------------------------------

DOCUMENT = """
[tiers.gold]
band = 0
target_ms = 200
[pools.stable]
endpoints = ["10.0.0.1:8000"]
[pools.canary]
endpoints = ["10.0.0.2:8000"]
[tenants.acme]
tier = "gold"
models = ["*"]
keys = [{ sha256 = "0000000000000000000000000000000000000000000000000000000000000000" }]
[[routes]]
name = "digits"
model = "digits"
"""
SPLIT = 'split = [{ pool = "stable", weight = 95 }, { pool = "canary", version = "8", weight = 5 }]\n'
DEFAULT = SPLIT + 'rollback = { canary = "canary@8" }\n'


def compiled(text: str) -> Rollback | None:
    (route,) = compile_documents({"all.toml": (DOCUMENT + text).encode()}).routes
    return route.rollback


def test_a_route_has_the_defaults_of_the_rule() -> None:
    assert compiled(DEFAULT) == Rollback(canary="canary@8")
    assert compiled(SPLIT) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('pool = "stable"\nrollback = { canary = "stable" }\n', "exactly two different sides"),
        (SPLIT.replace("]", ', { pool = "stable", version = "2", weight = 1 }]') + 'rollback = { canary = "stable" }\n',
         "exactly two different sides"),
        (SPLIT + 'rollback = { canary = "canary" }\n', "neither of the sides, stable and canary@8"),
        (SPLIT + 'rollback = { canary = "canary@8", min_calls = 19 }\n', "min_calls"),
        (SPLIT + 'rollback = { canary = "canary@8", margin = 1.0 }\n', "margin"),
        (SPLIT + 'rollback = { canary = "canary@8", agreement = -0.1 }\n', "agreement"),
        (SPLIT + 'rollback = { canary = "canary@8", compare_percent = 101.0 }\n', "compare_percent"),
        (DEFAULT + 'shadow = { pool = "stable" }\n', "leave out shadow"),
    ],
)  # fmt: skip
def test_a_wrong_rollback_is_refused_with_its_field(text: str, why: str) -> None:
    with pytest.raises(BadDocument, match=why) as refused:
        compiled(text)
    assert "rollback" in str(refused.value)


def test_explain_says_when_the_canary_is_rolled_back() -> None:
    snapshot = compile_documents({"all.toml": (DOCUMENT + DEFAULT).encode()})
    (key,) = snapshot.keys.values()
    steps = explain(snapshot, key, ExplainedCall(model="digits"), now=0.0)
    found = [step.says for step in steps if "canary@8" in step.says and step.stage == "route"]
    (rule,) = [each for each in found if "rolled back if more of its calls" in each]
    assert "by more than 2 %" in rule and "from 100 calls of each side on" in rule
    assert any("less than 90 % of their rows" in step.says for step in steps)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["met", "late", "missed"])), max_size=80))
def test_every_call_counts_once_and_on_its_side(calls: list[tuple[bool, str]]) -> None:
    watch = CanaryWatch(Rollback(canary="canary", min_calls=100))
    for canary, result in calls:
        watch.finished(canary=canary, result=result)
    for side, counted in zip((True, False), watch.counts, strict=True):
        results = [result for canary, result in calls if canary is side]
        assert (counted.calls, counted.failed, counted.late) == (
            len(results),
            results.count("missed"),
            results.count("late"),
        )
