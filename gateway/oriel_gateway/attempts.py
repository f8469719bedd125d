"""What is sent a second time, and where: only what surely did not execute, or what its route calls idempotent.

| what happened | nothing executed? | again |
|---|---|---|
| no connection could be made | surely | every other endpoint once; nothing was sent, so no budget |
| a kept connection closed before the request reached the other side | surely | once, on a new connection; no budget |
| 503 whose `reason` is one of our own for "not executed" | surely | another endpoint, once, within the budget [1] |
| 404, or 503 `model_not_ready`, for a model: it is not here | surely | another endpoint, once, within the budget |
| closed or broken before the first byte of an answer | perhaps | if the call may run twice: once, within the budget |

[1] Not where the call sticks to this one, nor where the answer says that whoever passed it on has tried again.

At most two requests are ever sent for a call (`budget.MAX_ATTEMPTS`), never after the first byte of an answer went to
the client, and never when the body was not kept (more than 64 KiB). Deadlines are the call's own and do not grow.
"""

from typing import Any, TypeVar

import msgspec

from oriel_gateway.endpoints import EndpointSet, HttpEndpoint, Reach, Standing
from oriel_gateway.pools import PoolGate
from oriel_policies.budget import MAX_ATTEMPTS
from oriel_wire.errors import UpstreamError, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h1_response import ResponseHead

__all__ = ["SPENT", "Tries", "note_answer", "and_this", "note_failure", "says_not_executed"]

E = TypeVar("E", bound=Standing)
_MAX_REASON_BODY = 4096
_SPENT = "x-oriel-retry"
SPENT = b"x-oriel-retry: spent"  # of an answer that was passed on: who asks through us does not ask again
_NOT_EXECUTED = frozenset({"queue_full", "server_stopping", "saturated", "displaced"})
_NOT_HERE = frozenset({"unknown_model", "model_not_ready"})


class _Answer(msgspec.Struct):
    error: Any = None
    reason: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


def says_not_executed(head: ResponseHead, data: bytes, *, model: bool) -> tuple[bool, bool]:
    """Of a whole answer: (the request was surely not executed, because this endpoint has not the model).

    model: the request names one; only then a 404 can be about this endpoint alone.
    """
    status = head.status
    if head.cost_us > 0:
        return False, False  # a service can be full after its model has run
    if status == 404 and model:
        return True, True
    if status == 400 and model and b"unknown model" in data[:256]:  # Triton before 2.41
        return True, True
    if status != 503 or len(data) > _MAX_REASON_BODY:
        return False, False
    if b"Exceeds maximum queue size" in data:  # Triton
        return True, False
    try:
        answer = _decode(data)
    except msgspec.MsgspecError:
        return False, False
    reason = answer.error.get("reason") if isinstance(answer.error, dict) else answer.reason
    if not isinstance(reason, str):
        return False, False
    return reason in _NOT_EXECUTED or (model and reason in _NOT_HERE), model and reason in _NOT_HERE


def note_answer(
    endpoints: EndpointSet[HttpEndpoint], endpoint: HttpEndpoint, status: int, now: float, s: float
) -> None:
    """A whole answer came after `s` seconds."""
    if status < 500:
        endpoint.answered(now, s)
    else:
        endpoints.erred(endpoint, status, now, s)


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

    __slots__ = ("_gate", "_lacking", "_model", "_next", "attempts", "fresh", "tried")

    def __init__(self, gate: PoolGate, model: str) -> None:
        self._gate = gate
        self._model = model
        self._next: HttpEndpoint | None = None
        self._lacking: HttpEndpoint | None = None
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

    def after_answer(
        self, endpoint: HttpEndpoint, head: ResponseHead, data: bytes, now: float, *, model: bool, sticks: bool
    ) -> bool:
        """Whether this answer means that another endpoint should be asked, and there is one."""
        not_executed, lacks = says_not_executed(head, data, model=model)
        if not not_executed or (sticks and not lacks) or (head.status == 503 and head.get(_SPENT) is not None):
            return False
        if not self._once_more(endpoint, now):
            if head.status == 503:
                head.forward.append(SPENT)
            return False
        self._lacking = endpoint if lacks else None
        return True

    def _once_more(self, endpoint: HttpEndpoint, now: float) -> bool:
        if self.attempts >= MAX_ATTEMPTS:
            return False
        tried = (*self.tried, endpoint)
        following = self._gate.endpoints.pick(now, tried, self._model)
        if following is None or not self._gate.retries.spend(now):
            return False
        self.attempts += 1
        self.tried = tried
        self._next = following
        return True

    def answered(self, status: int, now: float) -> None:
        """The answer that goes to the client came: whoever lacked the model was alone with that."""
        if self._lacking is not None and status < 400:
            self._gate.endpoints.lacks(self._lacking, self._model, now)
