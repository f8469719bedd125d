"""An inference server in virtual time: the real batchers, queues and cores; only the executions are made up.

An execution takes the seconds that its model's `seconds` returns for its rows, and the clock of all servers of a
simulation passes meanwhile. Nothing is read or written, and no thread runs. What happens on the way between a caller
and a server is left to whoever uses this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Call, Reply
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.workers import Job
from oriel_inference.clock import VirtualClock
from oriel_inference.model import ModelSpec, QueueRules, TensorInfo, TensorSpec
from oriel_policies.batch import BatchBounds, ServiceCurve
from oriel_wire.v2.messages import Array

LEARNED = 20  # batches of each size that a server has seen before


class SimulatedClock(VirtualClock):
    """Virtual time in which jobs run at the moment they are submitted, in a time of their own.

    ahead_s: how much later than the world's time the running job is.
    wait_s: how much later still the loop learns that the job has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0
        self.wait_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s

    def submit(self, job: Job) -> None:
        job()
        self.ahead_s = self.wait_s = 0.0

    def let_begin(self) -> None:
        pass

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        self.call_at(self.now() + self.wait_s, callback)


class SimulatedSession:
    """One instance of a model, whose runs take `seconds(rows)`, after which it waits for `row_s` for each row.

    ran: is called with rows and seconds of each run.
    """

    provider = "virtual"
    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[TensorInfo] = ()

    def __init__(
        self,
        clock: SimulatedClock,
        seconds: Callable[[int], float],
        ran: Callable[[int, float], None] | None = None,
        row_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._ran = ran
        self._row_s = row_s

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        rows = len(inputs["x"])
        self._clock.ahead_s = seconds = self._seconds(rows)
        self._clock.wait_s = rows * self._row_s
        if self._ran is not None:
            self._ran(rows, seconds)
        return [inputs["x"]]

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model of a simulated server.

    bounds: None means that every request runs alone.
    seconds: rows of a batch -> how long it takes, drawn anew each time.
    row_s: what an instance waits after a batch for each of its rows, while the server reads and writes.
    learned: sizes of batches whose times the server has learned before.
    """

    name: str
    bounds: BatchBounds | None
    instances: int
    seconds: Callable[[int], float]
    row_s: float = 0.0
    learned: Sequence[int] = ()

    def spec(self) -> ModelSpec:
        """Return it as a model of a repository, with one input of one column."""
        return ModelSpec(
            name=self.name,
            version=1,
            platform="",
            backend="",
            max_batch_size=1 if self.bounds is None else self.bounds.max_rows,
            inputs=(TensorSpec(name="x", datatype="FP32", dims=(1,)),),
            outputs=(TensorSpec(name="y", datatype="FP32", dims=(1,)),),
            bounds=self.bounds,
            queue=QueueRules(),
            instances=self.instances,
        )


class SimulatedServer:
    """A server of some models. cores: executions that may run at once, of all models together.

    ran: is called with the model, the rows and the seconds of each execution, when it begins.
    """

    def __init__(
        self,
        models: Sequence[SimulatedModel],
        clock: SimulatedClock,
        *,
        cores: int,
        ran: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self._clock = clock
        units = Cores(cores)
        self._arrays: dict[int, Array] = {}
        self.batchers: dict[str, Batcher] = {}
        for model in models:
            hook = None if ran is None else _of(ran, model.name)
            self.batchers[model.name] = Batcher(
                model.spec(),
                [SimulatedSession(clock, model.seconds, hook, model.row_s) for _ in range(model.instances)],
                clock=clock,
                cores=units,
                workers=clock,
                curve=_curve(model),
                inline_s=0.0,
            )

    @property
    def waiting(self) -> int:
        """Count the calls that wait for a batch."""
        return sum([batcher.pending for batcher in self.batchers.values()])

    def submit(
        self, model: str, rows: int, *, deadline: float, reply: Reply, band: int = 0, tenant: str = ""
    ) -> Callable[[], None]:
        """Send a call to a model; `reply` is called once, unless the caller leaves: by calling what this returns."""
        batcher = self.batchers[model]
        array = self._arrays.get(rows)
        if array is None:
            array = self._arrays[rows] = np.zeros((rows, 1), np.float32)
        call = Call(
            inputs={"x": array},
            rows=rows,
            signature=None,
            arrived_s=self._clock.now(),
            deadline=deadline,
            reply=reply,
            band=band,
            tenant=tenant,
        )
        batcher.submit(call)
        return lambda: None if batcher.leave(call) else None


def _curve(model: SimulatedModel) -> ServiceCurve:
    found = ServiceCurve()
    for _ in range(LEARNED):
        for rows in model.learned:
            found.observe(rows, model.seconds(rows))
    return found


def _of(ran: Callable[[str, int, float], None], model: str) -> Callable[[int, float], None]:
    return lambda rows, seconds: ran(model, rows, seconds)
