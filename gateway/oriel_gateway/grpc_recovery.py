"""How a gRPC call meets its upstream: which endpoint, what is sent again and where, second copies.

`GrpcRecovery` is the part of `grpc_call.GrpcCall` that asks. The rules are those of `attempts` and `hedge`; a whole
message is always here, so only a second copy is bound to 64 KiB.
"""

import asyncio
from time import monotonic

from grpc import StatusCode, aio

from oriel_gateway.attempts import and_this
from oriel_gateway.core import Gateway
from oriel_gateway.decisions import TOLD
from oriel_gateway.endpoints import Reach
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.grpc_endpoint import GrpcEndpoint
from oriel_gateway.grpc_errors import broken, not_here, says_not_executed, servers_fault, surely_not_executed
from oriel_gateway.pools import PoolGate
from oriel_gateway.routing_state import REPLAY_BYTES
from oriel_gateway.targets import Target
from oriel_policies.budget import MAX_ATTEMPTS
from oriel_policies.documents import Tenant
from oriel_policies.queue import Ticket
from oriel_wire.orca import LOAD_METRICS

__all__ = ["GrpcRecovery"]


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
        lacking: GrpcEndpoint | None = None
        while True:
            if not self._gate.grpc.usable:
                tried = ()
                await self._permit_again()
            endpoint = self._pick(tried)
            self._count_sent()
            hedged = self.target.plan.hedge_s and self._attempts == 1 and len(message) <= REPLAY_BYTES
            try:
                answer = await (self._hedged if hedged else self._ask)(endpoint, method, message)
            except aio.AioRpcError as error:
                endpoint = self.endpoint or endpoint
                tried = and_this(tried, endpoint)
                if not self._again(endpoint, error, tried):
                    if surely_not_executed(error):
                        self._in_vain(endpoint)
                    raise
                self._in_vain(endpoint)
                lacking = endpoint if self._lacks(error) else None
            else:
                if lacking is not None:
                    self._gate.grpc.lacks(lacking, self.target.name, self.response_s)
                return answer

    async def connected(self) -> GrpcEndpoint:
        """An endpoint with a connection, for a stream: its messages could not be sent again. Raises Refused."""
        tried: tuple[GrpcEndpoint, ...] = ()
        while True:
            if not self._gate.grpc.usable:
                tried = ()
                await self._permit_again()
            endpoint = self._pick(tried)
            self._count_sent()
            left_s = self.deadline - monotonic()
            if await endpoint.connect(min(left_s, self._gate.pool.connect_timeout_s)):
                return endpoint
            self._gate.grpc.found(endpoint, Reach.UNREACHABLE)
            self._in_vain(endpoint)
            tried = and_this(tried, endpoint)

    async def _ask(self, endpoint: GrpcEndpoint, method: str, message: bytes) -> bytes:
        """One request. Raises AioRpcError."""
        endpoint.outstanding += 1
        try:
            self.sent_s = sent_s = monotonic()
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
            if self._asked:
                self._gate.reported(
                    next((str(v) for k, v in await call.trailing_metadata() if k == LOAD_METRICS), None)
                )
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
                        if servers_fault(error) or self._lacks(error):
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
        second = self._gate.grpc.pick(now, (first,), self.target.name)
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
            lacking = these.lacking(now, self.target.name)
            endpoint = self._gate.grpc_sticky.pick(these.usable, self.stick, (*tried, *lacking))
            if endpoint is not None and not endpoint.outstanding:
                endpoint.record.heard_s = now
        else:
            endpoint = these.pick(now, tried, self.target.name)
        if endpoint is None:
            raise Refused(Outcome.UPSTREAM_UNREACHABLE, "no server of this pool can be reached", retry_after_s=1)
        self.endpoint = endpoint
        return endpoint

    def _lacks(self, error: aio.AioRpcError) -> bool:
        return self.target.kind == "model" and not_here(error)

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
            if servers_fault(error):
                status = 503 if error.code() is StatusCode.UNAVAILABLE else 500
                these.erred(endpoint, status, now, now - sent_s)
            else:
                endpoint.answered(now, now - sent_s)

    def _again(self, endpoint: GrpcEndpoint, error: aio.AioRpcError, tried: tuple[GrpcEndpoint, ...]) -> bool:
        """Whether to ask another one."""
        now = monotonic()
        these = self._gate.grpc
        if surely_not_executed(error):
            return not these.usable or these.pick(now, tried, self.target.name) is not None
        twice = broken(error) and self.target.plan.idempotent
        refused = says_not_executed(error) and not self.stick
        if self._attempts >= MAX_ATTEMPTS or now >= self.deadline or not (self._lacks(error) or twice or refused):
            return False
        if these.pick(now, tried, self.target.name) is None or not self._gate.retries.spend(now):
            return False
        self._attempts += 1
        return True
