"""Explains which rules would apply to a call and why, stage by stage, without a gateway. Pure.

It uses the same objects as the gateway (`Snapshot`, `Tenant`, `Route`), so its result cannot differ from what the
gateway does. Facts that depend on the moment (queue, health, use of limits) are named as such and not guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType

from oriel_policies.bounds.kinds import KINDS
from oriel_policies.documents import Allowance, ApiKey, Pool, Route, Snapshot, Tenant, Tier
from oriel_policies.documents.promises import fits, served_by
from oriel_policies.documents.reading import Reading
from oriel_policies.promise.tiers import lowered, offered, on_route
from oriel_policies.upstreams.fallback import passed_over

_UNKNOWN = "unauthenticated"
_TIER = "x-request-tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedCall:
    """The call to explain: of a model, perhaps in one version, or of a service. headers: lower-case name -> value."""

    model: str | None = None
    service: str | None = None
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "model" if self.model is not None else "service"

    @property
    def name(self) -> str:
        return self.model if self.model is not None else self.service or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one stage. refused: the `error.reason` the client would see, "" if the call continues."""

    stage: str
    says: str
    refused: str = ""


def explain(
    snapshot: Snapshot,
    key: ApiKey | None,
    call: ExplainedCall,
    *,
    now: float,
    documents: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Step]:
    """The stages in order, up to the one that refuses. key: the credential's key, None if it is not known.

    now: epoch seconds. documents: the documents that `snapshot` was compiled from, so that fields are named with their
    files.
    """
    if key is None:
        return [Step(stage="identify", says="no tenant of these documents has this credential", refused=_UNKNOWN)]
    named = f" by the key {key.name!r}" if key.name else ""
    if key.expires_at is not None and key.expires_at <= now:
        says = f"the credential of tenant {key.tenant.name}{named} expired on {_date(key.expires_at)}"
        return [Step(stage="identify", says=says, refused=_UNKNOWN)]
    tenant = key.tenant
    until = f", until {_date(key.expires_at)}" if key.expires_at is not None else ""
    scopes = f"; scopes: {', '.join(sorted(tenant.scopes))}" if tenant.scopes else ""
    steps = [Step(stage="identify", says=f"tenant {tenant.name}{named}{until}{scopes}")]
    reading = Reading(documents)
    steps.append(Step(stage="tier", says=_tier(tenant, _decided(snapshot, key, reading))))
    patterns = tenant.models if call.kind == "model" else tenant.services
    may = tenant.may_use_model(call.name) if call.kind == "model" else tenant.may_use_service(call.name)
    if not may:
        says = (
            f"{call.kind} {call.name!r} fits none of the tenant's {call.kind}s ({', '.join(patterns) or 'none'}): "
            "it looks absent"
        )
        return [*steps, Step(stage="allow", says=says, refused="not_found")]
    steps.append(Step(stage="allow", says=f"{call.kind} {call.name!r} fits {', '.join(patterns)}"))
    steps += [Step(stage="route", says=says) for says in _passed_over(snapshot, tenant, call)]
    route = next((route for route in snapshot.routes if not _misses(route, tenant, call)), None)
    if route is None:
        says = f"no route serves {call.kind} {call.name!r}{f' version {call.version}' if call.version else ''}"
        return [*steps, Step(stage="route", says=says, refused="not_found")]
    by_tier = _effective(snapshot, tenant, route, call, reading)
    steps += by_tier.steps
    if by_tier.tenant is None:
        return steps
    tenant = by_tier.tenant
    steps += [Step(stage="limit", says=says) for says in _limits(tenant, call, route)]
    steps += [Step(stage="route", says=says) for says in _route(route)]
    steps += [Step(stage="fallback", says=says) for says in _fallback(route, tenant, call)]
    pools = dict.fromkeys([side.pool for side in route.split] or [route.pool])
    pools |= dict.fromkeys([entry.pool for entry in route.fallback])
    return [*steps, *(Step(stage="pool", says=_pool(snapshot.pools[name], tenant)) for name in pools)]


def _tier(tenant: Tenant, decided: str) -> str:
    tier = tenant.tier
    named = [(word, getattr(tenant.service_tiers, word)) for word in ("flex", "priority")]
    others = "".join([f"; service_tier {word} is {each}" for word, each in named if each])
    token = f", {_ms(tier.token_s)} for each token of it" if tier.token_s else ""
    return (
        f"{tier.name}: band {tier.band}, on time within {_ms(tier.target_s)}, given up after {_ms(tier.give_up_s)} "
        f"unless the client asks for less; a stream may be silent for {_ms(tier.stream_idle_s)} and last "
        f"{_ms(tier.stream_max_s)}{token}; weight {tenant.weight:g} in its tier; {tier.objective * 100:g} % of its "
        f"calls should be on time{others}; decided by {decided}"
    )


