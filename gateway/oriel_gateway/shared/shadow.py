"""Shadow copies: an answered call is made once more at another pool, and the two answers are compared.

The copy starts when the original has its answer, so it can neither delay nor fail it. It is in the lowest band there
is, the first to be displaced, and is dropped before it costs anything: when there are already `SHADOWS` of them, when
anybody waits for the shadow's pool, when copies hold a quarter of that pool's permits, or without bytes for its body.
"""

import asyncio
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Any

from oriel_gateway.call.attempts import note_answer
from oriel_gateway.call.http import Call
from oriel_gateway.call.lifecycle import ANSWERING, DONE
from oriel_gateway.contracts import Host
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.shared.state import KEPT_BYTES, SHADOWS, RoutingState
from oriel_policies.documents import Route, Tenant
from oriel_wire.sampling import without_threshold

LOWEST_BAND = 255
_COMPARED_BYTES = KEPT_BYTES


class Fingerprint:
    """Status and body hash of one answer, built up as it comes. A body of more than 1 MiB is not compared."""

    __slots__ = ("_digest", "_size", "status")

    def __init__(self) -> None:
        self.status = 0
        self._digest = blake2b(digest_size=16)
        self._size = 0

    def add(self, data: bytes) -> None:
        """Take more of the body."""
        self._size += len(data)
        if self._size <= _COMPARED_BYTES:
            self._digest.update(data)

    def compare(self, other: "Fingerprint") -> str:
        """Return same, status_differs, body_differs or too_large."""
        if self.status != other.status:
            return "status_differs"
        if max(self._size, other._size) > _COMPARED_BYTES:
            return "too_large"
        same = self._size == other._size and self._digest.digest() == other._digest.digest()
        return "same" if same else "body_differs"


def shadow_tenant(routing: RoutingState, tenant: Tenant) -> Tenant:
    """Return the same tenant, less urgent than everything else."""
    known = routing.shadow_tenants
    found = known.get(tenant)
    if found is None:
        if len(known) >= 4096:
            known.clear()
        found = known[tenant] = replace(
            tenant, tier=replace(tenant.tier, band=LOWEST_BAND), allowances=(), unbilled="shadow"
        )
    return found


def place_for_copy(gateway: Host, routing: RoutingState, plan: Route, size_bytes: int) -> PoolGate | None:
    """Return the shadow's pool, with bytes and a place taken that `copy_done` gives back; None: drop the copy."""
    gate = gateway.pools.get(plan.shadow_pool)
    if (
        gate is None
        or gateway.draining
        or routing.shadows >= SHADOWS
        or len(gate.admission.queue)
        or gate.shadows >= max(1, gate.admission.limit // 4)
        or not gate.reserve_bytes(size_bytes, urgent=False)
    ):
        return None
    gate.shadows += 1
    return gate


def send_copy(call: Call, routing: RoutingState, body: bytes, seen: Fingerprint) -> None:
    """Send what `call` sent to the shadow pool of its route, a turn of the loop later. seen: how it was answered."""
    plan = call.target.plan
    gate = place_for_copy(call.gateway, routing, plan, len(body))
    if gate is None:
        routing.compared(plan.name, plan.shadow_pool, "dropped")
        return
    routing.shadows += 1
    copy = _ShadowCopy(call, routing, gate, seen, len(body))
    asyncio.get_running_loop().call_soon(copy.start, body)


class _ShadowCopy:
    """Makes one copy and receives its answer. It is not counted as a request and not traced: its original is."""

    __slots__ = ("_call", "_own", "_result", "_routing", "_seen", "_size_bytes")

    def __init__(
        self, original: Call, routing: RoutingState, gate: PoolGate, seen: Fingerprint, size_bytes: int
    ) -> None:
        mark, plan, now = original.mark, original.target.plan, monotonic()
        self._routing = routing
        self._seen = seen
        self._own = Fingerprint()
        self._result = "failed"
        self._size_bytes = size_bytes
        # A failed copy is not sent again.
        alone = replace(plan, hedge_s=0.0, idempotent=False)
        self._call = type(original)(
            original.gateway,
            None,
            gate,
            original.head,
            shadow_tenant(routing, original.tenant),
            replace(original.target, pool=plan.shadow_pool, special=False, plan=alone, fallbacks=()),
            Mark(
                mark.request_id,
                mark.trace,
                mark.onward,
                f"{mark.forward_id ^ 1 or 2:016x}",
                flags="00" if mark.flags in ("00", "01") else "02",
                parent=mark.own,
                state=without_threshold(mark.state),
            ),
            now,
            now + original.tenant.tier.give_up_s,
            receiver=self,
        )
        routing.detached[self] = None

    def start(self, body: bytes) -> None:
        """Ask for a permit, unless the gateway was closed meanwhile."""
        if self._call.state != DONE:
            self._call.whole(body)

    def cancel(self) -> None:
        """Drop the copy, because the gateway closes."""
        self._call.client_left()

    def response(self, call: Call, head: Any, data: bytes, complete: bool) -> bool:
        call.state = ANSWERING
        call.response_s = now = monotonic()
        if call.endpoint is not None:
            note_answer(call.endpoints, call.endpoint, head, now, now - call.sent_s)
        call.status, self._own.status = head.status, head.code
        call.cost_us = head.cost_us
        return self.response_data(call, data, complete)

    def response_data(self, call: Call, data: bytes, complete: bool) -> bool:
        self._own.add(data)
        if complete:
            self._result = self._seen.compare(self._own)
            call.finish(Outcome.ANSWERED)
        return True

    def refused(self, call: Call, refused: Refused) -> bool:
        if refused.outcome in (Outcome.QUEUE_FULL, Outcome.DISPLACED):
            self._result = "dropped"
        call.finish(refused.outcome)
        return True

    def ended(self, call: Call) -> None:
        routing, plan = self._routing, call.target.plan
        routing.detached.pop(self, None)
        routing.shadows -= 1
        call.gate.copy_done(self._size_bytes)
        routing.compared(plan.name, plan.shadow_pool, self._result)
