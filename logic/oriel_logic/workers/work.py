"""Runs one job in a worker: sends a value, a stream of pieces, or the error that it raised."""

import asyncio
import inspect
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from oriel_logic.bodies.signature import python_signature
from oriel_logic.errors import LogicError, Outcome
from oriel_logic.loading.handlers import one_line
from oriel_logic.services.batching import merge, rows_in, split
from oriel_logic.services.serving import Services
from oriel_logic.workers.frames import WINDOW, Frame, FrameTooLarge, Kind, Terms, unpack
from oriel_logic.workers.link import Link
from oriel_logic.workers.memory import MemoryBound
from oriel_logic.workers.remote import AsyncContext, JobAbandoned, JobContext, JobModels, Mailbox

MAX_TRACEBACK = 8000
Result = tuple[Any, list[tuple[str, float, float]]]


class JobRunner:
    """Runs a worker's jobs, one after another, in the main thread."""

    def __init__(self, link: Link, services: Services, memory: MemoryBound) -> None:
        self._link = link
        self._services = services
        self._memory = memory
        self._injected: dict[str, tuple[str, ...]] = {}
        self._runner: asyncio.Runner | None = None

    def work(self, frame: Frame) -> bool:
        """Run one job and send its answer. Raises OSError once the logic process has ended.

        Returns False if this process must not run another job, because it ran out of memory.
        """
        started = time.process_time_ns()
        kind, answer = self._outcome(frame)
        del frame
        cpu_us = (time.process_time_ns() - started) // 1000
        try:
            self._link.send(kind, answer, cpu_us=cpu_us)
        except FrameTooLarge as error:
            self._fail(f"its result is too large: {error}", "", cpu_us)
        except Exception as error:  # whatever pickling a user's value raises
            if self._link.is_gone(error):
                raise
            self._fail(*described(error), cpu_us)
        return kind is not Kind.EXHAUSTED

    def _fail(self, line: str, trace: str, cpu_us: int) -> None:
        self._link.send(Kind.FAILED, (Outcome.HANDLER_FAILED.value, line, trace), cpu_us=cpu_us)

    def _outcome(self, frame: Frame) -> tuple[Kind, Any]:
        begun = False

        def job() -> Any:
            nonlocal begun
            reference, arguments, terms = unpack(frame)
            self._memory.set(terms.memory_mb)
            function = self._services.resolve(reference)
            begun = True
            return self._result(function, reference, arguments, terms)

        try:
            return Kind.RESULT, job()
        except MemoryError as error:
            self._memory.lift()
            return Kind.EXHAUSTED, (Outcome.MEMORY_EXCEEDED.value, *described(error))
        except JobAbandoned:
            return Kind.FAILED, (Outcome.CALLER_LEFT.value, "nobody waits for it any more", "")
        except BaseException as error:  # user code: whatever it raises is this job's answer
            if isinstance(error, OSError) and self._link.is_gone(error):
                raise
            if isinstance(error, LogicError) and error.outcome is not Outcome.HANDLER_FAILED:
                return Kind.REFUSED, error.with_traceback(None)  # a refusal of the handler or of a model
            return Kind.FAILED if begun else Kind.UNFIT, (Outcome.HANDLER_FAILED.value, *described(error))
        finally:
            self._memory.lift()

    def _result(self, function: Callable[..., Any], reference: str, arguments: tuple[Any, ...], terms: Terms) -> Result:
        if terms.is_batch:
            return split(function(merge(arguments)), [rows_in(part) for part in arguments]), []
        wanted = self._injected.get(reference)
        if wanted is None:
            wanted = self._injected[reference] = injected(function, len(arguments))
        mailbox = Mailbox(self._link, WINDOW)
        runs_on_a_loop = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        context = AsyncContext(terms) if runs_on_a_loop else JobContext(terms)
        given: dict[str, Any] = {}
        if "models" in wanted:
            given["models"] = JobModels(mailbox.call_on_loop if runs_on_a_loop else mailbox.call)
        if "ctx" in wanted:
            given["ctx"] = context
        value = function(*arguments, **given)
        if terms.streams and isinstance(value, Iterator):
            self._stream(value, mailbox)
            value = None
        elif inspect.iscoroutine(value):
            value = self._on_loop(value, mailbox)
        elif terms.streams and isinstance(value, AsyncIterator):
            value = self._on_loop(self._stream_on_loop(value, mailbox), mailbox)
        return value, context.stages

    # Streams --------------------------------------------------------------------------------------------------------

    def _stream(self, pieces: Iterator[Any], mailbox: Mailbox) -> None:
        try:
            for piece in pieces:
                while not mailbox.credit and not mailbox.left:
                    mailbox.wait()
                mailbox.take_pending()
                mailbox.check()
                mailbox.credit -= 1
                self._link.send(Kind.PIECE, piece)
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()

    async def _stream_on_loop(self, pieces: AsyncIterator[Any], mailbox: Mailbox) -> None:
        try:
            async for piece in pieces:
                while not mailbox.credit:
                    await mailbox.more()
                mailbox.credit -= 1
                self._link.send(Kind.PIECE, piece)
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    # Coroutines -----------------------------------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, Any], mailbox: Mailbox) -> Any:
        """Run a coroutine on this worker's loop, which is kept between jobs, until it ends or no caller waits for
        it.
        """
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def attended() -> Any:
            loop = asyncio.get_running_loop()
            task = asyncio.current_task()
            assert task is not None
            mailbox.on_left = task.cancel

            def attend() -> None:
                try:
                    mailbox.take_pending()
                except OSError:
                    os._exit(0)  # the logic process has ended

            loop.add_reader(self._link.fileno(), attend)
            try:
                attend()
                return await work
            finally:
                loop.remove_reader(self._link.fileno())

        try:
            return self._runner.run(attended())
        except asyncio.CancelledError:
            mailbox.check()
            raise RuntimeError("the handler cancelled its own task") from None


def injected(function: Callable[..., Any], given: int) -> tuple[str, ...]:
    """Return which of `models` and `ctx` a function takes after its first `given` parameters."""
    try:
        names = list(python_signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return ()
    return tuple(name for name in names[given:] if name in ("models", "ctx"))


def described(error: BaseException) -> tuple[str, str]:
    """Return one line and the traceback for the log, from the handler's own first frame on if it has one."""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_globals.get("__name__", "").startswith("oriel_logic."):
        begin = begin.tb_next
    lines = traceback.format_exception(type(error), error, begin or error.__traceback__)
    return one_line(error), "".join(lines)[-MAX_TRACEBACK:]
