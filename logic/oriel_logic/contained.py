"""Tasks that end themselves only.

asyncio lets SystemExit and KeyboardInterrupt of any task end the loop, and with it the server. `sys.exit()` in a task
that a handler started has to be that task's failure. Install with `loop.set_task_factory(contained)`.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["TaskExited", "contained"]


class TaskExited(RuntimeError):
    """A task called `sys.exit()`, or raised KeyboardInterrupt."""


class Contained(Coroutine[Any, Any, Any]):
    """The coroutine within; SystemExit and KeyboardInterrupt come out of it as TaskExited."""

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
    """A task factory. options: of asyncio.Task, by keyword; which of them a loop passes differs between versions."""
    return asyncio.Task(Contained(coroutine), loop=loop, **options)
