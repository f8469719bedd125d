"""`Server-Timing` as our servers write it, and as others may."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.observe.server_timing import WRITTEN, bounded, read_server_timing, server_timing

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20)


@given(st.dictionaries(names, st.integers(0, 10**9)))
def test_what_is_written_is_read_again(microseconds: dict[str, int]) -> None:
    text = server_timing([(name, each / 1e6) for name, each in microseconds.items()])
    found = read_server_timing(text)
    assert {name: round(seconds * 1e6) for name, seconds in found.items()} == microseconds


def test_entries_of_other_servers_are_read_as_far_as_they_have_a_duration() -> None:
    text = 'cache;desc="hit, or miss; dur=9";dur=2.5,db;dur=7, miss, app ; dur=1;desc=x, logic;desc=y;dur=0.25'
    assert read_server_timing(text) == {"cache": 0.0025, "db": 0.007, "app": 0.001, "logic": 0.00025}
    assert read_server_timing("queue;dur=1, queue;dur=2") == {"queue": 0.003}
    assert read_server_timing("queue;dur=-1, x;dur=nan, ;dur=3") == {}


@given(st.text('a;,"=dur0. ', max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert all(seconds >= 0.0 for seconds in read_server_timing(text).values())


def test_text_that_is_made_to_be_slow_is_read_at_once_or_not_at_all() -> None:
    for hostile in (";" * 8000, "a" + ';"' * 4000, 'a;"' + '";"' * 2600, "a" + ";b" * 4000, "a;dur=1," * 5000):
        assert len(read_server_timing(hostile)) <= 1  # a pattern that backtracks would need hours


@given(st.lists(st.tuples(names, st.integers(0, 10**12)), max_size=300))
def test_what_is_written_is_bounded_and_loses_no_time(stages: list[tuple[str, int]]) -> None:
    text = server_timing([(name, microseconds / 1e6) for name, microseconds in stages])
    assert len(text) <= WRITTEN
    assert round(sum(read_server_timing(text).values()) * 1e6) == sum(microseconds for _, microseconds in stages)


def test_a_long_header_becomes_one_sum_per_stage() -> None:
    text = ", ".join(["queue;dur=1.000, compute;dur=0.500"] * 100)
    assert bounded(text) == "queue;dur=100.000, compute;dur=50.000"
    assert bounded(text[:200]) == text[:200] and bounded("x" * 9000) == ""
