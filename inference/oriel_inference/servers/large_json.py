"""Converts large JSON in child processes, so that it does not hold up the event loop.

msgspec and base64 hold the interpreter's lock, even in a thread, so a body of 64 MiB, the largest allowed, would stall
every other request for most of a second. So a long-lived child converts such a request into one with binary tensors,
which is then handled like all others, and converts its binary answer into JSON. A child is started when first needed,
replaced when it dies or takes too long, and ended after a while without work.

As many jobs run at a time as there are cores, and beside them one of a more urgent tier, which would otherwise wait for
them, and again with its answer for the next ones. A long text takes a child for seconds and needs up to MEMORY_BYTES,
so a tier has one of these at a time, and no other text waits behind a second one. Jobs wait in the order of
`oriel_policies.waiting.queue`, with the size of the text as the cost of a turn, so that no tenant and no tier takes the
children from the others; when too much waits, `oriel_policies.waiting.shares` says which job makes room.

Ownership: the event loop owns the queue and every `Job`; a `_Lane` has a thread that owns a child, and gets one job at
a time. A job is answered exactly once, on the loop: by the thread's result, by its deadline or because it was
displaced, and not at all once its caller has left. A job that is answered while it waits is not converted.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from oriel_inference.servers.large_json_child import Result, Task
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_wire.process.helper import Helper, HelperEnded, HelperLate

__all__ = ["Converted", "LargeJson", "Task", "Then"]

_log = logging.getLogger(__name__)

LONG_BYTES = 8 << 20  # a text from this size on takes so long that a more urgent one probably comes meanwhile
MAX_WAITING = 64
MAX_WAITING_BYTES = 256 << 20
MEMORY_BYTES = 4 << 30
TIMEOUT_S = 30.0
IDLE_S = 60.0
_NO_DEADLINE_S = 3600.0
_LONG = "long"  # the name under which the queue sets long texts aside
_CHILD = "oriel_inference.servers.large_json_child"
_Parts = Sequence[bytes | memoryview]

# The body's parts (one, unless it is a response) and the length of the JSON part before binary data (-1: all is JSON).
Converted = tuple[list[bytes], int]
Then = Callable[[Converted | InferenceError], None]


class Job:
    """One conversion. `then` is None, and `parts` empty, once the job is answered or its caller has left.

    words: the head of the message to the child.
    """

    __slots__ = ("band", "parts", "size", "task", "then", "ticket", "timer", "words")

    def __init__(self, words: tuple[Task, int, str], parts: _Parts, then: Then, band: int) -> None:
        self.task = words[0]
        self.words = words
        self.band = band
        self.parts = parts
        self.size = sum(len(part) for part in parts)
        self.then: Then | None = then
        self.ticket: Ticket | None = None
        self.timer: Timer | None = None


class LargeJson:
    """Owns the lanes and the jobs that wait for one. `submit` and its callbacks run on the loop. End with `close`.

    limit_bytes: the most bytes of one request as binary data. cores: jobs of one tier that run at a time.
    max_waiting, max_waiting_bytes: jobs that wait; one that need not wait may be larger.
    memory_bytes: address space of a child. timeout_s: seconds allowed for one job. idle_s: without work until a child
    is ended.
    """

    def __init__(
        self,
        clock: Clock,
        limit_bytes: int,
        *,
        cores: int = 1,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        timeout_s: float = TIMEOUT_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._clock = clock
        self._cores = cores
        self._waiting = SlaQueue(max_items=max_waiting, max_bytes=max_waiting_bytes)
        self._lanes = [
            _Lane(
                # The memory of the child bounds its answers too.
                Helper(_CHILD, str(memory_bytes), str(limit_bytes), max_body_bytes=memory_bytes),
                self._ended_in_thread,
                timeout_s=timeout_s,
                idle_s=idle_s,
            )
            for _ in range(cores + 1)
        ]
        self.converted = 0  # jobs that succeeded

    @property
    def pids(self) -> list[int]:
        """The process ids of the children that there are."""
        return [pid for lane in self._lanes if (pid := lane.helper.pid) is not None]

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
        model: str = "",
    ) -> Callable[[], None]:
        """Convert `parts`; `then` is called later, on the loop. length: bytes of the JSON part, None if all is JSON.

        deadline: monotonic seconds. band, tenant: the caller's band and tenant, which decide how it waits. model: the
        name of the request's model, for refusals.
        Returns the function to call when the caller leaves; `then` is not called after it.
        Raises QueueFull, ServerStopping.
        """
        if self._lanes[0].closed:
            raise ServerStopping
        job = Job((task, -1 if length is None else length, model), parts, then, band)
        displaced: list[Ticket] | None = []
        lane = self._lane(job)
        if lane is None:
            until = self._clock.now() + _NO_DEADLINE_S if deadline is None else deadline
            cost = float(job.size + 1)
            ticket = Ticket(band=band, tenant=tenant, deadline=until, cost=cost, size_bytes=job.size, payload=job)
            ticket.model = _LONG if job.size > LONG_BYTES else ""
            displaced = self._waiting.push(ticket)
            if displaced is None:
                raise QueueFull("too much large JSON waits to be converted: send tensors as binary data, or try again")
            job.ticket = ticket
        if deadline is not None:
            job.timer = self._clock.call_at(deadline, lambda: self._finish(job, DeadlineExceeded("json")))
        for each in displaced or ():
            self._finish(each.payload, QueueFull("other large JSON took the place: send tensors as binary data"))
        if lane is not None and (deadline is None or deadline > self._clock.now()):
            self._begin(lane, job)
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
        """Refuse the jobs that wait and end the children. Blocks for a moment."""
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:
            lane.join()

    def _finish(self, job: Job, result: Converted | InferenceError | None) -> None:
        """Runs on the loop; the first call ends the job. result: its result; None if the caller has left."""
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

    def _lane(self, job: Job) -> "_Lane | None":
        """Return a lane for a job; None while it has to wait."""
        return None if len(self._before(job)) >= self._cores or self._is_second_long(job) else self._free()

    def _is_second_long(self, job: Job) -> bool:
        """Return whether a job waits for the end of a long one, however many lanes are free."""
        return job.size > LONG_BYTES and any(each.size > LONG_BYTES for each in self._before(job))

    def _before(self, job: Job) -> list[Job]:
        """Return the jobs that run and are at least as urgent as this one."""
        return [lane.job for lane in self._lanes if lane.job is not None and lane.job.band <= job.band]

    def _free(self) -> "_Lane | None":
        """Return the first lane without a job, so that few children are needed."""
        return next((lane for lane in self._lanes if lane.job is None), None)

    def _ended_in_thread(self, lane: "_Lane", result: Converted | InferenceError) -> None:
        self._clock.call_from_thread(lambda: self._ended(lane, result))

    def _ended(self, lane: "_Lane", result: Converted | InferenceError) -> None:
        """Runs on the loop; the lane has done its job, and the next ones that can be in time begin."""
        job, lane.job = lane.job, None
        assert job is not None
        self.converted += not isinstance(result, InferenceError)
        self._finish(job, result)
        while job.size > LONG_BYTES and _LONG in self._waiting.aside:
            self._waiting.bring_back(_LONG)
        while (ticket := self._waiting.peek()) is not None:
            if self._is_second_long(ticket.payload):
                self._waiting.set_aside()
                continue
            if (free := self._lane(ticket.payload)) is None:
                break
            self._waiting.pop()
            if free.closed:
                self._finish(ticket.payload, ServerStopping())
            elif ticket.deadline <= self._clock.now():
                self._finish(ticket.payload, DeadlineExceeded("json"))
            else:
                self._begin(free, ticket.payload)

    def _begin(self, lane: "_Lane", job: Job) -> None:
        lane.begin(job)
        if job.band and job.size > LONG_BYTES and (free := self._free()) is not None:
            free.prepare()


class _Lane:
    """A thread and its child, which convert one job at a time.

    job: the job that runs; it belongs to the loop. helper: the child, which the thread uses.
    ended: called in the thread with the result of each job.
    """

    def __init__(
        self,
        helper: Helper,
        ended: Callable[["_Lane", Converted | InferenceError], None],
        *,
        timeout_s: float,
        idle_s: float,
    ) -> None:
        self.helper = helper
        self._ended = ended
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        # the next one for the thread; without parts it only starts the child, after None it ends
        self._queue: SimpleQueue[tuple[Job | None, _Parts] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.closed = False
        self.job: Job | None = None

    def begin(self, job: Job) -> None:
        """Convert a job; the lane is free."""
        self.job = job
        self._put(job, job.parts)

    def prepare(self) -> None:
        """Start the child if there is none."""
        if self.helper.pid is None:
            self._put(None, ())

    def _put(self, job: Job | None, parts: _Parts) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="oriel-large-json", daemon=True)
            self._thread.start()
        self._queue.put((job, parts))

    def close(self) -> None:
        """End the child, and the thread."""
        self.closed = True
        self.helper.close()
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    # The thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                given = self._queue.get(timeout=self._idle_s if self.helper.pid is not None else None)
            except Empty:
                self.helper.stop()
                continue
            if given is None:
                break
            job, parts = given
            if job is None:
                with suppress(OSError, HelperEnded):
                    self.helper.start()
            else:
                self._ended(self, ServerStopping() if self.closed else self._convert(job, parts))
            del given, job, parts  # not until the next one comes
        self.helper.stop()

    def _convert(self, job: Job, parts: _Parts) -> Converted | InferenceError:
        try:
            answer, pieces = self.helper.ask(job.words, parts, timeout_s=self._timeout_s)
        except HelperLate:
            return RequestTooLarge(f"the JSON took more than {self._timeout_s:g} s: send tensors as binary data")
        except (OSError, HelperEnded) as ended:
            if self.closed:
                return ServerStopping()
            _log.warning("the process that converts large JSON failed in the middle of a request: it %s", ended)
            return BackendFailed("the process that converts large JSON ended")
        except Exception:  # the thread goes on: jobs wait behind this one
            _log.exception("large JSON could not be converted")
            self.helper.stop()
            return BackendFailed("the server failed on this JSON")
        result, found = answer
        if result == Result.DONE:
            return pieces if job.task is Task.RESPONSE else [b"".join(pieces)], found
        return InvalidRequest(found) if result == Result.INVALID else RequestTooLarge(found)
