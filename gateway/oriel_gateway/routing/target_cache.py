"""Targets and header lines of tenants, remembered for as long as one snapshot of the documents is in force."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.tenant_buckets import OtherRequests
from oriel_gateway.routing.targets import Kind, Target, Tiers, resolve, resolve_grpc
from oriel_policies.documents import Route, Snapshot, Tenant
from oriel_policies.documents.promises import served_by
from oriel_policies.promise.routing import RouteTable
from oriel_policies.promise.tiers import by_service_tier, lowered, offered, on_route
from oriel_wire.context import format_stream
from oriel_wire.h2.hpack import literal

_TARGETS: Final = 8192  # in each of two generations
_LINE_BYTES: Final = 256  # longer request lines are resolved anew each time
_LISTED = 8  # tiers, in a refusal


class TargetCache:
    """Resolves and remembers what tenants ask for. tiers_differ: the tier of a call may depend on its route.

    routes: the routes in force, if they are not the snapshot's own. others: counts the requests for what there is not.
    """

    def __init__(
        self, snapshot: Snapshot, routes: Iterable[Route] | None = None, others: OtherRequests | None = None
    ) -> None:
        self._others = others or OtherRequests()
        self._snapshot = snapshot
        self.routes = RouteTable(snapshot.routes if routes is None else routes)
        self.tiers_differ = any(route.tier for route in snapshot.routes)
        self._targets: dict[tuple[Tenant, bytes], Target] = {}
        self._older: dict[tuple[Tenant, bytes], Target] = {}
        self._lines: dict[Tenant, bytes] = {}
        self._blocks: dict[Tenant, bytes] = {}
        self._repeating: dict[Tenant, Tenant] = {}

    @property
    def remembered(self) -> tuple[dict[Any, Any], ...]:
        """Everything that is remembered, to be freed when this cache is replaced."""
        return self._targets, self._older, self._lines, self._blocks, self._repeating

    def of_line(
        self, tenant: Tenant, line: bytes, method: str, path: str, query: str, tier: str | None = None
    ) -> Target:
        """Return the target of this tenant's request line. tier: see `served`. Raises Refused."""
        key = (tenant, line if tier is None else _with_tier(line, tier))
        found = self._known(key)
        if found is None:
            by_tier = partial(self.served, requested_tier=tier)
            try:
                found = resolve(method, path, query, tenant, self.routes, Tiers(by_tier, self.by_service_tier))
            except Refused as refused:
                self._others.count_refused(tenant, refused)
                raise
            self._remember(key, found)
        return found

    def of_method(
        self, tenant: Tenant, method: str, kind: Kind, name: str, version: str, tier: str | None = None
    ) -> Target:
        """Return the same for a gRPC method and the model that its message names. Raises Refused."""
        line = f"{method} {name} {version}".encode("ascii")
        key = (tenant, line if tier is None else _with_tier(line, tier))  # no HTTP request line looks like this
        found = self._known(key)
        if found is None:
            by_tier = partial(self.served, requested_tier=tier)
            try:
                found = resolve_grpc(kind, (name, version), method, tenant, self.routes, by_tier)
            except Refused as refused:
                self._others.count_refused(tenant, refused)
                raise
            self._remember(key, found)
        return found

    def by_service_tier(self, tenant: Tenant, route: Route) -> dict[str, Tenant | None]:
        """Return the tenant by the tier of each `service_tier` that its calls on a route may ask for; None for one
        that is refused.
        """
        snapshot = self._snapshot
        tiers = by_service_tier(tenant.tier, tenant.service_tiers, route, snapshot.tiers)
        found: dict[str, Tenant | None] = {"priority": None} if tenant.service_tiers.strict else {}
        for word, tier in tiers.items():
            found[word] = served_by(tenant, tier, snapshot.served, served_as=word)
        return found

    def served(self, tenant: Tenant, route: Route, requested_tier: str | None = None) -> Tenant:
        """Return the tenant by the tier that serves its calls on a route.

        requested_tier: the tier that the client asks for, None if it asks for none.
        Raises Refused TIER_NOT_ALLOWED for a tier above the one of the documents.
        """
        snapshot = self._snapshot
        tier = on_route(tenant.tier, route, snapshot.tiers)
        if requested_tier is not None:
            lower = lowered(tier, requested_tier, snapshot.tiers)
            if lower is None:
                names = ", ".join([each.name for each in offered(tier, snapshot.tiers)][:_LISTED])
                message = f"tier {requested_tier[:64]!r} cannot be asked for here; what can: {names}"
                raise Refused(Outcome.TIER_NOT_ALLOWED, message[:500])
            tier = lower
        return served_by(tenant, tier, snapshot.served)

    def tenant_lines(self, tenant: Tenant) -> bytes:
        """Return the header lines by which the next hop knows tier, band and tenant."""
        lines = self._lines.get(tenant)
        if lines is None:
            lines = self._lines[tenant] = _tenant_lines(tenant)
        return lines

    def tenant_block(self, tenant: Tenant) -> bytes:
        """Return the same for gRPC, as encoded header fields."""
        block = self._blocks.get(tenant)
        if block is None:
            fields = [
                (b"x-oriel-tier", tenant.tier.name.encode()),
                (b"x-oriel-priority", b"%d" % tenant.tier.band),
                (b"x-oriel-tenant", tenant.name.encode()),
            ]
            if tenant.tier.token_s:
                fields.append((b"x-oriel-stream", _stream(tenant).encode()))
            if tenant.unbilled:
                fields.append((b"x-oriel-unbilled", tenant.unbilled.encode()))
            block = self._blocks[tenant] = b"".join([literal(name, value) for name, value in fields])
        return block

    def repeating(self, tenant: Tenant) -> Tenant:
        """Return the tenant whose calls are second copies, which nobody is charged for."""
        found = self._repeating.get(tenant)
        if found is None:
            if len(self._repeating) >= _TARGETS:
                self._repeating.clear()
            found = self._repeating[tenant] = replace(tenant, unbilled="repeat")
        return found

    def _known(self, key: tuple[Tenant, bytes]) -> Target | None:
        found = self._targets.get(key)
        if found is None and (found := self._older.get(key)) is not None:
            self._remember(key, found)  # or it would go with its generation
        return found

    def _remember(self, key: tuple[Tenant, bytes], target: Target) -> None:
        if len(key[1]) > _LINE_BYTES:
            return
        if len(self._targets) >= _TARGETS:
            self._older, self._targets = self._targets, {}
        self._targets[key] = target


