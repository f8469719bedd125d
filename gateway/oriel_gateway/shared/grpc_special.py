"""Special routes over gRPC: the work of `special`, `single_flight` and `shadow`, for unary calls and as coroutines.

The same rules, state and counters; kept answers of the two protocols are apart, because the messages are. Streams are
neither kept nor copied: their first message chooses route and side, and they stay on one endpoint by nature.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from enum import Enum
from hashlib import blake2b
from time import monotonic

from grpc import aio

from oriel_gateway.call.grpc import GrpcCall
from oriel_gateway.contracts import Host
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_gateway.shared.shadow import place_for_copy, shadow_tenant
from oriel_gateway.shared.single_flight import wants_its_own
from oriel_gateway.shared.state import KEPT_BYTES, REPLAY_BYTES, KeptAnswer, RoutingState
from oriel_policies.assignment import unit
from oriel_policies.documents import Tenant
from oriel_policies.flights import Flight, Flights

__all__ = ["GrpcSpecial"]

# Wait for a permit, send the message as it was authorised, return the answer. Raises Refused, AioRpcError.
Forward = Callable[[GrpcCall, bytes], Awaitable[bytes]]


class _Detached(GrpcCall):
    """A call for others: not counted as a request, and its end is somebody else's to say."""

    def __init__(self, of: GrpcCall, gate: PoolGate, tenant: Tenant, target: Target, deadline: float) -> None:
        now, size = monotonic(), of.size_bytes
        super().__init__(of.gateway, gate, of.method, tenant, target, of.mark, of.metadata, size, now, deadline, None)
        self.stick = of.stick

    def end(self, outcome: Outcome, error: str = "") -> None:
        """An answer is not the end: see `hand_over` and `close`."""

    def close(self) -> None:
        """Give back the place or the permit."""
        super().end(Outcome.CALLER_LEFT)

    def hand_over(self, call: GrpcCall) -> None:
        """`call` has the permit from now on, as if it had been made itself."""
        call.queued_s, call.permit_s, call.sent_s = self.queued_s, self.permit_s, self.sent_s
        call.ahead, call.endpoint, call.tried = self.ahead, self.endpoint, self.tried
        call.response_s, call.cost_us = self.response_s, self.cost_us
        call._ticket, self._ticket = self._ticket, None
        self._ended = True
        self._gate.calls -= 1

    def _count(self, outcome: Outcome, now: float, error: str) -> None:
        """Whoever it works for is counted."""


class _Failed(Enum):
    """What becomes of those who followed a flight that failed."""

    FLY_AGAIN = "fly again"
    GO_ALONE = "go alone"


class _Member:
    """One caller in a flight."""

    __slots__ = ("answer", "call")

    def __init__(self, call: GrpcCall) -> None:
        self.call = call
        self.answer: asyncio.Future[bytes | _Failed] = asyncio.get_running_loop().create_future()


