"""Scans in virtual time: which steps share a batch, and how scans end."""

import gc

import numpy as np
import pytest

from oriel_inference.batching.call import Answer, Call
from oriel_inference.errors import BackendFailed, DeadlineExceeded, QueueFull, RequestTooLarge
from oriel_inference.sequences import scan
from oriel_wire.v2.messages import InferRequest, RequestedOutput

from .bench import context
from .sequence_bench import SequenceBench, bits


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SequenceBench:
    """Return a bench whose rounds have one step each, unless a test sets ROUND_S."""
    monkeypatch.setattr(scan, "ROUND_S", 0.0)
    return SequenceBench(slots=2)


def send(bench: SequenceBench, *steps: int, tenant: str = "", timeout_s: float = 60.0) -> int:
    """Submit a scan whose steps have these inputs; returns its number."""
    number, now = len(bench.calls), bench.clock.now()
    outputs = [RequestedOutput("y"), RequestedOutput("kept")]
    call = Call(
        inputs={"x": np.array(steps, np.int64).reshape(-1, 1)},
        rows=1,
        signature=None,
        arrived_s=now,
        deadline=now + timeout_s,
        reply=lambda result: bench.replied(number, result),
        tenant=tenant,
        source=(InferRequest(model_name="sum", parameters={"scan": True}, outputs=outputs), context(tenant)),
    )
    return bench.submit(call)


def values(bench: SequenceBench, number: int) -> tuple[list[int], int]:
    """Return the outputs of all steps of a scan, and its last state."""
    (reply,) = bench.replies[number]
    assert isinstance(reply, Answer)
    return reply.outputs[0][:, 0].tolist(), int(reply.outputs[1][0, 0])


def rows(bench: SequenceBench) -> list[list[int]]:
    """Return the inputs of every batch."""
    return [batch["x"] for batch in bench.sessions[0].batches]


def test_scans_share_batches_and_a_third_waits_for_a_slot(bench: SequenceBench) -> None:
    one, two, three = send(bench, 1, 2, 3), send(bench, 4, 5), send(bench, 6)
    bench.settle()
    assert rows(bench) == [[1, 4], [2, 5], [3, 6]]
    assert values(bench, one) == ([bits(1), bits(1, 2), bits(1, 2, 3)], bits(1, 2, 3))
    assert values(bench, two) == ([bits(4), bits(4, 5)], bits(4, 5))
    assert values(bench, three) == ([bits(6)], bits(6))
    assert bench.scheduler.table.holding == 0 and bench.ended() == {"end": 3}


def test_a_scan_shares_no_batch_with_a_step_of_a_sequence_and_sees_its_controls(bench: SequenceBench) -> None:
    scanned, step = send(bench, 10, 11, 12), bench.send(1, start=True)
    bench.settle()
    assert values(bench, scanned)[1] == bits(10, 11, 12) and bench.value(step) == bits(step)
    of_scan = [batch for batch in bench.sessions[0].batches if batch["x"][0] >= 10]
    assert [(batch["START"], batch["END"]) for batch in of_scan] == [([1], [-1]), ([-1], [-1]), ([-1], [1])]


def test_a_round_has_several_steps_until_its_time_is_over(
    bench: SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "ROUND_S", 1.0)
    one = send(bench, *range(20))
    bench.settle()
    assert values(bench, one)[1] == bits(*range(20)) and bench.statistics.executions == 1


def test_a_scan_ends_at_its_deadline_between_two_steps(bench: SequenceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "ROUND_S", 1000.0)
    session, run = bench.sessions[0], bench.sessions[0].run

    def slow(*arguments):  # type: ignore[no-untyped-def]
        bench.clock.advance(1.0)
        return run(*arguments)

    monkeypatch.setattr(session, "run", slow)
    late, other = send(bench, *range(10), timeout_s=2.5), send(bench, *range(20, 26))
    bench.settle()
    assert isinstance(bench.error(late), DeadlineExceeded)
    assert sum(1 for batch in rows(bench) if set(batch) & set(range(10))) == 3
    assert values(bench, other)[1] == bits(*range(20, 26))
    assert bench.ended() == {"expired": 1, "end": 1}


def test_a_caller_who_leaves_ends_the_scan(bench: SequenceBench) -> None:
    gone = send(bench, *range(5))
    bench.clock.run()  # its first round is with a worker
    assert bench.scheduler.caller_left(bench.calls[gone])
    bench.settle()
    assert not bench.replies[gone] and rows(bench) == []
    assert bench.scheduler.table.holding == 0 and bench.ended() == {"left": 1}