def _decided(snapshot: Snapshot, key: ApiKey, reading: Reading) -> str:
    """The document field that decides the tier of a credential, whatever the route."""
    name = key.tenant.name
    file, table = next(((file, table) for file, each, table in reading.tenants() if each == name), ("", None))
    own = f"{_in(file)}tenants.{name}.tier"
    if key.tenant is snapshot.tenants.get(name):
        return own
    digest = next((digest.hex() for digest, each in snapshot.keys.items() if each is key), "")
    if key.of_token:
        issuer = next((n for n in snapshot.issuers if key.name == f"token of {n}"), "*")
        where = next((file for file, document in reading.documents.items() if issuer in document.issuers), "")
        found = f"{_in(where)}issuers.{issuer}.tier_claim"
    else:
        numbers = [n for n, each in enumerate(table.keys if table is not None else ()) if each.sha256 == digest]
        found = f"{_in(file)}tenants.{name}.keys[{numbers[0] if numbers else '*'}].tier"
    return f"{found}, in place of {own} ({snapshot.tenants[name].tier.name})"


@dataclass(frozen=True, slots=True)
class _ByTier:
    """The tenant with the tier that serves a call, None if none does, and the effect of the route and of the
    request.
    """

    tenant: Tenant | None
    steps: list[Step]


def _effective(snapshot: Snapshot, tenant: Tenant, route: Route, call: ExplainedCall, reading: Reading) -> _ByTier:
    steps = []
    own, tiers = tenant.tier, snapshot.tiers
    tier = on_route(own, route, tiers)
    if tier.name != own.name:
        tenant = served_by(tenant, tier, snapshot.served)
        steps.append(Step(stage="tier", says=_tier(tenant, _route_field(snapshot, route, reading))))
    elif route.tier and route.tier != own.name:
        where = _route_field(snapshot, route, reading)
        says = f"stays {own.name}: {where} is {route.tier}, which is above, and the route does not say above_tenant"
        steps.append(Step(stage="tier", says=says))
    if (wanted := call.headers.get(_TIER)) is not None:
        lower = lowered(tier, wanted, tiers)
        if lower is None:
            says = (
                f"{_TIER}: {wanted} is not among what this call may ask for: {', '.join(_names(offered(tier, tiers)))}"
            )
            return _ByTier(None, [*steps, Step(stage="tier", says=says, refused="tier_not_allowed")])
        if lower.name != tier.name:
            tenant = served_by(tenant, lower, snapshot.served)
            steps.append(Step(stage="tier", says=_tier(tenant, f"the request's {_TIER}")))
    return _ByTier(tenant, steps)


def _names(tiers: Sequence[Tier]) -> list[str]:
    return [tier.name for tier in tiers]


def _route_field(snapshot: Snapshot, route: Route, reading: Reading) -> str:
    """Routes are compiled in the order of the files."""
    written = [f"{file}: routes[{n}]" for file, each in reading.documents.items() for n in range(len(each.routes))]
    return f"{written[snapshot.routes.index(route)] if written else f'route {route.name}'}.tier"


def _in(file: str) -> str:
    return f"{file}: " if file else ""


def _misses(route: Route, tenant: Tenant, call: ExplainedCall) -> str:
    """The reason why a route does not fit this call; "" if it fits."""
    pattern = route.model if call.kind == "model" else route.service
    if pattern is None or not fits(pattern, call.name):
        return "name"
    if route.version is not None and route.version != call.version:
        return f"it is for version {route.version}"
    if route.for_tiers and tenant.tier.name not in route.for_tiers:
        return f"it is for tenants of {' and '.join(route.for_tiers)}"
    for name, value in route.headers:
        if call.headers.get(name) != value:
            return f"it is for calls with the header {name}: {value}"
    return ""


def _passed_over(snapshot: Snapshot, tenant: Tenant, call: ExplainedCall) -> list[str]:
    """The routes of this name before the one that fits, and why each of them does not."""
    sentences = []
    for route in snapshot.routes:
        why = _misses(route, tenant, call)
        if not why:
            break
        if why != "name":
            sentences.append(f"not {route.name}: {why}")
    return sentences


def _limits(tenant: Tenant, call: ExplainedCall, route: Route) -> list[str]:
    applying = list(tenant.allowances_for(call.kind, call.name, route.name))
    applying += [each for each in tenant.allowances if each.budgets and each not in applying]  # they refuse nothing
    return [_allowance(allowance) for allowance in applying] or ["none applies"]


def _allowance(allowance: Allowance) -> str:
    bounds = [KINDS[each.field].sentence.format(amount=each.amount, burst=each.burst) for each in allowance.limits]
    for budget in allowance.budgets:
        ends = "calls are refused once it is spent" if budget.stop else "calls go on once it is spent"
        amount = f"{budget.amount / budget.scale:.9f}".rstrip("0").rstrip(".")
        bounds.append(f"{amount} {budget.unit} a {budget.period}, a warning from {budget.warn:.0%}, {ends}")
    return f"{allowance.name}: {'; '.join(bounds)}"


