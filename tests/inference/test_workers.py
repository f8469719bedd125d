"""The pool of threads that execute batches: when a job has begun, as its submitter sees it."""

import threading
from collections.abc import Iterator

import pytest

from oriel_inference.batching import workers
from oriel_inference.batching.workers import WorkerThreads


@pytest.fixture
def pool() -> Iterator[WorkerThreads]:
    made = WorkerThreads(1)
    yield made
    assert made.close(30.0)


def test_a_submitter_waits_until_its_job_has_begun(pool: WorkerThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BEGIN_S", 30.0)
    free, end = threading.Event(), threading.Event()
    pool.submit(lambda: _wait(free))
    pool.submit(lambda: _wait(end))
    timer = threading.Timer(0.1, free.set)
    timer.start()
    pool.let_begin()
    assert free.is_set()  # the only thread was busy until then; the second job has not ended
    end.set()
    timer.join()


def test_nobody_waits_for_longer_than_the_bound_or_without_a_job(pool: WorkerThreads) -> None:
    end, ran = threading.Event(), threading.Event()
    pool.let_begin()
    pool.submit(lambda: _wait(end))
    pool.submit(ran.set)
    pool.let_begin()  # the only thread is busy
    assert not ran.is_set()
    end.set()
    assert ran.wait(30.0)


def _wait(event: threading.Event) -> None:
    assert event.wait(30.0)
