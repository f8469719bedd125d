"""An inference server in virtual time: the real batchers, queues and cores; only the executions and the work of the
event loop are made up.

An execution takes the seconds that its model's `seconds` returns for its rows. Reading a call, handling a batch and
writing an answer take the loop's time (`LoopTimes`), and whatever comes meanwhile waits for the loop's next turn.
Nothing is read or written, and no thread runs. The way between a caller and a server is left to whoever
uses this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from oriel_inference.backends import Session
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call, Reply
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.workers import Job
from oriel_inference.clock import Timer, VirtualClock
from oriel_inference.errors import InferenceError
from oriel_inference.model import ModelSpec, QueueRules, TensorInfo, TensorSpec
from oriel_policies.waiting.batch import BatchBounds, ServiceCurve
from oriel_wire.v2.messages import Array

LEARNED = 20  # batches of each size that a server has seen before
SWITCH_S = 0.005  # time after which a thread that computes gives the interpreter to one that waits
FADE = 0.98  # factor on the weight of earlier periods of the loop after each further one

Callback = Callable[[], None]


class SimulatedLoop:
    """The event loop of one server. It runs what it has to do in turns, as the real one does: first what was due, then
    what arrived at sockets. Work that comes during a turn waits for the next one.

    All of a turn is run at the moment it begins; `now` is ahead of the world's clock by the time that it has spent so
    far. Between two turns that follow at once the loop keeps the interpreter: other threads get it when the loop rests,
    or after SWITCH_S.
    """

    def __init__(self, world: VirtualClock, turn_s: float, chance: Random) -> None:
        self.world = world
        self._turn_s = turn_s
        self._chance = chance
        self._due: list[Callback] = []
        self._arrived: list[Callback] = []
        self._jobs: list[Callback] = []
        self._busy = False
        self._changed_s = world.now()  # when it became busy or began to rest
        # seconds of recent periods, and the squares of those in which the loop was busy
        self._rest_s = self._busy_s = self._busy_squares = 0.0
        self.ahead_s = 0.0  # seconds by which `now` is ahead of the world's clock

    def now(self) -> float:
        return self.world.now() + self.ahead_s

    def spend(self, seconds: float) -> None:
        """Let the callback that runs take time."""
        self.ahead_s += seconds

    def call_soon(self, callback: Callback) -> None:
        """Run a callback in the next turn."""
        self._due.append(callback)
        self._wake()

    def arrive(self, callback: Callback) -> None:
        """Run a callback in the next turn, after those that were due."""
        self._arrived.append(callback)
        self._wake()

    def call_at(self, when_s: float, callback: Callback) -> Timer:
        """Run a callback in the first turn after a time of the world's clock."""
        timer = self.world.call_at(when_s, lambda: self.call_soon(run))

        def run() -> None:
            if not timer.cancelled:
                callback()

        return timer

    def begin(self, job: Callback) -> None:
        """Let a job begin in a thread as soon as that gets the interpreter."""
        self._jobs.append(job)
        self.world.call_at(self.now() + SWITCH_S, lambda: self.let_begin() if job in self._jobs else None)

    def let_begin(self) -> None:
        """Let the jobs begin now."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            began_s = self.ahead_s
            job()
            self.ahead_s = began_s

    def lock_wait_s(self) -> float:
        """Draw how long a thread waits for the interpreter at some later moment."""
        lasted_s = self.world.now() - self._changed_s if self._busy else 0.0
        busy_s, squares = self._busy_s + lasted_s, self._busy_squares + lasted_s * lasted_s
        if not busy_s or self._chance.random() * (self._rest_s + busy_s) > busy_s:
            return 0.0
        # a moment falls into a long period more often than into a short one: squares / busy_s is their mean then
        return min(SWITCH_S, self._chance.random() * squares / busy_s)

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            now = self.world.now()
            self._rest_s = FADE * self._rest_s + now - self._changed_s
            self._changed_s = now
            self.world.call_soon(self._turn)

    def _turn(self) -> None:
        self.spend(self._turn_s)
        callbacks = self._due + self._arrived
        self._due, self._arrived = [], []
        for callback in callbacks:
            callback()
        ends_s, self.ahead_s = self.now(), 0.0
        self.world.call_at(ends_s, self._rest)

    def _rest(self) -> None:
        if self._due or self._arrived:
            self._turn()
            return
        self._busy = False
        now = self.world.now()
        lasted_s = now - self._changed_s
        self._busy_s = FADE * self._busy_s + lasted_s
        self._busy_squares = FADE * self._busy_squares + lasted_s * lasted_s
        self._changed_s = now
        self.let_begin()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimes:
    """The times of a loop, in seconds.

    turn_s: seconds for each turn, whatever is done in it.
    call_s: seconds for a call: half when it is read, and half when it is answered or refused.
    batch_s: seconds for a batch: half when it begins, and half when it has ended.
    """

    turn_s: float = 0.0
    call_s: float = 0.0
    batch_s: float = 0.0


class SimulatedHost:
    """The clock and the threads of one model's batcher. All of a job is run at the moment it begins, as if in a thread:
    the time that it takes is not the loop's.

    wait_s: seconds from the end of the running job until the loop learns of it.
    """

    def __init__(self, loop: SimulatedLoop, times: LoopTimes) -> None:
        self._loop = loop
        self._times = times
        self.now = loop.now
        self.call_soon = loop.call_soon
        self.call_at = loop.call_at
        self.wait_s = 0.0

    def submit(self, job: Job) -> None:
        self._loop.spend(self._times.batch_s / 2)
        self._loop.begin(job)

    def let_begin(self) -> None:
        self._loop.let_begin()

    def ran(self, seconds: float, wait_s: float) -> float:
        """Let the running job have taken so long, and return when it ended. It goes on when it gets the interpreter."""
        self._loop.spend(seconds)
        end_s = self._loop.now()
        self._loop.spend(self._loop.lock_wait_s())
        self.wait_s = wait_s
        return end_s

    def call_from_thread(self, callback: Callback) -> None:
        def finished() -> None:
            self._loop.spend(self._times.batch_s / 2)
            callback()

        self._loop.world.call_at(self._loop.now() + self.wait_s, lambda: self._loop.call_soon(finished))


class SimulatedSession(Session):
    """One instance of a model, whose runs take `seconds(rows)`, after which it waits for `row_s` for each row.

    ran: callback with the rows, the seconds and the end of each run.
    """

    provider = "virtual"
    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[TensorInfo] = ()

    def __init__(
        self,
        host: SimulatedHost,
        seconds: Callable[[int], float],
        ran: Callable[[int, float, float], None] | None = None,
        row_s: float = 0.0,
    ) -> None:
        self._host = host
        self._seconds = seconds
        self._ran = ran
        self._row_s = row_s

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        rows = len(inputs["x"])
        seconds = self._seconds(rows)
        end_s = self._host.ran(seconds, rows * self._row_s)
        if self._ran is not None:
            self._ran(rows, seconds, end_s)
        return [inputs["x"]]

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model of a simulated server.

    bounds: None means that every request runs alone.
    seconds: rows of a batch -> how long it takes, drawn anew each time.
    row_s: seconds that an instance waits after a batch for each of its rows, beside what the loop does meanwhile.
    loop: the time that its calls and batches take of the event loop.
    learned: sizes of batches whose times the server has learned before.
    """

    name: str
    bounds: BatchBounds | None
    instances: int
    seconds: Callable[[int], float]
    row_s: float = 0.0
    loop: LoopTimes = LoopTimes()
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
    """A server of some models. cores: executions that may run at once, of all models together. chance: the random
    numbers for waits.

    ran: callback with the model, the rows, the seconds and the end of each execution, at its begin.
    """

    def __init__(
        self,
        models: Sequence[SimulatedModel],
        clock: VirtualClock,
        *,
        cores: int,
        chance: Random,
        ran: Callable[[str, int, float, float], None] | None = None,
    ) -> None:
        self._clock = clock
        self._loop = SimulatedLoop(clock, max([model.loop.turn_s for model in models]), chance)
        units = Cores(cores)
        self._arrays: dict[int, Array] = {}
        self._times = {model.name: model.loop for model in models}
        self.batchers: dict[str, Batcher] = {}
        for model in models:
            host = SimulatedHost(self._loop, model.loop)
            hook = None if ran is None else partial(ran, model.name)
            self.batchers[model.name] = Batcher(
                model.spec(),
                [SimulatedSession(host, model.seconds, hook, model.row_s) for _ in range(model.instances)],
                Machine(clock=host, cores=units, workers=host, inline_s=0.0),
                curve=_curve(model),
            )

    @property
    def waiting(self) -> int:
        """Count the calls that wait for a batch."""
        return sum([batcher.pending for batcher in self.batchers.values()])

    def submit(
        self, model: str, rows: int, *, timeout_s: float, reply: Reply, band: int = 0, tenant: str = ""
    ) -> Callable[[], None]:
        """Let a call arrive at a model, which has `timeout_s` from when it is read; `reply` is called once.

        A caller that leaves calls what this returns, and gets no reply from when the loop has noticed.
        """
        batcher, loop, times = self.batchers[model], self._loop, self._times[model]
        array = self._arrays.get(rows)
        if array is None:
            array = self._arrays[rows] = np.zeros((rows, 1), np.float32)
        calls: list[Call] = []

        def write(result: Answer | InferenceError) -> None:
            loop.spend(times.call_s / 2)
            self._clock.call_at(loop.now(), lambda: reply(result))

        def read() -> None:
            arrived_s = loop.now()
            loop.spend(times.call_s / 2)
            call = Call(
                inputs={"x": array},
                rows=rows,
                signature=None,
                arrived_s=arrived_s,
                deadline=arrived_s + timeout_s,
                reply=write,
                band=band,
                tenant=tenant,
            )
            calls.append(call)
            batcher.submit(call)

        loop.arrive(read)
        return lambda: loop.arrive(lambda: None if batcher.caller_left(calls[0]) else None)


def _curve(model: SimulatedModel) -> ServiceCurve:
    found = ServiceCurve()
    for _ in range(LEARNED):
        for rows in model.learned:
            found.observe(rows, model.seconds(rows))
    return found
