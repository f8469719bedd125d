"""What a loop reads while it is behind: the most urgent always, the others as far as there is time."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.overload import LEAST, MOST, QUIET_BEATS, TURN_S, WAIT_S, LoopOverload, shares

RANKS = st.integers(0, 40)
TIMES = st.floats(0.0, 2.0)
FLOOD = 10_000


def behind() -> LoopOverload:
    """The rule of a loop that has just fallen behind."""
    rule = LoopOverload()
    assert rule.beat(0.5, FLOOD)
    return rule


@given(st.lists(st.tuples(TIMES, RANKS, TIMES), max_size=60))
def test_the_most_urgent_are_never_refused_and_the_room_of_a_turn_has_bounds(
    turns: list[tuple[float, int, float]],
) -> None:
    rule = behind()
    for took_s, rank, wait_s in turns:
        assert LEAST <= rule.turn(took_s) == rule.most <= MOST
        rule.went_on(rank, 1, wait_s)
        assert not rule.refuses(0) and not rule.crowds(0)
        rule.crowds(rank)


@given(st.dictionaries(RANKS, TIMES), RANKS, RANKS)
def test_whoever_is_refused_is_refused_with_all_that_are_less_urgent(
    waits: dict[int, float], one: int, other: int
) -> None:
    rule = behind()
    for rank, wait_s in waits.items():
        rule.went_on(rank, 1, wait_s)
    if rule.refuses(min(one, other)):
        assert rule.refuses(max(one, other))
    if one:
        assert rule.refuses(one) == any(rank <= one and wait_s > WAIT_S for rank, wait_s in waits.items())


@given(st.integers(0, 300), RANKS, RANKS)
def test_a_turn_has_no_less_room_for_the_more_urgent(begun: int, one: int, other: int) -> None:
    found = []
    for rank in (min(one, other), max(one, other)):
        rule = behind()
        rule.turn(0.0)
        for _ in range(begun):
            rule.crowds(1)
        found.append(rule.crowds(rank))
    assert found in ([False, False], [False, True], [True, True])


@given(st.dictionaries(st.integers(1, 6), st.integers(0, 500)), st.integers(2, MOST))
def test_the_more_urgent_go_on_first_and_a_few_of_the_least_urgent(waiting: dict[int, int], most: int) -> None:
    found = shares(waiting, most)
    assert all(0 < count <= waiting[rank] for rank, count in found.items())
    assert sum(found.values()) == min(most, sum(waiting.values()))
    ranks = sorted(rank for rank, count in waiting.items() if count)
    assert not ranks or found[ranks[-1]]
    short = [rank for rank in ranks if found.get(rank, 0) < waiting[rank]]
    if short:
        assert not any(rank in found for rank in ranks[:-1] if rank > short[0])


@given(st.lists(TIMES, max_size=30))
def test_a_slow_machine_is_no_flood(late_s: list[float]) -> None:
    rule = LoopOverload()
    assert not any(rule.beat(each, 99) for each in late_s)


def test_it_ends_when_nothing_has_waited_or_was_refused_for_a_while() -> None:
    rule = behind()
    for _ in range(3 * QUIET_BEATS):
        rule.went_on(2, 1, WAIT_S)
        assert rule.beat(0.0, 10)
    rule.went_on(2, 1, 2.0 * WAIT_S)
    for _ in range(3 * QUIET_BEATS):
        assert rule.refuses(2) and rule.beat(0.0, 10)
    rule.went_on(2, 1, 0.0)
    assert [rule.beat(0.0, 10) for _ in range(QUIET_BEATS)] == [True] * (QUIET_BEATS - 1) + [False]


def test_each_rank_has_half_the_room_of_the_one_before_it() -> None:
    """A turn has room for 32 at first; those of rank 0 need none of it."""
    for rank, room in ((1, 32), (2, 16), (3, 8), (6, 1), (7, 0), (40, 0)):
        rule = behind()
        assert [rule.crowds(rank) for _ in range(33)] == [False] * room + [True] * (33 - room)


def test_a_turn_that_took_its_time_has_half_the_room_and_a_short_full_one_a_little_more() -> None:
    rule, room = behind(), 32
    assert rule.turn(2.0 * TURN_S) == room
    for _ in range(room - 1):
        rule.crowds(1)
    assert rule.turn(0.0) == room  # one less than there was room for
    for _ in range(room):
        rule.crowds(1)
    assert rule.turn(TURN_S) == room  # full, and neither short nor long
    rule.went_on(1, room, 0.0)
    assert rule.turn(0.0) == room + LEAST
    assert rule.turn(2.0 * TURN_S + 1e-9) == (room + LEAST) // 2
