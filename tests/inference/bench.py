"""Test doubles and builders that the inference tests share."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from fake_backend import FakeSession, Gate

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import InferenceError, InvalidRequest
from oriel_inference.model import ModelSpec, QueueRules, TensorInfo, TensorSpec
from oriel_policies.waiting.batch import BatchBounds, ServiceCurve
from oriel_wire.context import CallContext
from oriel_wire.observe.trace import new_trace
from oriel_wire.v2.messages import Array

from .manual_workers import ManualWorkers

X = TensorInfo(name="x", datatype="INT64", shape=(-1, -1))
Y = TensorInfo(name="y", datatype="INT64", shape=(-1, -1))


def spec(
    *,
    max_rows: int = 8,
    delay_s: float = 0.0,
    alone: bool = False,
    instances: int = 1,
    decoupled: bool = False,
    **queue: object,
) -> ModelSpec:
    return ModelSpec(
        name="double",
        version=1,
        platform="",
        backend="fake",
        max_batch_size=max_rows,
        inputs=(TensorSpec(name="x", datatype="INT64", dims=(-1,)),),
        outputs=(TensorSpec(name="y", datatype="INT64", dims=(-1,)),),
        bounds=None if alone else BatchBounds(max_rows=max_rows, max_delay_s=delay_s),
        queue=QueueRules(**queue),  # type: ignore[arg-type]
        instances=instances,
        decoupled=decoupled,
    )


def context(tenant: str, *, tier: str = "gold", unbilled: str = "") -> CallContext:
    return CallContext(
        request_id="r",
        deadline=0.0,
        tier=tier,
        band=0,
        tenant=tenant,
        models=(),
        trace=new_trace(False),
        unbilled=unbilled,
    )


class Linear(ServiceCurve):
    """A service time of fixed_s + n * per_row_s for n rows, whatever was observed: in virtual time fake sessions take
    none.
    """

    def __init__(self, fixed_s: float, per_row_s: float) -> None:
        super().__init__()
        for rows in range(1, 9):
            super().observe(rows, fixed_s + per_row_s * rows)

    def observe(self, rows: int, seconds: float) -> None:
        pass


class Picky(FakeSession):
    """A session that refuses batches with a row of one of these numbers. runs: the rows of each run, refused or not."""

    def __init__(self, bad: Collection[int]) -> None:
        super().__init__((X,), (Y,), gate=Gate())
        self._bad = bad
        self.runs: list[list[int]] = []

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.runs.append(list(dict.fromkeys(inputs["x"][:, 0].tolist())))
        if found := sorted(set(self.runs[-1]) & set(self._bad)):
            raise InvalidRequest(f"the model refuses {found}")
        return super().run(inputs, outputs)


class Calls:
    """Calls in virtual time, and their replies, by the numbers of the calls.

    served: what runs the calls. order: the numbers in the order of their replies.
    """

    def __init__(self, served: Scheduler, clock: VirtualClock, workers: ManualWorkers) -> None:
        self._served = served
        self.clock = clock
        self.workers = workers
        self.replies: dict[int, list[Answer | InferenceError]] = {}
        self.calls: list[Call] = []
        self.order: list[int] = []

    def submit(self, call: Call) -> int:
        """Submit the next call; returns its number."""
        number = len(self.calls)
        self.replies[number] = []
        self.calls.append(call)
        self._served.submit(call)
        return number

    def replied(self, number: int, result: Answer | InferenceError) -> None:
        self.replies[number].append(result)
        self.order.append(number)

    def leave(self, number: int) -> None:
        self._served.caller_left(self.calls[number])

    def step(self) -> None:
        """Run what the loop has to do, then one batch, then what follows from it."""
        self.clock.run()
        if self.workers.jobs:
            self.workers.run_next()
            self.clock.run()

    def settle(self) -> None:
        """Run everything that is due at this moment."""
        self.clock.run()
        while self.workers.jobs:
            self.step()

    def answer(self, number: int) -> Answer:
        (reply,) = self.replies[number]
        assert isinstance(reply, Answer), reply
        return reply

    def error(self, number: int) -> InferenceError:
        (reply,) = self.replies[number]
        assert isinstance(reply, InferenceError), reply
        return reply


class Bench(Calls):
    """A batcher in virtual time over fake sessions; its jobs run when the test says so."""

    def __init__(self, model: ModelSpec, *, cores: int = 4, sessions: int | None = None, **options: Any) -> None:
        clock, workers = VirtualClock(), ManualWorkers()
        self.cores = Cores(cores)
        self.bad: set[int] = set()  # numbers of calls with which every batch fails
        self.sessions = [Picky(self.bad) for _ in range(sessions or model.instances)]
        own = {name: options.pop(name) for name in ("units", "curve", "statistics", "placed") if name in options}
        options.setdefault("inline_s", 0.0)
        machine = Machine(clock=clock, cores=self.cores, workers=workers, **options)
        self.batcher = Batcher(model, self.sessions, machine, **own)
        super().__init__(self.batcher, clock, workers)

    def call(
        self,
        rows: int = 1,
        *,
        timeout_s: float = 60.0,
        width: int = 2,
        band: int = 0,
        tenant: str = "",
        size_bytes: int = 0,
        give_up_s: float | None = None,
        delays: bool = False,
        level: int = 0,
        caller: str = "",
    ) -> int:
        """Submit a call whose rows all hold its own number; returns the number."""
        number, now = len(self.calls), self.clock.now()
        call = Call(
            inputs={"x": np.full((rows, width), number, dtype=np.int64)},
            rows=rows,
            signature=width,
            arrived_s=now,
            deadline=now + timeout_s,
            give_up_s=None if give_up_s is None else now + give_up_s,
            delays=delays,
            reply=lambda result: self.replied(number, result),
            level=level,
            band=band,
            tenant=tenant,
            size_bytes=size_bytes,
            caller=caller,
            usage=self.batcher.accounts.of(context(tenant)),
        )
        return self.submit(call)

    @property
    def runs(self) -> list[list[int]]:
        """Return the numbers of the calls of each execution, including those that failed."""
        return [run for session in self.sessions for run in session.runs]

    @property
    def batches(self) -> Sequence[int]:
        return [rows for session in self.sessions for rows in session.batches]
