import asyncio

import pytest

from oriel_logic.observe.spans import stage_span
from oriel_logic.observe.stages import Ledger
from oriel_wire.trace import new_trace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_stages_of_one_name_add_up_in_order_of_start() -> None:
    ledger = Ledger(new_trace(True), clock=Clock())
    with ledger.stage("infer"), ledger.stage("pre"):
        pass
    with ledger.stage("infer"):
        pass
    assert ledger.timings() == [("infer", 4.0), ("pre", 1.0)]


def test_spans_are_children_of_the_request() -> None:
    ledger = Ledger(new_trace(True), clock=Clock())
    with pytest.raises(KeyError), ledger.stage("infer", kind="client") as stage:
        stage.attributes["oriel.model"] = "m"
        raise KeyError
    (span,) = [stage_span(each, ledger.root, 0.0) for each in ledger.stages]
    assert (span.name, span.kind, span.failed) == ("POST", "client", True)
    assert span.attributes == {"oriel.model": "m", "error.type": "KeyError"}
    assert (span.parent_id, span.context.trace_id) == (ledger.root.span_id, ledger.root.trace_id)


async def test_the_stage_that_a_deadline_hit_is_the_innermost_one() -> None:
    ledger = Ledger(new_trace(False))
    with pytest.raises(KeyError), ledger.stage("failed before"):
        raise KeyError
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            with ledger.stage("outer"), ledger.stage("inner"):
                await asyncio.Event().wait()
    assert ledger.interrupted == "inner"
    assert Ledger(new_trace(False)).interrupted == "handler"
