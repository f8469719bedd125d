"""Batches by rows: the rules, and that every caller gets its own rows whatever happens to the others."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.logic.conftest import a_call

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, LogicError, Refused, Saturated, WorkerDied
from oriel_logic.observe.metrics import Tally
from oriel_logic.services.batching import BatchLimits, WrongRows, batched, group_of, limits_of, merge, rows_in, split
from oriel_logic.services.context import Done, Work
from oriel_logic.workers.batcher import Batcher
from oriel_logic.workers.worker import Job
from oriel_policies.waiting.flows import Ticket
from oriel_wire.context import CallContext

from ..waiting import until

CallMaker = Callable[..., CallContext]
PARTS = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6)


@given(PARTS)
def test_merged_rows_come_apart_as_they_were(parts: list[list[int]]) -> None:
    sizes = [rows_in(part) for part in parts]
    assert split(merge(parts), sizes) == parts
    arrays = [np.array(part, np.int32).reshape(-1, 1) for part in parts]
    assert [part.tolist() for part in split(merge(arrays), sizes)] == [part.tolist() for part in arrays]


@pytest.mark.parametrize(
    ("given_back", "why"), [([1], "got 2 rows and gave 1"), ("text", "must give a list"), (None, "must give a list")]
)
def test_a_function_that_does_not_give_a_row_for_each_is_told(given_back: Any, why: str) -> None:
    with pytest.raises(WrongRows, match=why):
        split(given_back, [1, 1])


def test_only_what_fits_goes_together() -> None:
    wide, long = np.zeros((1, 3)), np.zeros((3, 1))
    assert group_of(wide) != group_of(long) != group_of([1])
    assert group_of(wide) == group_of(np.zeros((5, 3)))
    for wrong in (1, "text", {"a": 1}, np.float32(1)):
        with pytest.raises(WrongRows):
            rows_in(wrong)


def test_the_decorator_marks_and_refuses() -> None:
    assert limits_of(batched(max_rows=2, max_delay_ms=3)(module_function)) == BatchLimits(max_rows=2, max_delay_s=0.003)
    for keywords in ({"max_rows": 0}, {"max_rows": 1, "max_delay_ms": -1}, {"max_rows": 1, "max_delay_ms": 2000}):
        with pytest.raises(ValueError, match="must lie between"):
            batched(**keywords)
    for wrong in (module_coroutine, two_parameters, lambda rows: rows, len):
        with pytest.raises(TypeError):
            batched(max_rows=2)(wrong)


def module_function(rows: list[int]) -> list[int]:
    return rows


async def module_coroutine(rows: list[int]) -> list[int]:
    return rows


def two_parameters(rows: list[int], other: int) -> list[int]:
    return rows


class FakePool:
    """Runs batches when told to. `run` says what a batch gives, or raises."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.queued: list[tuple[Job, asyncio.Future[Done]]] = []
        self.batches: list[list[Any]] = []
        self.run: Callable[[list[Any]], Any] = lambda parts: [[-row for row in part] for part in parts]
        self.full = False

    def batch_job(self, work: Work, parts: Callable[[], list[Any] | None], deadline: float) -> Job:
        ticket = Ticket(band=work.call.band, tenant=work.call.tenant, deadline=deadline)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        return Job(
            reference=work.reference,
            stage=work.stage,
            request_id="",
            prepare=parts,
            ticket=ticket,
            future=future,
            queued_s=0.0,
            spent=work.spent,
        )

    async def submit(self, job: Job) -> Done:
        if self.full and not job.ticket.admitted:
            raise Saturated("full")
        self.queued.append((job, job.future))
        return await job.future

    async def work(self) -> None:
        """A worker takes all that is queued, the most urgent first."""
        await settled()
        while self.queued:
            self.queued.sort(key=lambda each: each[0].ticket.band)
            job, future = self.queued.pop(0)
            parts = job.prepare()
            if parts is None:
                future.set_result(Done([], 0))
            else:
                self.batches.append(parts)
                job.began_s = monotonic()
                try:
                    future.set_result(Done(self.run(parts), 1000))
                except LogicError as error:
                    future.set_exception(error)
            await settled()


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def batcher(pool: FakePool, *, max_rows: int = 4, max_delay_s: float = 60.0, **options: Any) -> Batcher:
    limits = BatchLimits(max_rows=max_rows, max_delay_s=max_delay_s)
    return Batcher(pool, limits, **{"max_waiting": 100, "max_waiting_bytes": 1 << 20, **options})


