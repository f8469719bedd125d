"""Decides what is sent a second time, and where: only what surely did not execute, or what its route calls idempotent.

| what happened | was it executed? | what is done |
|---|---|---|
| no connection could be made | surely not | every other endpoint once; nothing was sent, so no budget |
| a kept connection closed before the request arrived | surely not | once, on a new connection; no budget |
| 503 whose `reason` or text says that it was not queued [2] | surely not | another endpoint, once, by the budget [1] |
| 404 or 503 that says that the model is not here [3] | surely not | the same, at an endpoint that may have it |
| closed or broken before the first byte of an answer | perhaps | if the call may run twice: once, within the budget |
| the same, while a second copy of the call is under way | | wait for the copy |
| no endpoint is left to ask | | wait for one, ask all for the model, or give up |

[1] Not where the call sticks to this endpoint, nor where the answer says that another gateway has passed it on.

[2] Our own reasons, and the text with which Triton refuses a request before it has a place anywhere
(`pools.upstream_answers`).

[3] In the words of Triton, KServe, OVMS or MLServer; any other 404 only if the server says so when it is asked.

At most two requests are sent for a call in a pool (`budget.MAX_ATTEMPTS`), never after the first byte of an answer went
to the client, and never when the body was not kept (more than 64 KiB). Deadlines are the call's own and do not grow.

Nothing here waits, sends or starts anything: a decision reads the endpoints and spends from the retry budget. `Call`
carries it out.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from oriel_gateway.errors import Outcome
from oriel_gateway.pools.endpoint_state import EndpointState, HttpEndpoint, Reach
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.sequences import Stick
from oriel_gateway.pools.upstream_answers import NO_ROOM, AnswerKind
from oriel_policies.upstreams.budget import ABSENT_SHARE, MAX_ATTEMPTS, RetryBudget
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread

__all__ = [
    "Attempts",
    "Because",
    "Decision",
    "GiveUp",
    "Send",
    "Wait",
    "and_this",
    "decided_by_itself",
    "mark_spent",
    "note_answer",
    "note_failure",
    "sticky_endpoint",
    "why_failed",
]

E = TypeVar("E", bound=EndpointState)
_SPENT = "x-oriel-retry"
# with an answer that is passed on: another gateway in front of this one does not try again
SPENT = b"x-oriel-retry: spent"


class Because(Enum):
    """The reason of a decision."""

    # Reasons to send again
    UNREACHABLE = "no connection could be made"
    UNREAD = "the connection closed before the request was read"
    IDEMPOTENT = "no answer came, and the call may run twice"
    REFUSED = "the endpoint did not queue the request"
    ABSENT = "the endpoint does not have the model"
    FOUND = "the endpoints were asked for the model"
    # Reasons to wait
    COPY = "the second copy may still be answered"
    MODEL = "it is not known which endpoints have the model"
    NOBODY_USABLE = "no endpoint of the pool can be asked"
    # Reasons to give up
    ANSWER = "the answer is for the client"
    PERHAPS_EXECUTED = "the request may have been executed"
    NOT_KEPT = "the body was sent and is not here any more"
    STICKS = "the call sticks to this endpoint"
    PASSED_ON = "another gateway has tried again already"
    ATTEMPTS = "no attempt is left"
    BUDGET = "the retry budget is empty"
    NOBODY_ELSE = "no other endpoint can be asked"
    LOST = "the endpoint with the state of the sequence cannot be asked"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to this endpoint; fresh: on a new connection."""

    endpoint: HttpEndpoint
    because: Because
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait: for a COPY, for the search for a MODEL, or until somebody is usable."""

    because: Because


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Pass the answer or the failure on to the client.

    search: ask all endpoints for the model, so that the next call finds it.
    """

    because: Because
    search: bool = False


Decision = Send | Wait | GiveUp


def note_answer(
    endpoints: EndpointSet[HttpEndpoint], endpoint: HttpEndpoint, head: Any, now: float, s: float, model: str
) -> None:
    """Tell the endpoints that a whole answer of `endpoint` came, `s` seconds after the request for `model`."""
    status = head.status
    if status < 400:
        endpoints.note_answer(endpoint, now, s, model)
    else:
        after = head.get("retry-after") or "" if status in (429, 503) else ""
        wait_s = float(after) if after.isdecimal() and len(after) < 6 else 0.0
        endpoints.note_error(endpoint, status, now, s, wait_s, model)


