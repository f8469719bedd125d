import asyncio

import pytest

from oriel_logic.errors import Refused
from oriel_logic.observe.stages import Ledger
from oriel_logic.server.visit import stage_span
from oriel_wire.observe.trace import new_trace


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
    assert span.attributes == {"oriel.model": "m", "error.type": "KeyError", "http.request.method": "POST"}
    assert (span.parent_id, span.context.trace_id) == (ledger.root.span_id, ledger.root.trace_id)


def test_errors_of_ours_are_named_by_their_reason_and_a_look_up_of_metadata_is_a_get() -> None:
    ledger = Ledger(new_trace(True), clock=Clock())
    with pytest.raises(Refused), ledger.stage("pre"):
        raise Refused("no image")
    with ledger.stage("metadata", kind="client"):
        pass
    pre, metadata = [stage_span(each, ledger.root, 0.0) for each in ledger.stages]
    assert pre.attributes == {"error.type": "input_refused"} and metadata.name == "GET"


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


def test_times_that_servers_report_are_one_sum_per_stage_however_many_calls_were_made() -> None:
    ledger = Ledger(new_trace(False))
    ledger.timed("queue;dur=1, compute;dur=2")
    assert (ledger.upstream, ledger.reported_s) == ("queue;dur=1, compute;dur=2", {}), (
        "one answer is passed on as it is"
    )
    for _ in range(1817):
        ledger.timed("queue;dur=1, compute;dur=2")
    assert ledger.upstream == ""
    assert {name: round(seconds, 6) for name, seconds in ledger.reported_s.items()} == {
        "queue": 1.818,
        "compute": 3.636,
    }
