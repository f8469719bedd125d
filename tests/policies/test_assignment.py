"""Canary sides and sticky endpoints: the assignment of callers, and which of them move when something changes."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.upstreams.assignment import Rendezvous, Sides, unit

NAMES = ["a", "b", "c", "d"]
KEYS = [f"tenant-{number}" for number in range(4000)]
weights = st.lists(st.integers(0, 50), min_size=2, max_size=4).filter(any)


def sides(of: Sequence[float]) -> Sides:
    return Sides("route", NAMES[: len(of)], [weight / sum(of) for weight in of])


@given(weights)
@settings(max_examples=15)
def test_every_side_gets_its_share(of: list[int]) -> None:
    split = sides(of)
    counts = [0] * len(of)
    for key in KEYS:
        counts[split.of(key)] += 1
    for count, weight in zip(counts, of, strict=True):
        assert abs(count / len(KEYS) - weight / sum(of)) < 0.04
        assert weight or not count


@given(weights, st.data())
@settings(max_examples=30)
def test_keys_move_only_towards_sides_that_grew_more(of: list[int], data: st.DataObject) -> None:
    after = data.draw(st.lists(st.integers(1, 50), min_size=len(of), max_size=len(of)))
    old, new = sides(of), sides(after)
    for key in KEYS[:500]:
        left, now = old.of(key), new.of(key)
        if left != now:
            assert after[now] * of[left] >= after[left] * of[now]


def test_a_tenth_more_moves_a_tenth() -> None:
    before, after = sides([90, 10]), sides([80, 20])
    moved = [key for key in KEYS if before.of(key) != after.of(key)]
    assert 0.08 < len(moved) / len(KEYS) < 0.12
    assert all(after.of(key) == 1 for key in moved)


def test_the_order_of_the_sides_and_another_route_do_not_matter_to_one_another() -> None:
    one = Sides("route", ["a", "b"], [0.9, 0.1])
    turned = Sides("route", ["b", "a"], [0.1, 0.9])
    assert all(one.of(key) == 1 - turned.of(key) for key in KEYS[:500])
    other = Sides("other", ["a", "b"], [0.9, 0.1])
    both = sum(one.of(key) == 1 and other.of(key) == 1 for key in KEYS)
    assert both < 0.03 * len(KEYS)  # independent: 1 %; the same keys would be 10 %


@given(st.text())
def test_a_text_has_one_place_between_0_and_1(text: str) -> None:
    assert 0.0 < unit(text) < 1.0 and unit(text) == unit(text)


def test_places_do_not_depend_on_the_process() -> None:
    """Another release, another process: the same assignment. These numbers never change."""
    assert (unit(""), unit("abc")) == (0.7058483037031943, 0.34994251743053695)
    assert [Rendezvous(["a:1", "b:1", "c:1"]).first(key) for key in "xyzwvu"] == [1, 2, 1, 1, 0, 0]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True), st.text(max_size=20))
def test_an_endpoint_that_goes_moves_only_its_own(ports: list[int], key: str) -> None:
    names = [f"10.0.0.1:{port}" for port in ports]
    chosen = Rendezvous(names).first(key)
    assert chosen is not None
    for gone in range(len(names)):
        left = names[:gone] + names[gone + 1 :]
        now = Rendezvous(left).first(key)
        barred = Rendezvous(names).first(key, (gone,))
        if gone == chosen:
            assert (now is None) == (not left) == (barred is None)
        else:
            assert now is not None and left[now] == names[chosen] and barred == chosen
        if left:
            assert now is not None and barred is not None and left[now] == names[barred]


def test_endpoints_get_equal_shares() -> None:
    ring = Rendezvous([f"10.0.0.{n}:8000" for n in range(5)])
    counts = [0] * 5
    for key in KEYS:
        index = ring.first(key)
        assert index is not None
        counts[index] += 1
    assert all(abs(count / len(KEYS) - 0.2) < 0.04 for count in counts)
