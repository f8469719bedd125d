"""What the kernel tells about a thread."""

import time

import pytest

from oriel_wire.engine.kernel import thread_busy_s


def test_a_thread_that_computes_is_busy() -> None:
    before, ran_s = thread_busy_s(), time.thread_time()
    while time.thread_time() < ran_s + 0.3:
        pass
    assert thread_busy_s() - before > 0.1  # the kernel counts in ticks


def test_where_the_kernel_tells_nothing_the_time_that_the_thread_ran_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", absent)
        found = thread_busy_s()
    assert 0.0 < found <= time.thread_time()
