"""What every ingress of the gateway shares: the documents in force, the pools, the clock of deadlines, the counters."""

import asyncio
import random
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Protocol

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity import identify, still_valid
from oriel_gateway.limiter import Limiter
from oriel_gateway.pools import PoolGate
from oriel_gateway.stats import Stats
from oriel_gateway.targets import Target, resolve
from oriel_gateway.tracing import Mark, record_refusal
from oriel_policies.deadlines import DeadlineWheel
from oriel_policies.documents import ApiKey, Snapshot, Tenant
from oriel_wire.context import parse_timeout_ms, valid_request_id
from oriel_wire.h1 import Field, LineMemo
from oriel_wire.trace import SpanSink, parse_traceparent, random_bits

__all__ = ["Expirable", "Gateway"]

_TARGETS = 8192
LEARN_SHARE = 0.5  # of the tightest target that calls may spend in a pool so that its concurrency can be learned


class Expirable(Protocol):
    """Something with a deadline."""

    def expired(self) -> None:
        """The deadline passed: end now, and say where the call was."""


class Gateway:
    """The rooms before `forward`. Single writer: the loop it was built on."""

    def __init__(self, snapshot: Snapshot, *, limiter: Limiter, sink: SpanSink, sample_ratio: float = 1.0) -> None:
        self.snapshot = snapshot
        self.limiter = limiter
        self.sink = sink
        self.sample_ratio = sample_ratio
        self.stats = Stats()
        most_s = LEARN_SHARE * min((tier.target_s for tier in snapshot.tiers.values()), default=inf)
        self.pools = {name: PoolGate(pool, most_s=most_s) for name, pool in snapshot.pools.items()}
        self.top_band = min((tier.band for tier in snapshot.tiers.values()), default=0)
        self.draining = False
        self._loop = asyncio.get_running_loop()
        self._wheel: DeadlineWheel[Expirable] = DeadlineWheel(0.005)
        self._ticking: asyncio.TimerHandle | None = None
        self._targets: dict[tuple[Tenant, bytes], Target] = {}
        self._old_targets: dict[tuple[Tenant, bytes], Target] = {}
        self._tenant_lines = {tenant: _tenant_lines(tenant) for tenant in snapshot.tenants.values()}

    # identify, limit, route ------------------------------------------------------------------------------------

    def identify(self, credentials: Sequence[tuple[str, str]]) -> Tenant:
        """See `identity.identify`."""
        return identify(credentials, self.snapshot).tenant

    def identify_fields(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
        """The key behind parsed header lines; a line that was seen before is recognised by its hash."""
        if fields is not None and len(fields) == 1 and (owner := fields[0].owner) is not None:
            known: ApiKey = owner
            return still_valid(known)
        # A recognised line keeps neither name nor value: two credentials are refused before anyone looks at them.
        key = identify([(field.name, field.value) for field in fields or ()], self.snapshot)
        assert fields is not None
        memo.keep_credential(fields[0].line, key)
        return key

    def target(self, tenant: Tenant, line: bytes, method: str, path: str, query: str) -> Target:
        """What this tenant's request line asks for; remembered by its bytes. Raises Refused."""
        key = (tenant, line)
        found = self._targets.get(key)
        if found is None:
            found = self._old_targets.get(key) or resolve(method, path, query, tenant, self.snapshot)
            if len(line) <= 256:
                if len(self._targets) >= _TARGETS:
                    self._old_targets, self._targets = self._targets, {}
                self._targets[key] = found
        return found

    def tenant_lines(self, tenant: Tenant) -> bytes:
        """The header lines by which the next hop knows tier, band and tenant."""
        return self._tenant_lines[tenant]

    def deadline(self, tenant: Tenant, received_s: float, timeout_ms: str | None) -> float:
        """Absolute deadline: the tier's, or an earlier one the client asked for. Raises Refused BAD_REQUEST."""
        give_up_s = tenant.tier.give_up_s
        if timeout_ms is not None:
            asked_s = parse_timeout_ms(timeout_ms)
            if asked_s is None or asked_s <= 0.0:
                raise Refused(Outcome.BAD_REQUEST, "x-request-timeout-ms has to be a whole number of milliseconds > 0")
            give_up_s = min(give_up_s, asked_s)
        return received_s + give_up_s

    def mark(self, request_id: str | None, traceparent: str | None, tracestate: str | None) -> Mark:
        """The call's ids: the client's own where they are valid, fresh ones otherwise.

        A client's sampled bit is honoured; a trace that starts here is sampled by `sample_ratio`.
        """
        span_id = random_bits(64) or 1
        span_hex = f"{span_id:016x}"
        if request_id is None or not valid_request_id(request_id):
            request_id = span_hex
        parent = parse_traceparent(traceparent, tracestate or "") if traceparent else None
        if parent is not None:
            return Mark(request_id, parent.trace_id, parent.span_id, span_id, span_hex, parent.sampled, parent.state)
        sampled = self.sink.enabled and (self.sample_ratio >= 1.0 or random.random() < self.sample_ratio)
        return Mark(request_id, random_bits(128) or 1, 0, span_id, span_hex, sampled, "")

    def turned_away(self, refused: Refused, mark: Mark, tenant: Tenant | None, method: str, received_s: float) -> None:
        """Count a request that was refused before it became a call, and trace it if its sender is known."""
        self.stats.turned_away(refused.outcome)
        if tenant is not None and mark.sampled and self.sink.enabled:
            record_refusal(mark, tenant, self.sink, refused.outcome, refused.message, method, received_s, monotonic())

    # deadlines -------------------------------------------------------------------------------------------------

    def watch(self, item: Expirable, deadline: float, now: float) -> int:
        """Call `item.expired()` when the deadline passes; the answer is for `unwatch`."""
        slot = self._wheel.add(item, deadline, now)
        if self._ticking is None:
            self._ticking = self._loop.call_later(self._wheel.resolution_s, self._tick)
        return slot

    def unwatch(self, item: Expirable, slot: int) -> None:
        """The item ended by itself."""
        self._wheel.discard(item, slot)

    def _tick(self) -> None:
        due = self._wheel.due(monotonic())
        # Armed before anything is called: an error in one call must not stop the clock of all others.
        waiting = len(self._wheel) or len(due)
        self._ticking = self._loop.call_later(self._wheel.resolution_s, self._tick) if waiting else None
        for item in due:
            item.expired()

    async def close(self) -> None:
        """Stop the clock and close idle upstream connections."""
        if self._ticking is not None:
            self._ticking.cancel()
        for gate in self.pools.values():
            await gate.close()


def _tenant_lines(tenant: Tenant) -> bytes:
    lines = f"x-oriel-tier: {tenant.tier.name}\r\nx-oriel-priority: {tenant.tier.band}\r\nx-oriel-tenant: {tenant.name}"
    if tenant.models and tenant.models != ("*",):
        lines += f"\r\nx-oriel-models: {','.join(tenant.models)}"
    return lines.encode("ascii")
