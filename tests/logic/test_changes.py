from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.deploy.updates import plan

LISTING = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2))


class Watch:
    """As the watcher does it: every action is done at once."""

    def __init__(self) -> None:
        self.done: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        self.acted: list[tuple[str, str]] = []

    def see(self, now: dict[str, Any]) -> tuple[list[str], list[str]]:
        changed, removed = plan(self.done, self.before, now)
        self.before = now
        for key in changed:
            self.done[key] = now[key]
            self.acted.append(("set up", key))
        for key in removed:
            del self.done[key]
            self.acted.append(("remove", key))
        return changed, removed


@given(st.lists(LISTING, max_size=12), LISTING)
def test_what_stays_still_is_acted_upon_once(history: list[dict[str, int]], last: dict[str, int]) -> None:
    watch = Watch()
    for listing in history:
        watch.see(listing)
    watch.see(last)
    watch.see(last)
    assert watch.done == last
    assert watch.see(last) == ([], [])


@given(st.lists(LISTING, min_size=1, max_size=20))
def test_nothing_is_acted_upon_while_it_moves(history: list[dict[str, int]]) -> None:
    watch, before = Watch(), {}
    for now in history:
        changed, removed = watch.see(now)
        assert all(before.get(key) == now[key] for key in changed)
        assert all(key not in before and key not in now for key in removed)
        before = now


@given(LISTING, LISTING, LISTING, st.sets(st.sampled_from("abcd")))
def test_what_is_busy_is_left_alone_and_nothing_is_done_twice(
    done: dict[str, int], before: dict[str, int], now: dict[str, int], busy: set[str]
) -> None:
    changed, removed = plan(done, before, now, busy=busy)
    assert not busy & {*changed, *removed}
    assert not set(changed) & set(removed)
    assert all(done.get(key) != now[key] for key in changed)


def test_a_file_that_is_replaced_is_never_removed() -> None:
    watch = Watch()
    for listing in ({"a": 1}, {"a": 1}, {}, {"a": 2}, {"a": 2}):
        watch.see(listing)
    assert watch.acted == [("set up", "a"), ("set up", "a")]


def test_a_growing_upload_waits() -> None:
    watch = Watch()
    for size in (1, 2, 3, 4):
        assert watch.see({"a": size}) == ([], [])
    assert watch.see({"a": 4}) == (["a"], [])
