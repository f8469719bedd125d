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
from oriel_gateway.call.call import GatewayCall, Request
from oriel_gateway.call.contracts import ANSWERING, DONE, Call
from oriel_gateway.call.host import Host
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.pool import PoolGate, holding_of
from oriel_gateway.routing.targets import Target
from oriel_gateway.shared.agreement import Body, Compared
from oriel_gateway.shared.state import KEPT_BYTES, SHADOWS, RoutingState
from oriel_policies.documents import Tenant
from oriel_policies.waiting.shares import Holding
from oriel_wire.observe.sampling import without_threshold

LOWEST_BAND = 255
_COMPARED_BYTES = KEPT_BYTES


class Fingerprint:
    """Status and body hash of one answer, built up as it comes. A body of more than 1 MiB is not compared.

    body: the bytes of the answer to a v2 infer call over HTTP, if it is small enough; None for other calls.
    """

    def __init__(self, call: Call, head: Any) -> None:
        self.status = head.code
        self.body = Body(head.forward) if _is_infer(call) and head.code == 200 else None
        self._digest = blake2b(digest_size=16)
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take more of the body."""
        self._size += len(data)
        if self.body is not None:
            self.body.feed(data)
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


def _is_infer(call: Call) -> bool:
    """Return whether the answer to a call has the outputs of a model, in a form that is compared."""
    return call.side.protocol == "http" and call.target.kind == "model" and call.target.work.endswith("/infer")


def share_of_copies(call: Call) -> float:
    """Return which share of the calls of a target are made once more elsewhere, to compare the answers."""
    target, plan = call.target, call.target.plan
    if not target.executes:
        return 0.0
    if target.copies_to is not None and plan.rollback is not None:
        return plan.rollback.compare_share if _is_infer(call) else 0.0
    return plan.shadow_share if plan.shadow_pool else 0.0


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


def place_for_copy(
    gateway: Host, routing: RoutingState, pool: str, tenant: Tenant, size_bytes: int
) -> tuple[PoolGate, Holding] | None:
    """Return the pool for a copy and what it holds of the pool's bytes; None: drop the copy."""
    gate, holding = gateway.pools.get(pool), holding_of(tenant)
    if (
        gate is None
        or gateway.draining
        or routing.shadows >= SHADOWS
        or len(gate.admission.queue)
        or gate.shadows >= max(1, gate.admission.limit // 4)
        or not gate.reserve_bytes(holding, size_bytes)
    ):
        return None
    gate.bytes.fix(holding)
    gate.shadows += 1
    return gate, holding


def send_copy(call: Call, routing: RoutingState, body: bytes, seen: Fingerprint) -> None:
    """Send what `call` sent to the shadow pool of its route, or to the other side of its split, a turn of the loop
    later. seen: the fingerprint of its answer.
    """
    plan = call.target.plan
    target = call.target.copies_to or replace(call.target, pool=plan.shadow_pool)
    found = place_for_copy(call.gateway, routing, target.pool, shadow_tenant(routing, call.tenant), len(body))
    if found is None:
        routing.compared(plan.name, target.pool, "dropped")
        return
    routing.shadows += 1
    copy = _ShadowCopy(call, target, routing, *found, seen)
    asyncio.get_running_loop().call_soon(copy.start, body)


class _ShadowCopy:
    """Makes one copy and receives its answer. It is not counted as a request and not traced: its original is."""

    def __init__(
        self,
        original: Call,
        target: Target,
        routing: RoutingState,
        gate: PoolGate,
        holding: Holding,
        seen: Fingerprint,
    ) -> None:
        mark, plan, now = original.mark, original.target.plan, monotonic()
        self._routing = routing
        self._original = original.target
        self._seen = seen
        self._own: Fingerprint | None = None
        self._result = "failed"
        self._holding = holding
        # A failed copy is not sent again.
        alone = replace(plan, hedge_s=0.0, idempotent=False)
        tenant = shadow_tenant(routing, original.tenant)
        target = replace(target, tenant=tenant, special=False, plan=alone, fallbacks=(), copies_to=None)
        until = now + original.tenant.tier.give_up_s
        request = Request(None, original.head, _copied(mark), now)
        self._call = GatewayCall(original.gateway, request, original.side, gate, target, until)
        self._call.receiver = self
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
            note_answer(call.endpoints, call.endpoint, head, now, now - call.sent_s, call.target.sought)
        call.status = head.status
        self._own = Fingerprint(call, head)
        call.cost_us = head.cost_us
        return self.response_data(call, data, complete)

    def response_data(self, call: Call, data: bytes, complete: bool) -> bool:
        own = self._own
        assert own is not None
        own.feed(data)
        if complete:
            self._result = self._seen.compare(own)
            self._compare_values(own)
            call.finish(Outcome.ANSWERED)
        return True

    def _compare_values(self, own: Fingerprint) -> None:
        """Compare the outputs. The reference is the other side of a canary, and the original of a shadow."""
        seen, original, canaries = self._seen, self._original, self._routing.canaries
        if seen.body is None or own.body is None:
            return
        plan, judged = original.plan, original.copies_to is not None
        new, reference = (seen.body, own.body) if judged else (own.body, seen.body)

        def then(found: Compared) -> None:
            if judged and found.rows is not None:
                canaries.compared(plan, found.rows)

        compared_with = original.copies_to.side if original.copies_to is not None else plan.shadow_pool
        self._routing.agreement.compare((original.name, compared_with), new, reference, then)

    def refused(self, call: Call, refused: Refused) -> bool:
        if refused.outcome in (Outcome.QUEUE_FULL, Outcome.DISPLACED):
            self._result = "dropped"
        call.finish(refused.outcome)
        return True

    def finished(self, call: Call) -> None:
        routing = self._routing
        routing.detached.pop(self, None)
        routing.shadows -= 1
        call.gate.shadows -= 1
        call.gate.bytes.release(self._holding)
        routing.compared(call.target.plan.name, call.target.pool, self._result)


def _copied(mark: Mark) -> Mark:
    """Return the ids of the copy of a call: its span follows the call's own, and its trace is not kept."""
    flags = "00" if mark.flags in ("00", "01") else "02"
    made = Mark(mark.request_id, mark.trace, mark.onward, f"{mark.forward_id ^ 1 or 2:016x}", flags=flags)
    made.parent, made.state = mark.own, without_threshold(mark.state)
    return made
