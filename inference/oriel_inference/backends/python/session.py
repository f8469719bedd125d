"""An instance of a Python model, as the batcher sees it: a process that is started again when it dies.

Rules.
1. A batch is sent at once; `execute` never waits. Answers come as messages.
2. When the process dies, every request it has fails and the instance counts as busy until a new process is ready. The
   first restart is immediate, further ones wait longer and longer until an execution has returned again.
3. When nobody waits for any request of a batch that still runs, it may go on for `grace_s`; then the process is killed.
4. Responses of decoupled requests are numbered by credit: the child sends AHEAD of them and one more for each that was
   consumed, so a slow reader holds up only the thread that produces for it. At most MAX_OPEN batches are under way.

Everything belongs to the loop, except `run` and `close`, which are for other threads and block.
"""

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oriel_inference.backends import Execution, Outputs, Request
from oriel_inference.backends.python.frames import (
    Answers,
    Buffer,
    Cancel,
    Credit,
    Execute,
    Failed,
    Finalize,
    Finalized,
    FrameError,
    Infer,
    Initialize,
    Load,
    Loaded,
    Message,
    Ready,
    RequestHead,
    Respond,
    ResultHead,
    Returned,
    Say,
    read_tensors,
    tensor_parts,
)
from oriel_inference.backends.python.outcomes import error_of
from oriel_inference.backends.python.process import ModelProcess
from oriel_inference.errors import BackendFailed, InferenceError, LoadFailed, ServerStopping
from oriel_inference.model import TensorInfo
from oriel_wire.errors import BadMessage
from oriel_wire.v2.messages import Array

__all__ = ["Launch", "PythonLimits", "PythonSession", "Scripting"]

_log = logging.getLogger(__name__)

