"""Labels of metrics whose names come and go, such as `tenant`: their number is bounded, and no counter goes down."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.observe.objectives import Objectives
from oriel_gateway.observe.top_names import OTHER, RENAME_EVERY_S, TopNames


def clocked(*, max_named: int = 50, max_counted: int = 8192) -> tuple[TopNames[str], list[float]]:
    now = [0.0]
    return TopNames(lambda _: OTHER, max_named=max_named, max_counted=max_counted, clock=lambda: now[0]), now


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
