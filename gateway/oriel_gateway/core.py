"""The gateway as every ingress shares it: the documents in force, the pools, the deadline clock, the records."""

import asyncio
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import mypyc_attr

from oriel_gateway.api_docs.pages import ApiDocs
from oriel_gateway.call.host import Host
from oriel_gateway.call.kept_open import KeepAlive
from oriel_gateway.call.unread import Unread
from oriel_gateway.clock import DeadlineClock
from oriel_gateway.documents.in_force import DocumentsInForce
from oriel_gateway.identity.callers import Callers
from oriel_gateway.identity.tenant_buckets import OtherRequests
from oriel_gateway.limits import Limiter
from oriel_gateway.observe.records import Records
from oriel_gateway.observe.spending import Spending
from oriel_gateway.observe.tracing import Marks
from oriel_gateway.overload import Overload
from oriel_gateway.pools.health import Watch
from oriel_gateway.pools.model_placement import ModelPlacements
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.scaling import ScaledPools
from oriel_gateway.routing.target_cache import TargetCache
from oriel_gateway.shared.state import CACHE_BYTES, RoutingState
from oriel_policies.documents import Snapshot, Tenant
from oriel_policies.documents.packed import decoded
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_wire.engine.health import Watches
from oriel_wire.engine.large_messages import LargeMessages
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.sampling import Sampling
from oriel_wire.observe.trace import SpanSink

if TYPE_CHECKING:
    from oriel_gateway.identity.key_sets import KeySets
    from oriel_wire.observe.recall import Recaller

_RELEASED = 200  # remembered objects that are freed per turn of the loop
_BODY_BYTES: Final = 64 * 1024  # memory of smaller bodies is not worth returning to the system
_GIVE_BACK_S = 2.0
# the share of the tightest target that calls may spend in a pool so that its concurrency can be learned
LEARN_SHARE = 0.5
INCOMPLETE_S = 2.0  # after the drain began, and then again and again, requests that are still received are refused