class GrpcSpecial:
    """Owner of the tasks of flights and copies; `close` ends them."""

    def __init__(self, gateway: Host, routing: RoutingState, forward: Forward) -> None:
        self._gateway = gateway
        self._routing = routing
        self._forward = forward
        self._flights: Flights[_Member] = Flights()
        self._work: dict[object, asyncio.Task[None]] = {}
        self._copies: set[asyncio.Task[None]] = set()

    async def unary(self, call: GrpcCall, message: bytes) -> bytes:
        """Answer one call of a special target. Raises Refused or AioRpcError, as `forward` does."""
        target = call.target
        small = len(message) <= REPLAY_BYTES
        await call.let_through()  # before a kept answer can be given
        try:
            if small and target.keepable and not wants_its_own(call.metadata.get("cache-control")):
                answer = await self._shared(call, message)
            else:
                answer = await self._forward(call, message)
        except aio.AioRpcError as error:
            if small:
                self._copy(call, message, (error.code().name, b""))
            raise
        if small:
            self._copy(call, message, ("OK", answer))
        return answer

    async def close(self) -> None:
        """Cancel what nobody waits for."""
        tasks = [*self._work.values(), *self._copies]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Kept answers and single-flight ----------------------------------------------------------------------------

    async def _shared(self, call: GrpcCall, message: bytes) -> bytes:
        plan, routing = call.target.plan, self._routing
        key = _key(call, message)
        found = routing.cache.get(key, monotonic()) if plan.cache_s else None
        if found is not None:
            routing.answered_from(plan.name, "hit")
            call.notes += (("x-oriel-cache", "hit"), ("age", str(int(found[1]))))
            call.bytes_out = len(found[0].body)
            call.end(Outcome.ANSWERED)
            return found[0].body
        answer = await self._flown(call, key, message)
        if answer is _Failed.FLY_AGAIN:
            answer = await self._flown(call, key, message, again=True)
        return await self._forward(call, message) if isinstance(answer, _Failed) else answer

    async def _flown(self, call: GrpcCall, key: bytes, message: bytes, *, again: bool = False) -> bytes | _Failed:
        """The answer that all equal calls get, or what to do because there is none. Raises Refused, AioRpcError."""
        place = (key, call.tenant.tier.band, call.gate)
        member = _Member(call)
        flight, founded = self._flights.join(place, member)
        call.queued_s = monotonic()
        if founded:
            self._work[place] = asyncio.create_task(self._fly(flight, member, key, message, again))
        try:
            async with asyncio.timeout(max(0.0, call.deadline - call.queued_s)):
                return await member.answer
        except TimeoutError:
            late = "the deadline passed while waiting for the answer to an equal request"
            raise Refused(Outcome.DEADLINE_EXCEEDED, late) from None
        finally:
            if self._flights.leave(flight, member):
                self._work.pop(place).cancel()

    async def _fly(self, flight: Flight[_Member], founder: _Member, key: bytes, message: bytes, again: bool) -> None:
        """The one call for all members. It may take as long as the tier allows: they have their own deadlines."""
        call = founder.call
        plan, routing, tenant = call.target.plan, self._routing, call.tenant
        work = _Detached(call, call.gate, tenant, call.target, monotonic() + tenant.tier.give_up_s)
        try:
            answer = await self._forward(work, message)
        except (Refused, aio.AioRpcError) as error:
            for member in self._land(flight):
                if member.answer.done():
                    continue
                if member is founder:
                    member.answer.set_exception(error)
                else:
                    member.answer.set_result(_Failed.GO_ALONE if again else _Failed.FLY_AGAIN)
        else:
            if plan.cache_s and len(answer) <= KEPT_BYTES:
                owner = "" if plan.cache_shared else tenant.name
                kept = KeptAnswer(lines=(), body=answer)
                routing.cache.put(key, owner, kept, kept.size_bytes, monotonic(), plan.cache_s)
            how = "miss"
            for member in self._land(flight):
                if member.answer.done():
                    continue
                if how == "miss":
                    work.hand_over(member.call)
                routing.answered_from(plan.name, how)
                member.call.notes += (("x-oriel-cache", how),)
                member.call.bytes_out = len(answer)
                member.call.end(Outcome.ANSWERED)
                member.answer.set_result(answer)
                how = "joined"
        finally:
            work.close()
            for member in self._land(flight):  # only when this task was cancelled while somebody still waited
                member.answer.cancel()

    def _land(self, flight: Flight[_Member]) -> list[_Member]:
        if self._work.get(flight.key) is asyncio.current_task():
            del self._work[flight.key]
        return self._flights.land(flight)

    # Shadows ---------------------------------------------------------------------------------------------------

    def _copy(self, call: GrpcCall, message: bytes, seen: tuple[str, bytes]) -> None:
        target, routing = call.target, self._routing
        plan = target.plan
        if not plan.shadow_pool or not target.executes or not call.sent_s:
            return
        if unit(call.mark.request_id) >= plan.shadow_share:
            return
        gate = place_for_copy(self._gateway, routing, plan, len(message))
        if gate is None or not gate.speaks_grpc:
            if gate is not None:
                gate.copy_done(len(message))
            routing.compared(plan.name, plan.shadow_pool, "dropped")
            return
        routing.shadows += 1
        digest = blake2b(seen[1], digest_size=16).digest()
        task = asyncio.create_task(self._shadow(call, gate, message, seen[0], digest))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _shadow(self, call: GrpcCall, gate: PoolGate, message: bytes, code: str, digest: bytes) -> None:
        plan = call.target.plan
        # A copy is worth no second try.
        alone = replace(plan, hedge_s=0.0, idempotent=False)
        target = replace(call.target, pool=plan.shadow_pool, special=False, plan=alone)
        tenant = shadow_tenant(self._routing, call.tenant)
        work = _Detached(call, gate, tenant, target, monotonic() + call.tenant.tier.give_up_s)
        result = "failed"
        try:
            answer = await self._forward(work, message)
            same = blake2b(answer, digest_size=16).digest() == digest
            result = "status_differs" if code != "OK" else "same" if same else "body_differs"
        except aio.AioRpcError as error:
            if error.code().name == code:
                result = "same"
            elif code != "OK" or error.code().name not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                result = "status_differs"
        except Refused as refused:
            if refused.outcome in (Outcome.QUEUE_FULL, Outcome.DISPLACED):
                result = "dropped"
        finally:
            work.close()
            gate.copy_done(len(message))
            self._routing.shadows -= 1
            self._routing.compared(plan.name, plan.shadow_pool, result)


def _key(call: GrpcCall, message: bytes) -> bytes:
    target = call.target
    owner = "" if target.plan.cache_shared else call.tenant.name
    sent = [f"{name}:{value}" for name, value in sorted(call.sent_on())]
    known = "\0".join((owner, target.plan.name, target.pool, target.version, call.method, *sent))
    digest = blake2b(known.encode("utf-8", "surrogateescape"), digest_size=32, person=b"grpc")
    digest.update(b"\0\0")
    digest.update(message)
    return digest.digest()
