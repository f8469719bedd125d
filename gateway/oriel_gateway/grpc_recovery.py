"""How a gRPC call meets its upstream: which endpoint, what is sent again and where, second copies.

`GrpcRecovery` is the part of `grpc_call.GrpcCall` that asks. The rules are those of `attempts` and `hedge`; a whole
message is always here, so only a second copy is bound to 64 KiB.
"""

import asyncio
from time import monotonic
from typing import Any

from grpc import StatusCode, aio

from oriel_gateway.attempts import and_this
from oriel_gateway.call_state import LEAST_S
from oriel_gateway.core import Gateway
from oriel_gateway.decisions import TOLD
from oriel_gateway.endpoints import Reach, patience_s
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.grpc_endpoint import GrpcEndpoint
from oriel_gateway.grpc_errors import (
    broken,
    busy_for_s,
    not_connected,
    reported_cost_us,
    servers_fault,
    surely_not_executed,
    what_it_says,
)
from oriel_gateway.pools import PoolGate
from oriel_gateway.refusals import Said
from oriel_gateway.routing_state import REPLAY_BYTES
from oriel_gateway.targets import Target
from oriel_policies.budget import ABSENT_SHARE, MAX_ATTEMPTS
from oriel_policies.documents import Tenant
from oriel_policies.queue import Ticket
from oriel_wire.orca import LOAD_METRICS

__all__ = ["GrpcRecovery"]

# What the codes mean for an endpoint, as HTTP says it; any other is the caller's mistake.
_STATUS = {
    StatusCode.UNAVAILABLE: 503,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.INTERNAL: 500,
    StatusCode.UNKNOWN: 500,
    StatusCode.DATA_LOSS: 500,
}