def call_of(made: Batcher, rows: list[int], **promise: Any) -> "asyncio.Task[Done]":
    return asyncio.create_task(made.call(Work("f", (rows,), a_call(**promise), "prepare"), len(rows), 100))


async def test_a_batch_is_full_by_rows_and_waits_for_no_more() -> None:
    pool = FakePool()
    made = batcher(pool)
    calls = [call_of(made, [1, 2]), call_of(made, [3])]
    await pool.work()
    assert not pool.batches, "three rows of four: it waits"
    calls.append(call_of(made, [4]))
    await pool.work()
    assert pool.batches == [[[1, 2], [3], [4]]]
    assert [(await each).value for each in calls] == [[-1, -2], [-3], [-4]]
    assert pool.tally.batches == {"full": 1} and pool.tally.batched_rows == 4
    assert sum([(await each).cpu_us for each in calls]) == 1000


async def test_a_call_waits_no_longer_than_the_delay_or_than_its_deadline_allows() -> None:
    pool = FakePool()
    call = call_of(batcher(pool, max_delay_s=0.001), [1])
    await until(lambda: pool.queued)
    await pool.work()
    assert (await call).value == [-1]
    made = batcher(pool)
    made._curve.observe(1, 30.0)
    hurried = call_of(made, [1], deadline=monotonic() + 20)
    await pool.work()
    assert (await hurried).value == [-1]
    assert pool.tally.batches == {"delay": 1, "deadline": 1}


async def test_urgent_calls_are_in_the_first_batch_and_the_late_and_the_left_in_none() -> None:
    pool = FakePool()
    made = batcher(pool, max_rows=2)
    now = monotonic()
    bronze = call_of(made, [1], band=2)
    left = call_of(made, [2], band=2)
    await settled()
    gold = [call_of(made, [3], deadline=now + 50), call_of(made, [4], deadline=now + 40)]
    await settled()
    left.cancel()
    await pool.work()
    assert pool.batches == [[[4], [3]], [[1]]], "two full batches were released before one caller left"
    await asyncio.gather(bronze, *gold)
    assert pool.tally.dropped == {"left": 1}


async def test_who_expires_before_a_worker_is_there_is_told_and_not_in_the_batch() -> None:
    pool = FakePool()
    now = monotonic()
    made = batcher(pool, max_rows=2, clock=lambda: now)
    late, in_time = call_of(made, [1], deadline=now + 30), call_of(made, [2], deadline=now + 90)
    await settled()
    assert len(pool.queued) == 1, "both are released in one batch"
    now += 60
    await pool.work()
    with pytest.raises(DeadlineExceeded):
        await late
    assert pool.batches == [[[2]]]
    assert (await in_time).value == [-2]


async def test_a_batch_that_kills_its_worker_is_tried_caller_by_caller_also_in_a_full_queue() -> None:
    pool = FakePool()

    def run(parts: list[Any]) -> Any:
        pool.full = True
        if [13] in parts:
            raise WorkerDied("crash")
        return parts

    pool.run = run
    made = batcher(pool, max_rows=3)
    calls = [call_of(made, [12]), call_of(made, [13]), call_of(made, [14])]
    await pool.work()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[1], WorkerDied)
    assert [each.value for each in found if not isinstance(each, BaseException)] == [[12], [14]]  # type: ignore[union-attr]


async def test_a_pool_without_room_refuses_the_batch_and_does_not_spin() -> None:
    pool = FakePool()
    pool.full = True
    made = batcher(pool, max_rows=1)
    with pytest.raises(Saturated):
        await call_of(made, [1])
    await settled()
    assert made.is_idle


async def test_closing_tells_everybody_who_waits_or_is_in_a_batch() -> None:
    pool = FakePool()
    made = batcher(pool, max_rows=2)
    calls = [call_of(made, [1]), call_of(made, [2]), call_of(made, [3])]
    await settled()
    assert pool.queued.pop()[0].prepare() == [[1], [2]]
    made.close()
    await settled()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in found] == [WorkerDied] * 3
    assert made.is_idle


