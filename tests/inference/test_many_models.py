"""The work of a start grows with the number of models, not with its square: counted, not timed."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.batching.statistics import CHECKS, Ledger, Statistics
from oriel_inference.catalog import Catalog, Entry, ServingModel
from oriel_inference.errors import InferenceError
from oriel_inference.model import ModelState
from oriel_inference.servers.surface import STATISTICS_PER_TURN, Surface

MANY = 1000


class Name(str):
    """The name of a model, which counts how often one is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        Name.compared += 1
        return str.__ne__(self, other)


def line(name: str, version: int, *, serves: bool) -> Entry:
    """Return a line of the index whose serving model is nothing but its own."""
    serving = cast(ServingModel, object()) if serves else None
    state = ModelState.READY if serves else ModelState.LOADING
    return Entry(name=name, version=version, state=state, serving=serving)


def test_publishing_a_model_compares_it_with_no_other_one() -> None:
    catalog = Catalog()
    names = [Name(f"m{number}") for number in range(MANY)]
    Name.compared = 0
    for name in names:
        catalog.publish(name, [line(name, 0, serves=False)])
    for name in names:
        catalog.publish(name, [line(name, 1, serves=True)])
    assert Name.compared < 10 * MANY
    assert all(catalog.is_ready(name) for name in names)


published = st.lists(
    st.tuples(st.sampled_from("ab"), st.dictionaries(st.integers(1, 4), st.booleans(), max_size=3)), max_size=12
)


@given(published)
def test_a_request_finds_what_was_published_last(steps: list[tuple[str, dict[int, bool]]]) -> None:
    catalog, last = Catalog(), dict[str, list[Entry]]()
    for name, versions in steps:
        last[name] = [line(name, version, serves=serves) for version, serves in versions.items()]
        catalog.publish(name, last[name])
    for name in "ab":
        ready = {entry.version: entry.serving for entry in last.get(name, ()) if entry.serving is not None}
        assert catalog.is_ready(name) is bool(ready)
        for version in range(1, 5):
            assert catalog.serves(name, version) is (version in ready)
        if ready:
            assert catalog.get(name) is ready[max(ready)]
            assert all(catalog.get(name, str(version)) is serving for version, serving in ready.items())
        else:
            with pytest.raises(InferenceError):
                catalog.get(name)


def test_opening_counters_asks_about_few_of_the_versions_that_serve() -> None:
    names: list[str] = []
    serving = True

    def serves(name: str, version: int) -> bool:
        names.append(name)
        return serving

    ledger = Ledger(serves, max_versions=10)
    kept = [ledger.open(f"m{number}", 1) for number in range(MANY)]
    assert len(names) <= CHECKS * MANY
    assert all(ledger.open(f"m{number}", 1) is each for number, each in enumerate(kept))
    serving = False
    for number in range(MANY):
        ledger.open(f"n{number}", 1)
    assert len(ledger._kept) == 10


async def test_statistics_of_many_models_leave_the_loop_to_others() -> None:
    """Those of 5,000 models held it up for 180 ms."""
    loop, turns = asyncio.get_running_loop(), 0

    def other() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(other)

    batcher = SimpleNamespace(statistics=Statistics())
    serving = SimpleNamespace(spec=SimpleNamespace(name="m"), version="1", sessions=[], batcher=batcher)
    surface = cast(Surface, SimpleNamespace(catalog=SimpleNamespace(serving=lambda: iter([serving] * MANY))))
    other()
    assert len([each async for each in Surface.statistics(surface, "", "")]) == MANY
    assert turns > MANY // STATISTICS_PER_TURN
