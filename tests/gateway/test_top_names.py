"""Labels of metrics whose names come and go, such as `tenant`: their number is bounded, and no counter goes down."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.objectives import Objectives, result_of
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.top_names import OTHER, RENAME_EVERY_S, TopNames
from oriel_gateway.observe.usage import Usage

from .records import record


def clocked(*, max_named: int = 50, max_counted: int = 8192) -> tuple[TopNames[str], list[float]]:
    now = [0.0]
    return TopNames(lambda _: OTHER, max_named=max_named, max_counted=max_counted, clock=lambda: now[0]), now


def test_the_busiest_have_names_and_keep_them_against_equals() -> None:
    tenants, now = clocked(max_named=2)
    for name, calls in (("a", 5), ("b", 3), ("c", 1)):
        for _ in range(calls):
            tenants.count(name, "met")
    assert tenants.read() == {"a": {"met": 5}, "b": {"met": 3}, OTHER: {"met": 1}}
    now[0] += RENAME_EVERY_S
    for name, calls in (("a", 2), ("b", 2), ("c", 3)):
        for _ in range(calls):
            tenants.count(name, "met")
    assert tenants.read() == {"a": {"met": 7}, "b": {"met": 5}, OTHER: {"met": 4}}
    now[0] += RENAME_EVERY_S
    for _ in range(50):
        tenants.count("c", "met")
    assert set(tenants.read()) == {"a", "c", OTHER} or set(tenants.read()) == {"b", "c", OTHER}


def test_tenants_have_names_at_once_and_targets_that_callers_can_invent_with_a_scrape() -> None:
    objectives = Objectives()
    for name, calls in (("a", 3), ("b", 2)):
        objectives.counts(name, "gold", "model:digits").met += calls
    objectives.flush()
    assert objectives.tenants.read() == {"a": {"met": 3}, "b": {"met": 2}, OTHER: {}}
    assert objectives.pairs.read() == {
        ("a", "gold", "model:digits"): {"met": 0},
        ("b", "gold", "model:digits"): {"met": 0},
        (OTHER, "gold", OTHER): {"met": 5},
    }


def test_a_tenant_called_other_is_one_of_the_others() -> None:
    tenants, _ = clocked()
    tenants.read()
    tenants.count(OTHER, "met")
    assert tenants.read() == {OTHER: {"met": 1}}


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 20)), st.just(None)), min_size=1, max_size=60
    )
)
def test_series_are_bounded_and_never_go_down_while_they_are_there(steps: list[tuple[str, int] | None]) -> None:
    tenants, now = clocked(max_named=2, max_counted=4)
    before = tenants.read()
    for step in steps:
        if step is None:
            now[0] += RENAME_EVERY_S
        else:
            for _ in range(step[1]):
                tenants.count(step[0], "met")
        after = tenants.read()
        assert len(after) <= 3 and len(tenants._counted) <= 4
        for name in set(before) & set(after):
            assert all(after[name].get(result, 0) >= count for result, count in before[name].items())
        before = after


def test_what_counts_against_the_objective() -> None:
    for outcome in Outcome:
        assert result_of(outcome, 0) in ("missed", "excused")
    assert result_of(Outcome.QUEUE_FULL, 0) == result_of(Outcome.ANSWERED, 500) == "missed"
    assert result_of(Outcome.RATE_LIMITED, 0) == result_of(Outcome.ANSWERED, 404) == "excused"
    assert result_of(Outcome.CALLER_LEFT, 200) == "excused"
    stats = Stats(Objectives(), Usage())
    stats.recent.append(record(None, None, Outcome.UNAUTHENTICATED))
    assert not stats.attainment, "an unknown sender has no tier whose objective could be missed"