def test_a_reader_who_is_slow_delays_a_streamed_scan_to_its_deadline(bench: SequenceBench) -> None:
    streamed, written = send(bench, 1, 2, 3, timeout_s=9.0), []
    parts: list[list[int]] = []

    def emit(outputs, consumed):  # type: ignore[no-untyped-def]
        parts.append(outputs[0][:, 0].tolist())
        written.append(consumed)

    bench.calls[streamed].emit = emit
    bench.settle()
    assert parts == [[bits(1)]]
    written.pop()()
    bench.settle()
    assert parts == [[bits(1)], [bits(1, 2)]] and not bench.replies[streamed]
    bench.clock.advance(9.0)
    assert isinstance(bench.error(streamed), DeadlineExceeded) and bench.ended() == {"expired": 1}
    written.pop()()  # too late
    bench.settle()
    assert rows(bench) == [[1], [2]] and len(bench.replies[streamed]) == 1


def test_a_scan_whose_room_another_tenant_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "ROUND_S", 0.0)
    bench = SequenceBench(max_bytes=60)  # 240 bytes of outputs and states
    large = send(bench, *range(28), tenant="a")
    bench.clock.run()
    bench.step()
    small = send(bench, 30, 31, tenant="b")
    bench.settle()
    assert values(bench, small)[1] == bits(30, 31)
    assert isinstance(bench.error(large), QueueFull) and len(rows(bench)) < 10
    unread = send(bench, *range(28), tenant="a")
    bench.calls[unread].emit = lambda outputs, consumed: None
    bench.settle()
    send(bench, 30, 31, tenant="b")
    bench.settle()
    assert isinstance(bench.error(unread), QueueFull), "it waits for its reader and keeps the memory"


def test_the_states_of_a_scan_that_grow_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "ROUND_S", 0.0)
    bench = SequenceBench(max_bytes=60)

    def grow(inputs, outputs):  # type: ignore[no-untyped-def]
        return [inputs["x"] if name == "y" else np.repeat(inputs["state"], 2, axis=1) for name in outputs]

    monkeypatch.setattr(bench.sessions[0], "run", grow)
    grown = send(bench, *range(20))
    bench.settle()
    assert isinstance(bench.error(grown), QueueFull)


def test_a_slow_reader_who_leaves_gets_nothing_at_the_deadline(bench: SequenceBench) -> None:
    streamed = send(bench, 1, 2, timeout_s=9.0)
    bench.calls[streamed].emit = lambda outputs, consumed: None
    bench.settle()
    assert bench.scheduler.caller_left(bench.calls[streamed])
    of_scan = [timer for *_, timer in bench.clock._timers if "_round_ended" in str(timer.callback)]
    assert [timer.cancelled for timer in of_scan] == [True], "it keeps the scan in memory"
    bench.clock.advance(9.0)
    assert not bench.replies[streamed] and bench.ended() == {"left": 1}


def test_a_step_that_fails_ends_its_scan_and_no_other(bench: SequenceBench) -> None:
    bench.bad.add(2)
    one, two = send(bench, 1, 2, 3), send(bench, 4, 5, 6)
    bench.settle()
    assert isinstance(bench.error(one), BackendFailed)
    assert values(bench, two) == ([bits(4), bits(4, 5), bits(4, 5, 6)], bits(4, 5, 6))


def test_the_outputs_of_scans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_OUTPUT_BYTES", 79)
    bench = SequenceBench(max_bytes=100)
    long, short = send(bench, *range(10)), send(bench, *range(9))
    bench.settle()
    assert isinstance(bench.error(long), RequestTooLarge) and "send it in parts" in bench.text(long)
    assert values(bench, short)[1] == bits(*range(9))
    small = SequenceBench(max_bytes=15)
    refused = send(small, *range(9))
    small.settle()
    assert isinstance(small.error(refused), QueueFull)


def test_scans_that_have_ended_or_were_left_can_be_freed() -> None:
    """A round's inputs hold the scan in an array of objects, through which the collector sees no cycle."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, Call)}
    bench = SequenceBench(slots=2)
    send(bench, 1, 2, 3)
    gone = send(bench, *range(4, 9))
    bench.clock.run()
    assert bench.scheduler.caller_left(bench.calls[gone])
    bench.settle()
    del bench
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Call) and id(each) not in before]
