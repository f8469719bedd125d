"""The scheduler of a language model: leads its calls through the engine's steps in the order of `order`.

Rules.
1. The process of the model never waits for this side: a decision counts from the step after the next. A token that
   comes for a generation that has paused meanwhile still belongs to it; one that comes after it was added again, or
   after its end, is dropped.
2. Every call that `submit` accepts is finished exactly once. An expired one ends by a timer of its own: with an error,
   or, if a stream has begun, with a last response whose `finish_reason` is "deadline".
3. A slow reader delays nobody: once MAX_UNREAD of its responses are unread, what is new waits for its next response,
   which then has all of it. An answer has no more text than the model's context.
4. When the process dies, the generations that run fail at once. Those that wait go on with the next process, paused
   ones too: their tokens are here, and they were not in the engine when it failed.
5. Tokens and device time of a stream are charged as they are made. Those of a whole answer are charged with it, and
   to nobody if it fails.

Owner and single writer: the loop.
"""

import logging
from collections import Counter
from functools import partial
from itertools import count

from oriel_inference.batching.call import Answer, BatchTimes, Call, deliver, lateness
from oriel_inference.batching.device import Accounts
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.statistics import Responses, Statistics
from oriel_inference.clock import Timer
from oriel_inference.errors import (
    BackendFailed,
    CallerLeft,
    DeadlineExceeded,
    DeadlineTooShort,
    InferenceError,
    InvalidRequest,
    ModelNotReady,
    QueueFull,
    ServerStopping,
)
from oriel_inference.language.decoder import Decoder
from oriel_inference.language.engine import Options
from oriel_inference.language.generation import Generation
from oriel_inference.language.messages import StepReport
from oriel_inference.language.order import StepOrder
from oriel_inference.model import ModelSpec
from oriel_policies.metering.shares import split

_log = logging.getLogger(__name__)

MAX_UNREAD = 16
STATES = ("running", "waiting", "paused")  # the names of `LanguageScheduler.states`