class GrpcRecovery:
    """State of a call that asking needs; see `grpc_call.GrpcCall` for the rest. Times are monotonic seconds."""

    tenant: Tenant
    target: Target
    deadline: float
    permit_s: float
    sent_s: float
    response_s: float
    stick: str
    bytes_out = 0
    cost_us = -1  # what the server reported
    endpoint: GrpcEndpoint | None = None  # asked last
    tried: tuple[GrpcEndpoint, ...] = ()  # asked before in vain, the latest `TOLD` of them
    _gateway: Gateway
    _gate: PoolGate
    _ticket: Ticket | None
    _upstream: aio.Call | None
    _asked: bool
    _counted = False  # among the requests that second tries are a share of
    _attempts = 1  # requests that may have arrived somewhere

    async def permit(self) -> None:
        raise NotImplementedError

    def _onward(self) -> tuple[tuple[str, str], ...]:
        raise NotImplementedError

    async def ask(self, method: str, message: bytes) -> bytes:
        """Send and wait for the answer; once more to another endpoint if it surely was not executed, or may run twice.
        Raises AioRpcError as the upstream ended it, or Refused."""
        tried: tuple[GrpcEndpoint, ...] = ()
        while True:
            endpoint, tried = await self._next(tried)
            hedged = self.target.plan.hedge_s and self._attempts == 1 and len(message) <= REPLAY_BYTES
            try:
                return await (self._hedged if hedged else self._ask)(endpoint, method, message)
            except aio.AioRpcError as error:
                endpoint = self.endpoint or endpoint
                tried = and_this(tried, endpoint)
                if not await self._again(endpoint, error, tried):
                    if surely_not_executed(error):
                        self._in_vain(endpoint)
                    raise
                self._in_vain(endpoint)

    async def _next(self, tried: tuple[GrpcEndpoint, ...]) -> tuple[GrpcEndpoint, tuple[GrpcEndpoint, ...]]:
        """Whom to ask after `tried`, and whom of those not to ask again: nobody, if it had to wait for any to be there.
        Raises Refused."""
        if not self._gate.grpc.usable:
            tried = ()
            await self._permit_again()
        await self._know_model()
        endpoint = self._pick(tried)
        self._count_sent()
        return endpoint, tried

    async def _know_model(self) -> None:
        """Ask everybody for the model if nothing is known of it."""
        places, model, now = self._gate.grpc.places, self.target.sought, monotonic()
        if places.wary and places.unknown(model, now):
            await self._look(now)

    async def _look(self, now: float) -> None:
        places, model = self._gate.grpc.places, self.target.sought
        looker = _Looker()
        if places.look(model, looker, now):
            try:
                await looker.heard
            finally:
                places.leave(model, looker)

    async def connected(self) -> GrpcEndpoint:
        """An endpoint with a connection, for a stream: its messages could not be sent again. Raises Refused."""
        tried: tuple[GrpcEndpoint, ...] = ()
        while True:
            endpoint, tried = await self._next(tried)
            if await self._reached(endpoint):
                return endpoint
            self._in_vain(endpoint)
            tried = and_this(tried, endpoint)

    async def _reached(self, endpoint: GrpcEndpoint) -> bool:
        """Whether there is a connection: not waited for long while others can be asked. Raises Refused."""
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
        these.found(endpoint, Reach.UNREACHABLE)
        return False

    async def _ask(self, endpoint: GrpcEndpoint, method: str, message: bytes) -> bytes:
        """One request. Raises AioRpcError, or Refused at the deadline."""
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
                self._note(endpoint, error, sent_s)
                self.endpoint = endpoint
                raise
            self.response_s = now = monotonic()
            self.sent_s, self.endpoint = sent_s, endpoint  # of the copy that was answered
            endpoint.answered(now, now - sent_s)
            endpoint.heard = True
            trailing: Any = await call.trailing_metadata()
            self.cost_us = reported_cost_us(trailing)
            if self._asked:
                self._gate.reported(next((str(value) for key, value in trailing if key == LOAD_METRICS), None))
            return answer
        finally:
            endpoint.outstanding -= 1

    async def _hedged(self, first: GrpcEndpoint, method: str, message: bytes) -> bytes:
        """The same, with a second copy elsewhere when the first is late. The first good answer wins, or else the last
        failure; cancelled, both copies are."""
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
                        if servers_fault(error) or self._says(error) is not Said.ANSWER:
                            self._in_vain(endpoint)
                            continue
                    for late in flying.values():
                        self._in_vain(late)
                    self.endpoint = endpoint
                    return task.result()
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    def _second(self, first: GrpcEndpoint) -> GrpcEndpoint | None:
        """Where a second copy may go now, paid from the retry budget."""
        if self.stick:
            return None
        now = monotonic()
        second = self._gate.grpc.pick(now, (first,), self.target.sought)
        if second is None or not self._gate.retries.spend(now):
            return None
        self._attempts += 1
        return second

    def _in_vain(self, endpoint: GrpcEndpoint) -> None:
        self.endpoint = None
        self.tried = (*self.tried[1 - TOLD :], endpoint)

    def _count_sent(self) -> None:
        if not self._counted:
            self._counted = True
            self._gate.retries.requested(monotonic())

    async def _permit_again(self) -> None:
        """Nobody can be asked any more: others may have the permit meanwhile."""
        ticket, self._ticket = self._ticket, None
        self.permit_s = 0.0
        self._gate.give_back(ticket)
        await self.permit()

    def _pick(self, tried: tuple[GrpcEndpoint, ...]) -> GrpcEndpoint:
        these, now = self._gate.grpc, monotonic()
        if self.stick:
            lacking = these.places.lacking(self.target.sought, now)
            endpoint = self._gate.grpc_sticky.pick(these.usable, self.stick, (*tried, *lacking))
            if endpoint is not None and not endpoint.outstanding:
                endpoint.record.heard_s = now
        else:
            endpoint = these.pick(now, tried, self.target.sought)
        if endpoint is None:
            raise Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1)
        self.endpoint = endpoint
        return endpoint

    def _says(self, error: aio.AioRpcError) -> Said:
        return what_it_says(error, model=bool(self.target.sought))

    def _note(self, endpoint: GrpcEndpoint, error: aio.AioRpcError, sent_s: float) -> None:
        """What an error says of the endpoint."""
        now = monotonic()
        these = self._gate.grpc
        if surely_not_executed(error):
            these.found(endpoint, Reach.UNREACHABLE)
        elif broken(error):
            these.broke(endpoint, now)
        elif error.code() is StatusCode.DEADLINE_EXCEEDED:
            endpoint.cost.observed(now - sent_s, now)
        else:
            endpoint.heard = True
            these.erred(endpoint, _STATUS.get(error.code(), 400), now, now - sent_s, busy_for_s(error))
            if self._says(error) is Said.ABSENT:
                these.places.told(endpoint, self.target.sought, now)

    async def _again(self, endpoint: GrpcEndpoint, error: aio.AioRpcError, tried: tuple[GrpcEndpoint, ...]) -> bool:
        """Whether to ask another one."""
        now, model = monotonic(), self.target.sought
        these = self._gate.grpc
        if surely_not_executed(error):
            return not these.usable or these.pick(now, tried, model) is not None
        said = self._says(error)
        absent = said in (Said.ABSENT, Said.PERHAPS_ABSENT)
        if absent and these.places.may_look(model, now):
            if self._attempts >= MAX_ATTEMPTS:
                these.places.look(model, None, now)  # for the next call
                return False
            await self._look(now)
            now = monotonic()
        if said is Said.PERHAPS_ABSENT:
            absent = these.places.lacks(endpoint, model, now)  # else these are the model's own words
        absent = absent and these.places.elsewhere(model, now, tried)
        twice = broken(error) and self.target.plan.idempotent
        refused = said is Said.REFUSED and not self.stick
        if self._attempts >= MAX_ATTEMPTS or now >= self.deadline or not (absent or twice or refused):
            return False
        share = ABSENT_SHARE if absent else 1.0
        if these.pick(now, tried, model) is None or not self._gate.retries.spend(now, share=share):
            return False
        self._attempts += 1
        return True


class _Looker:
    """Waits for a search as a coroutine can."""

    __slots__ = ("heard",)

    def __init__(self) -> None:
        self.heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def looked(self) -> None:
        """See `places.Looker`."""
        if not self.heard.done():
            self.heard.set_result(None)
