from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from oriel_inference.servers.gather import IDLE_TURNS, MAX_CALLS, MAX_S, Gather

BUSY_S, QUIET_S = 0.00005, 0.000002


class Loop:
    """Turns of a loop: each takes as long as the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.soon: list[Callable[[], None]] = []
        self.submitted: list[tuple[str, Any]] = []
        self.gather = Gather(lambda: self.now_s, self.soon.append)

    def batcher(self, name: str = "short", *, is_short: bool = True) -> Any:
        batcher = SimpleNamespace(is_short=is_short, submit=lambda call: self.submitted.append((name, call)))
        return SimpleNamespace(batcher=batcher, holds=0)

    def call(self, **members: Any) -> Any:
        return SimpleNamespace(**{"finished": False, **members})

    def turn(self, seconds: float) -> None:
        self.now_s += seconds
        due, self.soon[:] = list(self.soon), []
        for callback in due:
            callback()


def test_call_that_comes_alone_waits_for_a_few_quiet_turns() -> None:
    loop = Loop()
    call = loop.call()
    loop.gather.submit(loop.batcher(), call)
    for _ in range(IDLE_TURNS - 1):
        loop.turn(QUIET_S)
        assert loop.submitted == []
    loop.turn(QUIET_S)
    assert loop.submitted == [("short", call)]
    assert loop.soon == []


def test_calls_that_come_while_the_loop_is_busy_go_together_in_their_order() -> None:
    loop = Loop()
    calls = [loop.call(number=number) for number in range(5)]
    for call in calls:
        loop.gather.submit(loop.batcher(), call)
        loop.turn(QUIET_S)
        loop.turn(BUSY_S)
        assert loop.submitted == []
    for _ in range(IDLE_TURNS):
        loop.turn(QUIET_S)
    assert [call for _, call in loop.submitted] == calls


def test_no_call_waits_for_longer_than_the_bound_or_behind_more_than_the_bound() -> None:
    loop = Loop()
    loop.gather.submit(loop.batcher(), loop.call())
    for _ in range(int(MAX_S / BUSY_S) + 1):
        loop.turn(BUSY_S)
    assert len(loop.submitted) == 1
    for _ in range(MAX_CALLS):
        loop.gather.submit(loop.batcher(), loop.call())
    loop.turn(BUSY_S)
    assert len(loop.submitted) == 1 + MAX_CALLS


def test_calls_of_longer_models_are_not_held_back() -> None:
    loop = Loop()
    loop.gather.submit(loop.batcher("long", is_short=False), loop.call())
    assert [name for name, _ in loop.submitted] == ["long"]
    assert loop.soon == []


def test_caller_that_left_meanwhile_is_not_submitted() -> None:
    loop = Loop()
    stays, leaves = loop.call(), loop.call()
    for call in (leaves, stays):
        loop.gather.submit(loop.batcher(), call)
    leaves.finished = True
    for _ in range(IDLE_TURNS):
        loop.turn(QUIET_S)
    assert [call for _, call in loop.submitted] == [stays]


def test_waiting_begins_anew_after_each_handing_over() -> None:
    loop = Loop()
    for _ in range(3):
        loop.gather.submit(loop.batcher(), loop.call())
        for _ in range(IDLE_TURNS):
            loop.turn(QUIET_S)
    assert len(loop.submitted) == 3


def test_a_version_is_held_until_the_calls_on_their_way_have_come() -> None:
    loop = Loop()
    serving = loop.batcher()
    loop.gather.submit(serving, loop.call())
    loop.gather.submit(serving, loop.call(finished=True))
    assert serving.holds == 2
    for _ in range(IDLE_TURNS):
        loop.turn(QUIET_S)
    assert serving.holds == 0 and len(loop.submitted) == 1