@mypyc_attr(allow_interpreted_subclasses=True)
class Gateway(Host):
    """Holds what all ingresses share, and puts documents in force.

    Single writer: the loop it was built on. fronts: the servers that remember credentials. left_pools: not in the
    documents any more, but calls are still on their way. refusing: what cannot be sent at once is refused, because it
    would still wait when the gateway ends. sampling: the sampling of traces, None for the sink's own.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        limiter: Limiter,
        sink: SpanSink,
        sampling: Sampling | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.snapshot = snapshot
        self.routing = RoutingState(cache=AnswerCache(max_bytes=cache_bytes))
        self.routing.canaries.changed = self.apply_rollbacks
        self.others = OtherRequests()
        self.targets = TargetCache(snapshot, self.routing.canaries.adopt(snapshot.routes), self.others)
        self.limiter = limiter
        self.sink = sink
        self.marks = Marks(sampling or sink.sampling)
        self.recaller: Recaller | None = None
        self.records = Records(sink)
        self.spending = Spending(limiter, snapshot)
        self.records.stats.spend_by(self.spending)
        limiter.used_before = self.records.stats.usage.before
        self.documents = DocumentsInForce()
        self.api_docs = ApiDocs()
        self.callers = Callers(snapshot)
        self.tokens_refused: dict[str, int] = {}
        self.key_sets: KeySets | None = None
        self.fronts: set[HttpServer] = set()
        self.unread = Unread()
        self.health_watches = Watches()
        self.bodies = LargeMessages(least_bytes=_BODY_BYTES, delay_s=_GIVE_BACK_S)
        most_s = learn_within_s(snapshot)
        self.pools = {name: PoolGate(pool, most_s=most_s) for name, pool in snapshot.pools.items()}
        self.left_pools: list[PoolGate] = []
        self.scaled = ScaledPools()
        self.scaled.adopt(self.pools, snapshot)
        self.placements = ModelPlacements(lambda: self.pools, lambda: self.scaled.plans)
        self._rank_tiers()
        self.draining = False
        self.refusing = False
        self.endpoint_watch = Watch(lambda: (*self.pools.values(), *self.left_pools))
        self.clock = DeadlineClock()
        self.keep_alive = KeepAlive(self.clock)
        self.overload = Overload(self.fronts, lambda: self.records.stats.finished_count)
        self.records.objectives.stood_still_s = self.overload.stood_still_s
        self._leftovers = _Leftovers()
        self._trust(snapshot)

    # documents -------------------------------------------------------------------------------------------------

    def adopt(self, snapshot: Snapshot, *, good: bool = True) -> None:
        """Put other documents in force, all at once. good: False if these are the current documents minus revoked
        entries.

        A call that has begun keeps its tenant, its target and its pool.
        Pools of the same name keep queue, permits and connections; one that is gone takes no new calls and is closed
        by `close_left_pools` when it is empty. Credentials are judged anew, on open connections as well.
        """
        self._trust(snapshot)
        self.spending.snapshot = snapshot
        old, pools = self.snapshot, {}
        most_s = learn_within_s(snapshot)
        for name, pool in snapshot.pools.items():
            gate = self.pools.get(name)
            if gate is None:
                gate = PoolGate(pool, most_s=most_s)
            elif gate.pool != pool:
                gate.adopt(pool, most_s=most_s)
            pools[name] = gate
        self.left_pools += [gate for name, gate in self.pools.items() if name not in pools]
        self.snapshot, self.pools = snapshot, pools
        self.scaled.adopt(pools, snapshot)
        routes = self.routing.canaries.adopt(snapshot.routes, whole=good)
        replaced, self.targets = self.targets, TargetCache(snapshot, routes, self.others)
        self.routing.adopted()
        self._rank_tiers()
        self._leftovers.free(*replaced.remembered, *decoded(old), old.served)
        self.forget_credentials()
        if good:
            self.documents.accepted()

    def apply_rollbacks(self) -> None:
        """Give canaries that were rolled back no more calls. A call that has begun keeps its side."""
        routes = self.routing.canaries.adopt(self.snapshot.routes, whole=False)
        replaced, self.targets = self.targets, TargetCache(self.snapshot, routes, self.others)
        self._leftovers.free(*replaced.remembered)
        self.forget_credentials()

    def forget_credentials(self) -> None:
        """Identify every caller anew, also those that were recognised."""
        for front in self.fronts:
            front.forget_credentials()
        if self.callers.tokens is not None:
            self.callers.tokens.forget()

    async def close_left_pools(self) -> None:
        """Close the removed pools whose last call has ended."""
        empty = [gate for gate in self.left_pools if gate.unused]
        self.left_pools = [gate for gate in self.left_pools if gate not in empty]
        for gate in empty:
            await gate.close()
        for gate in self.pools.values():
            await gate.close_left()

    def _trust(self, snapshot: Snapshot) -> None:
        """Accept tokens of the issuers of these documents, if there are any."""
        self.callers.snapshot, self.callers.tokens = snapshot, None
        if not snapshot.issuers:
            return
        # The cryptography is imported only if tokens are used.
        from oriel_gateway.identity.key_sets import KeySets
        from oriel_gateway.identity.tokens import Tokens

        if self.key_sets is None:
            self.key_sets = KeySets(self.forget_credentials)
        self.key_sets.adopt(snapshot.issuers.values())
        self.callers.tokens = Tokens(snapshot, self.key_sets, self.tokens_refused)

    def _rank_tiers(self) -> None:
        """Note which band is the most urgent of all."""
        self.top_band = min((tier.band for tier in self.snapshot.tiers.values()), default=0)
        for gate in self.pools.values():
            gate.bytes.first = self.top_band

    def rank(self, tenant: Tenant) -> int:
        """Return how urgent a tenant's tier is: 0 for the most urgent tiers of all."""
        return tenant.tier.band - self.top_band

    # The end ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether new connections are welcome: the upstreams were probed once, and the gateway does not drain.

        Upstreams that are down do not make the gateway unready: it holds calls for them, and serves other pools.
        """
        return not self.draining and self.endpoint_watch.probed_once

    def refuse_incomplete(self) -> None:
        """Refuse requests that their clients still send, now and every `INCOMPLETE_S`: they would hold up the stop."""
        asyncio.get_running_loop().call_later(INCOMPLETE_S, self.refuse_incomplete)
        for call in self.clock:
            if call.collecting:
                call.stopping()

    def refuse_waiting(self) -> None:
        """Refuse calls that were not sent to a server yet, and later ones that would have to wait."""
        self.refusing = True
        for call in self.clock:
            call.stopping()

    async def close(self) -> None:
        """Charge what has ended to budgets, stop the clock and close idle upstream connections."""
        self.records.stats.count()
        self.routing.close()
        self.clock.stop()
        self.keep_alive.stop()
        await self.endpoint_watch.close()
        await self.limiter.close()
        for gate in (*self.pools.values(), *self.left_pools):
            await gate.close()


def learn_within_s(snapshot: Snapshot) -> float:
    """Return how long calls may take in a pool whose concurrency is learned: a part of the tightest target."""
    return LEARN_SHARE * min((tier.target_s for tier in snapshot.tiers.values()), default=inf)


class _Leftovers:
    """Frees what was remembered for documents that were replaced, some of it in each turn of the loop.

    Freeing a hundred thousand tenants at once would hold the loop. Nobody reads these dicts any more.
    """

    __slots__ = ("_dicts", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._dicts: list[dict[Any, Any]] = []

    def free(self, *dicts: dict[Any, Any]) -> None:
        """Empty these dicts, a while later."""
        if not self._dicts:
            self._loop.call_soon(self._free_some)
        self._dicts += dicts

    def _free_some(self) -> None:
        last = self._dicts[-1]
        for key in list(islice(last, _RELEASED)):
            del last[key]
        if not last:
            self._dicts.pop()
        if self._dicts:
            self._loop.call_later(0.001, self._free_some)