class LanguageScheduler:
    """Runs the calls of one version of a language model.

    decoder: the model's process, which is ready.
    options: those that it was loaded with.
    """

    is_short = False
    resident = None

    def __init__(
        self, spec: ModelSpec, decoder: Decoder, options: Options, machine: Machine, statistics: Statistics
    ) -> None:
        self.spec, self.statistics = spec, statistics
        self.units = min(options.threads, machine.cores.total)
        self.share = self.units / machine.cores.total
        self.accounts = Accounts(machine.devices, spec.name, str(spec.version), machine.devices.host)
        self.cache_use = 0.0
        facts, self._decoder = decoder.facts, decoder
        self.order = StepOrder(
            slots=options.max_running,
            cache_tokens=facts.cache_tokens,
            step_tokens=options.step_tokens,
            max_items=machine.max_items,
            max_bytes=machine.max_bytes,
        )
        self._clock, self._devices, self._device = machine.clock, machine.devices, machine.devices.host
        self._outputs = [output.name for output in spec.outputs]
        self._calls: dict[Call, Generation] = {}
        self._numbers: dict[int, Generation] = {}
        self._next = count(1)
        self._busy_since: int | None = None  # set while something runs; see `Device.start`
        self._scheduled = self._closed = False
        self._expiry: Timer | None = None
        self._expiry_at: float | None = None
        decoder.on_step, decoder.on_end, decoder.on_ready = self._stepped, self._died, self._schedule

    # Scheduler --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Return the number of calls that wait, paused ones included."""
        return len(self.order.waiting)

    @property
    def running(self) -> int:
        """Return the number of calls in the engine."""
        return len(self.order.running)

    def states(self) -> dict[int, list[int]]:
        """Return for each band seen the number of calls that run, wait and have not begun, and are paused."""
        found = {band: [0, items, 0] for band, items, _ in self.order.waiting.depths()}
        for each in self.order.running:
            found[each.band][0] += 1
        for each in self.order.paused:
            found[each.band][1] -= 1
            found[each.band][2] += 1
        return found

    def depths(self) -> list[tuple[int, int, float | None]]:
        """Return (band, waiting calls, expected wait of a new call in seconds or None) for band 0 and every band
        seen.
        """
        depths = {0: 0} | {band: items for band, items, _ in self.order.waiting.depths()}
        return [(band, items, self.expected_wait_s(band)) for band, items in sorted(depths.items())]

    def expected_wait_s(self, band: int) -> float | None:
        """Return how many seconds a new call of `band` would wait for a slot; None if unknown."""
        return self.order.wait_s(band) if self.order.times.known or not self.running else None

    def submit(self, call: Call) -> None:
        """Accept `call`; its reply comes later on the loop, or immediately if it is refused."""
        try:
            generation, displaced = self._admit(call, self._clock.now())
        except InferenceError as error:
            self._refuse(call, error)
            return
        self._calls[call], call.inputs = generation, {}
        for loser in displaced:
            self._end(loser, QueueFull(f"a more urgent request took the place in {self.spec.name!r}'s queue"))
        self._schedule()

    def caller_left(self, call: Call) -> bool:
        """Remove a call whose caller went away, without a reply; its sequence ends at the next token. Returns False if
        the call had its reply before.
        """
        generation = self._calls.get(call)
        if generation is None or call.finished:
            return False
        self._end(generation, CallerLeft())
        return True

    def close(self) -> None:
        """Fail the waiting calls, paused ones too, and accept no more; what runs ends on its own."""
        self._closed = True
        for generation in [each for each in self._calls.values() if each not in self.order.running]:
            self._end(generation, ServerStopping())

    def _admit(self, call: Call, now: float) -> tuple[Generation, list[Generation]]:
        """Queue a call; return its generation, and those that it displaced. Raises InferenceError."""
        if self._closed:
            raise ServerStopping()
        if call.ticket.deadline <= now:
            raise lateness(call)
        name = f"model {self.spec.name!r}"
        if not self._decoder.is_ready and (retry_s := self._decoder.retry_s):
            text = f"the process of {name} has died again, and is started again in {retry_s:.1f} s"
            raise ModelNotReady(text, retry_s=retry_s)
        generation = Generation(call, self._decoder.facts, Responses(self.statistics, call.arrived_s))
        late_s = self.order.too_late_s(generation, now)
        if late_s == 0.0:
            raise DeadlineTooShort()
        if late_s is None and (displaced := self.order.join(generation, now)) is not None:
            return generation, displaced
        until = f" for this request's deadline: try again in {late_s:.1f} s" if late_s else ""
        error = QueueFull(f"the queue of {name} is full{until}")
        error.retry_s = late_s or error.retry_s
        raise error

    # Steps ------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._clock.call_soon(self._advance)

    def _advance(self) -> None:
        """Decide about the next step, and tell the engine what changes."""
        self._scheduled = False
        self._arm()
        if not self._decoder.is_ready:
            return
        paused, added = self.order.choose(self._clock.now())
        for each in paused:
            self._decoder.cancel(each.number)
            self.statistics.language["pauses"] += each.has_begun
        for each in added:
            self._numbers.pop(each.number, None)
            each.number = next(self._next)
            self._numbers[each.number] = each
            self._decoder.add(each.number, *each.rest())
        if self._busy_since is None and self.order.running:
            self._busy_since = self._device.start()
        elif self._busy_since is not None and not self.order.running:  # all have left: no report may follow
            self._device.end(self._busy_since, "left")
            self._busy_since = None

    def _stepped(self, report: StepReport) -> None:
        now, self.cache_use = self._clock.now(), report.cache_use
        self._charge_step(report)
        news: list[Generation] = []
        for each in report.progress:
            generation = self._numbers.get(each.number)
            if generation is None or (generation.is_bound and generation.ticket is not None):
                continue  # the latter paused before its first token, and begins anew: a resume would change it
            if each.refused:
                self._end(generation, InvalidRequest(each.refused))
                continue
            read = 0 if generation.is_counted else each.prompt_tokens
            if read:
                self.order.times.fresh.observe((read - each.cached_tokens) / read)
            made = generation.take(each, now)
            if made:
                self.order.progressed(generation, made, now)
            self.statistics.language.update(prompt=read, cached=each.cached_tokens if read else 0, generated=made)
            if generation.is_stream:
                _charge_tokens(generation, read, made)
            if generation.finish:
                self.order.times.ended(len(generation.ids))
                self._forget(generation)
            news.append(generation)
        if report.seconds:
            sequences = sum([1 for each in report.progress if each.ids])
            self.order.times.stepped(report.seconds, sequences, report.prompt_tokens)
        self._advance()  # the engine goes first: it should not wait for sockets
        for generation in news:
            if generation.finish:
                self._answer(generation)
            else:
                self._emit(generation)

    def _died(self, how: str) -> None:
        """Fail what ran in a process that is gone."""
        error = BackendFailed(f"the process of model {self.spec.name!r} died ({how}), it is being started again")
        if self._busy_since is not None:
            self._device.end(self._busy_since, "failed")
            self._busy_since = None
        for generation in list(self.order.running):
            self._end(generation, ServerStopping() if self._closed else error)
        self._numbers.clear()

    def _forget(self, generation: Generation) -> None:
        """Take an ended generation out of the order and the engine."""
        self.order.remove(generation)
        if self._numbers.pop(generation.number, None) is not None and self._decoder.is_ready:
            self._decoder.cancel(generation.number)
        self._schedule()

    def _charge_step(self, report: StepReport) -> None:
        """Charge the device time of a step to those it was for, by their tokens; prompts share those of prompts."""
        if self._busy_since is None:
            return
        used_ns = self._device.end(self._busy_since)
        self._busy_since = self._device.start() if self.order.running else None
        prompts = [each for each in self.order.running if not each.has_begun]
        weights = Counter({each: report.prompt_tokens // len(prompts) for each in prompts})
        for each in report.progress:
            if (generation := self._numbers.get(each.number)) is not None:
                weights[generation] += len(each.ids)
        if not weights:
            self._device.write_off(used_ns, "left")
            return
        for generation, share_ns in zip(weights, split(used_ns, list(weights.values())), strict=True):
            generation.device_ns += share_ns
            if generation.is_stream:
                self._devices.charge(self._device, share_ns, [generation.call])

    # Responses and ends -----------------------------------------------------------------------------------------

    def _emit(self, generation: Generation) -> None:
        """Send what is new; of an answer that goes on only to those who stream it and read what they get."""
        call, now = generation.call, self._clock.now()
        is_due = generation.is_stream and generation.has_news and generation.unread < MAX_UNREAD
        if call.finished or call.emit is None or not (is_due or generation.finish):
            return
        generation.responses.sent(now, now - generation.lap_s, 0.0)
        generation.lap_s = now
        generation.unread += 1
        try:
            call.emit(generation.response(self._outputs), partial(self._read, generation))
        except InferenceError as error:
            self._end(generation, error)
        except Exception:
            _log.exception("model %s: a response could not be delivered", self.spec.name)
            self._end(generation, BackendFailed("the server failed on this response"))

    def _read(self, generation: Generation) -> None:
        """Note that the reader has taken a response."""
        generation.unread -= 1
        if not generation.finish:
            self._emit(generation)

    def _answer(self, generation: Generation) -> None:
        """Send the last response of a generation that has ended, and finish its call."""
        call, now = generation.call, self._clock.now()
        self._emit(generation)
        if call.finished:
            return
        if not generation.is_stream:
            self._devices.charge(self._device, generation.device_ns, [call])
            _charge_tokens(generation, generation.prompt_tokens, len(generation.ids))
        del self._calls[call]
        times = BatchTimes(call.started_s, call.started_s, now, now, 1, generation.device_ns)
        generation.responses.finished(now - generation.lap_s, failed=False, cancelled=False)
        self.statistics.executed(times, 1)
        self.statistics.succeeded(queue_s=call.started_s - call.arrived_s, total_s=now - call.arrived_s)
        cost_us, decoding = generation.device_ns // 1000, generation.decoding()
        call.finished = True
        deliver(call, Answer((), times, cost_us, generation.device_ns, call.usage, (), decoding), self.spec.name)

    def _end(self, generation: Generation, error: InferenceError) -> None:
        """End a generation without an answer; its caller gets the error, unless it has left."""
        call, left = generation.call, isinstance(error, CallerLeft)
        self._forget(generation)
        self._calls.pop(call, None)
        if call.finished:
            return
        if not generation.is_stream:
            self._device.write_off(generation.device_ns, "left" if left else "failed")
        lap_s = self._clock.now() - generation.lap_s
        generation.responses.finished(lap_s, failed=not left, cancelled=left)
        if left:
            call.forget()
        self._refuse(call, error)

    def _refuse(self, call: Call, error: InferenceError) -> None:
        call.finished = True
        self.statistics.count_failure(error.outcome, self._clock.now() - call.arrived_s)
        deliver(call, error, self.spec.name)

    # Timers -----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Have `_expire` called at the next deadline."""
        if (at_s := self.order.next_expiry()) != self._expiry_at:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_at = at_s
            self._expiry = None if at_s is None else self._clock.call_at(at_s, self._expire)

    def _expire(self) -> None:
        now, self._expiry_at = self._clock.now(), None
        for generation in self.order.expired(now):
            call = generation.call
            if generation.is_stream and generation.has_begun:
                generation.end("deadline", now)
                self._forget(generation)
                self._answer(generation)
            else:
                self._end(generation, DeadlineExceeded("compute") if call.started_s else lateness(call))
        self._schedule()


def _charge_tokens(generation: Generation, prompt_tokens: int, made: int) -> None:
    if (row := generation.call.usage) is not None:
        row.touch()
        row.tokens_in += prompt_tokens
        row.tokens_out += made