def _with_tier(line: bytes, tier: str) -> bytes:
    """Return the key of a request line with a tier asked for; no line has a line feed in it."""
    return b"%b\n%b" % (line, tier.encode("latin-1", "replace"))


def _tenant_lines(tenant: Tenant) -> bytes:
    lines = f"x-oriel-tier: {tenant.tier.name}\r\nx-oriel-priority: {tenant.tier.band}\r\nx-oriel-tenant: {tenant.name}"
    if tenant.models != ("*",):
        # Without the line all models may be used: a tenant that may use none is given a pattern that no name fits.
        lines += f"\r\nx-oriel-models: {','.join(tenant.models) or '!'}"
    if tenant.services != ("*",):  # for the near name of a misspelt one
        lines += f"\r\nx-oriel-services: {','.join(tenant.services) or '!'}"
    if tenant.served_as:
        lines += f"\r\nx-oriel-service-tier: {tenant.served_as}"
    if tenant.tier.token_s:
        lines += f"\r\nx-oriel-stream: {_stream(tenant)}"
    if tenant.unbilled:
        lines += f"\r\nx-oriel-unbilled: {tenant.unbilled}"
    return lines.encode("ascii")


def _stream(tenant: Tenant) -> str:
    return format_stream(tenant.tier.token_s, tenant.tier.stream_max_s)
