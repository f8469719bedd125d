"""A task factory that confines SystemExit and KeyboardInterrupt to the task that raised them.

asyncio lets either end the loop, and with it the server. `sys.exit()` in a task that a handler started has to fail that
task only. Install with `loop.set_task_factory(contained)`.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


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
    """Make a task. options: of asyncio.Task, by keyword; loops of different versions pass different ones."""
    return asyncio.Task(Contained(coroutine), loop=loop, **options)
