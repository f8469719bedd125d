"""Test doubles and builders that the inference tests share."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from oriel_inference.backends.fake import FakeSession, Gate
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.workers import ManualWorkers
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import InferenceError, InvalidRequest
from oriel_inference.model import ModelSpec, QueueRules, TensorInfo, TensorSpec
from oriel_policies.batch import BatchBounds, ServiceCurve
from oriel_wire.context import CallContext
from oriel_wire.trace import new_trace
from oriel_wire.v2.messages import Array

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


class Bench:
    """A batcher in virtual time over fake sessions; its jobs run when the test says so."""

    def __init__(self, model: ModelSpec, *, cores: int = 4, sessions: int | None = None, **options: Any) -> None:
        self.clock = VirtualClock()
        self.workers = ManualWorkers()
        self.cores = Cores(cores)
        self.bad: set[int] = set()  # numbers of calls with which every batch fails
        self.sessions = [Picky(self.bad) for _ in range(sessions or model.instances)]
        options.setdefault("inline_s", 0.0)
        self.batcher = Batcher(
            model, self.sessions, clock=self.clock, cores=self.cores, workers=self.workers, **options
        )
        self.replies: dict[int, list[Answer | InferenceError]] = {}
        self.calls: list[Call] = []
        self.order: list[int] = []  # numbers in the order of their replies

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
        number = len(self.calls)
        self.replies[number] = []
        now = self.clock.now()
        call = Call(
            inputs={"x": np.full((rows, width), number, dtype=np.int64)},
            rows=rows,
            signature=width,
            arrived_s=now,
            deadline=now + timeout_s,
            give_up_s=None if give_up_s is None else now + give_up_s,
            delays=delays,
            reply=lambda result: self._replied(number, result),
            level=level,
            band=band,
            tenant=tenant,
            size_bytes=size_bytes,
            caller=caller,
            usage=self.batcher.accounts.of(context(tenant)),
        )
        self.calls.append(call)
        self.batcher.submit(call)
        return number

    def _replied(self, number: int, result: Answer | InferenceError) -> None:
        self.replies[number].append(result)
        self.order.append(number)

    def leave(self, number: int) -> None:
        self.batcher.leave(self.calls[number])

    def settle(self) -> None:
        """Run everything that is due at this moment."""
        self.clock.run()
        while self.workers.jobs:
            self.workers.run_next()
            self.clock.run()

    def answer(self, number: int) -> Answer:
        (reply,) = self.replies[number]
        assert isinstance(reply, Answer), reply
        return reply

    def error(self, number: int) -> InferenceError:
        (reply,) = self.replies[number]
        assert isinstance(reply, InferenceError), reply
        return reply

    @property
    def runs(self) -> list[list[int]]:
        """Return the numbers of the calls of each execution, including those that failed."""
        return [run for session in self.sessions for run in session.runs]

    @property
    def batches(self) -> Sequence[int]:
        return [rows for session in self.sessions for rows in session.batches]
