"""What is sent a second time, and where: only what surely did not execute, or what its route calls idempotent.

| what happened | nothing executed? | again |
|---|---|---|
| no connection could be made | surely | every other endpoint once; nothing was sent, so no budget |
| a kept connection closed before the request reached the other side | surely | once, on a new connection; no budget |
| 503 whose `reason` or words say that it was not queued [2] | surely | another endpoint, once, within the budget [1] |
| 404 or 503 that says that the model is not here [3] | surely | the same, where it may be |
| closed or broken before the first byte of an answer | perhaps | if the call may run twice: once, within the budget |

[1] Not where the call sticks to this one, nor where the answer says that another gateway has passed it on.

[2] Our own reasons, and the words with which Triton refuses a request before it has a place anywhere (`refusals`).
[3] In the words of Triton, KServe, OVMS or MLServer; any other 404 only if the server says so when it is asked.

At most two requests are ever sent for a call (`budget.MAX_ATTEMPTS`), never after the first byte of an answer went to
the client, and never when the body was not kept (more than 64 KiB). Deadlines are the call's own and do not grow.
"""

from typing import TypeVar

from oriel_gateway.endpoints import EndpointSet, HttpEndpoint, Reach, Standing
from oriel_gateway.pools import PoolGate
from oriel_gateway.refusals import Said
from oriel_policies.budget import ABSENT_SHARE, MAX_ATTEMPTS
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h1_response import ResponseHead

__all__ = ["SPENT", "Tries", "and_this", "note_answer", "note_failure"]

E = TypeVar("E", bound=Standing)
_SPENT = "x-oriel-retry"
SPENT = b"x-oriel-retry: spent"  # of an answer that was passed on: who asks through us does not ask again


def note_answer(
    endpoints: EndpointSet[HttpEndpoint], endpoint: HttpEndpoint, head: ResponseHead, now: float, s: float
) -> None:
    """A whole answer came after `s` seconds."""
    status = head.status
    if status < 400:
        endpoint.answered(now, s)
    else:
        wait_s = head.get("retry-after") or "" if status in (429, 503) else ""
        endpoints.erred(endpoint, status, now, s, float(wait_s) if wait_s.isdecimal() and len(wait_s) < 6 else 0.0)


def note_failure(
    endpoints: EndpointSet[HttpEndpoint], endpoint: HttpEndpoint, error: UpstreamError, now: float
) -> None:
    """No answer came."""
    if isinstance(error, UpstreamUnreachable):
        endpoints.found(endpoint, Reach.UNREACHABLE)
    elif not isinstance(error, UpstreamUnread):
        endpoints.broke(endpoint, now)


def and_this(tried: tuple[E, ...], endpoint: E) -> tuple[E, ...]:
    """Who is not asked any more: without those that cannot be picked anyway, or a call that meets a thousand servers
    that are all down compares each with each."""
    return (*(one for one in tried if one.reach is not Reach.UNREACHABLE), endpoint)


class Tries:
    """What one call in trouble has tried. attempts: requests of which bytes may have arrived somewhere."""

    __slots__ = ("_gate", "_model", "_next", "attempts", "fresh", "tried")

    def __init__(self, gate: PoolGate, model: str) -> None:
        self._gate = gate
        self._model = model
        self._next: HttpEndpoint | None = None
        self.tried: tuple[HttpEndpoint, ...] = ()
        self.attempts = 1
        self.fresh = False

    def pick(self, now: float) -> HttpEndpoint | None:
        """The endpoint for the next try; see `EndpointSet.pick`."""
        found, self._next = self._next, None
        return found or self._gate.endpoints.pick(now, self.tried, self._model)

    def after_failure(self, endpoint: HttpEndpoint, error: UpstreamError, now: float, *, twice: bool) -> bool:
        """Whether to try again. twice: the call may run twice, and its body is still here."""
        endpoints = self._gate.endpoints
        note_failure(endpoints, endpoint, error, now)
        if isinstance(error, UpstreamUnreachable):
            self.tried = and_this(self.tried, endpoint)
            return True
        if isinstance(error, UpstreamUnread):
            if self.fresh:
                return False
            self.fresh = True
            return True
        if not twice or self.attempts >= MAX_ATTEMPTS or not self._gate.retries.spend(now):
            return False
        self.attempts += 1
        self._next = endpoints.pick(now, (*self.tried, endpoint), self._model)
        self.fresh = True
        return True

    def after_answer(self, endpoint: HttpEndpoint, head: ResponseHead, said: Said, now: float, *, sticks: bool) -> bool:
        """Whether this answer means that another endpoint should be asked, and there is one. said: not PERHAPS."""
        spent = head.status == 503 and head.get(_SPENT) is not None
        if said is Said.ABSENT:
            again = self._gate.endpoints.places.elsewhere(self._model, now, (endpoint,))
        else:
            again = said is Said.REFUSED and not sticks
        if again and not spent and self._once_more(endpoint, now, said is Said.ABSENT):
            return True
        if head.status == 503 and SPENT not in head.forward:
            head.forward.append(SPENT)
        return False

    def _once_more(self, endpoint: HttpEndpoint, now: float, lacks: bool) -> bool:
        if self.attempts >= MAX_ATTEMPTS:
            return False
        tried = (*self.tried, endpoint)
        following = self._gate.endpoints.pick(now, tried, self._model)
        share = ABSENT_SHARE if lacks else 1.0
        if following is None or not self._gate.retries.spend(now, share=share):
            return False
        self.attempts += 1
        self.tried = tried
        self._next = following
        return True
