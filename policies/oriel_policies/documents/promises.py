"""The checked and compiled content of the documents: the values that the gateway acts on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network

from oriel_policies.bounds.kinds import KINDS, Counts
from oriel_policies.documents.schema import ServiceTiers
from oriel_policies.metering.budgets import Budget
from oriel_policies.metering.prices import Price
from oriel_policies.quality.canary import Rollback
from oriel_policies.scaling.wanted import Scaling

# The services of the OpenAI API whose calls take tokens; the others' answers report none.
TOKEN_SERVICES = frozenset({"chat.completions", "completions", "embeddings", "responses"})


def takes_tokens(kind: str, name: str) -> bool:
    """True if token limits count a call. kind: "model" or "service"."""
    return kind == "service" and name in TOKEN_SERVICES


def fits(pattern: str, name: str) -> bool:
    """Return whether `name` fits a pattern, in which * stands for any text.

    `fnmatch` is not used: it compiles a regular expression per pattern and caches 256 of them, so that a call would
    take milliseconds for a tenant, or after routes, with more patterns.
    """
    if "*" not in pattern:
        return pattern == name
    first, *parts, last = pattern.split("*")
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in parts:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A service level. band: 0 is served first. target_s orders and counts attainment; give_up_s is the deadline.

    stream_idle_s, stream_max_s: the longest silence and the longest duration of a stream after its first byte.
    objective: the share of calls that should be answered within the target.
    token_s: the target of the mean time from one token of a stream to the next; 0 for none.
    """

    name: str
    band: int
    target_s: float
    give_up_s: float
    stream_idle_s: float = 60.0
    stream_max_s: float = 600.0
    objective: float = 0.99
    token_s: float = 0.0

    def above(self, other: "Tier") -> bool:
        """Return whether this tier is more urgent than `other`: by band, within a band by target."""
        return (self.band, self.target_s) < (other.band, other.target_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A limit of `burst` requests at once and `requests_per_s` on average; the unit may also be bytes."""

    requests_per_s: float
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """The calls of a tenant that an allowance counts. If all fields are None: all calls. route, tier: names."""

    model: str | None = None
    service: str | None = None
    route: str | None = None
    tier: str | None = None

    def fits(self, kind: str, name: str, route: str, tier: str) -> bool:
        """Return whether a call is counted.

        kind: "model" or "service"; another kind fits only selectors of all calls, of a route or of a tier.
        """
        if self.route is not None:
            return route == self.route
        if self.tier is not None:
            return tier == self.tier
        if self.model is None and self.service is None:
            return True
        pattern = self.model if kind == "model" else self.service if kind == "service" else None
        return pattern is not None and fits(pattern, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit. field: the field of the documents by which `bounds.kinds` describes it. burst: 0 for a kind without
    bursts.
    """

    field: str
    amount: float
    burst: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allowance:
    """The limits or the budgets of some calls of one tenant. name: the counters' key, stable over reloads."""

    name: str
    selector: Selector
    limits: tuple[Limit, ...] = ()
    budgets: tuple[Budget, ...] = ()

    @property
    def counts_tokens(self) -> bool:
        """True if one of the limits is about tokens."""
        return any(KINDS[limit.field].counts is Counts.TOKENS for limit in self.limits)

    def counts(self, *, tokens: bool) -> bool:
        """True if a call has to be admitted by it. tokens: the call takes tokens."""
        if self.budgets:
            return any(budget.stop for budget in self.budgets)
        return tokens or any(KINDS[limit.field].counts is not Counts.TOKENS for limit in self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A credential, stored as its hash only. expires_at: epoch seconds; None never expires.

    tenant: the tenant with the tier of this credential. of_token: it represents a verified token, not a key of the
    documents. delegated: it represents the ticket of a request, whose id is its name.
    """

    tenant: "Tenant"
    expires_at: float | None
    name: str = ""
    of_token: bool = False
    delegated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An issuer whose tokens are accepted. jwks: a file name or an https URL; tier_claim: the claim that may name
    another tier, with above_tenant also one above the tenant's; tenants: patterns of the tenants that its tokens may
    name.

    key_set: the content of the file, b"" for a URL.
    """

    name: str
    issuer: str
    audience: tuple[str, ...]
    jwks: str
    algorithms: tuple[str, ...]
    leeway_s: int
    refresh_s: int
    tenant_claim: str
    tier_claim: str | None
    tenants: tuple[str, ...] = ("*",)
    above_tenant: bool = False
    key_set: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tenant:
    """A tenant with its tier, limits and permissions. Compared and hashed by identity; it lives as long as its
    snapshot.

    tier: serves its calls, or those of one key, one route or one request: see `served_by`.
    service_tiers: the tiers that bodies of the OpenAI API may ask for. served_as: the `service_tier` that the calls of
    this object asked for and get: "flex" or "priority"; "" for all others.
    caller: "service" for model calls that a service makes for it; "" for its own calls. See `by_ticket`.
    unbilled: why nobody is charged for the calls of this object: "shadow" or "repeat"; "" if the tenant is.
    """

    name: str
    tier: Tier
    weight: float
    allowances: tuple[Allowance, ...]
    scopes: frozenset[str]
    models: tuple[str, ...]
    services: tuple[str, ...]
    service_tiers: ServiceTiers = ServiceTiers()
    served_as: str = ""
    caller: str = ""
    unbilled: str = ""

    def allowances_for(self, kind: str, name: str, route: str) -> tuple[Allowance, ...]:
        """The allowances that count a call; all of them have to admit it. See `Selector.fits`."""
        fitting = (a for a in self.allowances if a.selector.fits(kind, name, route, self.tier.name))
        return tuple(a for a in fitting if a.counts(tokens=takes_tokens(kind, name)))

    def named_by(self, patterns: tuple[str, ...]) -> bool:
        """Return whether one of the patterns names the tenant; one with scopes only if it is its exact name."""
        return self.name in patterns or not self.scopes and any(fits(pattern, self.name) for pattern in patterns)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """How much it may use in a day or a month."""
        return next((allowance.budgets for allowance in self.allowances if allowance.budgets), ())

    def may_use_model(self, name: str) -> bool:
        """Return whether a pattern of this tenant names the model."""
        for pattern in self.models:  # a loop, because for each call a generator would cost more than the comparisons
            if pattern == "*" or fits(pattern, name):
                return True
        return False

    def may_use_service(self, name: str) -> bool:
        """Return whether a pattern of this tenant names the service."""
        return any(fits(pattern, name) for pattern in self.services)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A group of equal endpoints. max_inflight: the largest number of permits; if learn_concurrency, a lower limit is
    learned. max_streams: streaming calls that the servers have begun to answer. max_queue, max_queue_bytes: calls that
    may wait. probe: path that every endpoint is probed at, "" for none.
    discover: (host, port) whose addresses are the endpoints; the host is a DNS name, or `kubernetes:` with the name of
    a service and, after a dot, its namespace. place_models: the gateway decides which servers load which models.
    scaling: None for a pool whose replicas are not the gateway's to plan.
    engine: a name in `upstreams.engines.ENGINES`, "" for Oriel's servers and others of their protocols. metrics_port:
    the port of its metrics, 0 for that of its calls.
    """

    name: str
    endpoints: tuple[tuple[str, int], ...]
    grpc_endpoints: tuple[tuple[str, int], ...]
    max_inflight: int
    max_streams: int
    max_queue: int
    max_queue_bytes: int
    max_body_bytes: int
    max_response_bytes: int
    learn_concurrency: bool
    connect_timeout_s: float
    idle_timeout_s: float
    probe: str
    probe_interval_s: float
    discover: tuple[str, int] | None
    grpc_discover: tuple[str, int] | None
    triton_priorities: Mapping[str, int]
    place_models: bool = False
    scaling: Scaling | None = None
    engine: str = ""
    metrics_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One side of a canary.

    until: calls whose draw in [0, 1) is below this go here, unless a side before has taken them. version: "" as asked.
    """

    pool: str
    version: str
    until: float

    @property
    def name(self) -> str:
        """The side as answers, metrics, decisions and `rollback` name it."""
        return f"{self.pool}@{self.version}" if self.version else self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A further pool of a route; see `oriel_policies.upstreams.fallback`.

    model: the name that is asked for there, "" for the call's own.
    """

    pool: str
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """A route: the pool that answers for the models or services of a pattern, and how.

    split: empty, or the sides of a canary, whose first pool is `pool`; split_by: "tenant", "request" or a header name.
    sticky: "" | "stream" | a header name: equal values reach the same endpoint. headers: lower-case name -> value.
    for_tiers: the tiers of the tenants whose calls it takes; empty for all.
    tier: the highest tier that serves its calls, with above_tenant the exact one; "" for the caller's.
    fallback: pools for calls that would be late in `pool` or find no server there, in this order.
    rollback: the rule by which one of the two sides of the split is rolled back; None: neither is.
    sequences: the steps of one sequence reach the same endpoint, by the id in their requests.
    engines: one of its pools consists of engines of others.
    stored_state: calls of `/v1/responses` may name what earlier ones, of whatever tenant, have left on the servers.
    """

    name: str
    pool: str
    model: str | None
    service: str | None
    version: str | None
    headers: tuple[tuple[str, str], ...]
    split: tuple[Split, ...]
    split_by: str
    shadow_pool: str
    shadow_share: float
    sticky: str
    deterministic: bool
    cache_s: float
    cache_shared: bool
    idempotent: bool
    hedge_s: float
    for_tiers: tuple[str, ...] = ()
    tier: str = ""
    above_tenant: bool = False
    fallback: tuple[Fallback, ...] = ()
    rollback: Rollback | None = None
    stored_state: bool = False
    sequences: bool = False
    engines: bool = False

    @property
    def plain(self) -> bool:
        """Return whether a call needs only its pool: no copy of its body and no check of its headers."""
        return not (
            self.headers
            or self.split
            or self.shadow_pool
            or self.sticky
            or self.sequences
            or self.deterministic
            or self.idempotent
            or self.fallback
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """The settings of the public port for browsers, and for proxies in front of it.

    cors_origins: ("*",) allows every origin.
    """

    cors_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The compiled documents; replaced as a whole. keys: SHA-256 digest -> credential.

    served: tenants with other tiers than their own, created on first use: see `served_by`.
    """

    tiers: Mapping[str, Tier]
    tenants: Mapping[str, Tenant]
    issuers: Mapping[str, Issuer]
    pools: Mapping[str, Pool]
    routes: tuple[Route, ...]
    http: Http
    keys: Mapping[bytes, ApiKey] = field(repr=False)
    prices: Mapping[str, Price] = field(default_factory=dict)
    served: "Served" = field(default_factory=dict, repr=False)


# Keyed by the names of tenant and tier, `Tenant.caller`, `Tenant.service_tiers` and `Tenant.served_as`.
Served = dict[tuple[str, str, str, ServiceTiers, str], Tenant]


def served_by(
    tenant: Tenant, tier: Tier, served: Served, *, service_tiers: ServiceTiers | None = None, served_as: str = ""
) -> Tenant:
    """The tenant with another tier. There is one object for each key, because state about a tenant is found by
    identity.

    service_tiers, served_as: as in `Tenant`; None for the tenant's own `service_tiers`.
    """
    service_tiers = tenant.service_tiers if service_tiers is None else service_tiers
    if (tier.name, service_tiers, served_as) == (tenant.tier.name, tenant.service_tiers, tenant.served_as):
        return tenant
    key = (tenant.name, tier.name, tenant.caller, service_tiers, served_as)
    found = served.get(key)
    if found is None:
        found = served[key] = replace(tenant, tier=tier, service_tiers=service_tiers, served_as=served_as)
    return found


def by_ticket(tenant: Tenant, tier: Tier, served: Served) -> Tenant:
    """The tenant for whom a service that it called calls models, in the tier of that call.

    It may use every model, and nothing else: which models a service needs is the service's own business. It has no
    limits: the call of the service was counted.
    """
    key = (tenant.name, tier.name, "service", ServiceTiers(), "")
    found = served.get(key)
    if found is None:
        found = served[key] = replace(
            tenant,
            tier=tier,
            allowances=(),
            scopes=frozenset(),
            models=("*",),
            services=(),
            service_tiers=ServiceTiers(),
            caller="service",
        )
    return found
