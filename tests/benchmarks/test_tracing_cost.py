"""What the bench of tracing's cost makes of its rounds, and that each of its cases works."""

import argparse
import gc
from collections.abc import Iterator

import pytest
from gateway_bench.tracing_cost import BOUNDS, KEPT, NOT_KEPT, OFF, SOME, added, kept, measure


def test_rounds_are_compared_in_pairs() -> None:
    """The machine may be slower in one round: that is no cost of tracing."""
    found = {OFF: [50.0, 100.0, 50.0], NOT_KEPT: [51.0, 101.0, 50.0], SOME: [50.5, 101.0, 50.5]}
    more = added({**found, KEPT: [60.0, 120.0, 59.0]})
    assert more[NOT_KEPT] == (1.0, pytest.approx(0.01)) and more[SOME] == (0.5, pytest.approx(0.01))
    assert more[KEPT][0] == 10.0 and kept(more)


@pytest.mark.parametrize(
    ("case", "added"), [(NOT_KEPT, (1.1, 0.01)), (NOT_KEPT, (0.5, 0.03)), (SOME, (9.0, 0.03)), (KEPT, (15.1, 0.1))]
)
def test_a_bound_that_is_passed_is_told(case: str, added: tuple[float, float]) -> None:
    assert not kept({case: added}) and case in BOUNDS


@pytest.fixture
def collected() -> Iterator[None]:
    """Let the garbage collector of the other tests be as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


async def test_every_case_answers_all_requests_and_loses_no_span(collected: None) -> None:
    found = await measure(argparse.Namespace(connections=2, requests=8, rounds=1))
    assert {case: len(each) for case, each in found.items()} == {OFF: 1, NOT_KEPT: 1, SOME: 1, KEPT: 1}
