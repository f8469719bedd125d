"""The slots of loads, each of which runs in a thread."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf

import pytest

from oriel_inference.errors import InvalidRequest, LoadFailed
from oriel_inference.models import load_slots
from oriel_inference.models.load_slots import LoadSlots

LONG_S = 60.0


class Loads:
    """Loads that take the slots in threads of their own, and hold them until `end`."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.end = threading.Event()
        self.inside = threading.Semaphore(0)
        self._threads = threads

    def begin(self, slots: LoadSlots) -> "Future[None]":
        """Begin a load; return its end."""

        def load() -> None:
            with slots.taken():
                self.inside.release()
                self.end.wait(LONG_S)

        return self._threads.submit(load)

    def take_slots(self, count: int) -> bool:
        """Wait until so many more loads have their slots."""
        return all(self.inside.acquire(timeout=LONG_S) for _ in range(count))


@pytest.fixture
def loads() -> Iterator[Loads]:
    with ThreadPoolExecutor(8) as threads:
        made = Loads(threads)
        yield made
        made.end.set()


def test_loads_that_take_long_leave_their_slots_to_as_many_others(loads: Loads) -> None:
    """Two files whose check hung held up every other model for a minute."""
    slots = LoadSlots(2, slow_s=0.01)
    ends = [loads.begin(slots) for _ in range(5)]
    assert loads.take_slots(4) and not slots._is_free(inf), "as many as there are slots may be slow"
    loads.end.set()
    assert [each.result(LONG_S) for each in ends] == [None] * 5


class Counted(threading.Condition):
    """A condition that records how many threads each notification wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.woken: list[int] = []

    def notify(self, n: int = 1) -> None:
        self.woken.append(n)
        super().notify(n)


def test_the_end_of_a_load_wakes_one_of_those_that_wait(loads: Loads) -> None:
    """Thirty threads woke for each of a thousand small models, and all but one waited again."""
    slots = LoadSlots(1, slow_s=LONG_S)
    slots._changed = changed = Counted()
    found = threading.Semaphore(0)
    is_free = slots._is_free

    def watched(now: float) -> bool:
        found.release()
        return is_free(now)

    slots._is_free = watched  # type: ignore[method-assign]
    loads.end.set()
    with slots.taken():
        ends = [loads.begin(slots) for _ in range(5)]
        assert all(found.acquire(timeout=LONG_S) for _ in range(6))
    assert [each.result(LONG_S) for each in ends] == [None] * 5
    assert changed.woken == [1] * 6


def test_a_load_that_comes_shortly_before_another_one_is_slow_waits_no_longer_than_until_then(loads: Loads) -> None:
    slots = LoadSlots(1, slow_s=LONG_S)
    slots._began_s.append(time.monotonic() - LONG_S + 0.1)
    loads.begin(slots)
    assert loads.inside.acquire(timeout=LONG_S / 2)


def test_a_load_that_waits_for_its_slot_begins_when_another_ends(loads: Loads) -> None:
    slots = LoadSlots(1, slow_s=LONG_S)
    loads.begin(slots)
    assert loads.take_slots(1)
    second = loads.begin(slots)
    assert not loads.inside.acquire(blocking=False)
    loads.end.set()
    assert second.result(LONG_S) is None


def test_instances_of_a_model_lend_its_slot_once(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_slots, "MAX_LENT", 1)
    slots = LoadSlots(1, slow_s=LONG_S)
    loads.begin(slots)
    assert loads.take_slots(1)
    with slots.lent("m"):
        with slots.lent("m"):
            loads.begin(slots)
            assert loads.take_slots(1) and not slots._is_free(time.monotonic())
        with pytest.raises(InvalidRequest, match="1 models wait already"), slots.lent("another"):
            pass
    with slots.lent("another"):
        pass


def test_a_stop_ends_loads_that_wait_for_their_turn(loads: Loads) -> None:
    slots = LoadSlots(1, slow_s=LONG_S)
    loads.begin(slots)
    assert loads.take_slots(1)
    waiting = [loads.begin(slots) for _ in range(2)]
    slots.close()
    for each in waiting:
        with pytest.raises(LoadFailed, match="the server is stopping"):
            each.result(LONG_S)