MAX_OPEN = 1024
# What the v2 protocol gives a meaning of its own.
_RESERVED = frozenset(("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLimits:
    """start_s: import and `initialize`. finalize_s: `finalize` and the end of the process. grace_s: see rule 3.

    max_body_bytes: tensors of one message. backoff_s: the wait before the second restart in a row, doubled for each
    further one up to max_backoff_s.
    """

    start_s: float = 120.0
    finalize_s: float = 5.0
    grace_s: float = 10.0
    max_body_bytes: int = 512 << 20
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a process is started with. threads: of its numeric libraries."""

    file: str
    model: str
    version: str
    config: str
    args: Mapping[str, str]
    decoupled: bool
    threads: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


Scripting = Callable[["PythonSession", Infer, memoryview], None]


@dataclass(slots=True, eq=False)
class _Open:
    """A batch in the child. first: id of its first request; waiting: indexes without an answer."""

    execution: Execution
    first: int
    waiting: set[int]
    left: set[int] = field(default_factory=set)
    returned: bool = False
    timer: asyncio.TimerHandle | None = None


class PythonSession:
    """One instance. scripting: runs the requests its model makes of other models."""

    provider = "python"

    def __init__(self, launch: Launch, limits: PythonLimits, scripting: Scripting) -> None:
        self.adopt(launch)
        self._limits = limits
        self._scripting = scripting
        self._loop = asyncio.get_running_loop()
        self._process: ModelProcess | None = None
        self._ready = False
        self._step: asyncio.Future[Message] | None = None
        self._batches: dict[int, _Open] = {}
        self._by_request: dict[int, _Open] = {}
        self._numbers = 0
        self._held: list[Execution] = []  # returned while MAX_OPEN batches were under way
        self._waiting: list[Execution] = []  # came while there was no process
        self._stuck: list[Execution] = []  # were there when the process died
        self._deaths = 0
        self._restart: asyncio.Task[None] | None = None
        self.asks: dict[int, Callable[[], None]] = {}  # what it asks of other models -> how to give that up
        self._closing = False
        self._gone: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def adopt(self, launch: Launch) -> None:
        """What the model is, now that its configuration is complete; before `initialize`."""
        self.launch = launch
        self.inputs = launch.inputs
        self.outputs = launch.outputs
        self._input_types = {info.name: info.datatype for info in launch.inputs}
        self._names = [info.name for info in launch.outputs]

    # Life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> str | None:
        """Start the process and have it import the model; the configuration it completed, if it does. LoadFailed."""
        async with self._limited("imported"):
            process = ModelProcess(
                self.launch.model,
                threads=self.launch.threads,
                max_body_bytes=self._limits.max_body_bytes,
                on_message=self._message,
                on_end=self._ended,
            )
            self._process = process
            self._gone = self._loop.create_future()
            self._step = self._loop.create_future()
            try:
                await process.start()
            except OSError as error:
                raise LoadFailed(f"the model's process could not be started: {error.strerror}") from error
            launch = self.launch
            process.send(Load(launch.file, launch.model, launch.version, launch.config, self._limits.max_body_bytes))
            loaded = await self._step
        assert isinstance(loaded, Loaded)
        return loaded.config

    async def initialize(self) -> None:
        """Have the loaded model initialise itself. Raises LoadFailed."""
        async with self._limited("initialised"):
            assert self._process is not None
            self._step = self._loop.create_future()
            self._process.send(Initialize(dict(self.launch.args), self.launch.decoupled, self._names))
            await self._step
        self._ready = True

    async def end(self) -> None:
        """Finalise the model if it can be, end its process in any case; what it has fails."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        process, gone = self._process, self._gone
        if process is None or gone is None or gone.done():
            self._abandon(ServerStopping())
            return
        try:
            async with asyncio.timeout(self._limits.finalize_s):
                if self._ready:
                    self._step = self._loop.create_future()
                    process.send(Finalize())
                    await self._step
                    await asyncio.shield(gone)
        except (TimeoutError, LoadFailed):
            _log.warning("model %s did not finalise in time, its process is killed", self.launch.model)
        process.kill("it was unloaded")
        await gone
        self._abandon(ServerStopping())

    def close(self) -> None:
        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(self.end(), self._loop)])

    def kill(self, why: str) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill(why)

    def _limited(self, done: str) -> "_Limit":
        return _Limit(self, self._limits.start_s, f"the model was not {done} within {self._limits.start_s:g} s")

    def _ended(self, how: str) -> None:
        """The process is gone."""
        model, was_ready = self.launch.model, self._ready
        self._ready = False
        self._give_up()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._step is not None and not self._step.done():
            self._step.set_exception(LoadFailed(f"the model's process died ({how})"))
        if self._closing:
            return
        self._fail_all(BackendFailed(f"the process of model {model!r} died ({how}), it is being started again"))
        if was_ready:
            _log.error("model %s: its process died (%s), it is started again", model, how)
            self._restart = self._loop.create_task(self._start_again())

    async def _start_again(self) -> None:
        while True:
            if self._deaths:
                delay = self._limits.backoff_s * 2 ** min(self._deaths - 1, 16)
                await asyncio.sleep(min(delay, self._limits.max_backoff_s))
            self._deaths += 1
            try:
                await self.load()
                await self.initialize()
                break
            except LoadFailed as failure:
                _log.error("model %s could not be started again: %s", self.launch.model, failure.reason)
        _log.info("model %s: its process runs again", self.launch.model)
        stuck, self._stuck = self._stuck, []
        for execution in stuck:
            execution.returned()
        waiting, self._waiting = self._waiting, []
        for execution in waiting:
            self.execute(execution)

    # Executing ------------------------------------------------------------------------------------------------------

    def execute(self, execution: Execution) -> None:
        if not self._ready:
            if self._closing:
                _refuse(execution, ServerStopping())
            else:
                self._waiting.append(execution)
            return
        first = self._numbers
        self._numbers += len(execution.requests)
        body: list[Buffer] = []
        try:
            heads = [self._head(first + i, request, body) for i, request in enumerate(execution.requests)]
            assert self._process is not None
            self._process.send(Execute(first, heads), body)
        except (FrameError, BadMessage, ValueError, OverflowError) as error:
            _refuse(execution, BackendFailed(f"the batch cannot be sent to the model: {error}"))
            return
        opened = _Open(execution, first, set(range(len(heads))))
        self._batches[first] = opened
        self._by_request.update((first + i, opened) for i in range(len(heads)))

    def leave(self, execution: Execution, index: int) -> None:
        opened = next((each for each in self._batches.values() if each.execution is execution), None)
        if opened is None or self._process is None or index not in opened.waiting:
            return
        self._process.tell(Cancel(opened.first + index))
        opened.left.add(index)
        if not self.asked_by():
            self._give_up()
        if opened.returned and self.launch.decoupled:
            # Whatever the model still says of it is dropped: nothing to wait for.
            self._answer(opened, index, None)
        elif opened.left == opened.waiting and opened.timer is None:
            opened.timer = self._loop.call_later(
                self._limits.grace_s, self.kill, "it went on working when nobody waited any more"
            )

    def asked_by(self) -> Sequence[Request]:
        """The requests it works on now."""
        return [each.execution.requests[i] for each in self._batches.values() for i in each.waiting - each.left]

    def _give_up(self) -> None:
        """Nobody waits for what was asked of other models."""
        asks, self.asks = self.asks, {}
        for leave in asks.values():
            leave()

    def inferred(self, message: Message, body: Sequence[Buffer] = ()) -> None:
        """What another model said to this one. Raises FrameError."""
        if self._process is not None:
            self._process.tell(message, body)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        deadline = time.monotonic() + self._limits.start_s
        once = _Once(Request(inputs=inputs, outputs=outputs, deadline=deadline, ends=deadline))
        self._loop.call_soon_threadsafe(self.execute, once)
        try:
            found = once.result.result(self._limits.start_s)
        except TimeoutError as error:
            self._loop.call_soon_threadsafe(self.kill, "its warm-up took too long")
            raise BackendFailed(f"the model gave no answer within {self._limits.start_s:g} s") from error
        arrays = dict(zip(self._names, found, strict=True))
        missing = [name for name in outputs if arrays[name] is None]
        if missing:
            raise BackendFailed(f"the model gave no output {missing[0][:64]!r}")
        return [arrays[name] for name in outputs]

    def _head(self, number: int, request: Request, body: list[Buffer]) -> RequestHead:
        asked = request.asked
        parameters = asked.parameters if asked is not None else {}
        sequence, timeout = parameters.get("sequence_id", 0), parameters.get("timeout", 0)
        return RequestHead(
            id=number,
            request_id=asked.id if asked is not None else "",
            correlation=sequence if isinstance(sequence, int | str) else 0,
            flags=bool(parameters.get("sequence_start")) + 2 * bool(parameters.get("sequence_end")),
            timeout_us=timeout if isinstance(timeout, int) else 0,
            parameters={key: value for key, value in parameters.items() if key not in _RESERVED} if parameters else {},
            outputs=list(request.outputs),
            deadline=request.deadline,
            ends=request.ends,
            idle_s=request.idle_s,
            inputs=tensor_parts(
                [(name, self._input_types[name], array) for name, array in request.inputs.items()], body
            ),
        )

    # What the child says --------------------------------------------------------------------------------------------

    def _message(self, message: Message, body: memoryview) -> None:
        match message:
            case Answers():
                self._answers(message, body)
            case Respond():
                self._respond(message, body)
            case Returned():
                opened = self._batches.get(message.batch)
                if opened is not None:
                    self._returned(opened)
            case Say():
                _log.log(message.level, "model %s: %s", self.launch.model, message.text)
            case Infer():
                self._scripting(self, message, body)
            case Failed():
                _log.error("model %s failed to load:\n%s", self.launch.model, message.detail)
                self._done(LoadFailed(f"the model's code failed: {message.reason}"))
            case Loaded() | Ready() | Finalized():
                self._done(message)
            case _:
                self.kill("it said what is not for it to say")

    def _done(self, what: Message | LoadFailed) -> None:
        if self._step is None or self._step.done():
            return
        if isinstance(what, LoadFailed):
            self._step.set_exception(what)
        else:
            self._step.set_result(what)

    def _answers(self, message: Answers, body: memoryview) -> None:
        opened = self._batches.get(message.batch)
        if opened is None or len(message.results) != len(opened.execution.requests):
            self.kill("it answered what it was not asked")
            return
        opened.execution.computing(message.began, message.ended)
        self._returned(opened)  # the next batch starts before this one's answers are written
        at = 0
        for index, head in enumerate(message.results):
            result, at = self._result(head, body, at)
            self._answer(opened, index, result)

    def _respond(self, message: Respond, body: memoryview) -> None:
        opened = self._by_request.get(message.request)
        if opened is None:
            return
        index = message.request - opened.first
        if message.result is not None:
            result, _ = self._result(message.result, body, 0)
            if isinstance(result, InferenceError):
                if self._process is not None and not message.final:
                    self._process.tell(Cancel(message.request))
                self._answer(opened, index, result)
                return
            opened.execution.respond(index, result, lambda: self._consumed(message.request))
        if message.final:
            self._answer(opened, index, None)

    def _consumed(self, request: int) -> None:
        if self._process is not None and request in self._by_request:
            self._process.tell(Credit(request, 1))

    def _result(self, head: ResultHead, body: memoryview, at: int) -> tuple[Outputs | InferenceError, int]:
        try:
            parts, at = read_tensors(head.tensors, body, at)
        except (FrameError, BadMessage) as error:
            return BackendFailed(f"the model's answer cannot be read: {error}"), at
        if head.error is not None:
            return error_of(*head.error), at
        found = {name: (datatype, array) for name, datatype, array in parts}
        arrays: list[Array | None] = []
        for info in self.outputs:
            datatype, array = found.get(info.name, (info.datatype, None))
            if datatype != info.datatype:
                text = f"output {info.name[:64]!r} of the model is {datatype}, its configuration says {info.datatype}"
                return BackendFailed(text), at
            arrays.append(array)
        return Outputs(arrays, head.parameters), at

    def _answer(self, opened: _Open, index: int, result: Outputs | InferenceError | None) -> None:
        if index not in opened.waiting:
            return
        opened.waiting.discard(index)
        opened.left.discard(index)
        del self._by_request[opened.first + index]
        opened.execution.answer(index, result)
        self._forget(opened)

    def _returned(self, opened: _Open) -> None:
        if opened.returned:
            return
        self._deaths = 0
        opened.returned = True
        if opened.timer is not None:
            opened.timer.cancel()
        for index in tuple(opened.left) if self.launch.decoupled else ():
            self._answer(opened, index, None)
        self._held.append(opened.execution)
        self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        """What has returned and has no request left is done with; there is room for more then."""
        if opened.returned and not opened.waiting:
            self._batches.pop(opened.first, None)
        while self._held and len(self._batches) < MAX_OPEN:
            self._held.pop().returned()

    def _fail_all(self, error: InferenceError) -> None:
        """Of a process that is gone. Its executions return when there is a new one."""
        batches, self._batches = list(self._batches.values()), {}
        self._by_request.clear()
        for opened in batches:
            if opened.timer is not None:
                opened.timer.cancel()
            for index in sorted(opened.waiting):
                opened.execution.answer(index, error)
            if not opened.returned:
                self._stuck.append(opened.execution)
        self._stuck += self._held
        self._held = []

    def _abandon(self, error: InferenceError) -> None:
        """There will be no new process."""
        self._fail_all(error)
        for execution in self._stuck:
            execution.returned()
        for execution in self._waiting:
            _refuse(execution, error)
        self._stuck, self._waiting = [], []


class _Limit:
    """A step of the start, within its time: the process is killed if it is late, or if the step failed."""

    def __init__(self, session: PythonSession, seconds: float, late: str) -> None:
        self._session = session
        self._timeout = asyncio.timeout(seconds)
        self._late = late

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            self._session.kill(self._late)
            raise LoadFailed(self._late) from late
        finally:
            if error is not None:
                self._session.kill("it did not start")


class _Once:
    """One request of which another thread waits for the answer."""

    def __init__(self, request: Request) -> None:
        self.requests = (request,)
        self.result: concurrent.futures.Future[Outputs] = concurrent.futures.Future()

    def computing(self, began_s: float, ended_s: float) -> None:
        pass

    def answer(self, index: int, result: Outputs | InferenceError | None) -> None:
        if isinstance(result, InferenceError):
            self.result.set_exception(result)
        else:
            self.result.set_result(result or Outputs())

    def respond(self, index: int, outputs: Outputs, consumed: Callable[[], None]) -> None:
        consumed()

    def returned(self) -> None:
        pass


def _refuse(execution: Execution, error: InferenceError) -> None:
    for index in range(len(execution.requests)):
        execution.answer(index, error)
    execution.returned()
