"""Holds the calls for models that are not loaded, and has each of those models loaded once for all of them.

Rules.
1. The first call for a model starts its load; calls that come meanwhile wait for the same load. They wait in one queue
   per model, in the usual order, under their own deadlines and tiers, and within the bounds of a model's queue.
2. A call whose deadline is closer than the shortest load of that model so far is refused at once, with the seconds that
   the load still needs. The load goes on: the next call finds the model.
3. A caller that leaves frees its place. A load that has begun is finished, even if all its callers have left.
4. When the model serves, its calls begin in the order of the queue, PIECE of them in one turn of the loop. If the load
   fails, each of them is refused with the reason, and so is every call in the next RETRY_S seconds, or ten times the
   load if that is longer; then a call may start another load.
5. A load that found no memory is not tried again for FULL_PAUSE_S, and for twice as long each further time up to
   LONGEST_PAUSE_S, or a flood of calls would be a flood of tries.
6. A model with waiting calls counts as leased, and so do those that its load needs.
7. Calls that found their model not loaded are counted, also those that are refused: they are its demand for memory, and
   that of the models which its load needs.

Owner and single writer: the loop.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from oriel_inference.catalog import Catalog
from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    ModelMemoryFull,
    ModelNotReady,
    NoVersion,
    QueueFull,
    ServerStopping,
)
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_wire.context import CallContext
from oriel_wire.v2.datatypes import quoted

_log = logging.getLogger(__name__)

RETRY_S = 10.0
RETRY_LOADS = 10.0
FULL_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0
PIECE = 32


# A waiting call: the functions that begin it again and that end it with an error. One of both is called, once.
_Waiting = tuple[Callable[[], None], Callable[[InferenceError], None]]


@dataclass(frozen=True, slots=True)
class _Full:
    """A load that found no memory. until_s: the time when it may be tried again, pause_s after it was refused."""

    until_s: float
    pause_s: float
    why: ModelMemoryFull


class _Load:
    """One load and the calls that wait for it. needs: the models of an ensemble's steps, which it loads first."""

    def __init__(self, queue: SlaQueue, began_s: float, ended: "asyncio.Future[str]") -> None:
        self.queue = queue
        self.began_s = began_s
        self.ended = ended
        self.needs: set[str] = set()
        self.timer: Timer | None = None


