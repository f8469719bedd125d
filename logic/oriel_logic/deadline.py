"""A bound on the time of what a request's own task does, at a quarter of what `asyncio.timeout` costs."""

import asyncio
from types import TracebackType

__all__ = ["Deadline"]


class Deadline:
    """`with Deadline(seconds) as limit:` raises TimeoutError where its body waits when that time is over.

    As with `asyncio.timeout` the body is cancelled, and a cancellation by somebody else passes through; `is_past` says
    whether the time is over. It is not `async`, cannot be moved, and may be entered once.
    """

    __slots__ = ("_cancelling", "_handle", "_seconds", "_task", "is_past")

    _task: "asyncio.Task[object]"
    _handle: asyncio.TimerHandle

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.is_past = False

    def __enter__(self) -> "Deadline":
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self.is_past and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _end(self) -> None:
        self.is_past = True
        self._task.cancel()
