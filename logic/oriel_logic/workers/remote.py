"""`models` and `ctx` inside a worker: calls go over the job's socket to the logic process, which makes them.

A plain function blocks in `models.infer(...)`; a coroutine awaits it, several at a time if it likes. When no caller
waits for the job any more, a blocked call raises JobAbandoned and an awaited one is cancelled.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from oriel_logic.workers.frames import Frame, Kind, Terms, unpack
from oriel_logic.workers.link import Link


class JobAbandoned(BaseException):
    """No caller waits for this job any more. Not an Exception, so that a handler that catches those does not go on."""


class Mailbox:
    """The frames that arrive for a job while it runs. Frames of one job are never left for the next.

    left: no caller waits any more.
    credit: number of pieces that may be sent.
    """

    def __init__(self, link: Link, credit: int) -> None:
        self.link = link
        self.left = False
        self.credit = credit
        self.on_left: Callable[[], object] | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._number = 0
        self._reader: asyncio.Future[None] | None = None

    def _ask(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> "Future[Any]":
        self._number += 1
        future = self._calls[self._number] = Future[Any]()
        self.link.send(Kind.CALL, (self._number, method, arguments, keywords))
        return future

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a model and block until it answers. Raises what the model's client raised, or JobAbandoned."""
        self.check()
        future = self._ask(method, arguments, keywords)
        while not future.done():
            self.wait()
            self.check()
        return future.result()

    async def call_on_loop(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a model, on a loop that reads `link` with `take_pending`."""
        return await asyncio.wrap_future(self._ask(method, arguments, keywords))

    async def more(self) -> None:
        """Wait until another piece may be sent; on a loop."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def check(self) -> None:
        if self.left:
            raise JobAbandoned

    def wait(self) -> None:
        """Block until a frame arrives."""
        self._take(self.link.receive())

    def take_pending(self) -> None:
        for frame in self.link.pending():
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.CANCEL:
            self.left = True
            if self.on_left is not None:
                self.on_left()
        elif frame.kind is Kind.MORE:
            self.credit += 1
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
        elif frame.kind is Kind.CALLED:
            number, value, error = unpack(frame)
            future = self._calls.pop(number, None)
            if future is None or not future.set_running_or_notify_cancel():
                return  # nobody waits for it
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)


class JobModels:
    """`models` in a worker. call: makes a call of a model by its method; a coroutine's `models` have one to await."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.infer = partial(call, "infer")
        self.scan = partial(call, "scan")
        self.metadata = partial(call, "metadata")
        self.ready = partial(call, "ready")


class JobContext:
    """`ctx` in a worker: the attributes of `context.Context`, for a plain function."""

    def __init__(self, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        self.request_id = terms.request_id
        self.tier = terms.tier
        self.tenant = terms.tenant
        self.stages: list[tuple[str, float, float]] = []
        self._deadline = terms.deadline
        self._clock = clock

    @property
    def remaining_s(self) -> float:
        return self._deadline - self._clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.stages.append((name, started, time.monotonic()))

    def run(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Call the function here: this is a worker process already."""
        with self.stage(function.__name__):
            return function(*arguments)


class AsyncContext(JobContext):
    """`ctx` in a worker, for a coroutine."""

    async def run(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        return super().run(function, *arguments)
