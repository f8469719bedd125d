"""An instance of a Python model as the batcher sees it: a process that is started again when it dies.

Rules.
1. A batch is sent at once; `execute` never waits. Answers arrive as messages.
2. When the process dies, every request it has fails, and the instance counts as busy until a new process is ready. The
   first restart is immediate; further ones wait longer and longer until an execution has returned again.
3. When all callers of a running batch have left, it may run on for `grace_s`; then the process is killed.
4. Requests that arrive while there is no process wait for the next one, unless their callers leave. While every
   instance of the model waits before a further restart, they are refused instead, with the time until the first
   one.

Everything belongs to the loop, except `run` and `close`, which block and are for other threads.
"""

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from oriel_inference.backends import Execution, Outputs, Request, RequestSession
from oriel_inference.backends.python.executions import Executions, refuse
from oriel_inference.backends.python.frames import decode
from oriel_inference.backends.python.launch import Launch, PythonLimits
from oriel_inference.backends.python.messages import (
    Answers,
    Cancel,
    Credit,
    Failed,
    Finalize,
    Finalized,
    Infer,
    Inferred,
    Initialize,
    Load,
    Loaded,
    MakeMetric,
    Manage,
    Message,
    Ready,
    Respond,
    ResultHead,
    Returned,
    Say,
    UseMetric,
)
from oriel_inference.backends.python.model_metrics import Holdings
from oriel_inference.backends.python.outcomes import code_of
from oriel_inference.backends.python.process import ModelProcess, resident_bytes
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    LoadFailed,
    ModelNotReady,
    ServerStopping,
)
from oriel_wire.process.messages import Buffer
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)

# A warm-up reads this many responses of a decoupled model and then stops, because some models never end.
WARM_RESPONSES = 1000


class OutgoingCall(Protocol):
    """A request of the session's model to another model."""

    def taken(self, count: int) -> None:
        """Report that the model has taken `count` more responses."""
        ...

    def caller_left(self) -> None:
        """Report that the model wants no more responses."""
        ...


Scripting = Callable[["PythonSession", Infer | Manage, memoryview], None]


