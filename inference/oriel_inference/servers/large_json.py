"""Converts large JSON in a child process, so that it does not hold up the event loop.

msgspec and base64 hold the interpreter's lock, even in a thread, so a body of 64 MiB, the largest allowed, would stall
every other request for most of a second. So a long-lived child converts such a request into one with binary tensors,
which is then handled like all others, and converts its binary answer into JSON. The child is started when first needed,
replaced when it dies or takes too long, and ended after a while without work.

Jobs wait in the order of `oriel_policies.queue`, with the size of the text as the cost of a turn, so that no tenant and
no tier takes the child from the others; when too much waits, `oriel_policies.shares` says which job makes room.

Ownership: the event loop owns the queue and every `Job`; one thread owns the child, and gets one job at a time. A job
is answered exactly once, on the loop: by the thread's result, by its deadline or because it was displaced, and not at
all once its caller has left. A job that is answered while it waits is not converted.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    ServerStopping,
)
from oriel_inference.servers.large_json_frames import FRAME, Result, Task
from oriel_policies.flows import Ticket
from oriel_policies.queue import Pushed, SlaQueue
from oriel_wire.engine.child import Child

__all__ = ["Converted", "LargeJson", "Task", "Then"]

_log = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_WAITING_BYTES = 256 << 20
MEMORY_BYTES = 4 << 30
TIMEOUT_S = 30.0
IDLE_S = 60.0
_NO_DEADLINE_S = 3600.0
_CHILD = "oriel_inference.servers.large_json_child"
_Parts = Sequence[bytes | memoryview]

# The body's parts (one, unless it is a response) and the length of the JSON part before binary data (-1: all is JSON).
Converted = tuple[list[bytes], int]
Then = Callable[[Converted | InferenceError], None]


class Job:
    """One conversion. `then` is None, and `parts` empty, once the job is answered or its caller has left."""

    __slots__ = ("length", "parts", "size", "task", "then", "ticket", "timer")

    def __init__(self, task: Task, parts: _Parts, length: int, then: Then) -> None:
        self.task = task
        self.parts = parts
        self.length = length
        self.size = sum(len(part) for part in parts)
        self.then: Then | None = then
        self.ticket: Ticket | None = None
        self.timer: Timer | None = None


class LargeJson:
    """Owns the child and the jobs that wait for it. `submit` and its callbacks run on the loop. End with `close`.

    limit_bytes: of one request as binary data.
    max_waiting, max_waiting_bytes: jobs that wait; one that need not wait may be larger.
    memory_bytes: address space of the child. timeout_s: for one job. idle_s: without work until the child is ended.
    """

    def __init__(
        self,
        clock: Clock,
        limit_bytes: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        timeout_s: float = TIMEOUT_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._memory_bytes = memory_bytes
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._waiting = SlaQueue(max_items=max_waiting, max_bytes=max_waiting_bytes)
        self._busy = False
        self._queue: SimpleQueue[tuple[Job, _Parts] | None] = SimpleQueue()  # the next one for the thread
        self._thread: threading.Thread | None = None
        self._child: Child | None = None
        self._closed = False
        self.converted = 0  # jobs that succeeded

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        child = self._child
        return None if child is None else child.pid

    def submit(
        self,
        task: Task,
        parts: _Parts,
        length: int | None,
        then: Then,
        *,
        deadline: float | None = None,
        band: int = 0,
        tenant: str = "",
    ) -> Callable[[], None]:
        """Convert `parts`; `then` is called later, on the loop. length: of the JSON part, None if all is JSON.

        deadline: monotonic seconds. band, tenant: of the caller, by which it waits.
        Returns the function to call when the caller leaves; `then` is not called after it.
        Raises QueueFull, ServerStopping.
        """
        if self._closed:
            raise ServerStopping
        job = Job(task, parts, -1 if length is None else length, then)
        displaced: list[Ticket] = []
        if self._busy:
            until = self._clock.now() + _NO_DEADLINE_S if deadline is None else deadline
            cost = float(job.size + 1)
            ticket = Ticket(band=band, tenant=tenant, deadline=until, cost=cost, size_bytes=job.size, payload=job)
            pushed, displaced = self._waiting.push(ticket)
            if pushed is Pushed.FULL:
                raise QueueFull("too much large JSON waits to be converted: send tensors as binary data, or try again")
            job.ticket = ticket
        if deadline is not None:
            job.timer = self._clock.call_at(deadline, lambda: self._finish(job, DeadlineExceeded("json")))
        for each in displaced:
            self._finish(each.payload, QueueFull("other large JSON took the place: send tensors as binary data"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="oriel-large-json", daemon=True)
            self._thread.start()
        if not self._busy and (deadline is None or deadline > self._clock.now()):
            self._run(job)
        return lambda: self._finish(job, None)

    async def convert(self, task: Task, parts: _Parts) -> Converted:
        """Convert `parts`, for a coroutine. Raises InferenceError."""
        answer: asyncio.Future[Converted] = asyncio.get_running_loop().create_future()

        def then(result: Converted | InferenceError) -> None:
            if isinstance(result, InferenceError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        leave = self.submit(task, parts, None, then)
        try:
            return await answer
        finally:
            leave()

    def close(self) -> None:
        """Refuse the jobs that wait and end the child. Blocks for a moment."""
        self._closed = True
        self._kill()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    def _finish(self, job: Job, result: Converted | InferenceError | None) -> None:
        """Runs on the loop; the first call ends the job. result: None if the caller has left."""
        then, job.then, job.parts = job.then, None, ()
        if then is None:
            return
        ticket, job.ticket = job.ticket, None
        if ticket is not None:
            self._waiting.remove(ticket)
            ticket.payload = None
        if job.timer is not None:
            job.timer.cancel()
        if result is not None:
            then(result)

    def _run(self, job: Job) -> None:
        self._busy = True
        self._queue.put((job, job.parts))

    def _ended(self, job: Job, result: Converted | InferenceError) -> None:
        """Runs on the loop; the thread has done a job, and gets the next one that can be in time."""
        self._busy = False
        self._finish(job, result)
        while not self._busy and (ticket := self._waiting.pop()) is not None:
            if self._closed:
                self._finish(ticket.payload, ServerStopping())
            elif ticket.deadline <= self._clock.now():
                self._finish(ticket.payload, DeadlineExceeded("json"))
            else:
                self._run(ticket.payload)

    # The thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                given = self._queue.get(timeout=self._idle_s if self._child is not None else None)
            except Empty:
                self._end()
                continue
            if given is None:
                break
            job, parts = given
            result = ServerStopping() if self._closed else self._convert(job, parts)
            self._clock.call_from_thread(lambda job=job, result=result: self._ended(job, result))  # type: ignore[misc]
            del given, job, parts, result  # not until the next one comes
        self._end()

    def _convert(self, job: Job, parts: _Parts) -> Converted | InferenceError:
        deadline = time.monotonic() + self._timeout_s
        try:
            child = self._running()
            child.write(FRAME.pack(job.task, job.length, job.size), deadline)
            for part in parts:
                child.write(part, deadline)
            code, length, size = FRAME.unpack(b"".join(child.read(FRAME.size, deadline)))
            pieces = child.read(size, deadline)
        except TimeoutError:
            self._end()
            return RequestTooLarge(f"the JSON took more than {self._timeout_s:g} s: send tensors as binary data")
        except OSError:
            _log.warning("the process that converts large JSON ended in the middle of a request")
            self._end()
            return ServerStopping() if self._closed else BackendFailed("the process that converts large JSON ended")
        if code == Result.DONE:
            self.converted += 1
            return pieces if job.task is Task.RESPONSE else [b"".join(pieces)], length
        text = b"".join(pieces).decode(errors="replace")
        return InvalidRequest(text) if code == Result.INVALID else RequestTooLarge(text)

    def _running(self) -> Child:
        child = self._child
        if child is None or not child.running:
            self._end()
            # A few seconds more than ours: the child ends itself only if this process is no longer there to kill it.
            limits = (self._memory_bytes, int(self._timeout_s) + 5, self._limit_bytes)
            child = self._child = Child(_CHILD, *map(str, limits))
            if self._closed:
                child.kill()
        return child

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            child.kill()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
