"""What every ingress of the gateway shares: the documents in force, the pools, the clock of deadlines, the counters."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from mypy_extensions import mypyc_attr

from oriel_gateway.access_log import AccessLog
from oriel_gateway.api_docs.pages import ApiDocs
from oriel_gateway.decisions import NOT_REACHED, Decisions
from oriel_gateway.documents import DocumentsInForce
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity import identify, still_valid
from oriel_gateway.limits import Limiter
from oriel_gateway.pools import PoolGate
from oriel_gateway.routing_state import CACHE_BYTES, RoutingState
from oriel_gateway.stats import BATCH, Stats
from oriel_gateway.targets import Kind, Target, absent, resolve, resolve_grpc
from oriel_gateway.tracing import Mark, Recorded, record_call, record_refusal
from oriel_gateway.unread import Unread
from oriel_gateway.watch import Watch
from oriel_policies.answer_cache import AnswerCache
from oriel_policies.deadlines import DeadlineWheel
from oriel_policies.documents import ApiKey, Route, Snapshot, Tenant
from oriel_policies.documents.packed import decoded
from oriel_policies.documents.promises import served_by
from oriel_policies.routing import RouteTable
from oriel_policies.tiers import flex, lowered, offered, on_route
from oriel_wire.context import parse_timeout_ms, valid_request_id
from oriel_wire.engine.large_messages import LargeMessages
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h1 import Field, LineMemo
from oriel_wire.trace import SpanSink, TraceIds, bounded_state, read_traceparent

if TYPE_CHECKING:
    from oriel_gateway.key_sets import KeySets
    from oriel_gateway.tokens import Tokens

__all__ = ["Expirable", "Gateway", "Young"]

_TARGETS: Final = 8192
_LINE_BYTES: Final = 256  # longer ones are judged anew each time
_LISTED = 8  # tiers, in a refusal
_RELEASED = 200  # remembered things let go per turn of the loop
_BODY_BYTES: Final = 64 * 1024  # smaller bodies leave no memory behind that is worth giving back
_GIVE_BACK_S = 2.0
LEARN_SHARE = 0.5  # of the tightest target that calls may spend in a pool so that its concurrency can be learned


class Expirable(Protocol):
    """Something with a deadline."""

    def expired(self) -> None:
        """The deadline passed: end now, and say where the call was."""

    def stopping(self) -> None:
        """The gateway is about to end: be refused unless it has been sent to a server."""


class Young(Expirable, Protocol):
    """Something that has just begun, and most often ends before the clock's next tick.

    slot: below 0 while the clock is to take it in.
    """

    slot: int
    deadline: float
    received_s: float


@mypyc_attr(allow_interpreted_subclasses=True)
class Gateway:
    """The rooms before `forward`. Single writer: the loop it was built on."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        limiter: Limiter,
        sink: SpanSink,
        sample_ratio: float = 1.0,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.snapshot = snapshot
        self.routes = RouteTable(snapshot.routes)
        self.limiter = limiter
        self.sink = sink
        self.sample_ratio = sample_ratio
        self.stats = Stats()
        self.routing = RoutingState(cache=AnswerCache(max_bytes=cache_bytes))
        self.decisions = Decisions()
        self.access_log: AccessLog | None = None
        self.documents = DocumentsInForce()
        self.api_docs = ApiDocs()
        self.tokens: Tokens | None = None
        self.tokens_refused: dict[str, int] = {}
        self.key_sets: KeySets | None = None
        self.fronts: set[HttpServer] = set()  # who remembers credentials
        self.unread = Unread()
        self.bodies = LargeMessages(least_bytes=_BODY_BYTES, delay_s=_GIVE_BACK_S)
        most_s = _most_s(snapshot)
        self.pools = {name: PoolGate(pool, most_s=most_s) for name, pool in snapshot.pools.items()}
        self.left_pools: list[PoolGate] = []  # not in the documents any more, but calls are still on their way
        self.top_band = min((tier.band for tier in snapshot.tiers.values()), default=0)
        self.tiers_differ = _tiers_differ(snapshot)
        self.draining = False
        self.refusing = False  # what cannot be sent at once, because it would still wait when the gateway ends
        self.endpoint_watch = Watch(lambda: (*self.pools.values(), *self.left_pools))
        self._loop = asyncio.get_running_loop()
        self._wheel: DeadlineWheel[Expirable] = DeadlineWheel(0.005)
        self._ticking: asyncio.TimerHandle | None = None
        self.young: dict[Young, None] = {}
        self._targets: dict[tuple[Tenant, bytes], Target] = {}
        self._old_targets: dict[tuple[Tenant, bytes], Target] = {}
        self._tenant_lines: dict[Tenant, bytes] = {}
        self._ids = TraceIds()
        self._released: list[dict[Any, Any]] = []
        self._trust(snapshot)

    # documents -------------------------------------------------------------------------------------------------

    def adopt(self, snapshot: Snapshot, *, good: bool = True) -> None:
        """New documents, all at once; good: False for those in force less what no longer counts.

        A call that has begun keeps its tenant, its target and its pool.
        Pools of the same name keep queue, permits and connections; one that is gone takes no new calls and is closed
        by `close_left_pools` when it is empty. Credentials are judged anew, on open connections as well.
        """
        self._trust(snapshot)
        old, pools = self.snapshot, {}
        most_s = _most_s(snapshot)
        for name, pool in snapshot.pools.items():
            gate = self.pools.get(name)
            if gate is None:
                gate = PoolGate(pool, most_s=most_s)
            elif gate.pool != pool:
                gate.adopt(pool, most_s=most_s)
            pools[name] = gate
        self.left_pools += [gate for name, gate in self.pools.items() if name not in pools]
        self.snapshot, self.pools = snapshot, pools
        self.routes = RouteTable(snapshot.routes)
        self.routing.adopted()
        self.top_band = min((tier.band for tier in snapshot.tiers.values()), default=0)
        self.tiers_differ = _tiers_differ(snapshot)
        self._release(self._targets, self._old_targets, self._tenant_lines, *decoded(old), old.served)
        self._targets, self._old_targets, self._tenant_lines = {}, {}, {}
        self.forget_credentials()
        if good:
            self.documents.took()

    def forget_credentials(self) -> None:
        """Whoever was recognised has to be identified again."""
        for front in self.fronts:
            front.forget_credentials()
        if self.tokens is not None:
            self.tokens.forget()

    async def close_left_pools(self) -> None:
        """Close the removed pools whose last call has ended."""
        empty = [gate for gate in self.left_pools if gate.unused]
        self.left_pools = [gate for gate in self.left_pools if gate not in empty]
        for gate in empty:
            await gate.close()
        for gate in self.pools.values():
            await gate.close_left()

    def _trust(self, snapshot: Snapshot) -> None:
        """Tokens of the issuers of these documents, if there are any."""
        if not snapshot.issuers:
            self.tokens = None
            return
        # Only whoever uses tokens pays for the cryptography.
        from oriel_gateway.key_sets import KeySets
        from oriel_gateway.tokens import Tokens

        if self.key_sets is None:
            self.key_sets = KeySets(self.forget_credentials)
        self.key_sets.adopt(snapshot.issuers.values())
        self.tokens = Tokens(snapshot, self.key_sets, self.tokens_refused)

    def _release(self, *remembered: dict[Any, Any]) -> None:
        """Freeing a hundred thousand tenants at once would hold the loop; nobody looks into these dicts any more."""
        if not self._released:
            self._loop.call_soon(self._release_some)
        self._released += remembered

    def _release_some(self) -> None:
        last = self._released[-1]
        for key in list(islice(last, _RELEASED)):
            del last[key]
        if not last:
            self._released.pop()
        if self._released:
            self._loop.call_later(0.001, self._release_some)

    # identify, limit, route ------------------------------------------------------------------------------------

    def identify(self, credentials: Sequence[tuple[str, str]]) -> ApiKey:
        """See `identity.identify`."""
        return identify(credentials, self.snapshot, self.tokens)

    def identify_fields(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
        """The key behind parsed header lines; a line that was seen before is recognised by its hash."""
        if fields is not None and len(fields) == 1 and (owner := fields[0].owner) is not None:
            known: ApiKey = owner
            return still_valid(known)
        # A recognised line keeps neither name nor value: two credentials are refused before anyone looks at them.
        key = identify([(field.name, field.value) for field in fields or ()], self.snapshot, self.tokens)
        assert fields is not None
        memo.keep_credential(fields[0].line, key)
        return key

    def target(
        self, tenant: Tenant, line: bytes, method: str, path: str, query: str, tier: str | None = None
    ) -> Target:
        """What this tenant's request line asks for; remembered by its bytes. tier: see `served`. Raises Refused."""
        key = (tenant, line if tier is None else _with_tier(line, tier))
        found = self._targets.get(key)
        if found is None:
            found = self._old_targets.get(key)
            if found is None:
                by_tier = partial(self.served, asked=tier)
                found = resolve(method, path, query, tenant, self.routes, by_tier, self.flexed)
            self._remember(key, found)
        return found

    def grpc_target(
        self, tenant: Tenant, method: str, kind: Kind, name: str, version: str, tier: str | None = None
    ) -> Target:
        """The same for a gRPC method and the model that its message names. Raises Refused."""
        line = f"{method} {name} {version}".encode("ascii")
        key = (tenant, line if tier is None else _with_tier(line, tier))  # no HTTP request line looks like this
        found = self._targets.get(key)
        if found is None:
            found = self._old_targets.get(key)
            if found is None:
                by_tier = partial(self.served, asked=tier)
                found = resolve_grpc(kind, name, version, method, tenant, self.routes, by_tier)
            self._remember(key, found)
        return found

    def flexed(self, tenant: Tenant) -> Tenant:
        """The tenant by the tier of `service_tier: "flex"`."""
        return served_by(tenant, flex(tenant.tier, self.snapshot.tiers), self.snapshot.served)

    def served(self, tenant: Tenant, route: Route, asked: str | None = None) -> Tenant:
        """The tenant by the tier that serves its calls on a route. asked: the tier the client asks for, if it does.

        Raises Refused TIER_NOT_ALLOWED for one that is above what the documents say.
        """
        snapshot = self.snapshot
        tier = on_route(tenant.tier, route, snapshot.tiers)
        if asked is not None:
            lower = lowered(tier, asked, snapshot.tiers)
            if lower is None:
                names = ", ".join([each.name for each in offered(tier, snapshot.tiers)][:_LISTED])
                message = f"tier {asked[:64]!r} cannot be asked for here; what can: {names}"
                raise Refused(Outcome.TIER_NOT_ALLOWED, message[:500])
            tier = lower
        return served_by(tenant, tier, snapshot.served)

    def chosen(self, target: Target, header: Callable[[str], str | None], mark: Mark) -> Target:
        """Of a target with choices, the one for a call with these headers and ids. Raises Refused NOT_FOUND."""
        assert target.choices is not None
        found = target.choices.pick(header, mark.request_id)
        if found is None:
            raise absent(target.kind, target.name)
        return found

    def _remember(self, key: tuple[Tenant, bytes], target: Target) -> None:
        if len(key[1]) > _LINE_BYTES:
            return
        if len(self._targets) >= _TARGETS:
            self._old_targets, self._targets = self._targets, {}
        self._targets[key] = target

    def tenant_lines(self, tenant: Tenant) -> bytes:
        """The header lines by which the next hop knows tier, band and tenant."""
        lines = self._tenant_lines.get(tenant)
        if lines is None:
            lines = self._tenant_lines[tenant] = _tenant_lines(tenant)
        return lines

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
        ids = self._ids
        if len(ids.spans) < 2 or not ids.traces:
            ids.refill()
        own = ids.spans.pop()
        if request_id is None or not valid_request_id(request_id):
            request_id = own
        parent = read_traceparent(traceparent) if traceparent else None
        if parent is not None:
            trace, span, sampled = parent
            state = bounded_state(tracestate) if tracestate else ""
            return Mark(request_id, trace, own, ids.spans.pop(), sampled, span, state)
        sampled = self.sink.enabled and (self.sample_ratio >= 1.0 or random.random() < self.sample_ratio)
        return Mark(request_id, ids.traces.pop(), own, ids.spans.pop(), sampled)

    def fresh_mark(self) -> Mark:
        """The same for a client that has none."""
        spans, traces = self._ids.spans, self._ids.traces
        if len(spans) < 2 or not traces:
            return self.mark(None, None, None)
        own = spans.pop()
        sampled = self.sink.enabled and (self.sample_ratio >= 1.0 or random.random() < self.sample_ratio)
        return Mark(own, traces.pop(), own, spans.pop(), sampled)

    def turned_away(
        self,
        refused: Refused,
        mark: Mark,
        tenant: Tenant | None,
        method: str,
        received_s: float,
        *,
        protocol: str = "http",
        status: int = 0,
        target: Target | None = None,
    ) -> None:
        """Count, keep and log a request that was refused before it became a call; trace it if its sender is known."""
        outcome, message = refused.outcome, refused.message
        self.stats.turned_away(outcome, tenant)
        now = monotonic()
        # In the order of `Decided`.
        decided = (
            *(now, mark, method, protocol, tenant, target, outcome, status, message, received_s),
            *NOT_REACHED,
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        if tenant is not None and mark.sampled and self.sink.enabled:
            record_refusal(mark, tenant, self.sink, outcome, message, method, received_s, now)

    def ended(self, call: Recorded, now: float, error: str, answered_s: float, bytes_in: int) -> None:
        """Count, keep, log and trace a call that is over. answered_s: when it was what its target is about."""
        # In the order of `Decided`.
        decided = (
            now,
            call.mark,
            call.method,
            call.protocol,
            call.tenant,
            call.target,
            call.outcome,
            call.status,
            error,
            call.received_s,
            call.queued_s,
            call.permit_s,
            call.sent_s,
            call.response_s,
            call.deadline,
            call.ahead,
            bytes_in,
            call.bytes_out,
            call.endpoint,
            call.tried,
            answered_s,
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        recent = self.stats.recent
        recent.append(decided)
        if len(recent) >= BATCH:
            self.stats.count()
        if call.mark.sampled and self.sink.enabled:
            record_call(call, self.sink, now, error)

    @property
    def ready(self) -> bool:
        """Whether new connections are welcome: it has had a look at its upstreams and does not drain.

        Upstreams that are down do not make the gateway unready: it holds calls for them, and serves other pools.
        """
        return not self.draining and self.endpoint_watch.looked

    # deadlines -------------------------------------------------------------------------------------------------

    def watch(self, item: Expirable, deadline: float, now: float) -> int:
        """Call `item.expired()` when the deadline passes; the answer is for `unwatch`."""
        slot = self._wheel.add(item, deadline, now)
        self.tick_soon()
        return slot

    def tick_soon(self) -> None:
        """Whatever is put into `young` is watched from the next tick on, unless its slot says that it is over."""
        if self._ticking is None:
            self._ticking = self._loop.call_later(self._wheel.resolution_s, self._tick)

    def unwatch(self, item: Expirable, slot: int) -> None:
        """The item ended by itself."""
        self._wheel.discard(item, slot)

    def _tick(self) -> None:
        wheel, young = self._wheel, self.young
        self.young = {}
        for begun in young:
            begun.slot = wheel.add(begun, begun.deadline, begun.received_s)
        due = wheel.due(monotonic())
        # Armed before anything is called: an error in one call must not stop the clock of all others.
        waiting = len(self._wheel) or len(due)
        self._ticking = self._loop.call_later(self._wheel.resolution_s, self._tick) if waiting else None
        for item in due:
            item.expired()

    def refuse_waiting(self) -> None:
        """Refuse calls that have been sent to nobody, and later ones that would have to wait, as `server_stopping`."""
        self.refusing = True
        for call in (*self.young, *self._wheel):
            call.stopping()

    async def close(self) -> None:
        """Stop the clock and close idle upstream connections."""
        self.routing.close()
        if self._ticking is not None:
            self._ticking.cancel()
        await self.endpoint_watch.close()
        await self.limiter.close()
        for gate in (*self.pools.values(), *self.left_pools):
            await gate.close()


def _with_tier(line: bytes, tier: str) -> bytes:
    """What a target is remembered by; no line has a line feed in it."""
    return b"%b\n%b" % (line, tier.encode("latin-1", "replace"))


def _tenant_lines(tenant: Tenant) -> bytes:
    lines = f"x-oriel-tier: {tenant.tier.name}\r\nx-oriel-priority: {tenant.tier.band}\r\nx-oriel-tenant: {tenant.name}"
    if tenant.models != ("*",):
        # Without the line all models may be used: a tenant that may use none is given a pattern that no name fits.
        lines += f"\r\nx-oriel-models: {','.join(tenant.models) or '!'}"
    if tenant.services != ("*",):  # for the near name of a misspelt one
        lines += f"\r\nx-oriel-services: {','.join(tenant.services) or '!'}"
    return lines.encode("ascii")


def _tiers_differ(snapshot: Snapshot) -> bool:
    """Whether the tier of a call may depend on its route."""
    return any(route.tier for route in snapshot.routes)


def _most_s(snapshot: Snapshot) -> float:
    return LEARN_SHARE * min((tier.target_s for tier in snapshot.tiers.values()), default=inf)