def note_failure(
    endpoints: EndpointSet[HttpEndpoint], endpoint: HttpEndpoint, error: UpstreamError, now: float, model: str
) -> None:
    """Tell the endpoints that no answer of `endpoint` came."""
    if isinstance(error, UpstreamUnreachable):
        endpoints.note_reach(endpoint, Reach.UNREACHABLE)
    elif not isinstance(error, UpstreamUnread):
        endpoints.note_broken(endpoint, now, model)


def why_failed(error: UpstreamError) -> str:
    """Return why an attempt got no answer: its outcome, if it had been the last."""
    unreachable = isinstance(error, UpstreamUnreachable)
    return (Outcome.UPSTREAM_UNREACHABLE if unreachable else Outcome.UPSTREAM_BROKEN).value


def mark_spent(head: Any) -> None:
    """Mark a 503 that is passed on: it was tried again here, as far as that was possible."""
    if head.status == 503 and SPENT not in head.forward:
        head.forward.append(SPENT)


def and_this(tried: tuple[E, ...], endpoint: E) -> tuple[E, ...]:
    """Add `endpoint` to those that are not asked again; leave out those that refuse connections, which are not picked
    anyway.

    Otherwise a call that meets a thousand servers that are all down would compare each with each.
    """
    return (*(one for one in tried if one.reach is not Reach.UNREACHABLE), endpoint)


def sticky_endpoint(
    endpoints: EndpointSet[HttpEndpoint], stick: Stick, model: str, now: float, tried: tuple[HttpEndpoint, ...] = ()
) -> HttpEndpoint | None:
    """Return the endpoint that a call's key chooses among those that can be asked and were not tried; a step of a
    sequence goes to the endpoint that it is bound to, or nowhere.
    """
    locations, endpoint = endpoints.model_locations, stick.bound
    if locations.unknown(model, now) if endpoint is None else endpoint.reach is Reach.UNREACHABLE:
        return None
    if endpoint is None:
        endpoint = endpoints.sticky.pick(endpoints.usable, stick.key, (*tried, *locations.lacking(model, now)))
    if endpoint is not None and not endpoint.outstanding:
        endpoint.record.heard_s = now
    if endpoint is not None and stick.room is not None and not endpoints.sequences.place(stick, endpoint, now):
        return None
    return endpoint


def decided_by_itself(kind: AnswerKind, status: int, *, copy: bool) -> Decision | None:
    """Decide on an answer that needs no look at other endpoints; None: `Attempts.after_answer` decides.

    copy: a second copy of the call is under way, and an answer that is not good is worth less than the copy's.
    """
    if copy:
        return GiveUp(Because.ANSWER) if status < 500 and kind is AnswerKind.ANSWER else Wait(Because.COPY)
    return GiveUp(Because.ANSWER) if kind is AnswerKind.ANSWER and status != 503 else None


