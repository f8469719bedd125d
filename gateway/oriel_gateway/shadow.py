"""Shadow copies: an answered call is made once more at another pool, and the two answers are compared.

The copy starts when the original has its answer, so it can neither delay nor fail it. It is in the lowest band there
is, the first to be displaced, and is dropped before it costs anything: when there are already `SHADOWS` of them, when
anybody waits for the shadow's pool, when copies hold a quarter of that pool's permits, or without bytes for its body.
"""

import asyncio
from dataclasses import replace
from hashlib import blake2b
from time import monotonic

from oriel_gateway.attempts import note_answer
from oriel_gateway.call import Call
from oriel_gateway.call_state import ANSWERING, DONE
from oriel_gateway.core import Gateway
from oriel_gateway.detached import DetachedCall
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools import PoolGate
from oriel_gateway.routing_state import KEPT_BYTES, SHADOWS
from oriel_gateway.tracing import Mark
from oriel_policies.documents import Route, Tenant
from oriel_wire.h1_response import ResponseHead

__all__ = ["Fingerprint", "ShadowCall", "place_for_copy", "send_copy", "shadow_tenant"]

LOWEST_BAND = 255
_COMPARED_BYTES = KEPT_BYTES


class Fingerprint:
    """Status and body hash of one answer, as it comes. Past 1 MiB of body it is not compared."""

    __slots__ = ("_digest", "_size", "status")

    def __init__(self) -> None:
        self.status = 0
        self._digest = blake2b(digest_size=16)
        self._size = 0

    def add(self, data: bytes) -> None:
        """More of the body."""
        self._size += len(data)
        if self._size <= _COMPARED_BYTES:
            self._digest.update(data)

    def compare(self, other: "Fingerprint") -> str:
        """same | status_differs | body_differs | too_large"""
        if self.status != other.status:
            return "status_differs"
        if max(self._size, other._size) > _COMPARED_BYTES:
            return "too_large"
        same = self._size == other._size and self._digest.digest() == other._digest.digest()
        return "same" if same else "body_differs"


def shadow_tenant(gateway: Gateway, tenant: Tenant) -> Tenant:
    """The same tenant, less urgent than everything else."""
    known = gateway.routing.shadow_tenants
    found = known.get(tenant)
    if found is None:
        if len(known) >= 4096:
            known.clear()
        found = known[tenant] = replace(tenant, tier=replace(tenant.tier, band=LOWEST_BAND), allowances=())
    return found


def place_for_copy(gateway: Gateway, plan: Route, size_bytes: int) -> PoolGate | None:
    """The shadow's pool with bytes and a place taken, to be given back by `copy_done`; None: drop the copy."""
    gate = gateway.pools.get(plan.shadow_pool)
    if (
        gate is None
        or gateway.draining
        or gateway.routing.shadows >= SHADOWS
        or len(gate.admission.queue)
        or gate.shadows >= max(1, gate.admission.limit // 4)
        or not gate.hold(size_bytes, urgent=False)
    ):
        return None
    gate.shadows += 1
    return gate


def send_copy(call: Call, body: bytes, seen: Fingerprint) -> None:
    """Send what `call` sent to the shadow pool of its route, a turn of the loop later."""
    routing, plan = call.gateway.routing, call.target.plan
    gate = place_for_copy(call.gateway, plan, len(body))
    if gate is None:
        routing.compared(plan.name, plan.shadow_pool, "dropped")
        return
    routing.shadows += 1
    copy = ShadowCall(call, gate, seen, len(body))
    asyncio.get_running_loop().call_soon(copy.start, body)


class ShadowCall(DetachedCall):
    """One copy. original: the call it repeats, which has ended; seen: what that was answered."""

    def __init__(self, original: Call, gate: PoolGate, seen: Fingerprint, size_bytes: int) -> None:
        gateway, mark, now = original.gateway, original.mark, monotonic()
        plan, onward = original.target.plan, f"{mark.forward_id ^ 1 or 2:016x}"
        super().__init__(
            gateway,
            gate,
            original.head,
            shadow_tenant(gateway, original.tenant),
            # A copy is worth no second try.
            replace(
                original.target,
                pool=plan.shadow_pool,
                special=False,
                plan=replace(plan, hedge_s=0.0, idempotent=False),
            ),
            Mark(mark.request_id, mark.trace, mark.onward, onward, False, mark.own, mark.state),
            now,
            now + original.tenant.tier.give_up_s,
        )
        self._seen = seen
        self._own = Fingerprint()
        self._result = "failed"
        self._size_bytes = size_bytes

    def start(self, body: bytes) -> None:
        """Ask for a permit, unless the gateway was closed meanwhile."""
        if self.state != DONE:
            self.whole(body)

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        self.state = ANSWERING
        self.response_s = now = monotonic()
        if self._endpoint is not None:
            note_answer(self._gate.endpoints, self._endpoint, head, now, now - self.sent_s)
        self.status = self._own.status = head.status
        self.cost_us = head.cost_us
        self.response_data(data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        self._own.add(data)
        if complete:
            self._connection = None
            self._result = self._seen.compare(self._own)
            self._end(Outcome.ANSWERED)

    def refuse(self, refused: Refused) -> None:
        if self.state == DONE:
            return
        if refused.outcome in (Outcome.QUEUE_FULL, Outcome.DISPLACED):
            self._result = "dropped"
        self._end(refused.outcome)

    def _count(self, outcome: Outcome, now: float, error: str) -> None:
        super()._count(outcome, now, error)
        routing, plan = self._gateway.routing, self.target.plan
        routing.shadows -= 1
        self._gate.copy_done(self._size_bytes)
        routing.compared(plan.name, plan.shadow_pool, self._result)
