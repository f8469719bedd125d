"""The batcher of one model version: one queue, its instances, and the rules that decide which call runs when.

Rules.
1. `oriel_policies.waiting.queue` decides the order: band, tenant by rows, deadline. `oriel_policies.waiting.batch`
   decides when a batch runs and how large it is.
2. Every call that `submit` accepts is finished exactly once: answered, failed, expired or left. The code that finishes
   a call sets `Call.finished` first and then calls the reply; nothing else acts on a finished call.
3. Expiry has its own timers, independent of what runs: one for the earliest deadline in the queue, and one per running
   batch for its members. An expired call is never started. A call that expires while its batch runs is answered at
   once, and its rows are dropped.
4. A caller that leaves (`caller_left`) frees its place at once. A running batch is not interrupted.
5. A batch takes cores before it takes calls, so that the order is decided at the last moment.
6. The queue policies of the model apply in addition: places per level, how long a call may wait, and whether it is then
   refused or goes on waiting behind the others of its level. With `preserve_ordering` the calls of a tenant run first
   come, first served, and its answers wait for one another, see `queue_policies`.
7. A batch that fails is executed again in parts, see `assemble`. Callers that failed lately have batches of their own.

Calls of decoupled models run alone, see `stream`; `Call.on_early_end` is called when such a call ends early.

A batch whose measured service time is below `inline_s` runs on the loop: handing it to a thread would cost more than
the work itself. Dispatch is always deferred to the end of the loop's turn, so that calls that arrive together run
together.

Owner and single writer: the loop. Only `execute` runs in a worker.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from oriel_inference.backends import RequestSession, Session, resident_memory
from oriel_inference.batching.assemble import Results, execute
from oriel_inference.batching.call import Answer, BatchTimes, Call, deliver, lateness
from oriel_inference.batching.cores import Contender
from oriel_inference.batching.device import Accounts, Device
from oriel_inference.batching.failed_callers import FailedCallers
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.pick import pick, unwrap
from oriel_inference.batching.queue_policies import AnswerLine, LevelBounds
from oriel_inference.batching.rate_limiter import InstanceLimits
from oriel_inference.batching.requests import Ends, RequestBatch
from oriel_inference.batching.response_cache import ModelCache
from oriel_inference.batching.running import Running, swap_sessions
from oriel_inference.batching.service_times import ServiceTimes
from oriel_inference.batching.statistics import Statistics
from oriel_inference.batching.verbose import log_batch, log_executed, log_failed
from oriel_inference.batching.wait_estimate import WaitEstimate
from oriel_inference.clock import Timer
from oriel_inference.errors import CallerLeft, DeadlineTooShort, InferenceError, QueueFull, ServerStopping
from oriel_inference.model import ModelSpec
from oriel_policies.waiting.batch import BatchBounds, Decision, Fill, Idle, Run, ServiceCurve, WaitUntil
from oriel_policies.waiting.batch_queue import BatchQueue
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)


class Batcher:
    """The queue and the instances of one model version.

    sessions: one per instance, owned by the caller; several may be the same one.
    units: cores that one run takes.
    curve: measured service times to start with.
    statistics: counters to continue; new ones by default.
    placed: the device of each session; the host by default.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sessions: Sequence[Session],
        machine: Machine,
        *,
        units: int = 1,
        curve: ServiceCurve | None = None,
        statistics: Statistics | None = None,
        placed: Sequence[Device] = (),
    ) -> None:
        clock, cores, devices, limiter = machine.clock, machine.cores, machine.devices, machine.limiter
        self.spec = spec
        self.units = min(max(1, units), cores.total)
        self.share = self.units / cores.total  # the part of the server's cores that one run keeps busy
        self.curve, self.statistics = curve or ServiceCurve(), statistics or Statistics()
        shared = machine.answers if spec.cached else None
        self._answers = None if shared is None else ModelCache(shared, spec, machine, self.statistics)
        self._devices = devices
        self._device_of = {id(session): device for session, device in zip(sessions, placed, strict=False)}
        self.accounts = Accounts(devices, spec.name, str(spec.version), placed[0] if placed else devices.host)
        self._clock = clock
        apart = isinstance(next(iter(sessions), None), RequestSession)  # it answers later: it cannot run on the loop
        self._cores = limiter or cores
        self._contender = Contender(0 if limiter and apart else self.units, self.urgency, self.granted)
        self._workers = machine.workers
        self._queue = SlaQueue(max_items=spec.queue.max_items or machine.max_items, max_bytes=machine.max_bytes)
        self._alone, self.resident = spec.bounds is None, None if spec.ragged else resident_memory(sessions)
        self._bounds = replace(
            spec.bounds or BatchBounds(max_rows=max(1, spec.max_batch_size)), max_bytes=machine.max_batch_bytes
        )
        self._output_names = [output.name for output in spec.outputs]
        self._in_order = spec.queue.preserve_ordering
        # The responses of a decoupled model cannot be held back, so its requests run one after the other.
        self._idle = list(sessions[:1] if self._in_order and spec.decoupled else sessions)
        self._limits: InstanceLimits | None = None
        if limiter and spec.limits:
            by_session = {id(each): limit for each, limit in zip(sessions, spec.limits, strict=False)}
            self._limits = InstanceLimits(limiter, self._contender, self._idle, by_session)
        self._line = AnswerLine(clock, self._succeed, self._fail) if self._in_order and not spec.decoupled else None
        self._levels = LevelBounds(spec.queue) if spec.queue.priority_levels and spec.queue.bounded else None
        self._running: set[Running] = set()
        self._wait_estimate = WaitEstimate(
            self._queue,
            self.curve,
            self._idle,
            self._running,
            max_rows=0 if self._alone else self._bounds.max_rows,
            slots=cores.total // self.units,
            clock=clock,
        )
        self._waiting: BatchQueue[Call] = BatchQueue(self._queue, self._bounds, self.curve)
        self._scheduled = False
        self._closed = False
        self._expiry: Timer | None = None
        self._expiry_at = 0.0
        self._wait: Timer | None = None
        self._failed = None if apart else FailedCallers(spec, clock.now)
        # A batch on a GPU may wait for the capture of a graph (`backends.gpu_work`), which the loop must not do.
        on_loop = not apart and self._limits is None and all(device is devices.host for device in placed)
        self._service_times = ServiceTimes(self._bounds, self.curve, machine.inline_s if on_loop else 0.0)

    # Joining and leaving the queue ------------------------------------------------------------------------------

    @property
    def pending(self) -> int:  # calls in the queue
        return len(self._queue)

    @property
    def running(self) -> int:  # batches on instances
        return len(self._running)

    def depths(self) -> list[tuple[int, int, float | None]]:
        """Return (band, waiting calls, seconds that a new call would wait or None) for band 0 and every band seen."""
        return self._wait_estimate.by_band()

    def expected_wait_s(self, band: int) -> float | None:  # the wait of a new call; None if unknown
        return self._wait_estimate.wait_s(band)

    @property
    def is_short(self) -> bool:  # True if a batch would run on the loop now
        return bool(self._idle) and self._service_times.is_short(self._waiting.rows + 1)

    def submit(self, call: Call) -> None:
        """Queue `call`; its reply comes later on the loop, or immediately if the call is refused."""
        if self._closed:
            self._fail(call, ServerStopping())
            return
        ticket = call.ticket
        if ticket.deadline <= (now := self._clock.now()):
            if not call.delays or call.deadline <= now:
                self._fail(call, lateness(call))
                return
            ticket = call.parked(call.deadline)
        if self._answers is not None and self._answers.takes(call):
            return
        if self._service_times.floor.refuses(call.rows, call.deadline - now):
            self._fail(call, DeadlineTooShort())
            return
        levels = self._levels
        if levels is not None and not levels.join(call):
            message = f"the queue of model {self.spec.name!r} is full for priority {call.level}"
            self._fail(call, QueueFull(message))
            return
        if self._in_order:
            ticket.order = call.arrived_s
        displaced = self._queue.push(ticket)
        if displaced is None:
            if levels is not None:
                levels.leave(call)
            self._fail(call, QueueFull(f"the queue of model {self.spec.name!r} is full"))
            return
        if self._line is not None:
            self._line.join(call)
        self._service_times.queued(call.rows, call.deadline - now, now)
        self._waiting.rows += call.rows
        for loser in displaced:
            self._evict(loser, QueueFull(f"a more urgent request took the place in {self.spec.name!r}'s queue"))
        if self._bounds.max_delay_s > 0.0:
            self._waiting.arrived(call)
        if self._expiry is None or ticket.deadline < self._expiry_at:
            self._arm_expiry(ticket.deadline)
        if self._idle and not self._scheduled:
            self._scheduled = True
            self._clock.call_soon(self._dispatch)

    def caller_left(self, call: Call) -> bool:
        """Remove a call whose caller went away; its reply is not called. Frees its place in the queue now, or drops its
        rows when the batch ends.

        Returns False if the call had its reply before.
        """
        if call.finished:
            return False
        call.finished = True
        if call.on_early_end is not None:
            call.on_early_end()
        if self._queue.remove(call.ticket):
            self._waiting.rows -= call.rows
            if self._levels is not None:
                self._levels.leave(call)
            unwrap(call.ticket).inputs = {}
        call.forget()
        if self._line is not None:
            self._line.remove(call)
        self.statistics.count_failure(CallerLeft.outcome, self._clock.now() - call.arrived_s)
        return True

    def swap(self, sessions: Sequence[Session]) -> Callable[[], bool]:
        """Let the next batches run on other sessions; see `swap_sessions`."""
        self.resident = None if self.spec.ragged else resident_memory(sessions)
        if self._limits is not None:
            self._limits.swap([*self._idle, *(batch.session for batch in self._running)], sessions)
        return swap_sessions(sessions, self._idle, self._running, self._device_of, self._devices.host)

    def close(self) -> None:
        """Fail the waiting calls and accept no more; running batches end on their own."""
        self._closed = True
        if self._answers is not None:
            self._answers.close()
        while (ticket := self._queue.pop()) is not None:
            self._evict(ticket, ServerStopping())
        if self._limits is not None:
            self._limits.close()
        for timer in (self._expiry, self._wait):
            if timer is not None:
                timer.cancel()

    # Contender for cores ----------------------------------------------------------------------------------------

    def urgency(self) -> tuple[int, float] | None:
        """Return band and deadline of the first call; None if nothing could run."""
        head = self._queue.peek() if self._idle else None
        return None if head is None else (head.band, head.deadline)

    def granted(self) -> None:
        """Start one batch on the cores that were granted, or return them."""
        chosen, decision = self._idle[-1], self._decide()
        if isinstance(decision, Run):
            self._start(decision)
        else:
            self._release(chosen, contends=False)
        self._schedule()

    def _release(self, session: Session, *, contends: bool = True) -> None:
        if self._limits is not None:
            self._limits.release(session, contends=contends)
        self._cores.release(self._contender.units)

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
            if self._service_times.is_short(decision.rows):
                self._run_inline(decision)
                self._schedule()  # one batch per turn, because the loop also serves sockets
                return
            if not self._cores.acquire(self._contender):
                return
            self._start(decision)

    def _decide(self) -> Decision:
        now = self._clock.now()
        tightest = self._queue.next_deadline()
        if tightest is not None and tightest <= now:
            self._expire()
            tightest = self._queue.next_deadline()
        if tightest is not None and tightest - now < self._service_times.floor.ceiling_s:
            self._refuse_hopeless(now)
            tightest = self._queue.next_deadline()
        if tightest is None:
            return Idle()
        decision = self._waiting.decide(now, tightest, coming=self._service_times.returns.coming(now))
        if isinstance(decision, WaitUntil):
            if self._wait is not None:
                self._wait.cancel()
            self._wait = self._clock.call_at(decision.at_s, self._schedule)
        return decision

    def _refuse_hopeless(self, now: float) -> None:
        while (ticket := self._queue.peek()) is not None:
            call = ticket.payload
            if not self._service_times.floor.refuses(call.rows, call.deadline - now):
                return
            self._queue.remove(ticket)
            self._evict(ticket, DeadlineTooShort())

    def _take(self, decision: Run) -> list[Call]:
        now = self._clock.now()
        limit = 1 if self._alone else min(decision.rows, self._service_times.useful_rows)
        fill = Fill(limit, self.curve, now, self._bounds.max_bytes)
        crowded = self._waiting.rows > limit and not self._in_order
        failed = self._failed.judge() if self._failed else None
        calls = pick(self._queue, fill, limit, crowded, self._alone, failed=failed, in_order=self._in_order)
        for call in calls:
            call.started_s = now
            if self._levels is not None:
                self._levels.leave(call)
        self._waiting.rows -= fill.rows
        reason = "alone" if self._alone else decision.reason
        self.statistics.releases[reason] += 1
        if _log.isEnabledFor(logging.DEBUG):
            log_batch(self.spec, calls, fill.rows, reason, now)
        return calls

    def _start(self, decision: Run) -> None:
        self._service_times.went_to_a_thread()
        batch = Running(self._take(decision), self._idle.pop(), self._clock, self._fail)
        self._running.add(batch)
        clock = self._clock
        if isinstance(batch.session, RequestSession):
            self._hand_over(batch, batch.session)
            return
        work = self._executing(batch)

        def job() -> None:
            results = work()
            clock.call_from_thread(lambda: self._ended(batch, results))

        self._workers.submit(job)

    def _hand_over(self, batch: Running, session: RequestSession) -> None:
        """Give a batch to a session that answers later. The instance may be free before the last call is finished, or
        stay busy after it.
        """
        starting = True
        device = self._device(session)

        def finish(results: Results, last: bool) -> None:
            if last:
                self._retire(batch)
            self._learn(results)
            self._deliver(results, device)

        def free() -> None:
            self._idle.append(session)
            self._release(session, contends=not starting)
            if starting:
                self._schedule()  # refused at once: the next batch must not start inside this one
            else:
                self._dispatch()

        RequestBatch(
            self.spec,
            session,
            batch.calls,
            self._clock,
            Ends(finish, free, self._fail),
            self.statistics,
            device,
        ).start()
        starting = False

    def _executing(self, batch: Running) -> Callable[[], Results]:
        spec, names, now, device = self.spec, self._output_names, self._clock.now, self._device(batch.session)
        return lambda: execute(batch.session, spec, names, batch.calls, now, device)

    def _device(self, session: Session) -> Device:
        return self._device_of.get(id(session), self._devices.host)

    def _retire(self, batch: Running) -> None:
        self._running.discard(batch)
        batch.stop_timer()

    def _ended(self, batch: Running, results: Results) -> None:
        self._retire(batch)
        self._idle.append(batch.session)
        self._learn(results)
        rows, times = sum([call.rows for call in batch.calls]), self._service_times
        device = self._device(batch.session)
        gathers = times.gathers(self._waiting.rows, rows)
        if not gathers:  # the next batch begins before answers are written: the device should not wait for sockets
            self._release(batch.session)
            self._dispatch()
            self._workers.let_begin()
        self._deliver(results, device)
        times.batch_finished(rows, self._clock.now())
        if gathers:
            self._release(batch.session)
            self._dispatch()

    def _run_inline(self, decision: Run) -> None:
        calls = self._take(decision)
        started, device = self._clock.now(), self._device(self._idle[-1])
        results = execute(self._idle[-1], self.spec, self._output_names, calls, self._clock.now, device)
        self._service_times.ran_inline(self._clock.now() - started)
        self._learn(results)
        self._deliver(results, device)

    def _learn(self, results: Results) -> None:
        if self.spec.decoupled:
            return  # the duration depends on the reader as well
        for _, outcome in results:
            if not isinstance(outcome, InferenceError):
                times = outcome[1]
                self._service_times.ran(times.rows, (times.split_s - times.started_s) / times.steps)

    # Finishing calls --------------------------------------------------------------------------------------------

    def _deliver(self, results: Results, device: Device) -> None:
        for calls, outcome in results:
            if isinstance(outcome, InferenceError):
                if _log.isEnabledFor(logging.DEBUG):
                    log_failed(self.spec, calls, outcome)
                if self._failed is not None and len(calls) == 1:
                    self._failed.record_failure(calls[0], outcome)
                for call in calls:
                    self._fail(call, outcome)
            else:
                self._answer(calls, *outcome, device)

    def _answer(self, calls: Sequence[Call], shares: list[list[Array]], times: BatchTimes, device: Device) -> None:
        statistics, now = self.statistics, self._clock.now()
        if _log.isEnabledFor(logging.DEBUG):
            log_executed(self.spec, calls, times)
        answered = 0
        per_row_us = (times.split_s - times.started_s) * 1e6 / max(1, times.rows)
        charges = self._devices.charge(device, times.device_ns, calls)
        for call, outputs, device_ns in zip(calls, shares, charges, strict=True):
            if call.finished:
                continue
            answer = Answer(outputs, times, int(per_row_us * call.rows), device_ns, call.usage)
            answered += 1
            if self._line is not None:
                self._line.deliver(call, answer)
                continue
            call.finished = True
            statistics.succeeded(queue_s=times.started_s - call.arrived_s, total_s=now - call.arrived_s)
            deliver(call, answer, self.spec.name)
        statistics.executed(times, answered, calls, shares, self.spec)

    def _succeed(self, call: Call, answer: Answer) -> None:
        """Deliver an answer whose turn has come."""
        call.finished = True
        queued_s, total_s = answer.times.started_s - call.arrived_s, self._clock.now() - call.arrived_s
        self.statistics.succeeded(queue_s=queued_s, total_s=total_s)
        deliver(call, answer, self.spec.name)

    def _fail(self, call: Call, error: InferenceError) -> None:
        if call.finished:
            return
        call.finished = True
        if call.on_early_end is not None:
            call.on_early_end()
        self.statistics.count_failure(error.outcome, self._clock.now() - call.arrived_s)
        deliver(call, error, self.spec.name)
        if self._line is not None:
            self._line.remove(call)

    def _evict(self, ticket: Ticket, error: InferenceError | None) -> None:
        """Finish a call that has just left the queue without running. error: its error; None if it was late."""
        call = unwrap(ticket)
        call.inputs = {}
        self._waiting.rows -= call.rows
        if self._levels is not None:
            self._levels.leave(call)
        self._fail(call, error or lateness(call))

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
                # cannot be refused: it takes its own place again
                self._queue.push(unwrap(ticket).parked(call.deadline))
            else:
                self._evict(ticket, None)
