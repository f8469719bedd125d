"""Requests whose traces are not kept, and what is found of them later."""

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.observe.unsampled import (
    MAX_NOTED,
    MAX_TRACES,
    SEGMENT,
    SEGMENTS,
    Unsampled,
    keep_body,
    requested_traces,
)

traces = st.integers(1, (1 << 128) - 1)


def build() -> list[int]:
    return []


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_every_request_is_given_out_once_whenever_it_is_asked_for(steps: list[tuple[int, bool]]) -> None:
    ring, waiting, seen = Unsampled(), dict[int, list[int]](), set[int]()
    for number, (trace, asks) in enumerate(steps):
        if asks:
            known, found = ring.pop([trace])
            assert known == (trace in seen)
            assert [record[0] for _, _, record, _ in found] == waiting.pop(trace, [])
        else:
            ring.note(trace, build, (number,), 1)
            waiting.setdefault(trace, []).append(number)
            seen.add(trace)


def test_the_oldest_segment_is_forgotten_as_a_whole_and_its_index_with_it() -> None:
    ring = Unsampled()
    for number in range(MAX_NOTED + 1):
        ring.note(number, build, (number,), 1)
        if number % 5000 == 0:
            ring.pop([number])
    assert ring.pop([1])[0] == 0 and ring.pop([SEGMENT - 1])[0] == 0
    assert ring.pop([SEGMENT + 1])[0] == 1 and ring.pop([MAX_NOTED])[0] == 1
    assert len(ring._segments) == SEGMENTS and len(ring._indexed) == SEGMENTS


def test_what_was_sent_is_known_and_not_sent_again() -> None:
    ring = Unsampled()
    ring.sent(7)
    ring.sent(8, ("whom to ask",))
    assert ring.pop([7]) == (1, [])
    assert ring.pop([8]) == (1, [(8, None, ("whom to ask",), 0)])
    assert ring.pop([8]) == (1, [])


@given(st.lists(traces, min_size=1, max_size=8))
def test_a_request_names_its_traces(ids: list[int]) -> None:
    assert requested_traces(keep_body([f"{each:032x}" for each in ids])) == ids


def test_a_request_that_is_too_large_or_malformed_is_none() -> None:
    one = "0" * 31 + "1"
    assert requested_traces(keep_body([one] * MAX_TRACES)) == [1] * MAX_TRACES
    for body in (b"", keep_body([one] * (MAX_TRACES + 1)), b"1", b"g" * 32, b"\xff" * 32, b"1" * 33):
        assert requested_traces(body) is None
