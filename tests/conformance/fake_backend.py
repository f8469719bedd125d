"""A test double of a backend: it doubles its inputs and runs only when its gate is open. It needs no runtime and no
files.

Its decoupled form returns as many responses as its first input asks for.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from oriel_inference.backends import Backend, Execution, Outputs, Request, RequestSession, Session
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_wire.v2.messages import Array

WAIT_S = 120.0
AHEAD = 16  # responses of a request that are on their way to its reader


class Gate:
    """Holds runs back. It is open by default; while it is closed, every run waits for `open` or for a pass from
    `step`.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._open = True
        self._passes = 0
        self._waiting = 0

    def close(self) -> None:
        with self._condition:
            self._open = False

    def open(self) -> None:
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def step(self, passes: int = 1) -> None:
        """Let `passes` runs pass."""
        with self._condition:
            self._passes += passes
            self._condition.notify_all()

    def wait_for_runs(self, count: int) -> None:
        """Block the test until `count` runs wait at the gate."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._waiting >= count, WAIT_S):
                raise TimeoutError(f"{self._waiting} of {count} runs reached the gate")

    def enter(self) -> None:
        """Wait here until the run may pass; called by the session."""
        with self._condition:
            self._waiting += 1
            self._condition.notify_all()
            try:
                if not self._condition.wait_for(lambda: self._open or self._passes, WAIT_S):
                    raise TimeoutError("nobody opened the gate")
                if not self._open:
                    self._passes -= 1
            finally:
                self._waiting -= 1


class FakeSession(Session):
    """A session that returns each input times two (BYTES: repeated). `batches` records the first axis of every run,
    `captured` the shapes of CUDA graphs.
    """

    provider = "FakeExecutionProvider"

    def __init__(
        self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], *, gate: Gate, fail: bool = False
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.gate = gate
        self.fail = fail
        self.batches: list[int] = []
        self.captured: list[Mapping[str, tuple[int, ...]]] = []
        self.closed = False
        self.occupied_bytes = 0

    def memory_bytes(self) -> int:
        return self.occupied_bytes

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        first = next(iter(inputs.values()))
        self.batches.append(int(first.shape[0]) if first.ndim else 1)
        self.gate.enter()
        if self.fail:
            raise BackendFailed("the fake backend is set to fail")
        sources = {out.name: into.name for out, into in zip(self.outputs, self.inputs, strict=True)}
        return [inputs[sources[name]] + inputs[sources[name]] for name in outputs]

    def capture(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        self.captured += shapes

    def close(self) -> None:
        self.closed = True


class FakeStreamSession(FakeSession, RequestSession):
    """A decoupled session, with a thread for each request. For BYTES it returns one response per word of the first
    text; for numbers as many responses as the first element says, and response i holds i.

    With `fail` set it fails after its last response. `abandoned` counts the requests that were not answered to their
    end.
    """

    abandoned = 0

    def __init__(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], *, gate: Gate) -> None:
        super().__init__(inputs, outputs, gate=gate)
        self._left: dict[tuple[int, int], threading.Event] = {}

    def execute(self, execution: Execution) -> None:
        loop = asyncio.get_running_loop()
        (request,) = execution.requests
        self._left[id(execution), 0] = threading.Event()
        threading.Thread(target=self._answer, args=(loop, execution, request), daemon=True).start()

    def caller_left(self, execution: Execution, index: int) -> None:
        self._left[id(execution), index].set()

    def _answer(self, loop: asyncio.AbstractEventLoop, execution: Execution, request: Request) -> None:
        source = next(iter(request.inputs.values()))
        self.batches.append(int(source.shape[0]) if source.ndim else 1)
        first = source.flat[0]
        credit, left = threading.Semaphore(AHEAD), self._left[id(execution), 0]
        for each in first.split() if isinstance(first, bytes) else range(int(first)):
            self.gate.enter()
            while not left.is_set() and not credit.acquire(timeout=0.01):
                pass
            if left.is_set():
                self.abandoned += 1
                break
            outputs = Outputs([np.full(source.shape, each, source.dtype) for _ in request.outputs])
            loop.call_soon_threadsafe(execution.respond, 0, outputs, credit.release)
        error = BackendFailed("the fake backend is set to fail") if self.fail else None
        loop.call_soon_threadsafe(execution.answer, 0, error)
        loop.call_soon_threadsafe(execution.returned)


class FakeRequestSession(FakeSession, RequestSession):
    """A session that takes requests one by one, doubles them as `FakeSession` does, and answers when the test calls
    `finish`.

    under_way: executions that have not been answered.
    left: (execution, index) of the requests whose callers have left.
    """

    def __init__(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], *, gate: Gate) -> None:
        super().__init__(inputs, outputs, gate=gate)
        self.under_way: list[Execution] = []
        self.left: list[tuple[Execution, int]] = []

    def execute(self, execution: Execution) -> None:
        self.under_way.append(execution)

    def caller_left(self, execution: Execution, index: int) -> None:
        self.left.append((execution, index))

    def finish(self, errors: Mapping[int, InferenceError] | None = None, *, back: bool = True) -> Execution:
        """Answer the oldest execution, some of its requests with errors. back: whether the instance reports that it can
        take more.
        """
        execution = self.under_way.pop(0)
        if back:
            execution.returned()
        for index, request in enumerate(execution.requests):
            error = (errors or {}).get(index)
            execution.answer(index, error or Outputs([array + array for array in request.inputs.values()]))
        return execution


class FakeBackend(Backend):
    """Opens every path as the same kind of session. `sessions` holds all sessions, `opened` the arguments of each
    call, `most_open` how many sessions were open at once.

    occupied_bytes: memory that each session reports; 0 for unknown.
    loads: holds the opening of sessions back.
    """

    name = "fake"

    def __init__(
        self,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        *,
        decoupled: bool = False,
        gpus: Sequence[Gpu] = (),
        occupied_bytes: int = 0,
    ) -> None:
        self._kind = FakeStreamSession if decoupled else FakeSession
        self._inputs = inputs
        self._outputs = outputs
        self._gpus = gpus
        self.gate = Gate()
        self.sessions: list[FakeSession] = []
        self.opened: list[tuple[str, EngineOptions]] = []
        self.occupied_bytes = occupied_bytes
        self.loads = Gate()
        self.most_open = 0

    def open(self, path: Path, options: EngineOptions) -> FakeSession:
        self.loads.enter()
        session = self._kind(self._inputs, self._outputs, gate=self.gate)
        session.occupied_bytes = self.occupied_bytes
        self.sessions.append(session)
        self.most_open = max(self.most_open, sum(not each.closed for each in self.sessions))
        self.opened.append((path.name, options))
        return session

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus
