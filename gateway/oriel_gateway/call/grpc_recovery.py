"""Send a gRPC call to its upstream: choose endpoints, send again elsewhere, send second copies.

`GrpcRecovery` is the part of `grpc.GrpcCall` that sends. The rules are those of `attempts` and `hedge`. A whole message
is always kept, so the limit of 64 KiB applies only to a second copy.
"""

import asyncio
from time import monotonic
from typing import Any

from grpc import StatusCode, aio

from oriel_gateway.call.attempts import and_this
from oriel_gateway.call.hedge import HEDGED_BYTES
from oriel_gateway.call.lifecycle import LEAST_S
from oriel_gateway.contracts import Host
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.observe.decisions import MAX_TRIED
from oriel_gateway.pools.endpoints import Reach, patience_s
from oriel_gateway.pools.grpc_endpoint import GrpcEndpoint
from oriel_gateway.pools.grpc_errors import (
    broken,
    busy_for_s,
    classify_error,
    not_connected,
    reported_cost_us,
    servers_fault,
    surely_not_executed,
)
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.upstream_answers import AnswerKind
from oriel_gateway.routing.targets import Target
from oriel_policies.budget import ABSENT_SHARE, MAX_ATTEMPTS
from oriel_policies.documents import Tenant
from oriel_policies.queue import Ticket
from oriel_wire.orca import LOAD_METRICS

# These are the HTTP statuses of the codes, as far as they concern an endpoint; any other code is the caller's mistake.
_STATUS = {
    StatusCode.UNAVAILABLE: 503,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.INTERNAL: 500,
    StatusCode.UNKNOWN: 500,
    StatusCode.DATA_LOSS: 500,
}


class GrpcRecovery:
    """The state of a call that sending needs; see `grpc.GrpcCall` for the rest. Times are monotonic seconds."""

    tenant: Tenant
    target: Target
    deadline: float
    permit_s: float
    sent_s: float
    response_s: float
    stick: str
    bytes_out = 0
    cost_us = -1  # as the server reported it
    endpoint: GrpcEndpoint | None = None  # the one that got the call last
    tried: tuple[GrpcEndpoint, ...] = ()  # those that got it in vain, the latest `MAX_TRIED` of them
    _gateway: Host
    _gate: PoolGate
    _ticket: Ticket | None
    _upstream: aio.Call | None
    _report_wanted: bool
    _counted = False  # whether it counts among the requests of which second tries are a share
    _attempts = 1  # requests that may have arrived at a server

    async def permit(self) -> None:
        raise NotImplementedError

    def _onward(self) -> tuple[tuple[str, str], ...]:
        raise NotImplementedError

    async def ask(self, method: str, message: bytes) -> bytes:
        """Send the message and return the answer; send it once more if it surely was not executed, or may run twice.

        Raises AioRpcError as the upstream ended the call, or Refused.
        """
        tried: tuple[GrpcEndpoint, ...] = ()
        while True:
            endpoint, tried = await self._next(tried)
            hedged = self.target.plan.hedge_s and self._attempts == 1 and len(message) <= HEDGED_BYTES
            try:
                return await (self._hedged if hedged else self._ask)(endpoint, method, message)
            except aio.AioRpcError as error:
                endpoint = self.endpoint or endpoint
                tried = and_this(tried, endpoint)
                if not await self._may_send_again(endpoint, error, tried):
                    if surely_not_executed(error):
                        self._note_tried(endpoint)
                    raise
                self._note_tried(endpoint)

    async def _next(self, tried: tuple[GrpcEndpoint, ...]) -> tuple[GrpcEndpoint, tuple[GrpcEndpoint, ...]]:
        """Return the next endpoint after `tried`, and the endpoints that are still excluded.

        None is excluded any more if the call had to wait for a usable endpoint. Raises Refused.
        """
        if not self._gate.grpc.usable:
            tried = ()
            await self._reacquire_permit()
        await self._locate_model()
        endpoint = self._pick(tried)
        self._count_sent()
        return endpoint, tried

    async def _locate_model(self) -> None:
        """Probe all endpoints for the model if nothing is known of it."""
        locations, model, now = self._gate.grpc.model_locations, self.target.sought, monotonic()
        if locations.needs_check and locations.unknown(model, now):
            await self._probe_model(now)

    async def _probe_model(self, now: float) -> None:
        locations, model = self._gate.grpc.model_locations, self.target.sought
        end = _ProbeEnd()
        if locations.probe(model, end, now):
            try:
                await end.reached
            finally:
                locations.stop_waiting(model, end)

    async def connected(self) -> GrpcEndpoint:
        """Return an endpoint with a connection, for a stream: its messages could not be sent again. Raises Refused."""
        tried: tuple[GrpcEndpoint, ...] = ()
        while True:
            endpoint, tried = await self._next(tried)
            if await self._reached(endpoint):
                return endpoint
            self._note_tried(endpoint)
            tried = and_this(tried, endpoint)

    async def _reached(self, endpoint: GrpcEndpoint) -> bool:
        """Connect to the endpoint. Returns whether it did, after a short wait while others are usable. Raises
        Refused.
        """
        if endpoint.connected:
            return True
        these, timeout_s = self._gate.grpc, self._gate.pool.connect_timeout_s
        if len(these.usable) > 1:
            timeout_s = min(timeout_s, patience_s(these))
        try:
            if await endpoint.connect(timeout_s, self.deadline):
                return True
        except TimeoutError:
            late = "the deadline passed while waiting for the upstream"
            raise Refused(Outcome.DEADLINE_EXCEEDED, late) from None
        these.note_reach(endpoint, Reach.UNREACHABLE)
        return False

    async def _ask(self, endpoint: GrpcEndpoint, method: str, message: bytes) -> bytes:
        """Send one request. Raises AioRpcError, or Refused at the deadline."""
        endpoint.outstanding += 1
        try:
            before_s, self.sent_s = self.sent_s, monotonic()
            if not await self._reached(endpoint):
                raise not_connected()
            self.sent_s = sent_s = monotonic()
            if sent_s >= self.deadline - LEAST_S:
                self.sent_s = before_s
                raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for the upstream")
            send = endpoint.channel.unary_unary(method, None, None)
            call = send(message, timeout=max(0.0, self.deadline - sent_s), metadata=self._onward())
            self._upstream = call
            try:
                answer: bytes = await call
            except aio.AioRpcError as error:
                self._note_error(endpoint, error, sent_s)
                self.endpoint = endpoint
                raise
            self.response_s = now = monotonic()
            self.sent_s, self.endpoint = sent_s, endpoint  # of the copy that was answered
            endpoint.note_answer(now, now - sent_s)
            endpoint.heard = True
            trailing: Any = await call.trailing_metadata()
            self.cost_us = reported_cost_us(trailing)
            if self._report_wanted:
                self._gate.note_load_report(next((str(value) for key, value in trailing if key == LOAD_METRICS), None))
            return answer
        finally:
            endpoint.outstanding -= 1

    async def _hedged(self, first: GrpcEndpoint, method: str, message: bytes) -> bytes:
        """Send the request, and a second copy elsewhere if the first one is late.

        Returns the first good answer, or raises the last failure. If this is cancelled, both copies are cancelled.
        """
        flying = {asyncio.create_task(self._ask(first, method, message)): first}
        try:
            await asyncio.wait(flying, timeout=self.target.plan.hedge_s)
            if not next(iter(flying)).done() and (second := self._second(first)) is not None:
                flying[asyncio.create_task(self._ask(second, method, message))] = second
            while True:
                done, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    endpoint = flying.pop(task)
                    error = task.exception()
                    if error is not None and flying and isinstance(error, aio.AioRpcError):
                        if servers_fault(error) or self._classify(error) is not AnswerKind.ANSWER:
                            self._note_tried(endpoint)
                            continue
                    for late in flying.values():
                        self._note_tried(late)
                    self.endpoint = endpoint
                    return task.result()
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    def _second(self, first: GrpcEndpoint) -> GrpcEndpoint | None:
        """Return an endpoint for a second copy, paid from the retry budget; None if there is none."""
        if self.stick:
            return None
        now = monotonic()
        second = self._gate.grpc.pick(now, (first,), self.target.sought)
        if second is None or not self._gate.retries.spend(now):
            return None
        self._attempts += 1
        return second

    def _note_tried(self, endpoint: GrpcEndpoint) -> None:
        self.endpoint = None
        self.tried = (*self.tried[1 - MAX_TRIED :], endpoint)

    def _count_sent(self) -> None:
        if not self._counted:
            self._counted = True
            self._gate.retries.requested(monotonic())

    async def _reacquire_permit(self) -> None:
        """Release the permit for other calls, because no endpoint is usable any more, and acquire one again."""
        ticket, self._ticket = self._ticket, None
        self.permit_s = 0.0
        self._gate.release_unused_permit(ticket)
        await self.permit()

    def _pick(self, tried: tuple[GrpcEndpoint, ...]) -> GrpcEndpoint:
        these, now = self._gate.grpc, monotonic()
        if self.stick:
            lacking = these.model_locations.lacking(self.target.sought, now)
            endpoint = these.sticky.pick(these.usable, self.stick, (*tried, *lacking))
            if endpoint is not None and not endpoint.outstanding:
                endpoint.record.heard_s = now
        else:
            endpoint = these.pick(now, tried, self.target.sought)
        if endpoint is None:
            raise Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1)
        self.endpoint = endpoint
        return endpoint

    def _classify(self, error: aio.AioRpcError) -> AnswerKind:
        return classify_error(error, model=bool(self.target.sought))

    def _note_error(self, endpoint: GrpcEndpoint, error: aio.AioRpcError, sent_s: float) -> None:
        """Note what an error means for the endpoint."""
        now = monotonic()
        these = self._gate.grpc
        if surely_not_executed(error):
            these.note_reach(endpoint, Reach.UNREACHABLE)
        elif broken(error):
            these.note_broken(endpoint, now)
        elif error.code() is StatusCode.DEADLINE_EXCEEDED:
            endpoint.cost.observed(now - sent_s, now)
        else:
            endpoint.heard = True
            these.note_error(endpoint, _STATUS.get(error.code(), 400), now, now - sent_s, busy_for_s(error))
            if self._classify(error) is AnswerKind.ABSENT:
                these.model_locations.note_denied(endpoint, self.target.sought, now)

    async def _may_send_again(
        self, endpoint: GrpcEndpoint, error: aio.AioRpcError, tried: tuple[GrpcEndpoint, ...]
    ) -> bool:
        """Whether to send the call to another endpoint."""
        now, model = monotonic(), self.target.sought
        these = self._gate.grpc
        if surely_not_executed(error):
            return not these.usable or these.pick(now, tried, model) is not None
        kind = self._classify(error)
        absent = kind in (AnswerKind.ABSENT, AnswerKind.PERHAPS_ABSENT)
        if absent and these.model_locations.may_probe(model, now):
            if self._attempts >= MAX_ATTEMPTS:
                these.model_locations.probe(model, None, now)  # for the next call
                return False
            await self._probe_model(now)
            now = monotonic()
        if kind is AnswerKind.PERHAPS_ABSENT:
            absent = these.model_locations.lacks(endpoint, model, now)  # otherwise these are the model's own words
        absent = absent and these.model_locations.elsewhere(model, now, tried)
        twice = broken(error) and self.target.plan.idempotent
        refused = kind is AnswerKind.REFUSED and not self.stick
        if self._attempts >= MAX_ATTEMPTS or now >= self.deadline or not (absent or twice or refused):
            return False
        share = ABSENT_SHARE if absent else 1.0
        if these.pick(now, tried, model) is None or not self._gate.retries.spend(now, share=share):
            return False
        self._attempts += 1
        return True


class _ProbeEnd:
    """Waits for the end of a probe in a coroutine."""

    __slots__ = ("reached",)

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def probe_finished(self) -> None:
        """See `model_locations.ProbeWaiter`."""
        if not self.reached.done():
            self.reached.set_result(None)
