"""Which endpoints of a pool have a model: "unmodified" servers of one pool often have different ones.

| what is known of a model | who is asked |
|---|---|
| nothing, in a pool that is probed | nobody yet: all are asked at once whether the model is ready there |
| some have it not (asked, or a call was told so) | the others |
| nobody has it | anyone, and nobody is asked again for `NOWHERE_S`: their 404 is the answer |

What an endpoint says to a call weighs more than what it says when asked. "No" is believed for `ABSENT_S`; then the
next call goes where the model was, and meanwhile everybody is asked again. "No" of an endpoint that was only asked
counts while another one says yes: servers that do not know the question all say no.

Bounds: `MAX_MODELS` models somebody has, as many that nobody has; `ASKS_PER_S` questions a second and pool, a second's
worth at once; no question is waited for longer than `ANSWER_S`. Where a bound is met, anyone is asked.
Single writer: the gateway's loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Askable", "Looker", "Places"]

ABSENT_S = 10.0
NOWHERE_S = 2.0
AGAIN_S = 1.0
MOVED_S = 0.1  # where the one that had it has it no more
MAX_MODELS = 4096
ASKS_PER_S = 100.0
ANSWER_S = 0.25
LATER_ANSWERS_S = 0.05  # after the first yes


class Askable(Protocol):
    """An endpoint, as far as this file is concerned."""

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        """`done` is told once whether the model is ready there; None: there is no telling."""


class Looker(Protocol):
    """Who waits for a search. Called on the loop, at most once."""

    def looked(self) -> None:
        """What can be known is."""


E = TypeVar("E", bound=Askable)


class _Place(Generic[E]):
    """told: who said to a call that it has not the model, until when that is believed; said: who said so when it was
    asked; due_s: until when all this is believed; looked_s: when everybody was asked."""

    __slots__ = ("due_s", "looked_s", "said", "told")

    def __init__(self, due_s: float) -> None:
        self.told: dict[E, float] = {}
        self.said: set[E] = set()
        self.due_s = due_s
        self.looked_s = 0.0

    def lacks(self, one: E) -> bool:
        return one in self.told or one in self.said


class _Search(Generic[E]):
    """One question to many. Ends when all have answered, shortly after a first yes, or when time is up."""

    __slots__ = ("_done", "_left", "_model", "_timer", "asked", "lookers", "no", "yes")

    def __init__(self, model: str, asked: Sequence[E], done: "Callable[[_Search[E]], None]") -> None:
        self.asked = asked
        self.yes: set[E] = set()
        self.no: set[E] = set()
        self.lookers: dict[Looker, None] = {}
        self._done: Callable[[_Search[E]], None] | None = done
        self._left = len(asked)
        self._timer = asyncio.get_running_loop().call_later(ANSWER_S, self._end)
        self._model = model

    def start(self) -> None:
        for one in self.asked:
            one.ask_for_model(self._model, ANSWER_S, partial(self._answer, one))

    def _answer(self, one: E, ready: bool | None) -> None:
        self._left -= 1
        if ready is not None:
            if ready and not self.yes:
                self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(LATER_ANSWERS_S, self._end)
            (self.yes if ready else self.no).add(one)
        if not self._left:
            self._end()

    def _end(self) -> None:
        self._timer.cancel()
        done, self._done = self._done, None
        if done is not None:
            done(self)


class Places(Generic[E]):
    """See the module's head. usable: the endpoints that can be asked now.

    first: ask before the first call for a model. wary: something is known, or has to be; only then a pick has to
    care, and not about `plain` models, which every endpoint has.
    """

    def __init__(self, usable: Callable[[], Sequence[E]], *, first: bool = False) -> None:
        self._usable = usable
        self.first = first
        self.wary = False
        self.plain: dict[str, None] = {"": None}
        self._places: dict[str, _Place[E]] = {}  # of models that somebody has, or may have
        self._anyone: dict[str, _Place[E]] = {}  # of models that nobody has, or nobody could be asked for
        self._searches: dict[str, _Search[E]] = {}
        self._asks = ASKS_PER_S
        self._asks_s = 0.0
        self._turn = 0

    def assigned(self, members: Sequence[E], new: Sequence[E]) -> None:
        """Others are in the pool now. Whether new ones have a model is asked before calls for it go there."""
        there = set(members)
        for place in self._places.values():
            place.told = {one: until for one, until in place.told.items() if one in there}
            place.said &= there
        self._anyone.clear()
        if self.first and new:
            self._places |= {model: _Place(0.0) for model in self.plain if model}
            self.plain.clear()
            self.plain[""] = None
            for place in self._places.values():
                place.said |= set(new)
                place.due_s = 0.0
        self.wary = bool(self._places) or (self.first and len(members) > 1)

    def unknown(self, model: str, now: float) -> bool:
        """Whether everybody has to be asked before a call is sent."""
        if not self.first or model in self.plain or model in self._places or len(self._usable()) < 2:
            return False
        return self._nobody(model, now) is None

    def among(self, usable: Sequence[E], model: str, now: float) -> Sequence[E]:
        """Those of `usable` that may have the model, all of them if nobody has; none while it is `unknown`."""
        if model in self.plain:
            return usable
        place = self._places.get(model)
        if place is not None:
            if place.due_s <= now and model not in self._searches:
                place.due_s = now + AGAIN_S
                if not self.look(model, None, now) and not place.said:
                    place.told = {one: until for one, until in place.told.items() if until > now}
            return [one for one in usable if not place.lacks(one)] or usable
        if self.unknown(model, now):
            return ()
        place = self._anyone.get(model)
        if place is None or not place.told:
            return usable
        return [one for one in usable if place.told.get(one, 0.0) <= now] or usable

    def elsewhere(self, model: str, now: float, tried: Sequence[E]) -> bool:
        """Whether one that was not tried may have the model."""
        place = self._places.get(model) or self._nobody(model, now)
        return any(one not in tried and (place is None or not place.lacks(one)) for one in self._usable())

    def lacks(self, one: E, model: str, now: float) -> bool:
        """Whether this endpoint is known not to have the model."""
        place = self._places.get(model) or self._nobody(model, now)
        return place is not None and place.lacks(one)

    def lacking(self, model: str, now: float) -> Sequence[E]:
        """The usable ones that have not the model, while others may have it."""
        usable = self._usable()
        if not self.wary or model in self.plain:
            return ()
        among = self.among(usable, model, now)
        return [one for one in usable if one not in among] if among else ()

    def told(self, one: E, model: str, now: float) -> None:
        """A call was told that the endpoint has not the model."""
        place = self._places.get(model) or self._nobody(model, now)
        if place is None:
            self.plain.pop(model, None)
            old = self._anyone.pop(model, None)
            _bound(self._places)
            # A pool that is not probed begins to ask when it has met an endpoint without the model.
            place = self._places[model] = _Place(0.0)
            if old is not None:
                place.told = {one: until for one, until in old.told.items() if until > now}
        place.told[one] = now + ABSENT_S
        self.wary = True

    def may_look(self, model: str, now: float) -> bool:
        """Whether it is time to ask for this model (again)."""
        if model in self._searches:
            return True
        place = self._places.get(model)
        if place is not None:
            left = any(not place.lacks(one) for one in self._usable())
            return now - place.looked_s >= (AGAIN_S if left else MOVED_S)
        return self._nobody(model, now) is None

    def look(self, model: str, looker: Looker | None, now: float) -> bool:
        """Ask everybody for the model, or join whoever does; False: nothing is asked, and `looker` not told."""
        search = self._searches.get(model)
        if search is None:
            usable = self._usable()
            asked = self._in_turn(usable, int(self._allowed(now)))
            if len(usable) < 2 or not asked:
                if model not in self._places:
                    self._open(model, _Place(now + AGAIN_S))
                return False
            self._asks -= len(asked)
            search = self._searches[model] = _Search(model, asked, partial(self._found, model))
            search.start()
        if looker is not None:
            search.lookers[looker] = None
        return True

    def leave(self, model: str, looker: Looker) -> None:
        """Who waited does not any more."""
        search = self._searches.get(model)
        if search is not None:
            search.lookers.pop(looker, None)

    def _nobody(self, model: str, now: float) -> "_Place[E] | None":
        place = self._anyone.get(model)
        return place if place is not None and place.due_s > now else None

    def _open(self, model: str, place: "_Place[E]") -> None:
        self._anyone.pop(model, None)
        _bound(self._anyone)
        self._anyone[model] = place

    def _allowed(self, now: float) -> float:
        self._asks = min(ASKS_PER_S, self._asks + (now - self._asks_s) * ASKS_PER_S)
        self._asks_s = now
        return self._asks

    def _in_turn(self, usable: Sequence[E], count: int) -> Sequence[E]:
        """All of them, or as many as may be asked at once: others the next time. None if too few may."""
        if len(usable) <= count:
            return list(usable)
        if count < min(len(usable), int(ASKS_PER_S) // 2):
            return ()
        self._turn = start = (self._turn + count) % len(usable)
        return [*usable[start:], *usable[:start]][:count]

    def _found(self, model: str, search: "_Search[E]") -> None:
        self._searches.pop(model, None)
        now = monotonic()
        place = self._places.get(model) or self._anyone.pop(model, None) or _Place[E](0.0)
        self._places.pop(model, None)
        told = {one: until for one, until in place.told.items() if until > now}
        place.looked_s = now
        if search.yes:
            if search.yes <= told.keys():  # it was gone, and is back
                told = {one: until for one, until in told.items() if one not in search.yes}
            silent = {one for one in search.asked if one not in search.yes and one not in search.no}
            place.told = told
            place.said = (place.said - search.yes) | search.no | silent
            place.due_s = now + (AGAIN_S if silent else ABSENT_S)
            if told or place.said:
                _bound(self._places)
                self._places[model] = place
            else:
                del self.plain[""]
                _bound(self.plain)
                self.plain |= {model: None, "": None}  # "" is never the oldest
        else:
            place.told, place.said, place.due_s = told, search.no, now + NOWHERE_S
            self._open(model, place)
        for looker in search.lookers:
            looker.looked()


def _bound(remembered: dict[str, Any]) -> None:
    """Room for one more: the oldest goes."""
    if len(remembered) >= MAX_MODELS:
        del remembered[next(iter(remembered))]
