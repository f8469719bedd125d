"""The wait for a worker is a stage of its own, `logic-wait`, which the gateway tells from the work."""

import asyncio
import pickle

import pytest

from oriel_logic.observe.stages import Ledger
from oriel_logic.services.context import Context, Done
from oriel_logic.workers.frames import Frame, Kind
from oriel_logic.workers.worker import WAITED_S, Job
from oriel_policies.waiting.flows import Ticket
from oriel_wire.observe.trace import TraceContext


@pytest.mark.parametrize("waited_s", [0.0, WAITED_S / 2, 0.25])
async def test_a_job_that_waited_for_a_worker_says_for_how_long(waited_s: float) -> None:
    ticket = Ticket(band=0, tenant="t", deadline=1e9, cost=1.0, size_bytes=0)
    future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
    job = Job(
        reference="r", stage="work", request_id="i", prepare=lambda: None, ticket=ticket, future=future, queued_s=7.0
    )
    job.began_s = 7.0 + waited_s
    job.answer(Frame(Kind.RESULT, 900, (), memoryview(pickle.dumps((42, [("rank", 8.0, 8.5)])))))
    done = await future
    ledger = Ledger(TraceContext(1, 2, False))
    with ledger.stage("work") as timed:
        value = Context(None, ledger, None)._accounted(done, timed)  # type: ignore[arg-type]
    times = dict(ledger.timings())
    assert value == 42 and times["rank"] == 0.5
    assert times.get("wait") == (pytest.approx(0.25) if waited_s > WAITED_S else None)
