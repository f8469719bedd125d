"""Connect meters with their ledger: batches, time budgets, the circuit breaker and the heartbeat.

The asks of one loop iteration are sent as one batch; a few batches may be under way at a time. A batch that is not
answered within the budget counts as a failure and makes room for the next; its answer still counts if it comes later,
so a slow ledger loses no units. After five failures in a row the ledger is not asked any more: each gateway admits its
share alone, and the heartbeat, once a second, probes whether the ledger is back. No call ever waits for that; and as
long as a ledger that came back is on probation, calls wait for it `DOUBTFUL_S` at most.

A gateway that is alone cannot know whether the others are alone as well. If they are, the N shares of 1.5 / N are the
promised bound; if they are not, those shares come on top of the whole limit that the others admit. So at first a
gateway that is alone admits a negligible share (`_careful`), until the others, which learn from the ledger which
gateways are silent, have made room for its whole share (`rest`).
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from oriel_gateway.limits.ledger import PRESENCE_S, Ledger, LedgerLost, Presence, Question
from oriel_policies.bounds.ledger import Answer, Ask
from oriel_policies.upstreams.breaker import Breaker

_log = logging.getLogger(__name__)

BUDGET_S = 0.02
LOST_S = 0.5  # a batch without an answer is given up after this, or after the budget if that is longer
PROBE_S = 0.9  # together with the tick, a probe about once a second
TICK_S = 0.0625
CLOSE_S = 0.25
NAMED_AGAIN_S = 300.0  # the log names one cause of being alone again after this
MAX_TICKED = 2000  # meters that are polled per tick; the others are next
MAX_UNDER_WAY = 16
MAX_SHARE = 1.5
DOUBTFUL_S = 0.005

Done = Callable[[list[Answer] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerClientLimits:
    """The pace and the bounds of a ledger client.

    beat_s: seconds between two announcements of this gateway.
    careful_s: seconds of silence after which the other gateways have noticed it, and left this one its share.
    max_batch: asks in one batch; one turn of the loop can build so many well within the budget.
    max_lanes: batches under way within their budget.
    max_waiting: asks that wait to be sent; a further one counts as lost.
    """

    beat_s: float = 1.0
    careful_s: float = PRESENCE_S + 1.5
    max_batch: int = 64
    max_lanes: int = 4
    max_waiting: int = 100_000


DEFAULTS = LedgerClientLimits()


class Reporting(Protocol):
    """A meter that may have units to report or to ask for."""

    tenant: str

    def tick(self, now: float) -> Ask | None:
        """Return an ask that no call waits for, or None."""

    def ask_finished(self, ask: Ask, answer: Answer | None, now: float) -> None:
        """Take in the answer to an ask; None if it was lost."""

    def final_ask(self, now: float) -> Ask | None:
        """Return the final ask before this gateway ends, which gives back what is left over."""

    def quiet(self, now: float) -> bool:
        """Return whether there will be nothing to report until the next call."""


class LedgerClient:
    """Sends the asks of meters to a ledger. Single writer: the loop it is opened on.

    replicas: the number of gateways; at first the given one, then what the ledger reports.
    share: the part that this gateway may admit of every limit alone while the ledger cannot be asked.
    rest: the part of every limit that is left for the gateways that ask, because others have fallen silent.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        replicas: int = 1,
        budget_s: float = BUDGET_S,
        limits: LedgerClientLimits = DEFAULTS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ledger = ledger
        self._budget_s = budget_s
        self._limits = limits
        self._clock = clock
        self._breaker = Breaker(probe_s=PROBE_S)
        self._least = max(1, replicas)
        self.replicas = self._least
        self.share = _careful(self._least)
        self.rest = 1.0
        self._alone_s: float | None = None  # since when this gateway is alone
        self._cause, self._named_s, self._named = "", 0.0, False  # why it was the last time that the log said so
        self._waiting: deque[tuple[Question, Done]] = deque()
        self._active: OrderedDict[Reporting, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes = 0
        self._pumping = False
        self._ticking: asyncio.TimerHandle | None = None
        self._beat_s = 0.0
        self._beating = False
        self._closed = False
        self.late_batches = 0  # batches that missed their budget or were lost
        self.batches = 0  # all batches

    @property
    def up(self) -> bool:
        """Return whether the ledger is asked at all: the circuit breaker is closed."""
        return self._breaker.closed

    def doubtful(self, now: float) -> bool:
        """Return whether the ledger has answered again for a short time only."""
        return self._breaker.on_probation(now)

    def patience_s(self, now: float) -> float:
        """Return how long a call waits for an answer."""
        return min(DOUBTFUL_S, self._budget_s) if self.doubtful(now) else self._budget_s

    def activate(self, meter: Reporting) -> None:
        """Tick this meter until it is quiet."""
        self._active[meter] = None
        if self._ticking is None and not self._closed:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def send(self, tenant: str, asks: Sequence[Ask], done: Done) -> None:
        """Send asks soon. `done` is called later with the answers, or with None if they are lost."""
        if len(self._waiting) >= self._limits.max_waiting:
            asyncio.get_running_loop().call_soon(done, None)
            return
        self._waiting.append(((tenant, asks), done))
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def open(self) -> None:
        """Start the heartbeat."""
        self._tick()

    async def close(self) -> None:
        """Give back what is left over, if the ledger accepts it in time."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        now = self._clock()
        final = [(meter.tenant, meter.final_ask(now)) for meter in self._active if self.up]
        questions: list[Question] = [(tenant, [ask]) for tenant, ask in final if ask is not None]
        try:
            async with asyncio.timeout(CLOSE_S):
                for start in range(0, len(questions), self._limits.max_batch):
                    await self._ledger.ask(questions[start : start + self._limits.max_batch])
        except (LedgerLost, TimeoutError):
            _log.info("units reserved in Redis could not be returned; they expire")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._ledger.close()

    def _pump(self) -> None:
        self._pumping = False
        while self._waiting and self._lanes < self._limits.max_lanes and len(self._tasks) < MAX_UNDER_WAY:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._limits.max_batch))]
            if not self.up:
                for _, done in batch:
                    done(None)
                continue
            self._lanes += 1
            self.batches += 1
            task = asyncio.get_running_loop().create_task(self._send_batch(batch))
            self._tasks.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a batch of requests to the limiter's ledger failed", exc_info=error)

    async def _send_batch(self, batch: list[tuple[Question, Done]]) -> None:
        """Send one batch and call every `done`."""
        in_time = True

        def overdue() -> None:
            nonlocal in_time
            in_time = False
            self._lanes -= 1
            self._failed(f"no answer within {self._budget_s * 1e3:g} ms")
            self._pump()

        timer = asyncio.get_running_loop().call_later(self._budget_s, overdue)
        answers: Sequence[list[Answer] | None] | None = None
        try:
            async with asyncio.timeout(max(LOST_S, self._budget_s)):
                answers = await self._ledger.ask([question for question, _ in batch])
        except (LedgerLost, TimeoutError) as error:
            if in_time:
                self._failed(str(error) or "no answer")
        finally:
            timer.cancel()
            if in_time:
                self._lanes -= 1
        if answers is None:
            for _, done in batch:
                done(None)
            return
        if in_time:
            self._succeeded()
        for (_, done), answer in zip(batch, answers, strict=True):
            done(answer)

    def _tick(self) -> None:
        self._ticking = None
        now = self._clock()
        probe = not self._beating and self._breaker.probe(now)
        if probe or (self.up and now >= self._beat_s and not self._beating):
            self._beat_s = now + self._limits.beat_s
            self._beating = True
            task = asyncio.get_running_loop().create_task(self._beat(probe=probe))
            self._tasks.add(task)
            task.add_done_callback(self._sent)
        up = self.up
        if self._alone_s is not None and now >= self._alone_s + self._limits.careful_s:
            self.share = _share(self.replicas)
        for _ in range(min(len(self._active), MAX_TICKED)):
            meter, _ = self._active.popitem(last=False)
            ask = meter.tick(now) if up else None
            if ask is not None:
                self.send(meter.tenant, [ask], self._finisher(meter, ask))
            if ask is not None or not meter.quiet(now):
                self._active[meter] = None
        if not self._closed:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _finisher(self, meter: Reporting, ask: Ask) -> Done:
        return lambda answers: meter.ask_finished(ask, answers[0] if answers else None, self._clock())

    async def _beat(self, *, probe: bool) -> None:
        """Announce this gateway; while the breaker is open this is its probe. A slow answer counts as none."""
        try:
            async with asyncio.timeout(self._budget_s if probe else max(LOST_S, self._budget_s)):
                present = await self._ledger.hello(_share(self.replicas))
            rest = _rest(present)
            if rest < self.rest:
                _log.warning(
                    "other gateways no longer reach the limiter's ledger and may admit %.2f of each limit by "
                    "themselves: %.2f of it is left for the gateways that do reach it",
                    present.alone,
                    rest,
                )
            self.rest = rest
            if self.replicas != max(self._least, present.gateways):
                self.replicas = max(self._least, present.gateways)
                self.share = _careful(self.replicas)
            if probe:
                self._succeeded()
        except (LedgerLost, TimeoutError) as error:
            self._failed(str(error) or "no answer")
        finally:
            self._beating = False

    def _failed(self, why: str) -> None:
        self.late_batches += 1
        was = self.up
        self._breaker.record_failure(self._clock())
        if was and not self.up:
            self._alone_s = now = self._clock()
            self._named = why != self._cause or now >= self._named_s + NAMED_AGAIN_S
            if self._named:
                self._cause, self._named_s = why, now
                _log.warning(
                    "the limiter's ledger cannot be used (%s): until it answers again, this gateway admits %.2f of "
                    "every limit by itself, which is its share",
                    why,
                    _share(self.replicas),
                )
            waiting, self._waiting = self._waiting, deque()
            for _, done in waiting:
                done(None)

    def _succeeded(self) -> None:
        was = self.up
        self._breaker.succeeded(self._clock())
        if self.up and not was:
            self._alone_s, self.share = None, _careful(self.replicas)
            if self._named:
                _log.info("the limiter's ledger answers again, %d gateways share it", self.replicas)


def _share(replicas: int) -> float:
    """Return what each of N gateways may admit of every limit alone: 1 / N x min(1.5, N / 2), and at least 1 / N.

    Together they stay within 1.5 x the limit if all have lost the ledger, and also if some have and the others leave
    them room.
    """
    return max(1.0, min(MAX_SHARE, replicas / 2)) / replicas


def _rest(present: Presence) -> float:
    """Return what the gateways that ask may have of a limit beside what silent ones may admit alone.

    It is never less than their own shares: some of the silent ones have died, and their successors are present.
    """
    here = present.gateways - present.silent
    return min(1.0, max(MAX_SHARE - present.alone, MAX_SHARE * here / present.gateways))


def _careful(replicas: int) -> float:
    """Return the share of a gateway alone as long as another may still have the whole limit from the ledger."""
    return (MAX_SHARE - 1.0) / (replicas - 1) if replicas > 1 else 1.0
