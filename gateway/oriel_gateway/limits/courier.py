"""Between meters and their ledger: batches, time budgets, the breaker, the beat.

Asks of one loop iteration travel as one batch; a few batches may be under way at a time. A batch that is not answered
within the budget counts as a failure, and makes room for the next; its answer still counts if it comes later, so a slow
ledger loses no units. After five failures in a row nobody asks any more: each gateway admits its share alone, and the
beat, once a second, tries whether the ledger is back. No call ever waits for that; and as long as a ledger that came
back is on probation, calls wait for it `DOUBTFUL_S` at most.

Who is alone cannot know whether the others are as well. If they are, N shares of 1.5 / N are what is promised; if they
are not, those shares come on top of the whole limit that the others admit. So at first a gateway that is alone takes
so little that it does not matter (`_careful`), until the others, who hear from the ledger who is silent, have made room
for its whole share (`rest`).
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from oriel_gateway.limits.ledger import PRESENCE_S, Ledger, LedgerLost, Question
from oriel_policies.breaker import Breaker
from oriel_policies.ledger import Answer, Ask

__all__ = ["BUDGET_S", "Courier", "Reporting"]

_log = logging.getLogger(__name__)

BUDGET_S = 0.02
LOST_S = 0.5  # after this a batch is given up
BEAT_S = 1.0
PROBE_S = 0.9  # with the tick it is looked at, about once a second
TICK_S = 0.0625
CLOSE_S = 0.25
MAX_BATCH = 64  # what one turn of the loop can put together well within the budget
MAX_TICKED = 2000  # meters looked at per tick; the others are next
MAX_LANES = 4  # batches within their budget
MAX_UNDER_WAY = 16
MAX_WAITING = 100_000
MAX_SHARE = 1.5
_LEAST_REST = 0.01
DOUBTFUL_S = 0.005
CAREFUL_S = PRESENCE_S + BEAT_S + 0.5  # after this the others know

Done = Callable[[list[Answer] | None], None]


class Reporting(Protocol):
    """A meter that may have something to say or to want."""

    tenant: str

    def tick(self, now: float) -> Ask | None:
        """An ask that no call waits for, or None."""

    def ended(self, ask: Ask, answer: Answer | None, now: float) -> None:
        """What became of it."""

    def parting(self, now: float) -> Ask | None:
        """The last words before this gateway ends: what is left over goes back."""

    def quiet(self, now: float) -> bool:
        """Whether there will be nothing to say until the next take."""


class Courier:
    """Single writer: the loop it is opened on. replicas: gateways to reckon with until the ledger says a number.

    share: what this gateway may admit alone of every limit while nobody can be asked. rest: what of every limit is left
    for those who do ask, because others have fallen silent.
    """

    def __init__(
        self, ledger: Ledger, *, replicas: int = 1, budget_s: float = BUDGET_S, clock: Callable[[], float] = monotonic
    ) -> None:
        self._ledger = ledger
        self._budget_s = budget_s
        self._clock = clock
        self._breaker = Breaker(probe_s=PROBE_S)
        self._least = max(1, replicas)
        self.replicas = self._least
        self.share = _careful(self._least)
        self.rest = 1.0
        self._alone_s: float | None = None  # since when
        self._waiting: deque[tuple[Question, Done]] = deque()
        self._active: OrderedDict[Reporting, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes = 0
        self._pumping = False
        self._ticking: asyncio.TimerHandle | None = None
        self._beat_s = 0.0
        self._beating = False
        self._closed = False
        self.late = 0  # batches that missed their budget or were lost
        self.asked = 0  # batches in all

    @property
    def up(self) -> bool:
        """Whether the ledger is asked at all."""
        return self._breaker.closed

    def patience_s(self, now: float) -> float:
        """How long a call waits for an answer."""
        return min(DOUBTFUL_S, self._budget_s) if self._breaker.on_probation(now) else self._budget_s

    def active(self, meter: Reporting) -> None:
        """Tick this meter until it is quiet."""
        self._active[meter] = None
        if self._ticking is None and not self._closed:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def send(self, tenant: str, asks: Sequence[Ask], done: Done) -> None:
        """Ask soon; `done` hears the answers, or None when they are lost. Never called before this returns."""
        if len(self._waiting) >= MAX_WAITING:
            asyncio.get_running_loop().call_soon(done, None)
            return
        self._waiting.append(((tenant, asks), done))
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def open(self) -> None:
        """Begin to beat."""
        self._tick()

    async def close(self) -> None:
        """Give back what is left over, if the ledger takes it in time."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        now = self._clock()
        said = [(meter.tenant, meter.parting(now)) for meter in self._active if self.up]
        questions: list[Question] = [(tenant, [ask]) for tenant, ask in said if ask is not None]
        try:
            async with asyncio.timeout(CLOSE_S):
                for start in range(0, len(questions), MAX_BATCH):
                    await self._ledger.ask(questions[start : start + MAX_BATCH])
        except (LedgerLost, TimeoutError):
            _log.info("what this gateway had leased was not given back: it runs out by itself")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._ledger.close()

    def _pump(self) -> None:
        self._pumping = False
        while self._waiting and self._lanes < MAX_LANES and len(self._tasks) < MAX_UNDER_WAY:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            if not self.up:
                for _, done in batch:
                    done(None)
                continue
            self._lanes += 1
            self.asked += 1
            task = asyncio.get_running_loop().create_task(self._carry(batch))
            self._tasks.add(task)
            task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a batch of asks ended in an error", exc_info=error)

    async def _carry(self, batch: list[tuple[Question, Done]]) -> None:
        """One batch, from its asks to the last `done`."""
        in_time = True

        def overdue() -> None:
            nonlocal in_time
            in_time = False
            self._lanes -= 1
            self._failed("too slow")
            self._pump()

        timer = asyncio.get_running_loop().call_later(self._budget_s, overdue)
        answers: Sequence[list[Answer] | None] | None = None
        try:
            async with asyncio.timeout(LOST_S):
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
            self._beat_s = now + BEAT_S
            self._beating = True
            task = asyncio.get_running_loop().create_task(self._beat(probe=probe))
            self._tasks.add(task)
            task.add_done_callback(self._carried)
        up = self.up
        if self._alone_s is not None and now >= self._alone_s + CAREFUL_S:
            self.share = _share(self.replicas)
        for _ in range(min(len(self._active), MAX_TICKED)):
            meter, _ = self._active.popitem(last=False)
            ask = meter.tick(now) if up else None
            if ask is not None:
                self.send(meter.tenant, [ask], self._reported(meter, ask))
            if ask is not None or not meter.quiet(now):
                self._active[meter] = None
        if not self._closed:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _reported(self, meter: Reporting, ask: Ask) -> Done:
        return lambda answers: meter.ended(ask, answers[0] if answers else None, self._clock())

    async def _beat(self, *, probe: bool) -> None:
        """Say hello; while the breaker is open that is its probe. A slow answer is no answer."""
        try:
            async with asyncio.timeout(self._budget_s if probe else LOST_S):
                present = await self._ledger.hello(_share(self.replicas))
            rest = max(_LEAST_REST, min(1.0, MAX_SHARE - present.alone))
            if rest < self.rest:
                _log.warning(
                    "gateways that share the limits are silent and may admit %.2f of each alone: %.2f of it is left "
                    "for those that ask",
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
        self.late += 1
        was = self.up
        self._breaker.failed(self._clock())
        if was and not self.up:
            self._alone_s = self._clock()
            _log.warning(
                "the limiter's ledger does not answer within %g ms (%s): until it does, this gateway admits its share, "
                "%.2f of every limit, alone",
                self._budget_s * 1e3,
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
            _log.info("the limiter's ledger answers again, %d gateways share it", self.replicas)


def _share(replicas: int) -> float:
    """What each of N gateways may admit of every limit while it cannot ask: 1 / N x min(1.5, N / 2), and >= 1 / N.

    All of them stay within 1.5 x the limit together if all have lost the ledger, and also if some have and the others
    leave them room.
    """
    return max(1.0, min(MAX_SHARE, replicas / 2)) / replicas


def _careful(replicas: int) -> float:
    """The same while one gateway alone may still have the whole limit from the ledger."""
    return (MAX_SHARE - 1.0) / (replicas - 1) if replicas > 1 else 1.0