class Demand:
    """The loads that calls have asked for.

    bring: loads a model; returns why (part of) it was refused, "" if all went well. Raises InferenceError.
    spawn: starts a task that ends with the server.
    max_items, max_bytes: bounds of the calls that wait for one model.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        bring: Callable[[str], Coroutine[Any, Any, str]],
        max_items: int,
        max_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._spawn = spawn
        self._bring = bring
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._loads: dict[str, _Load] = {}
        self._failed: dict[str, tuple[float, str]] = {}  # model -> (until when it is not tried again, why)
        self._full: dict[str, _Full] = {}
        self._shortest_s: dict[str, float] = {}
        self._needs: dict[str, frozenset[str]] = {}  # ensemble -> the models that its latest load needed
        self._missed: Counter[str] = Counter()
        self._closed = False

    # Callers ----------------------------------------------------------------------------------------------------

    def wait(
        self,
        model: str,
        ctx: CallContext,
        *,
        size_bytes: int,
        resume: Callable[[], None],
        refuse: Callable[[InferenceError], None],
    ) -> Callable[[], None]:
        """Have a call wait until its model serves, and start the load if none is under way.

        resume: called when the model serves; it begins the call again.
        refuse: called instead of `resume` if the load fails or the deadline passes.

        Returns the function to call when the caller leaves. Raises InferenceError; then neither is called.
        """
        now = self._clock.now()
        self._missed.update((model, *self._needs.get(model, ())))
        load = self._find(model, now)
        if ctx.deadline <= now:
            raise DeadlineExceeded("loading")
        needs_s = self._shortest_s.get(model, 0.0) - (now - load.began_s)
        if ctx.deadline - now < needs_s:
            raise ModelNotReady(
                f"model {quoted(model)} is being loaded, which takes {needs_s:.1f} s more, and this request has less",
                retry_s=needs_s,
            )
        ticket = Ticket(
            band=ctx.band,
            tenant=ctx.tenant,
            deadline=ctx.deadline,
            size_bytes=size_bytes,
            payload=(resume, refuse),
        )
        displaced = load.queue.push(ticket)
        if displaced is None:
            raise QueueFull(f"too many requests already wait for model {quoted(model)} to be loaded")
        for each in displaced:
            _end(each, QueueFull(f"a more urgent request took the place among those that wait for {quoted(model)}"))
        self._watch(load)
        return lambda: self._leave(load, ticket)

    async def load(self, model: str, *, again: bool = False) -> str:
        """Load a model as a call would, or wait for the load under way; return why (part of) it was refused, "" if all
        went well.

        again: True to load even if a load has failed lately.

        Raises InferenceError. The load goes on if this is cancelled.
        """
        load = self._find(model, self._clock.now(), again=again)
        return await asyncio.shield(load.ended)

    def need(self, model: str, parts: Iterable[str]) -> None:
        """Record that the load of a model needs others, which must stay until its calls have begun."""
        load = self._loads.get(model)
        if load is not None:
            load.needs.update(parts)
            self._needs[model] = frozenset(load.needs)

    def take_missed(self) -> Counter[str]:
        """Return model -> the calls that found it not loaded since the last time."""
        missed, self._missed = self._missed, Counter()
        return missed

    def is_needed(self, model: str) -> bool:
        """Return whether calls wait for a model, or the load of another needs it."""
        return model in self._loads or any(model in load.needs for load in self._loads.values())

    def changed(self, model: str) -> None:
        """Forget why a model could not be loaded, because its files have changed."""
        self._failed.pop(model, None)
        self._full.pop(model, None)
        self._shortest_s.pop(model, None)
        self._needs.pop(model, None)

    @property
    def waiting(self) -> dict[str, int]:
        """Return the number of waiting calls of each model that is being loaded."""
        return {model: len(load.queue) for model, load in self._loads.items()}

    def close(self) -> None:
        """Refuse the calls that wait, and accept no more."""
        self._closed = True
        for load in self._loads.values():
            self._refuse_all(load, ServerStopping())

    # Loads ------------------------------------------------------------------------------------------------------

    def _find(self, model: str, now: float, *, again: bool = False) -> _Load:
        """Return the load of a model; start one if there is none. again: even if one has failed lately. Raises
        InferenceError.
        """
        if self._closed:
            raise ServerStopping
        load = self._loads.get(model)
        if load is None:
            until_s, reason = self._failed.get(model, (0.0, ""))
            if now < until_s and not again:
                raise _no_version(model, reason)
            full = self._full.get(model)
            if full is not None and now < full.until_s and not again:
                raise ModelMemoryFull(full.why.message, retry_s=full.why.retry_s)
            queue = SlaQueue(max_items=self._max_items, max_bytes=self._max_bytes)
            load = self._loads[model] = _Load(queue, now, asyncio.get_running_loop().create_future())
            load.ended.add_done_callback(_read)
            self._spawn(self._run(model, load))
        return load

    async def _run(self, model: str, load: _Load) -> None:
        try:
            while True:
                reason = await self._bring(model)
                if not self._catalog.is_ready(model):
                    self._failed_load(model, load, reason or "it was unloaded")
                    return
                took_s = self._clock.now() - load.began_s
                self._shortest_s[model] = min(took_s, self._shortest_s.get(model, took_s))
                self._failed.pop(model, None)
                self._full.pop(model, None)
                if not load.ended.done():
                    load.ended.set_result(reason)
                await self._begin_calls(model, load)
                if not len(load.queue):
                    return
                load.began_s = self._clock.now()  # it was unloaded before all of them could begin
        except ModelMemoryFull as why:
            now, before, pause_s = self._clock.now(), self._full.get(model), FULL_PAUSE_S
            if before is not None and now < before.until_s + LONGEST_PAUSE_S:
                pause_s = min(2.0 * before.pause_s, LONGEST_PAUSE_S)
            self._full[model] = _Full(now + pause_s, pause_s, why)
            self._fail(load, why)
        except InferenceError as refusal:
            self._fail(load, refusal)
        except asyncio.CancelledError:
            self._fail(load, ServerStopping())
            raise
        except Exception:
            # An unexpected error in one load must not leave its callers without an answer.
            _log.exception("model %s could not be loaded", model)
            self._fail(load, BackendFailed("the model could not be loaded, the server's log says why"))
        finally:
            del self._loads[model]
            if load.timer is not None:
                load.timer.cancel()

    async def _begin_calls(self, model: str, load: _Load) -> None:
        while len(load.queue) and self._catalog.is_ready(model):
            for _ in range(PIECE):
                ticket = load.queue.pop()
                if ticket is None:
                    break
                _begin(ticket, model)
            await asyncio.sleep(0)

    def _failed_load(self, model: str, load: _Load, reason: str) -> None:
        now = self._clock.now()
        self._failed[model] = now + max(RETRY_S, RETRY_LOADS * (now - load.began_s)), reason
        self._fail(load, _no_version(model, reason))

    def _fail(self, load: _Load, error: InferenceError) -> None:
        self._refuse_all(load, error)
        if not load.ended.done():
            load.ended.set_exception(error)

    def _refuse_all(self, load: _Load, error: InferenceError) -> None:
        while (ticket := load.queue.pop()) is not None:
            _end(ticket, error)

    # Waiting calls ----------------------------------------------------------------------------------------------

    def _leave(self, load: _Load, ticket: Ticket) -> None:
        if load.queue.remove(ticket):
            ticket.payload = None

    def _watch(self, load: _Load) -> None:
        if load.timer is not None:
            load.timer.cancel()
        following = load.queue.next_deadline()
        load.timer = None if following is None else self._clock.call_at(following, lambda: self._expire(load))

    def _expire(self, load: _Load) -> None:
        for ticket in load.queue.expire(self._clock.now()):
            _end(ticket, DeadlineExceeded("loading"))
        self._watch(load)


def _take(ticket: Ticket) -> _Waiting:
    waiting: _Waiting = ticket.payload
    ticket.payload = None  # it refers to the exchange, which refers to the function that removes the ticket: a cycle
    return waiting


def _begin(ticket: Ticket, model: str) -> None:
    resume, refuse = _take(ticket)
    try:
        resume()
    except Exception:
        # The others that wait need their turns, too.
        _log.exception("a call that waited for model %s failed unexpectedly", model)
        refuse(BackendFailed("the server failed on this request"))


def _no_version(model: str, reason: str) -> NoVersion:
    return NoVersion(f"model {quoted(model)} has no available version: {reason}")


def _end(ticket: Ticket, error: InferenceError) -> None:
    try:
        _take(ticket)[1](error)
    except Exception:
        # The others that wait need their answers, too.
        _log.exception("a call that waited for its model could not be refused")


def _read(ended: "asyncio.Future[str]") -> None:
    """Mark the outcome as read: most loads have only callers that are refused one by one."""
    if not ended.cancelled():
        ended.exception()
