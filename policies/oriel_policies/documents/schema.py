"""The documents as people write them: one struct per table. `compile` checks what types cannot express.

Unknown fields are refused. Times end in _ms or _s, sizes in _bytes; docs/policies.md explains every field.
"""

from datetime import date, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DAY_MS = 24 * 3_600_000

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Timeout = Annotated[int, Meta(ge=1, le=DAY_MS)]
Start = Annotated[int, Meta(ge=1000, le=DAY_MS)]
Hold = Annotated[int, Meta(ge=0, le=DAY_MS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Inside = Annotated[float, Meta(gt=0, lt=1)]  # a share that is neither nothing nor all
Below = Annotated[float, Meta(ge=0, lt=1)]


class _Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class TierTable(_Table):
    """`[tiers.NAME]`: a service level. band 0 is served first."""

    band: Annotated[int, Meta(ge=0, le=255)]
    target_ms: int
    give_up_ms: int | None = None
    stream_idle_ms: int = 60_000
    stream_max_ms: int = 600_000
    token_ms: int | None = None
    objective: Inside = 0.99


class ServiceTiers(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """The tiers of calls of the OpenAI API by the `service_tier` of their bodies; "" where the documents name none.
    strict: refuse `priority` where it cannot be had, instead of serving the call by the tier of its key."""

    flex: str = ""
    priority: str = ""
    strict: bool = False


class KeyTable(_Table):
    """An API key, by its SHA-256. name: used in explanations and logs. tier: the tier of its calls, instead of the
    tenant's; above_tenant: it may be above the tenant's. service_tiers: instead of the tenant's."""

    sha256: str
    name: str = ""
    expires: datetime | None = None
    tier: str | None = None
    above_tenant: bool = False
    service_tiers: ServiceTiers | None = None


class LimitTable(_Table):
    """The limits of one tenant; an absent field is not bounded."""

    requests_per_s: float | None = None
    burst: int = 1
    concurrency: int | None = None
    bytes_per_s: int | None = None
    bytes_burst: int | None = None
    tokens_per_minute: int | None = None
    tokens_burst: int | None = None
    requests_per_day: int | None = None
    requests_per_month: int | None = None
    compute_ms_per_day: int | None = None
    compute_ms_per_month: int | None = None


class ScopedLimitTable(LimitTable):
    """Limits for some of a tenant's calls together: those of a model or service pattern, of one route or of one
    tier.
    """

    model: str | None = None
    service: str | None = None
    route: str | None = None
    tier: str | None = None


class BudgetTable(_Table):
    """How much a tenant may use: an amount of money, of time or of tokens per day or month (UTC). warn: the share of
    it that is reported as a warning. stop: refuse calls once it is spent."""

    amount: float | str
    unit: str
    period: Literal["day", "month"] = "month"
    warn: Annotated[float, Meta(gt=0, le=1)] = 0.8
    stop: bool = True


class TenantTable(_Table):
    """`[tenants.NAME]`"""

    tier: str
    keys: list[KeyTable] = []
    models: list[str] = []
    services: list[str] = []
    scopes: list[str] = []
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    limit: LimitTable | None = None
    limits: list[ScopedLimitTable] = []
    budgets: list[BudgetTable] = []
    service_tiers: ServiceTiers | None = None


class TenantLine(TenantTable, kw_only=True):
    """One line of a `*.ndjson` file beside the TOML documents: the same fields and the tenant's name."""

    name: str


class IssuerTable(_Table):
    """`[issuers.NAME]`: whose JSON Web Tokens are accepted. jwks: a file beside the documents, or an https URL.
    tenants: patterns of the tenants that its tokens may name; tenants with scopes are named exactly. above_tenant: the
    tier of `tier_claim` may be above the tenant's."""

    issuer: str
    audience: list[str]
    jwks: str
    algorithms: list[str] = msgspec.field(default_factory=lambda: ["RS256", "ES256", "EdDSA"])
    leeway_s: Annotated[int, Meta(ge=0, le=600)] = 60
    refresh_s: Annotated[int, Meta(ge=1, le=86400)] = 300
    tenant_claim: str = "tenant"
    tier_claim: str | None = None
    above_tenant: bool = False
    tenants: list[str] | None = None


class WindowTable(_Table, rename={"begins": "from", "ends": "to"}):
    """`[[pools.NAME.scaling.schedule]]`: at least `minimum` replicas from "Mon-Fri 08:00" to "18:00" of a zone."""

    begins: str
    ends: str
    minimum: int
    zone: str = "UTC"


class ScalingTable(_Table):
    """`[pools.NAME.scaling]`: how many replicas the pool may have, and what decides how many it needs. spare: replicas
    beyond those that the most urgent tier needs. start_ms: time until a new replica serves, in 95 of 100 starts.
    capacity: device-seconds that one replica does per second. call_ms: device time of a call, until answers show it.
    miss_share: calls of an urgent tier that may wait too long. weights: tier -> share of its work that is paid for.
    hold_ms: time for which a call is held without a server, instead of its tier's give_up_ms; tier_hold_ms: the same
    for some tiers."""

    minimum: int
    maximum: int
    spare: int = 0
    start_ms: Start = 60_000
    keep_alive_ms: Start = 300_000
    capacity: Annotated[float, Meta(ge=0.001, le=1_000_000)] = 1.0
    call_ms: Annotated[float, Meta(ge=0.001, le=3_600_000)] | None = None
    miss_share: Inside = 0.002
    weights: dict[str, Share] = {}
    schedule: list[WindowTable] = []
    hold_ms: Hold | None = None
    tier_hold_ms: dict[str, Hold] = {}


class PoolTable(_Table):
    """`[pools.NAME]`: a group of equal servers. discover: instead of `endpoints`, `dns:HOST:PORT` or
    `kubernetes:SERVICE[.NAMESPACE]:PORT`. place_models: decide which of the servers, which load models on demand, have
    which models. engine: the servers of others that it consists of (docs/engines.md); metrics_port: the port of their
    metrics, if it is another one.
    """

    engine: Literal["vllm", "sglang", "trtllm", "openai", "triton", "v2"] | None = None
    metrics_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    endpoints: list[str] = []
    discover: str | None = None
    grpc_endpoints: list[str] = []
    grpc_discover: str | None = None
    learn_concurrency: bool = True
    max_inflight: Positive | None = None
    max_streams: Count = 256
    max_queue: Count = 1024
    max_queue_bytes: Count = 256 * 1024 * 1024
    max_body_bytes: Count = 64 * 1024 * 1024
    max_response_bytes: Positive = 1024 * 1024 * 1024
    connect_timeout_ms: Timeout = 2000
    idle_timeout_ms: Timeout = 45_000
    probe: str | None = None
    probe_interval_ms: Timeout = 1000
    triton_priorities: dict[str, Annotated[int, Meta(ge=1, le=2**31 - 1)]] = {}
    place_models: bool = False
    scaling: ScalingTable | None = None


class SplitTable(_Table):
    """One side of a canary: a share of the calls goes to `pool`, or to `version` of the model."""

    weight: Annotated[float, Meta(ge=0, le=1_000_000)]
    pool: str | None = None
    version: str | None = None


class RollbackTable(_Table):
    """Rolls one side of a split back by itself; see `oriel_policies.quality.canary.Rollback`."""

    canary: str
    min_calls: Annotated[int, Meta(ge=20, le=1_000_000)] = 100
    margin: Below = 0.02
    agreement: Below = 0.9
    compare_percent: Annotated[float, Meta(ge=0, le=100)] = 10.0


class ShadowTable(_Table):
    """Copies of `percent` of the calls go to `pool`; their answers are discarded."""

    pool: str
    percent: Annotated[float, Meta(gt=0, le=100)] = 100.0


class FallbackTable(_Table):
    """A further pool of a route, for calls that the pools before it cannot serve in time. model: asked for there."""

    pool: str
    model: str | None = None


class RouteTable(_Table):
    """One of `[[routes]]`: the first that fits decides. tier: the highest tier that serves its calls; with
    above_tenant, the exact one. for_tiers: the tiers of the tenants that it is for; empty for all.
    """

    pool: str | None = None
    name: str | None = None
    model: str | None = None
    service: str | None = None
    version: str | None = None
    headers: dict[str, str] = {}
    for_tiers: list[str] = []
    split: list[SplitTable] = []
    split_by: str = "tenant"
    rollback: RollbackTable | None = None
    fallback: list[str | FallbackTable] = []
    shadow: ShadowTable | None = None
    sticky: str | None = None
    deterministic: bool = False
    cache_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    cache_shared: bool = False
    idempotent: bool = False
    hedge_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0
    tier: str | None = None
    above_tenant: bool = False
    stored_state: bool = False


class HttpTable(_Table):
    """`[http]`: the public HTTP port. cors_origins: exact origins or "*"; trusted_proxies: networks."""

    cors_origins: list[str] = []
    trusted_proxies: list[str] = []


class PriceTable(_Table, rename={"device_class": "class"}, kw_only=True):
    """`[prices.NAME]`: what the use of a class of device costs from a day on, in units of a currency. Amounts are
    numbers, or texts if they have to be exact. tier: for the use in this tier only."""

    device_class: str = ""
    tier: str = ""
    currency: str
    valid_from: date
    device_hour: float | str = 0
    cpu_core_hour: float | str = 0
    gib_out: float | str = 0
    million_tokens_in: float | str = 0
    million_tokens_out: float | str = 0


class DocumentTable(_Table):
    """One whole file."""

    tiers: dict[str, TierTable] = {}
    tenants: dict[str, TenantTable] = {}
    issuers: dict[str, IssuerTable] = {}
    pools: dict[str, PoolTable] = {}
    prices: dict[str, PriceTable] = {}
    routes: list[RouteTable] = []
    http: HttpTable | None = None
