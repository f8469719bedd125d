"""Keep which endpoints of a pool have a model: "unmodified" servers of one pool often have different models.

| what is known of a model | which endpoints get its calls |
|---|---|
| nothing, in a pool with a probe path | none yet: all endpoints are probed at once for the model |
| some endpoints lack it (they reported or denied it) | the others |
| every endpoint lacks it | any; the model is not probed again for `NOWHERE_S`: their 404 is the answer |

An endpoint *denies* a model in its answer to a call (it lacks the model, or the memory to load it), and *reports* that
it lacks the model in its answer to a probe. A denial weighs more than a report. A denial is believed for `ABSENT_S`;
then the next call goes where the model was, and all endpoints are probed again meanwhile. A report of absence counts
only while another endpoint reports the model: servers that do not know the question all report its absence.

Bounds: `MAX_MODELS` models that some endpoint has, and as many that no endpoint has; `ASKS_PER_S` probes per second and
pool, with a burst of one second; no probe lasts longer than `ANSWER_S`. Beyond a bound, a call may go to any endpoint.
Single writer: the gateway's loop.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

ABSENT_S = 10.0
NOWHERE_S = 2.0
AGAIN_S = 1.0
MOVED_S = 0.1  # applies when no usable endpoint is left that may have the model
MAX_MODELS = 4096
ASKS_PER_S = 100.0
ANSWER_S = 0.25
LATER_ANSWERS_S = 0.05  # a probe goes on for this long after the first endpoint has reported the model


class Askable(Protocol):
    """An endpoint that can be probed for a model."""

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        """Call `done` once: whether the model is ready there, or None if the endpoint gave no usable answer."""


# Called on the loop, at most once, when every endpoint has answered or the time for a probe is over.
Finished = Callable[[], None]
E = TypeVar("E", bound=Askable)


class _Location(Generic[E]):
    """The endpoints that lack one model.

    denied: endpoints that denied the model to a call, and until when that is believed.
    reported: endpoints that reported its absence to a probe.
    due_s: the time when the model has to be probed again.
    probed_s: the time when all endpoints were probed last.
    """

    __slots__ = ("denied", "due_s", "probed_s", "reported")

    def __init__(self, due_s: float) -> None:
        self.denied: dict[E, float] = {}
        self.reported: set[E] = set()
        self.due_s = due_s
        self.probed_s = 0.0

    def lacks(self, endpoint: E) -> bool:
        return endpoint in self.denied or endpoint in self.reported


class _Probe(Generic[E]):
    """A probe of many endpoints for one model.

    It ends when all have answered, shortly after the first one that has the model, or after `ANSWER_S`.
    """

    def __init__(self, model: str, endpoints: Sequence[E], done: "Callable[[_Probe[E]], None]") -> None:
        self.endpoints = endpoints
        self.yes: set[E] = set()
        self.no: set[E] = set()
        self.waiters: dict[Finished, None] = {}
        self._done: Callable[[_Probe[E]], None] | None = done
        self._left = len(endpoints)
        self._timer = asyncio.get_running_loop().call_later(ANSWER_S, self._end)
        self._model = model

    def start(self) -> None:
        for endpoint in self.endpoints:
            endpoint.ask_for_model(self._model, ANSWER_S, partial(self._answer, endpoint))

    def _answer(self, endpoint: E, ready: bool | None) -> None:
        self._left -= 1
        if ready is not None:
            if ready and not self.yes:
                self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(LATER_ANSWERS_S, self._end)
            (self.yes if ready else self.no).add(endpoint)
        if not self._left:
            self._end()

    def _end(self) -> None:
        self._timer.cancel()
        done, self._done = self._done, None
        if done is not None:
            done(self)


class ModelLocations(Generic[E]):
    """The models of one pool's endpoints.

    usable: returns the endpoints that can be picked now.
    probe_first: True if endpoints are probed before the first call for a model is sent.
    needs_check: False while nothing is known or to be probed, so that a pick need not consider the model.
    everywhere: models that every endpoint has; a pick need not consider them.
    moved_s: between two probes for a model that no usable endpoint is left for.
    max_models: models that are remembered of each kind.
    """

    def __init__(self, usable: Callable[[], Sequence[E]], *, probe_first: bool = False) -> None:
        self._usable = usable
        self.probe_first = probe_first
        self.needs_check = False
        self.everywhere: dict[str, None] = {"": None}
        self.moved_s = MOVED_S
        self.max_models = MAX_MODELS
        # narrows the endpoints for a model that none has: those that shall load it
        self.loads_first: Callable[[str, Sequence[E]], Sequence[E]] | None = None
        self._somewhere: dict[str, _Location[E]] = {}  # models that some endpoint has or may have
        self._nowhere: dict[str, _Location[E]] = {}  # models that no endpoint has, or that could not be probed
        self._probes: dict[str, _Probe[E]] = {}
        self._budget = ASKS_PER_S
        self._budget_s = 0.0
        self._turn = 0

    def assigned(self, members: Sequence[E], new: Sequence[E]) -> None:
        """Adapt to the pool's new members. New ones are probed for a model before calls for it go there."""
        present = set(members)
        for location in self._somewhere.values():
            location.denied = {member: until for member, until in location.denied.items() if member in present}
            location.reported &= present
        self._nowhere.clear()
        if self.probe_first and new:
            self._somewhere |= {model: _Location(0.0) for model in self.everywhere if model}
            self.everywhere.clear()
            self.everywhere[""] = None
            for location in self._somewhere.values():
                location.reported |= set(new)
                location.due_s = 0.0
        self.needs_check = bool(self._somewhere) or (self.probe_first and len(members) > 1)

    def unknown(self, model: str, now: float) -> bool:
        """Return whether all endpoints have to be probed before a call for this model is sent."""
        if not self.probe_first or model in self.everywhere or model in self._somewhere or len(self._usable()) < 2:
            return False
        return self._found_nowhere(model, now) is None

    def among(self, usable: Sequence[E], model: str, now: float) -> Sequence[E]:
        """Narrow `usable` to those that may have the model: all if none has it, and none while it is `unknown`."""
        if model in self.everywhere:
            return usable
        location = self._somewhere.get(model)
        if location is not None:
            if location.due_s <= now and model not in self._probes:
                location.due_s = now + AGAIN_S
                if not self.probe(model, None, now) and not location.reported:
                    location.denied = {member: until for member, until in location.denied.items() if until > now}
            return [member for member in usable if not location.lacks(member)] or usable
        if self.unknown(model, now):
            return ()
        location = self._nowhere.get(model)
        if location is not None and location.denied:
            usable = [member for member in usable if location.denied.get(member, 0.0) <= now] or usable
        return usable if self.loads_first is None else self.loads_first(model, usable)

    def elsewhere(self, model: str, now: float, tried: Sequence[E]) -> bool:
        """Return whether a usable endpoint that was not tried may have the model."""
        location = self._somewhere.get(model) or self._found_nowhere(model, now)
        return any(
            member not in tried and (location is None or not location.lacks(member)) for member in self._usable()
        )

    def lacks(self, endpoint: E, model: str, now: float) -> bool:
        """Return whether this endpoint is known to lack the model."""
        location = self._somewhere.get(model) or self._found_nowhere(model, now)
        return location is not None and location.lacks(endpoint)

    def lacking(self, model: str, now: float) -> Sequence[E]:
        """The usable endpoints that lack the model while others may have it."""
        usable = self._usable()
        if not self.needs_check or model in self.everywhere:
            return ()
        among = self.among(usable, model, now)
        return [member for member in usable if member not in among] if among else ()

    def note_denied(self, endpoint: E, model: str, now: float) -> None:
        """Record that the endpoint denied the model to a call."""
        location = self._somewhere.get(model) or self._found_nowhere(model, now)
        if location is None:
            self.everywhere.pop(model, None)
            old = self._nowhere.pop(model, None)
            self._make_room(self._somewhere)
            # A pool without a probe path begins to probe once it has met an endpoint that lacks the model.
            location = self._somewhere[model] = _Location(0.0)
            if old is not None:
                location.denied = {member: until for member, until in old.denied.items() if until > now}
        location.denied[endpoint] = now + ABSENT_S
        self.needs_check = True

    def note_reported(self, model: str, having: Collection[E], now: float) -> None:
        """Record which usable endpoints have a model in memory, by their own reports. having: one or more."""
        location = self._somewhere.get(model)
        lacking = {endpoint for endpoint in self._usable() if endpoint not in having}
        if location is None:
            if not lacking:
                return
            self.everywhere.pop(model, None)
            self._nowhere.pop(model, None)
            self._make_room(self._somewhere)
            location = self._somewhere[model] = _Location(0.0)
        location.denied = {endpoint: until for endpoint, until in location.denied.items() if until > now}
        location.reported = lacking
        location.due_s = now + ABSENT_S
        self.needs_check = True
        if not lacking and not location.denied:
            del self._somewhere[model]
            self._note_everywhere(model)

    def may_probe(self, model: str, now: float) -> bool:
        """Return whether it is time to probe for this model, for the first time or again."""
        if model in self._probes:
            return True
        location = self._somewhere.get(model)
        if location is not None:
            left = any(not location.lacks(member) for member in self._usable())
            return now - location.probed_s >= (AGAIN_S if left else self.moved_s)
        return self._found_nowhere(model, now) is None

    def probe(self, model: str, waiter: Finished | None, now: float) -> bool:
        """Probe all endpoints for the model, or join a probe under way.

        Returns False if no probe was possible; then `waiter` is not called.
        """
        probe = self._probes.get(model)
        if probe is None:
            usable = self._usable()
            probed = self._in_turn(usable, int(self._allowed(now)))
            if len(usable) < 2 or not probed:
                if model not in self._somewhere:
                    self._note_nowhere(model, _Location(now + AGAIN_S))
                return False
            self._budget -= len(probed)
            probe = self._probes[model] = _Probe(model, probed, partial(self._finish, model))
            probe.start()
        if waiter is not None:
            probe.waiters[waiter] = None
        return True

    def stop_waiting(self, model: str, waiter: Finished) -> None:
        """Do not call this waiter when the probe for the model ends."""
        probe = self._probes.get(model)
        if probe is not None:
            probe.waiters.pop(waiter, None)

    def _found_nowhere(self, model: str, now: float) -> "_Location[E] | None":
        location = self._nowhere.get(model)
        return location if location is not None and location.due_s > now else None

    def _note_nowhere(self, model: str, location: "_Location[E]") -> None:
        self._nowhere.pop(model, None)
        self._make_room(self._nowhere)
        self._nowhere[model] = location

    def _note_everywhere(self, model: str) -> None:
        del self.everywhere[""]
        self._make_room(self.everywhere)
        self.everywhere |= {model: None, "": None}  # "" is never the oldest

    def _allowed(self, now: float) -> float:
        self._budget = min(ASKS_PER_S, self._budget + (now - self._budget_s) * ASKS_PER_S)
        self._budget_s = now
        return self._budget

    def _in_turn(self, usable: Sequence[E], count: int) -> Sequence[E]:
        """All of `usable`, or `count` of them beginning where the last probe ended; none if `count` is too small."""
        if len(usable) <= count:
            return list(usable)
        if count < min(len(usable), int(ASKS_PER_S) // 2):
            return ()
        self._turn = start = (self._turn + count) % len(usable)
        return [*usable[start:], *usable[:start]][:count]

    def _finish(self, model: str, probe: "_Probe[E]") -> None:
        self._probes.pop(model, None)
        now = monotonic()
        location = self._somewhere.get(model) or self._nowhere.pop(model, None) or _Location[E](0.0)
        self._somewhere.pop(model, None)
        denied = {member: until for member, until in location.denied.items() if until > now}
        location.probed_s = now
        if probe.yes:
            if probe.yes <= denied.keys():  # the model was gone from there, and is back
                denied = {member: until for member, until in denied.items() if member not in probe.yes}
            silent = {member for member in probe.endpoints if member not in probe.yes and member not in probe.no}
            location.denied = denied
            location.reported = (location.reported - probe.yes) | probe.no | silent
            location.due_s = now + (AGAIN_S if silent else ABSENT_S)
            if denied or location.reported:
                self._make_room(self._somewhere)
                self._somewhere[model] = location
            else:
                self._note_everywhere(model)
        else:
            location.denied, location.reported, location.due_s = denied, probe.no, now + NOWHERE_S
            self._note_nowhere(model, location)
        for waiter in probe.waiters:
            waiter()

    def _make_room(self, remembered: dict[str, Any]) -> None:
        """Drop the oldest entry if there are as many as may be remembered."""
        if len(remembered) >= self.max_models:
            del remembered[next(iter(remembered))]