async def test_a_batch_whose_callers_have_all_left_is_called_off() -> None:
    pool = FakePool()
    made = batcher(pool, max_rows=2)
    calls = [call_of(made, [1]), call_of(made, [2])]
    await settled()
    job, future = pool.queued.pop()
    assert job.prepare() == [[1], [2]]
    calls[0].cancel()
    await settled()
    assert not future.cancelled()
    calls[1].cancel()
    await settled()
    assert future.cancelled() and made.is_idle


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(0, 2), st.booleans(), st.booleans()
        ),
        max_size=25,
    ),
    st.integers(1, 6),
    st.sets(st.integers(0, 60), max_size=3),
    st.sets(st.integers(0, 60), max_size=2),
)
def test_every_caller_gets_its_own_rows_exactly_once(
    arrivals: list[tuple[list[int], int, bool, bool]], max_rows: int, bad: set[int], deadly: set[int]
) -> None:
    """Whoever leaves, whatever fails, in whatever order workers come: MLServer#1306 gave callers others' rows."""

    def run(parts: list[list[int]]) -> Any:
        rows = {row for part in parts for row in part}
        if deadly & rows:
            raise WorkerDied("crash")
        if bad & rows:
            raise Refused("bad")
        return [[-row for row in part] for part in parts]

    async def story() -> None:
        pool = FakePool()
        pool.run = run
        made = batcher(pool, max_rows=max_rows, max_delay_s=0.0)
        calls = []
        for rows, band, leaves, works in arrivals:
            calls.append(call_of(made, rows, band=band))
            await settled()
            if leaves:
                calls[-1].cancel()
            if works:
                await pool.work()
        await pool.work()
        await pool.work()
        for (rows, _, leaves, _), call in zip(arrivals, calls, strict=True):
            (found,) = await asyncio.gather(call, return_exceptions=True)
            if isinstance(found, asyncio.CancelledError):
                assert leaves
            elif deadly & set(rows):
                assert isinstance(found, WorkerDied)
            elif bad & set(rows):
                assert isinstance(found, Refused)
            else:
                assert isinstance(found, Done)
                assert found.value == [-row for row in rows]
        assert made.waiting == 0 and made.is_idle
        together = [batch for batch in pool.batches if len(batch) > 1]
        assert all(sum(map(len, batch)) <= max_rows for batch in together)
        made.close()

    asyncio.run(story())


# -- with real workers ------------------------------------------------------------------------------------------------


async def test_requests_share_one_call_of_the_function_in_a_worker(pool: Any, call: CallMaker) -> None:
    made = await pool()
    limits = BatchLimits(max_rows=3, max_delay_s=60.0)
    where = "function:oriel_services.jobs:negated"
    rows = [[1], [2], [3]]
    calls = [made.batched(Work(where, (each,), call(), "negated"), limits) for each in rows]
    assert [done.value for done in await asyncio.gather(*calls)] == [[(-1, 3)], [(-2, 3)], [(-3, 3)]]
    arrays = [np.full((1, 30_000), each, np.float32) for each in (1, 2, 3)]
    calls = [made.batched(Work(f"{where}_array", (each,), call(), "negated"), limits) for each in arrays]
    assert [done.value[0, 0] for done in await asyncio.gather(*calls)] == [-1, -2, -3]
    mixed = [made.batched(Work(where, (each,), call(), "negated"), limits) for each in ([1], ["x"], [3])]
    found = await asyncio.gather(*mixed, return_exceptions=True)
    assert isinstance(found[1], HandlerFailed)
    assert [each.value for each in found if not isinstance(each, BaseException)] == [[(-1, 1)], [(-3, 1)]]
    with pytest.raises(HandlerFailed, match="takes rows"):
        await made.batched(Work(where, (1,), call(), "negated"), limits)


async def test_of_no_rows_the_function_is_not_called(pool: Any, call: CallMaker) -> None:
    made = await pool()
    limits = BatchLimits(max_rows=3, max_delay_s=60.0)
    for none in ([], np.zeros((0, 3), np.float32)):
        done = await made.batched(Work("function:oriel_services.jobs:fail", (none,), call(), "fail"), limits)
        assert done.value == []
    assert made.tally.jobs == 0
