"""The process of a language model as the server sees it: starts it, hands commands and reports on, restarts it.

Rules.
1. `add` and `cancel` never wait. The fate of a sequence comes in reports: refused, or tokens until it has finished.
2. When the process dies, all its sequences are gone: `on_end` reports it once, and nothing comes for their numbers any
   more. The first restart is immediate; further ones wait longer and longer until a process has made a token again.
   `on_ready` reports that sequences can be added again.
3. A report follows each command and each step. If none comes for `stall_s`, the process hangs and is killed.

Everything belongs to the loop on which the decoder is made.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from oriel_inference.backends.python.launch import Launch, PythonLimits
from oriel_inference.backends.python.process import ModelProcess, resident_bytes
from oriel_inference.errors import LoadFailed
from oriel_inference.language.engine import Facts, Sampling
from oriel_inference.language.messages import Add, Cancel, Failed, Load, Loaded, Report, StepReport, read_report
from oriel_wire.process.messages import FrameError

_log = logging.getLogger(__name__)

CHILD = "oriel_inference.language.child"
STALL_S = 60.0


class Decoder:
    """A language model in a process of its own.

    launch: the values with which the process is started.
    load: its first message.
    limits: the times of its start and its restarts.
    is_ready: True while sequences can be added.
    facts: those of the last load; only after `start`.
    on_step: called with each report. on_end: called with the reason when the process is gone. on_ready: called when a
    new one is ready, not after `start`.
    """

    facts: Facts

    def __init__(self, launch: Launch, load: Load, limits: PythonLimits, *, stall_s: float = STALL_S) -> None:
        self.is_ready = False
        self.on_step: Callable[[StepReport], None] = lambda _: None
        self.on_end: Callable[[str], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self._launch = launch
        self._load = load
        self._limits = limits
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._process: ModelProcess[Report] | None = None
        self._loaded: asyncio.Future[Facts] = self._loop.create_future()  # done unless a process loads the model
        self._gone = asyncio.Event()
        self._gone.set()
        self._running: set[int] = set()  # sequences that a report has to come for
        self._watch: asyncio.TimerHandle | None = None
        self._restart: asyncio.Task[None] | None = None
        self._deaths = 0
        self._down_until = 0.0
        self._closing = False

    @property
    def retry_s(self) -> float:
        """Return the seconds until the process is started again; 0 if it is ready or being started."""
        return max(0.0, self._down_until - self._loop.time())

    @property
    def pid(self) -> int | None:
        """Return the process id while there is a process."""
        return None if self._process is None or self._gone.is_set() else self._process.pid

    def memory_bytes(self) -> int:
        """Return the resident memory of the process; 0 while there is none."""
        pid = self.pid
        return 0 if pid is None else resident_bytes(pid)

    async def start(self) -> Facts:
        """Start the process, have it load the model, and return the facts about it. Raises LoadFailed."""
        process: ModelProcess[Report] = ModelProcess(
            self._launch,
            module=CHILD,
            decode=read_report,
            max_body_bytes=0,
            on_message=lambda message, _: self._received(message),
            on_end=self._ended,
        )
        self._process, self._loaded = process, self._loop.create_future()
        self._gone.clear()
        try:
            async with asyncio.timeout(self._limits.start_s):
                await process.start()
                process.send(self._load)
                self.facts = await self._loaded
        except BaseException as error:
            self._loaded.cancel()
            process.kill("it did not start")
            await self._gone.wait()
            if isinstance(error, TimeoutError):
                raise LoadFailed(f"the model was not loaded within {self._limits.start_s:g} s") from error
            if isinstance(error, OSError):
                raise LoadFailed(f"the model has no process: {error.strerror}") from error
            raise
        self.is_ready = True
        return self.facts

    def add(self, number: int, prompt: str | Sequence[int], sampling: Sampling) -> None:
        """Begin a sequence; only while the decoder is ready. number: used for no other sequence before the next
        `on_end`. Raises FrameError if the prompt is too large for a message.
        """
        assert self._process is not None and self.is_ready, "sequences are added while the process is ready"
        self._process.send(Add(number, prompt if isinstance(prompt, str) else list(prompt), sampling))
        self._running.add(number)
        self._expect()  # not from now on if a report is due already: a process that hangs gets new sequences as well

    def cancel(self, number: int) -> None:
        """End a sequence; one that has ended already is ignored. A report under way may still name it."""
        if number in self._running and self._process is not None:
            self._running.discard(number)
            self._process.send(Cancel(number))

    def kill(self, why: str) -> None:
        """Kill the process whatever it does; it is started again unless the decoder is being closed."""
        if self._process is not None:
            self._process.kill(why)

    async def close(self) -> None:
        """End the process, which has nothing to keep; `on_end` is called for the sequences in progress. No restart
        follows.
        """
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        self.kill("it was unloaded")
        await self._gone.wait()

    def _received(self, message: Report) -> None:
        match message:
            case StepReport():
                for each in message.progress:
                    if each.ids:
                        self._deaths = 0
                    if each.finish or each.refused:
                        self._running.discard(each.number)
                self._reported()
                if self._running:
                    self._expect()
                self.on_step(message)
            case Loaded() if not self._loaded.done():
                self._loaded.set_result(message.facts)
            case Failed() if not self._loaded.done():
                self._loaded.set_exception(LoadFailed(message.reason))
            case _:
                raise FrameError("it sent a message of the wrong kind")

    def _expect(self) -> None:
        """Expect a report within the time of a step."""
        if self._watch is None:
            stalled = f"it made no step within {self._stall_s:g} s"
            self._watch = self._loop.call_later(self._stall_s, self.kill, stalled)

    def _reported(self) -> None:
        """Expect no report any more."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _ended(self, how: str) -> None:
        """Handle the end of a process."""
        self._gone.set()
        was_ready, self.is_ready = self.is_ready, False
        self._running.clear()
        self._reported()
        if not self._loaded.done():
            self._loaded.set_exception(LoadFailed(f"the model's process died ({how})"))
        if was_ready:
            if not self._closing:
                _log.error("model %s: its process died (%s), it is started again", self._launch.model, how)
                self._restart = self._loop.create_task(self._start_again())
            self.on_end(how)

    async def _start_again(self) -> None:
        while True:
            if self._deaths:
                limits = self._limits
                delay_s = min(limits.backoff_s * 2 ** min(self._deaths - 1, 16), limits.max_backoff_s)
                self._down_until = self._loop.time() + delay_s
                await asyncio.sleep(delay_s)
            self._deaths += 1
            try:
                await self.start()
                break
            except LoadFailed as failure:
                _log.error("model %s could not be started again: %s", self._launch.model, failure.reason)
            except Exception:
                # Without this task the model would never recover.
                _log.exception("model %s could not be started again", self._launch.model)
        _log.info("model %s: its process runs again", self._launch.model)
        self.on_ready()