class Attempts:
    """Records what one call has tried, and decides what comes next.

    count: requests of which bytes may have arrived somewhere. fresh: the next request needs a new connection.
    stick: its tie to one endpoint, None if any will do.
    """

    __slots__ = ("_endpoints", "_model", "_retries", "_stick", "count", "fresh", "tried")

    def __init__(
        self, endpoints: EndpointSet[HttpEndpoint], retries: RetryBudget, model: str, stick: Stick | None = None
    ) -> None:
        self._endpoints = endpoints
        self._retries = retries
        self._model = model
        self._stick = stick
        self.tried: tuple[HttpEndpoint, ...] = ()
        self.count = 1
        self.fresh = False

    def another(self, now: float, because: Because) -> Decision:
        """Decide where to send next, or what to do if nobody can be asked."""
        endpoint = self._pick(now, self.tried)
        return self.nobody(now) if endpoint is None else Send(endpoint, because, self.fresh)

    def nobody(self, now: float) -> Decision:
        """Decide what to do when there was no endpoint to pick."""
        if self._stick is not None and self._stick.bound is not None:
            return GiveUp(Because.LOST)
        endpoints = self._endpoints
        if not endpoints.usable:
            return Wait(Because.NOBODY_USABLE)
        return (
            Wait(Because.MODEL) if endpoints.model_locations.unknown(self._model, now) else GiveUp(Because.NOBODY_ELSE)
        )

    def after_failure(
        self, endpoint: HttpEndpoint, error: UpstreamError, now: float, *, kept: bool, sent: bool, twice: bool
    ) -> Decision:
        """Decide what to do when no answer came from `endpoint`; `note_failure` has been called for it.

        kept: the body is still here. sent: bytes of the request may have arrived. twice: the call may run twice.
        """
        if sent and not kept:
            return GiveUp(Because.NOT_KEPT)
        if isinstance(error, UpstreamUnreachable):
            self.tried = and_this(self.tried, endpoint)
            return self.another(now, Because.UNREACHABLE)
        if isinstance(error, UpstreamUnread):
            if self.fresh:
                return GiveUp(Because.UNREAD)
            self.fresh = True
            return self.another(now, Because.UNREAD)
        if not twice or not kept:
            return GiveUp(Because.PERHAPS_EXECUTED)
        if self.count >= MAX_ATTEMPTS:
            return GiveUp(Because.ATTEMPTS)
        if not self._retries.spend(now):
            return GiveUp(Because.BUDGET)
        self.count += 1
        self.fresh = True
        other = None if self._stick is not None else self._pick(now, (*self.tried, endpoint))
        return Send(other, Because.IDEMPOTENT, True) if other is not None else self.another(now, Because.IDEMPOTENT)

    def after_answer(
        self,
        endpoint: HttpEndpoint,
        head: Any,
        kind: AnswerKind,
        now: float,
        *,
        kept: bool,
        searched: bool = False,
    ) -> Decision:
        """Decide after an answer of `endpoint` on which `decided_by_itself` does not.

        searched: all endpoints were asked for the model, or cannot be asked now: do not wait for that.
        """
        if self._stick is not None and self._stick.bound is not None:
            return GiveUp(Because.STICKS)
        locations, model = self._endpoints.model_locations, self._model
        if not kept:
            self.count = MAX_ATTEMPTS
        if not searched and kind in (AnswerKind.ABSENT, AnswerKind.PERHAPS_ABSENT) and locations.may_probe(model, now):
            # A body that is gone cannot be sent again, but the next call has to know.
            spent = self.count >= MAX_ATTEMPTS
            return GiveUp(Because.ATTEMPTS, search=True) if spent else Wait(Because.MODEL)
        if kind is AnswerKind.PERHAPS_ABSENT:
            if not locations.lacks(endpoint, model, now):
                return GiveUp(Because.ANSWER)  # the server has the model, so the 404 is the model's own answer
            kind = AnswerKind.ABSENT
        if kind is AnswerKind.ABSENT:
            if not locations.elsewhere(model, now, (endpoint,)):
                return GiveUp(Because.NOBODY_ELSE)
        elif kind not in NO_ROOM:
            return GiveUp(Because.ANSWER)
        elif self._stick is not None:
            return GiveUp(Because.STICKS)
        if head.status == 503 and head.get(_SPENT) is not None:
            return GiveUp(Because.PASSED_ON)
        if self.count >= MAX_ATTEMPTS:
            return GiveUp(Because.ATTEMPTS)
        tried = (*self.tried, endpoint)
        other = self._pick(now, tried)
        if other is None:
            return GiveUp(Because.NOBODY_ELSE)
        absent = kind is not AnswerKind.REFUSED
        if not self._retries.spend(now, share=ABSENT_SHARE if absent else 1.0):
            return GiveUp(Because.BUDGET)
        self.count += 1
        self.tried = tried
        return Send(other, Because.ABSENT if absent else Because.REFUSED, self.fresh)

    def _pick(self, now: float, tried: tuple[HttpEndpoint, ...]) -> HttpEndpoint | None:
        if self._stick is not None:
            return sticky_endpoint(self._endpoints, self._stick, self._model, now, tried)
        return self._endpoints.pick(now, tried, self._model)
