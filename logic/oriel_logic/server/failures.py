"""Errors that handlers raise, and the tasks and generators that they leave.

asyncio lets SystemExit and KeyboardInterrupt end the loop, and with it the server. `sys.exit()` in a task that a
handler started has to fail that task only: install the task factory with `loop.set_task_factory(contained)`.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from oriel_logic.errors import HandlerFailed, LogicError


class TaskExited(RuntimeError):
    """A task called `sys.exit()`, or raised KeyboardInterrupt."""


class Contained(Coroutine[Any, Any, Any]):
    """Wraps a coroutine and raises its SystemExit and KeyboardInterrupt as TaskExited."""

    __slots__ = ("__name__", "__qualname__", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__name__ = getattr(coroutine, "__name__", "task")
        self.__qualname__ = getattr(coroutine, "__qualname__", "task")

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise exited(error) from error

    def throw(self, *error: Any) -> Any:
        """See Coroutine."""
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exiting:
            raise exited(exiting) from exiting

    def close(self) -> None:
        """See Coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


def exited(error: BaseException) -> TaskExited:
    return TaskExited(f"a task ended by {type(error).__name__}: {error}"[:300])


def contained(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    """Make a task. options: keywords of asyncio.Task; loops of different versions pass different ones."""
    return asyncio.Task(Contained(coroutine), loop=loop, **options)


async def close(values: Any) -> None:
    """Close a generator that may be suspended."""
    closing = getattr(values, "aclose", None)
    if closing is not None:
        await closing()


def failed(error: BaseException) -> LogicError:
    """Convert what a handler raised to the caller's error: its own refusal, or that of a call in a task group."""
    meant = first_logic_error(error)
    if meant is not None:
        return meant
    made = HandlerFailed("the service failed: its log says why under this request id")
    made.__cause__ = error
    return made


def first_logic_error(error: BaseException) -> LogicError | None:
    """Return the first refusal in an exception group, so that its meaning is not lost."""
    if isinstance(error, LogicError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = first_logic_error(inner)
            if found is not None:
                return found
    return None
