"""The pool of threads that execute batches: when a job has begun, as its submitter sees it."""

import threading
from collections.abc import Iterator

import pytest

from oriel_inference.batching import workers
from oriel_inference.batching.workers import WorkerThreads


@pytest.fixture
def end() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def pool(end: threading.Event) -> Iterator[WorkerThreads]:
    made = WorkerThreads(1)
    yield made
    end.set()
    assert made.close(30.0)


def test_a_submitter_waits_until_its_job_has_begun(
    pool: WorkerThreads, end: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "BEGIN_S", 30.0)
    free = threading.Event()
    pool.submit(lambda: _wait(free))
    pool.submit(lambda: _wait(end))
    timer = threading.Timer(0.1, free.set)
    timer.start()
    pool.let_begin()
    was_free = free.is_set()
    timer.join()
    assert was_free, "the only thread was busy until then, and the second job has not ended yet"


def test_nobody_waits_for_longer_than_the_bound_or_without_a_job(pool: WorkerThreads, end: threading.Event) -> None:
    ran = threading.Event()
    pool.let_begin()
    pool.submit(lambda: _wait(end))
    pool.submit(ran.set)
    pool.let_begin()  # the only thread is busy
    assert not ran.is_set()
    end.set()
    assert ran.wait(30.0)


def _wait(event: threading.Event) -> None:
    event.wait(30.0)