class PythonSession(RequestSession):
    """One instance. scripting: runs the requests that its model makes to other models, and to load them."""

    provider = "python"

    def __init__(self, launch: Launch, limits: PythonLimits, scripting: Scripting, metrics: Holdings) -> None:
        self.adopt(launch)
        self._metrics = metrics
        self._limits = limits
        self._scripting = scripting
        self._loop = asyncio.get_running_loop()
        self._process: ModelProcess[Message] | None = None
        self._executions: Executions | None = None  # set while the process is ready
        self._step: asyncio.Future[Message] | None = None
        # arrived while there was no process -> indexes whose callers have left
        self._waiting: dict[Execution, set[int]] = {}
        self._stuck: list[Execution] = []  # in progress when the process died
        self._deaths = 0
        self._down_until = 0.0  # while it waits before a further restart
        self.siblings: Sequence[PythonSession] = (self,)  # all instances of the model
        self._restart: asyncio.Task[None] | None = None
        self.model_calls: dict[int, OutgoingCall] = {}  # requests of its model to other models
        self._closing = False
        self._gone: asyncio.Future[str] | None = None  # the sentence about the end of the process

    @property
    def pid(self) -> int | None:
        """Return the process id while there is a process."""
        return None if self._process is None else self._process.pid

    @property
    def starting(self) -> bool:
        """Return whether the model is not initialised yet."""
        return self._executions is None and not self._closing

    def memory_bytes(self) -> int:
        """Return the resident memory of the process; 0 while it is not ready or if the system does not report it."""
        return 0 if self.pid is None or self._executions is None else resident_bytes(self.pid)

    def adopt(self, launch: Launch) -> None:
        """Set the launch values once the configuration is complete; called before `initialize`."""
        self.launch = launch
        self.inputs = launch.inputs
        self.outputs = launch.outputs

    # Start and end --------------------------------------------------------------------------------------------------

    async def load(self, *, complete: bool = False) -> str | None:
        """Start the process, have it import the model, and return the result. Raises LoadFailed.

        complete: have the model complete the configuration, if it can.
        """
        async with self._limited("imported"):
            process: ModelProcess[Message] = ModelProcess(
                self.launch,
                module="oriel_inference.backends.python.child",
                decode=decode,
                max_body_bytes=self._limits.max_body_bytes,
                on_message=self._message,
                on_end=lambda how: self._ended(process, how),
            )
            self._process = process
            self._gone = self._loop.create_future()
            self._step = self._loop.create_future()
            try:
                await process.start()
            except OSError as error:
                raise LoadFailed(f"the model's process could not be started: {error.strerror}") from error
            launch, max_body_bytes = self.launch, self._limits.max_body_bytes
            process.send(Load(launch.file, launch.model, launch.version, launch.config, complete, max_body_bytes))
            loaded = await self._step
        assert isinstance(loaded, Loaded)
        return loaded.config

    async def initialize(self) -> None:
        """Have the loaded model initialise itself. Raises LoadFailed."""
        async with self._limited("initialised"):
            assert self._process is not None and self._gone is not None
            if self._gone.done():
                raise LoadFailed(f"the model's process died ({self._gone.result()})")
            self._step = self._loop.create_future()
            names = [info.name for info in self.outputs]
            self._process.send(Initialize(dict(self.launch.args), self.launch.decoupled, names))
            await self._step
            self._executions = Executions(
                self.launch, self._process, grace_s=self._limits.grace_s, progressed=self._progressed
            )
            self._metrics.process_ready()

    async def finalise(self) -> None:
        """Finalise the model if possible, and end its process in any case; the requests it has fail."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        process, gone = self._process, self._gone
        if process is None or gone is None or gone.done():
            self._abandon()
            return
        try:
            async with asyncio.timeout(self._limits.finalize_s):
                if self._executions is not None:
                    self._step = self._loop.create_future()
                    process.send(Finalize())
                    await self._step
                    await asyncio.shield(gone)
        except (TimeoutError, LoadFailed):
            _log.warning("model %s did not finalise in time, its process is killed", self.launch.model)
        process.kill("it was unloaded")
        await gone
        self._abandon()

    def close(self) -> None:
        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(self.finalise(), self._loop)])

    def kill(self, why: str) -> None:
        """Kill the process whatever it does."""
        if self._process is not None:
            self._process.kill(why)

    @asynccontextmanager
    async def _limited(self, done: str) -> AsyncIterator[None]:
        """Run one step of the start within its time limit; kill the process if the step is late or fails."""
        try:
            async with asyncio.timeout(self._limits.start_s):
                yield
        except TimeoutError as error:
            late = f"the model was not {done} within {self._limits.start_s:g} s"
            self.kill(late)
            raise LoadFailed(late) from error
        except BaseException:
            self.kill("it did not start")
            raise

    def _ended(self, process: ModelProcess[Message], how: str) -> None:
        """Handle the end of a process."""
        if process is not self._process:
            return  # a process that did not start and has been replaced already
        model, executions = self.launch.model, self._executions
        self._executions = None
        self._metrics.process_died()
        self._give_up()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(how)
        if self._step is not None and not self._step.done():
            self._step.set_exception(LoadFailed(f"the model's process died ({how})"))
            self._step.exception()  # the caller may have gone
        if executions is not None and self._closing:
            self._stuck += executions.fail_all(ServerStopping())
        elif executions is not None:
            if self.on_death is not None:
                self.on_death()
            error = BackendFailed(f"the process of model {model!r} died ({how}), it is being started again")
            self._stuck += executions.fail_all(error)
            _log.error("model %s: its process died (%s), it is started again", model, how)
            self._restart = self._loop.create_task(self._start_again())

    async def _start_again(self) -> None:
        while True:
            if self._deaths:
                delay = min(self._limits.backoff_s * 2 ** min(self._deaths - 1, 16), self._limits.max_backoff_s)
                self._down_until = self._loop.time() + delay
                if self._all_down_s():
                    for each in self.siblings:
                        each._turn_away()
                await asyncio.sleep(delay)
                self._down_until = 0.0
            self._deaths += 1
            try:
                await self.load()
                await self.initialize()
                break
            except LoadFailed as failure:
                _log.error("model %s could not be started again: %s", self.launch.model, failure.reason)
            except Exception:
                # Without this task the instance would never recover.
                _log.exception("model %s could not be started again", self.launch.model)
        _log.info("model %s: its process runs again", self.launch.model)
        stuck, self._stuck = self._stuck, []
        for execution in stuck:
            execution.returned()
        waiting, self._waiting = self._waiting, {}
        for execution, left in waiting.items():
            self._execute_late(execution, left)

    def _all_down_s(self) -> float:
        """Return the seconds until an instance is started again; 0 unless all of them wait before a further restart."""
        return max(0.0, min(each._down_until for each in self.siblings) - self._loop.time())

    def _turn_away(self) -> None:
        """Free the instance for calls that are refused at once, and refuse those that wait for its process."""
        waiting, self._waiting = self._waiting, {}
        for execution in waiting:
            self._refuse_while_down(execution)
        stuck, self._stuck = self._stuck, []
        for execution in stuck:
            execution.returned()

    def _refuse_while_down(self, execution: Execution) -> None:
        retry_s = self._all_down_s()
        text = f"the process of model {self.launch.model!r} has died again, and is started again in {retry_s:.1f} s"
        refuse(execution, ModelNotReady(text, retry_s=retry_s), range(len(execution.requests)))

    # Executing ------------------------------------------------------------------------------------------------------

    def execute(self, execution: Execution) -> None:
        if self._executions is not None:
            self._executions.begin(execution, range(len(execution.requests)))
        elif self._closing:
            refuse(execution, ServerStopping(), range(len(execution.requests)))
        elif self._all_down_s():
            self._refuse_while_down(execution)
        else:
            self._waiting[execution] = set()

    def _execute_late(self, execution: Execution, left: set[int]) -> None:
        """Send the requests that waited for a process, without those whose callers have left or whose deadlines have
        passed.
        """
        now, members = self._loop.time(), []
        for index, request in enumerate(execution.requests):
            if index in left:
                execution.answer(index, BackendFailed("all callers have left"))
            elif request.deadline <= now:
                execution.answer(index, DeadlineExceeded("queue"))
            else:
                members.append(index)
        if not members:
            execution.returned()
        elif self._executions is not None:
            self._executions.begin(execution, members)
        else:  # the process is gone again
            refuse(execution, BackendFailed(f"the process of model {self.launch.model!r} died"), members)

    def caller_left(self, execution: Execution, index: int) -> None:
        if execution in self._waiting:
            self._waiting[execution].add(index)
        if self._executions is not None:
            self._executions.caller_left(execution, index)
            if not self._executions.waiting_requests():
                self._give_up()

    def waiting_requests(self) -> Sequence[Request]:
        """Return the requests that it works on and whose callers still wait."""
        return self._executions.waiting_requests() if self._executions is not None else ()

    def _progressed(self) -> None:
        self._deaths = 0

    def _give_up(self) -> None:
        """Cancel the requests to other models when no caller waits for their answers."""
        model_calls, self.model_calls = self.model_calls, {}
        for call in model_calls.values():
            call.caller_left()

    def inferred(self, message: Message, body: Sequence[Buffer] = ()) -> None:
        """Pass a response of another model on to this one. Raises FrameError."""
        if self._process is not None:
            self._process.tell(message, body)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run one request, as every session does. The responses of a decoupled model are dropped, and the list is
        empty.
        """
        deadline = time.monotonic() + self._limits.start_s
        request = Request(inputs=inputs, outputs=outputs, deadline=deadline, ends=deadline)
        once = _Once(request, lambda: self.caller_left(once, 0))
        self._loop.call_soon_threadsafe(self.execute, once)
        try:
            found = once.result.result(self._limits.start_s)
        except TimeoutError as error:
            self._loop.call_soon_threadsafe(self.kill, "its warm-up took too long")
            raise BackendFailed(f"the model did not answer within {self._limits.start_s:g} s") from error
        if self.launch.decoupled:
            return []
        arrays = dict(zip((info.name for info in self.outputs), found, strict=True))
        missing = [name for name in outputs if arrays[name] is None]
        if missing:
            raise BackendFailed(f"the model returned no output {missing[0][:64]!r}")
        return [arrays[name] for name in outputs]

    # Messages of the child ------------------------------------------------------------------------------------------

    def _message(self, message: Message, body: memoryview) -> None:
        match message:
            case Answers() if self._executions is not None:
                self._executions.answers(message, body)
            case Respond() if self._executions is not None:
                self._executions.respond(message, body)
            case Returned() if self._executions is not None:
                self._executions.returned(message)
            case Say():
                _log_text(message.level, self.launch.model, message.text)
            case Credit() if message.request in self.model_calls:
                self.model_calls[message.request].taken(message.count)
            case Cancel() if message.request in self.model_calls:
                self.model_calls[message.request].caller_left()
            case Credit() | Cancel():
                pass  # about a request that has ended meanwhile
            case Infer() | Manage():
                self._scripting(self, message, body)
            case MakeMetric() | UseMetric():
                self._measure(message)
            case Failed():
                _log_text(logging.ERROR, self.launch.model, f"failed to load\n{message.detail}")
                self._done(LoadFailed(f"the model's code failed: {message.reason}"))
            case Loaded() | Ready() | Finalized():
                self._done(message)
            case _:
                self.kill("it sent a message of the wrong kind")

    def _measure(self, message: MakeMetric | UseMetric) -> None:
        head = ResultHead()
        try:
            if isinstance(message, UseMetric):
                head.parameters = {"value": self._metrics.use(message)}
            else:
                self._metrics.make(message)
        except InvalidRequest as refusal:
            head.error = code_of(refusal), refusal.message
        if message.id:
            self.inferred(Inferred(message.id, head, True))

    def _done(self, what: Message | LoadFailed) -> None:
        if self._step is None or self._step.done():
            return
        if isinstance(what, LoadFailed):
            self._step.set_exception(what)
        else:
            self._step.set_result(what)

    def _abandon(self) -> None:
        """Fail what waits, because there will be no new process."""
        self._metrics.close()
        for execution in self._stuck:
            execution.returned()
        for execution in self._waiting:
            refuse(execution, ServerStopping(), range(len(execution.requests)))
        self._stuck, self._waiting = [], {}


class _Once:
    """One request whose answer another thread waits for. leave: called when it has had WARM_RESPONSES responses."""

    def __init__(self, request: Request, leave: Callable[[], None]) -> None:
        self.requests = (request,)
        self._leave = leave
        self._responses = 0
        self.result: concurrent.futures.Future[Outputs] = concurrent.futures.Future()

    def computing(self, began_s: float, ended_s: float) -> None:
        pass

    def answer(self, index: int, result: Outputs | InferenceError | None) -> None:
        if isinstance(result, InferenceError):
            self.result.set_exception(result)
        else:
            self.result.set_result(result or Outputs())

    def respond(self, index: int, outputs: Outputs, consumed: Callable[[], None]) -> None:
        self._responses += 1
        if self._responses == WARM_RESPONSES:
            self._leave()
        else:
            consumed()

    def returned(self) -> None:
        pass


def _log_text(level: int, model: str, text: str) -> None:
    """Log a text of a model; what follows its first line is mostly a traceback."""
    first, _, rest = text.rstrip().partition("\n")
    _log.log(level, "model %s: %s", model, first, extra={"target": model, "printed": "model", "traceback": rest})