def _route(route: Route) -> list[str]:
    sentences = [f"{route.name} to {f'pool {route.pool}' if not route.split else 'a split'}"]
    if route.split:
        by = route.split_by if route.split_by in ("tenant", "request") else f"the header {route.split_by}"
        before = 0.0
        for side in route.split:
            version = f" as version {side.version}" if side.version else ""
            sentences.append(f"{(side.until - before) * 100:.3g} % by {by} to pool {side.pool}{version}")
            before = side.until
    if (rule := route.rollback) is not None:
        sentences.append(
            f"{rule.canary} is rolled back if more of its calls than of the other side's fail or are late, by more "
            f"than {rule.margin * 100:.3g} % and beyond chance, from {rule.min_calls} calls of each side on"
        )
        if rule.agreement and rule.compare_share:
            sentences.append(
                f"{rule.compare_share * 100:.3g} % of its calls are made on the other side too, and it is rolled back "
                f"if less than {rule.agreement * 100:.3g} % of their rows have the same class"
            )
    if route.shadow_pool:
        sentences.append(f"copies of {route.shadow_share * 100:.3g} % go to pool {route.shadow_pool}")
    if route.sticky:
        sentences.append("one endpoint per " + ("stream" if route.sticky == "stream" else f"value of {route.sticky}"))
    if route.sequences:
        sentences.append("one endpoint per sequence, by the id in its requests")
    if route.stored_state:
        sentences.append("calls of /v1/responses may name what earlier ones have left on the servers")
    if route.deterministic:
        kept = f"kept for {route.cache_s:g} s" if route.cache_s else "not kept"
        shared = " for all tenants" if route.cache_shared else ""
        sentences.append(f"equal calls at the same time are made once; answers are {kept}{shared}")
    if route.idempotent:
        hedged = f", hedged after {_ms(route.hedge_s)}" if route.hedge_s else ""
        sentences.append(f"a call may run twice: it is retried{hedged}")
    return sentences


def _fallback(route: Route, tenant: Tenant, call: ExplainedCall) -> list[str]:
    if not route.fallback:
        return []
    sentences = [
        "a call that finds no usable server, no place in the queue or, by wait and usual time, no answer before its "
        "deadline goes to the first of the next pools that has all three, if no server can have executed it"
    ]
    for number, entry in enumerate(route.fallback, 1):
        says = f"{number}. pool {entry.pool}"
        if entry.model:
            why = passed_over(
                entry.model,
                may_use=tenant.may_use_model(entry.model),
                kind=call.kind,
                name=call.name,
                version=call.version,
            )
            says += f" with the model {entry.model!r}" + (f"; not for this call: {why}" if why else "")
        sentences.append(says)
    return sentences


def _pool(pool: Pool, tenant: Tenant) -> str:
    addresses = _addresses(pool.endpoints, pool.discover)
    over_grpc = _addresses(pool.grpc_endpoints, pool.grpc_discover)
    learned = " at most, learned below that" if pool.learn_concurrency else ""
    text = (
        f"{pool.name}: {addresses or 'no HTTP'}; {f'over gRPC {over_grpc}' if over_grpc else 'absent over gRPC'}; "
        f"{pool.max_inflight} permits{learned}; {pool.max_streams} streams; {pool.max_queue} calls and "
        f"{pool.max_queue_bytes} bytes may wait; "
        f"bodies up to {pool.max_body_bytes} bytes, answers up to {pool.max_response_bytes}; connections within "
        f"{_ms(pool.connect_timeout_s)}, kept for {_ms(pool.idle_timeout_s)}; "
        + (f"{pool.probe} probed every {_ms(pool.probe_interval_s)}" if pool.probe else "not probed")
        + (f"; engine {pool.engine}" if pool.engine else "")
        + (f"; metrics at port {pool.metrics_port}" if pool.metrics_port else "")
    )
    if pool.place_models:
        text += "; models are placed on its servers"
    priority = pool.triton_priorities.get(tenant.tier.name)
    if priority is not None:
        text += f"; Triton priority {priority}{'' if pool.engine == 'triton' else ' over gRPC'}"
    if (scaling := pool.scaling) is not None:
        share = scaling.weights.get(tenant.tier.name, 1.0)
        text += (
            f"; {scaling.minimum} to {scaling.maximum} replicas"
            + "".join([f", at least {window.minimum} from {window}" for window in scaling.schedule])
            + (f", {scaling.spare} spare while in use" if scaling.spare else "")
            + f", planned with {_ms(scaling.start_s)} for a start and {share:.3g} of this tier's work"
        )
        hold_s = scaling.hold_for(tenant.tier.name)
        text += "; held until its deadline" if hold_s is None else f"; held for {_ms(hold_s)}"
        text += " while no replica is ready"
    return text


def _addresses(endpoints: Sequence[tuple[str, int]], discover: tuple[str, int] | None) -> str:
    if discover is not None and discover[0].startswith("kubernetes:"):
        return f"the pods of the Kubernetes service {discover[0].removeprefix('kubernetes:')}, port {discover[1]}"
    if discover is not None:
        return f"what {discover[0]}:{discover[1]} resolves to"
    return ", ".join(f"{host}:{port}" for host, port in endpoints)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:g} ms"


def _date(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
