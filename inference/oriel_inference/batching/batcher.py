"""The batcher of one model version: one queue, its instances, and the rules of who runs when.

Rules.
1. Order is `oriel_policies.queue`: band, tenant by rows, deadline. When and how many is `oriel_policies.batch`.
2. Every call that `submit` takes is finished exactly once: answered, failed, expired or left. Whoever sets
   `Call.finished` does so first and nobody acts on a finished call again; the reply is called by that one.
3. Expiry has its own timers, independent of what runs: one for the earliest deadline in the queue, one per running
   batch for its members. An expired call is never started; one that expires on the device is answered at once and
   its rows are dropped.
4. A caller that leaves (`leave`) frees its place at once. A running batch is not interrupted.
5. A batch takes cores before it takes calls, so that the order is decided at the last moment.
6. The model's queue policies come on top, whatever its scheduler: places per level, how long a call may wait, and
   whether it is then refused or goes on waiting behind the others of its level. With `preserve_ordering` a tenant's
   calls run first come, first served, and its answers stand in line for one another, see `line`.
7. A batch that fails is executed again in parts, see `assemble`; callers that failed lately have batches of their own.

Calls of decoupled models run alone, see `stream`; what runs of them is told when its call ends early (`Call.relay`).

Batches that take less than `inline_s` by experience run on the loop: handing them to a thread would cost more than the
work. Dispatch is always deferred to the end of the loop's turn, so calls that arrive together run together.

Owner and single writer: the loop. Only `execute` runs in a worker.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from oriel_inference.backends import DecoupledSession, RequestSession, Session, takes_requests
from oriel_inference.batching.assemble import Results, execute
from oriel_inference.batching.call import Answer, BatchTimes, Call, deliver
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.experience import INLINE_S, Experience
from oriel_inference.batching.failed_callers import FailedCallers
from oriel_inference.batching.levels import LevelBounds
from oriel_inference.batching.line import AnswerLine
from oriel_inference.batching.outlook import Outlook
from oriel_inference.batching.pick import pick, unwrap
from oriel_inference.batching.requests import RequestBatch
from oriel_inference.batching.running import Running
from oriel_inference.batching.stream import Relay, execute_stream
from oriel_inference.batching.verbose import say_batch, say_executed, say_failed
from oriel_inference.batching.workers import Workers
from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import (
    CallerLeft,
    DeadlineExceeded,
    DeadlineTooShort,
    InferenceError,
    QueueFull,
    QueueTimeout,
    ServerStopping,
)
from oriel_inference.model import ModelSpec
from oriel_inference.statistics import Statistics
from oriel_policies.batch import Backlog, BatchBounds, Fill, Idle, Run, ServiceCurve, WaitUntil, decide
from oriel_policies.queue import Pushed, SlaQueue, Ticket
from oriel_wire.v2.messages import Array

__all__ = ["Batcher"]

_log = logging.getLogger(__name__)


class Batcher:
    """sessions: one per instance, owned by the caller. units: cores of one run. max_items, max_bytes: queue bounds.

    max_batch_bytes: input bytes of one execution; a single call may have more. curve: what is known of service times.
    statistics: counters to go on with, fresh ones by default.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sessions: Sequence[Session],
        *,
        clock: Clock,
        cores: Cores,
        workers: Workers,
        units: int = 1,
        max_items: int = 10_000,
        max_bytes: int = 256 << 20,
        max_batch_bytes: int = 64 << 20,
        inline_s: float = INLINE_S,
        curve: ServiceCurve | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.spec = spec
        self.units = min(max(1, units), cores.total)
        self.curve = curve or ServiceCurve()
        self.statistics = statistics or Statistics()
        self._clock = clock
        self._cores = cores
        self._workers = workers
        self._queue = SlaQueue(max_items=spec.queue.max_items or max_items, max_bytes=max_bytes)
        self._alone = spec.bounds is None
        self._bounds = replace(
            spec.bounds or BatchBounds(max_rows=max(1, spec.max_batch_size)), max_bytes=max_batch_bytes
        )
        self._output_names = [output.name for output in spec.outputs]
        self._in_order = spec.queue.preserve_ordering
        # Responses of a decoupled model cannot be held back: its requests run one after the other instead.
        self._idle = list(sessions[:1] if self._in_order and spec.decoupled else sessions)
        self._line = AnswerLine(clock, self._succeed, self._fail) if self._in_order and not spec.decoupled else None
        self._levels = LevelBounds(spec.queue) if spec.queue.priority_levels and spec.queue.bounded else None
        self._running: set[Running] = set()
        self._outlook = Outlook(
            self._queue,
            self.curve,
            self._idle,
            self._running,
            max_rows=0 if self._alone else self._bounds.max_rows,
            slots=cores.total // self.units,
            clock=clock,
        )
        self._rows = 0
        self._arrivals: deque[Call] = deque()  # in order of arrival; kept only where a delay is asked for
        self._scheduled = False
        self._closed = False
        self._expiry: Timer | None = None
        self._expiry_at = 0.0
        self._wait: Timer | None = None
        # Whoever answers later cannot run on the loop.
        apart = bool(sessions) and takes_requests(sessions[0])
        self._failed = None if apart or spec.decoupled else FailedCallers(spec, clock.now)
        self._experience = Experience(self._bounds, self.curve, 0.0 if apart else inline_s)

    # Calls come and go ------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Calls in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Batches on instances."""
        return len(self._running)

    def depths(self) -> list[tuple[int, int, float | None]]:
        """(band, calls that wait, seconds a new call would wait; None if unknown) of every band seen, and of band 0."""
        return self._outlook.by_band()

    def expected_wait_s(self, band: int) -> float | None:
        """Seconds a call of `band` that came now would wait; None if that is not known."""
        return self._outlook.wait_s(band)

    @property
    def is_short(self) -> bool:
        """Whether a batch would run on the loop now."""
        return bool(self._idle) and self._experience.is_short(self._rows + 1)

    def submit(self, call: Call) -> None:
        """Queue `call`; its reply comes later on the loop, or now if it is refused."""
        if self._closed:
            self._fail(call, ServerStopping())
            return
        ticket = call.ticket
        if ticket.deadline <= (now := self._clock.now()):
            if not call.delays or call.deadline <= now:
                self._fail(call, self._lateness(call))
                return
            ticket = call.parked(call.deadline)
        if self._experience.floor.refuses(call.rows, call.deadline - now):
            self._fail(call, DeadlineTooShort())
            return
        levels = self._levels
        if levels is not None and not levels.enter(call):
            message = f"the queue of model {self.spec.name!r} is full for priority {call.level}"
            self._fail(call, QueueFull(message))
            return
        if self._in_order:
            ticket.order = call.arrived_s
        pushed, displaced = self._queue.push(ticket)
        if pushed is Pushed.FULL:
            if levels is not None:
                levels.leave(call)
            self._fail(call, QueueFull(f"the queue of model {self.spec.name!r} is full"))
            return
        if self._line is not None:
            self._line.enter(call)
        self._experience.came(call.rows, call.deadline - now, now)
        self._rows += call.rows
        for loser in displaced:
            self._evict(loser, QueueFull(f"a more urgent request took the place in {self.spec.name!r}'s queue"))
        if self._bounds.max_delay_s > 0.0:
            self._arrivals.append(call)
            if len(self._arrivals) > 2 * len(self._queue) + 64:  # one that waits long must not keep all that follow
                self._arrivals = deque(each for each in self._arrivals if not (each.finished or each.started_s))
        if self._expiry is None or ticket.deadline < self._expiry_at:
            self._arm_expiry(ticket.deadline)
        if self._idle and not self._scheduled:
            self._scheduled = True
            self._clock.call_soon(self._dispatch)

    def leave(self, call: Call) -> bool:
        """The caller went away: no reply. Frees the queue place now, or drops the rows when the batch ends.

        False if the call had its reply before.
        """
        if call.finished:
            return False
        call.finished = True
        if call.relay is not None:
            call.relay.close()
        if self._queue.remove(call.ticket):
            self._rows -= call.rows
            if self._levels is not None:
                self._levels.leave(call)
            unwrap(call.ticket).inputs = {}
        call.forget()
        if self._line is not None:
            self._line.left(call)
        self.statistics.failed(CallerLeft.outcome, self._clock.now() - call.arrived_s)
        return True

    def close(self) -> None:
        """Fail what waits; running batches end on their own. Nothing is taken afterwards."""
        self._closed = True
        while (ticket := self._queue.pop()) is not None:
            self._evict(ticket, ServerStopping())
        for timer in (self._expiry, self._wait):
            if timer is not None:
                timer.cancel()

    # Contender for cores ----------------------------------------------------------------------------------------

    def urgency(self) -> tuple[int, float] | None:
        """Band and deadline of the head; None if nothing could run."""
        head = self._queue.peek() if self._idle else None
        return None if head is None else (head.band, head.deadline)

    def granted(self) -> None:
        """Cores are ours: start one batch or give them back."""
        decision = self._decide()
        if isinstance(decision, Run) and self._idle:
            self._start(decision)
        else:
            self._cores.release(self.units)
        self._schedule()

    # Dispatch ---------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled and self._idle and len(self._queue):
            self._scheduled = True
            self._clock.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        while self._idle:
            decision = self._decide()
            if not isinstance(decision, Run):
                return
            if self._experience.is_short(decision.rows):
                self._run_inline(decision)
                self._schedule()  # one batch per turn: the loop has sockets to serve
                return
            if not self._cores.take(self):
                return
            self._start(decision)

    def _decide(self) -> Run | WaitUntil | Idle:
        now = self._clock.now()
        tightest = self._queue.next_deadline()
        if tightest is not None and tightest <= now:
            self._expire()
            tightest = self._queue.next_deadline()
        if tightest is not None and tightest - now < self._experience.floor.ceiling_s:
            self._refuse_hopeless(now)
            tightest = self._queue.next_deadline()
        if tightest is None:
            return Idle()
        coming = self._experience.returns.outlook(now)
        backlog = Backlog(self._rows, self._oldest_s(now), tightest, self._queue.size_bytes, *coming)
        decision = decide(backlog, self._bounds, self.curve, now)
        if isinstance(decision, WaitUntil):
            if self._wait is not None:
                self._wait.cancel()
            self._wait = self._clock.call_at(decision.at_s, self._schedule)
        return decision

    def _refuse_hopeless(self, now: float) -> None:
        while (ticket := self._queue.peek()) is not None:
            call = ticket.payload
            if not self._experience.floor.refuses(call.rows, call.deadline - now):
                return
            self._queue.remove(ticket)
            self._evict(ticket, DeadlineTooShort())

    def _oldest_s(self, now: float) -> float:
        arrivals = self._arrivals
        while arrivals and (arrivals[0].finished or arrivals[0].started_s):
            arrivals.popleft()
        return arrivals[0].arrived_s if arrivals else now

    def _take(self, decision: Run) -> list[Call]:
        now = self._clock.now()
        limit = 1 if self._alone else min(decision.rows, self._experience.useful_rows)
        fill = Fill(limit, self.curve, now, self._bounds.max_bytes)
        crowded = self._rows > limit and not self._in_order
        failed = self._failed.judge() if self._failed else None
        calls = pick(self._queue, fill, limit, crowded, self._alone, failed=failed, in_order=self._in_order)
        for call in calls:
            call.started_s = now
            if self._levels is not None:
                self._levels.leave(call)
        self._rows -= fill.rows
        reason = "alone" if self._alone else decision.reason
        self.statistics.releases[reason] += 1
        if _log.isEnabledFor(logging.DEBUG):
            say_batch(self.spec, calls, fill.rows, reason, now)
        return calls

    def _start(self, decision: Run) -> None:
        self._experience.went_to_a_thread()
        batch = Running(self._take(decision), self._idle.pop(), self.units, self._clock, self._fail)
        self._running.add(batch)
        clock = self._clock
        if takes_requests(batch.session):
            self._hand_over(batch, batch.session)
            return
        work = self._streaming(batch) if self.spec.decoupled else self._executing(batch)

        def job() -> None:
            results = work()
            clock.call_from_thread(lambda: self._ended(batch, results))

        self._workers.submit(job)

    def _hand_over(self, batch: Running, session: RequestSession) -> None:
        """The instance may be free before the last call is finished, and stay busy after it."""
        starting = True

        def finish(results: Results, last: bool) -> None:
            if last:
                self._retire(batch)
            self._learn(results)
            self._deliver(results)

        def free() -> None:
            self._idle.append(session)
            self._cores.release(batch.units)
            if starting:
                self._schedule()  # refused at once: the next one must not start inside this one
            else:
                self._dispatch()

        RequestBatch(
            self.spec,
            session,
            batch.calls,
            self._clock,
            finish=finish,
            free=free,
            fail=self._fail,
            statistics=self.statistics,
        ).start()
        starting = False

    def _executing(self, batch: Running) -> Callable[[], Results]:
        spec, names, now = self.spec, self._output_names, self._clock.now
        return lambda: execute(batch.session, spec, names, batch.calls, now)

    def _streaming(self, batch: Running) -> Callable[[], Results]:
        (call,) = batch.calls
        session = cast(DecoupledSession, batch.session)  # seen to when the model was loaded
        call.relay = relay = Relay(call, self._clock, self._fail, self.statistics)
        spec, names, now = self.spec, self._output_names, self._clock.now
        return lambda: [(batch.calls, execute_stream(session, spec, names, call, relay, now))]

    def _retire(self, batch: Running) -> None:
        self._running.discard(batch)
        batch.ended()

    def _ended(self, batch: Running, results: Results) -> None:
        self._retire(batch)
        self._idle.append(batch.session)
        self._learn(results)
        rows, experience = sum([call.rows for call in batch.calls]), self._experience
        gathers = experience.gathers(self._rows, rows)
        if gathers:
            self._deliver(results)
            experience.answered(rows, self._clock.now())
        # Otherwise the next batch starts before answers are written: the device should not wait for sockets.
        self._cores.release(batch.units)
        self._dispatch()
        if not gathers:
            self._deliver(results)
            experience.answered(rows, self._clock.now())

    def _run_inline(self, decision: Run) -> None:
        calls = self._take(decision)
        started = self._clock.now()
        results = execute(self._idle[-1], self.spec, self._output_names, calls, self._clock.now)
        self._experience.ran_inline(self._clock.now() - started)
        self._learn(results)
        self._deliver(results)

    def _learn(self, results: Results) -> None:
        if self.spec.decoupled:
            return  # how long it takes is up to its reader as well
        for _, outcome in results:
            if not isinstance(outcome, InferenceError):
                times = outcome[1]
                self._experience.ran(times.rows, times.split_s - times.started_s)

    # Endings ----------------------------------------------------------------------------------------------------

    def _deliver(self, results: Results) -> None:
        for calls, outcome in results:
            if isinstance(outcome, InferenceError):
                if _log.isEnabledFor(logging.DEBUG):
                    say_failed(self.spec, calls, outcome)
                if self._failed is not None and len(calls) == 1:
                    self._failed.failed(calls[0], outcome)
                for call in calls:
                    self._fail(call, outcome)
            else:
                self._answer(calls, *outcome)

    def _answer(self, calls: Sequence[Call], shares: list[list[Array]], times: BatchTimes) -> None:
        statistics, now = self.statistics, self._clock.now()
        if _log.isEnabledFor(logging.DEBUG):
            say_executed(self.spec, calls, times)
        answered = 0
        per_row_us = (times.split_s - times.started_s) * 1e6 / max(1, times.rows)
        for call, outputs in zip(calls, shares, strict=True):
            if call.finished:
                continue
            answer = Answer(outputs, times, int(per_row_us * call.rows))
            answered += 1
            if self._line is not None:
                self._line.answered(call, answer)
                continue
            call.finished = True
            statistics.succeeded(queue_s=times.started_s - call.arrived_s, total_s=now - call.arrived_s)
            self._reply(call, answer)
        statistics.executed(times, answered)

    def _succeed(self, call: Call, answer: Answer) -> None:
        """An answer whose turn has come."""
        call.finished = True
        queued_s, total_s = answer.times.started_s - call.arrived_s, self._clock.now() - call.arrived_s
        self.statistics.succeeded(queue_s=queued_s, total_s=total_s)
        self._reply(call, answer)

    def _fail(self, call: Call, error: InferenceError) -> None:
        if call.finished:
            return
        call.finished = True
        if call.relay is not None:
            call.relay.close()
        self.statistics.failed(error.outcome, self._clock.now() - call.arrived_s)
        self._reply(call, error)
        if self._line is not None:
            self._line.left(call)

    def _evict(self, ticket: Ticket, error: InferenceError | None) -> None:
        """Finish a call that has just left the queue without running; no error given means it was late."""
        call = unwrap(ticket)
        call.inputs = {}
        self._rows -= call.rows
        if self._levels is not None:
            self._levels.leave(call)
        self._fail(call, error or self._lateness(call))

    def _reply(self, call: Call, result: Answer | InferenceError) -> None:
        deliver(call, result, self.spec.name)

    def _lateness(self, call: Call) -> InferenceError:
        if call.ticket.deadline < call.deadline:
            return QueueTimeout("Request timeout expired")
        return DeadlineExceeded("queue")

    # Timers -----------------------------------------------------------------------------------------------------

    def _arm_expiry(self, at_s: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_at = at_s
        self._expiry = self._clock.call_at(at_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry = None
        self._expire()
        following = self._queue.next_deadline()
        if following is not None:
            self._arm_expiry(following)

    def _expire(self) -> None:
        now = self._clock.now()
        for ticket in self._queue.expire(now):
            call = ticket.payload
            if call.delays and ticket.deadline < call.deadline and now < call.deadline:
                self._queue.push(unwrap(ticket).parked(call.deadline))  # there is room: its own place
            else:
                self._evict(ticket, None)
