"""Compiles a set of documents to a snapshot.

A set of documents is a mapping file name -> bytes. Every file may hold any of the tables; a name may be defined once
in the whole set. Compilation is all or nothing: a bad document raises an error that names every wrong table, and the
previous snapshot stays in use.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_network
from itertools import accumulate
from typing import TypeVar
from urllib.parse import urlsplit

from oriel_policies.documents.issuers import issuer
from oriel_policies.documents.prices import price
from oriel_policies.documents.promises import Fallback, Http, Issuer, Pool, Route, Snapshot, Split, Tier, fits
from oriel_policies.documents.reading import Reading, nearest
from oriel_policies.documents.rollback import rollback
from oriel_policies.documents.schema import (
    DAY_MS,
    HttpTable,
    PoolTable,
    RouteTable,
    ScalingTable,
    ShadowTable,
    SplitTable,
    TierTable,
)
from oriel_policies.documents.tenants import Tenants, check_pattern, known_tier, unique
from oriel_policies.errors import BadDocument
from oriel_policies.metering.prices import Price
from oriel_policies.scaling.schedule import Window, read_window
from oriel_policies.scaling.wanted import Scaling
from oriel_policies.upstreams.engines import ENGINES
from oriel_policies.upstreams.fallback import MODEL_IN_JSON, MOST_POOLS

_HEADER = re.compile(r"[a-z0-9-]{1,64}\Z")
_VERSION = re.compile(r"(?:0|[1-9][0-9]{0,17})\Z")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})\Z")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?\Z")
_PATH = re.compile(r"/[!-~]{0,255}\Z")
_GIVE_UP_FACTOR = 4
_ROUTE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_MODEL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
_MODEL_OF_BODY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}(?:/[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}){0,3}\Z")
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "x-api-key"})
_PROBE_V2 = "/v2/health/ready"
_PROBE_LOGIC = "/health/ready"
MAX_MISTAKES = 100
_INFLIGHT = 32
_ENGINE_INFLIGHT = 1024  # how many fewer are enough is read from the engines
_MOST_REPLICAS = 10_000
_MOST_WINDOWS = 50

T = TypeVar("T")


class _Mistakes:
    """The mistakes so far. A wrong table is left out and the others are still checked."""

    def __init__(self, found: list[BadDocument]) -> None:
        self.found = found

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the mistake that ends the block, and go on."""
        try:
            yield
        except BadDocument as error:
            self.found.append(error)

    def check(self) -> None:
        if self.found:
            first = self.found[0]
            first.others = tuple(self.found[1:MAX_MISTAKES])
            raise first


def compile_documents(files: Mapping[str, bytes]) -> Snapshot:
    """Read and check a whole set: `*.ndjson` holds tenants, one per line; `*.json` key sets of issuers; all else TOML.

    Raises BadDocument for the first mistake; `others` has the rest.
    """
    reading = Reading(files)
    mistakes = _Mistakes(reading.mistakes)
    if reading.unreadable:
        # without this file, names in the other files would look unknown although they are defined in it
        mistakes.check()
    documents = reading.documents
    tiers: dict[str, Tier] = {}
    pools: dict[str, Pool] = {}
    issuers: dict[str, Issuer] = {}
    prices: dict[str, Price] = {}
    routes: list[Route] = []
    http: Http | None = None
    routed = [route for d in documents.values() for route in d.routes]
    probes = {pool: _PROBE_LOGIC for route in routed if route.service for pool in _pools_of(route)}
    probes |= {pool: _PROBE_V2 for route in routed if route.model for pool in _pools_of(route)}

    def all_of(table: str, known: dict[str, T], one: Callable[[str, str, str, object], T]) -> None:
        for file, document in documents.items():
            for name, item in getattr(document, table).items():
                path = f"{table}.{name}"
                with mistakes.noted():
                    unique(file, path, name, known)
                    known[name] = one(file, path, name, item)

    all_of("tiers", tiers, _tier)
    # Names whose own table is wrong. That mistake is reported already, so references to them are not reported as
    # unknown.
    bad_tiers = reading.bad["tiers"] | {name for d in documents.values() for name in d.tiers} - tiers.keys()
    all_of(
        "pools", pools, lambda file, path, name, item: _pool(file, path, name, item, probes, tiers.keys() | bad_tiers)
    )
    alone = sum(len(document.issuers) for document in documents.values()) == 1

    def an_issuer(file: str, path: str, name: str, item: object) -> Issuer:
        return issuer(file, path, name, item, issuers, reading.attached, alone=alone)

    all_of("issuers", issuers, an_issuer)
    all_of("prices", prices, price)
    for file, document in documents.items():
        for name, priced in document.prices.items():
            if priced.tier:
                with mistakes.noted():
                    known_tier(file, f"prices.{name}.tier", priced.tier, tiers, bad_tiers)
    bad_pools = reading.bad["pools"] | {name for d in documents.values() for name in d.pools} - pools.keys()
    names: set[str] = set()
    for file, document in documents.items():
        numbers = reading.route_numbers.get(file) or range(len(document.routes))
        for number, table in zip(numbers, document.routes, strict=True):
            path = f"routes[{number}]"
            with mistakes.noted():
                routes.append(_route(file, path, table, pools, bad_pools, names))
            for field, tier in [("tier", table.tier), *(("for_tiers", each) for each in table.for_tiers)]:
                if tier is not None:
                    with mistakes.noted():
                        known_tier(file, f"{path}.{field}", tier, tiers, bad_tiers)
        if document.http is not None:
            if http is not None:
                mistakes.found.append(BadDocument(file, "http", "defined twice"))
            with mistakes.noted():
                http = _http(file, document.http)
    whole = len(routes) == sum(len(d.routes) for d in documents.values()) and not reading.route_numbers
    known = not reading.bad["prices"] and len(prices) == sum(len(d.prices) for d in documents.values())
    currencies = {each.currency for each in prices.values()} if known else None
    tenants = Tenants(tiers, bad_tiers, names if whole else None, currencies)
    for file, name, tenant in reading.tenants():
        with mistakes.noted():
            tenants.add(file, f"tenants.{name}", name, tenant)
        if len(mistakes.found) >= MAX_MISTAKES:
            break  # more mistakes than that are not read by a person
    mistakes.check()
    return Snapshot(
        tiers=tiers,
        tenants=tenants.compiled,
        issuers=issuers,
        pools=pools,
        routes=tuple(routes),
        http=http or Http(),
        keys=tenants.keys,
        prices=prices,
        served=tenants.served,
    )


def _tier(file: str, path: str, name: str, tier: object) -> Tier:
    assert isinstance(tier, TierTable)
    give_up_ms = tier.target_ms * _GIVE_UP_FACTOR if tier.give_up_ms is None else tier.give_up_ms
    if not 1 <= tier.target_ms <= give_up_ms <= DAY_MS:
        raise BadDocument(file, path, f"1 <= target_ms <= give_up_ms <= {DAY_MS} has to hold")
    if not 1 <= tier.stream_idle_ms <= tier.stream_max_ms <= DAY_MS:
        raise BadDocument(file, path, f"1 <= stream_idle_ms <= stream_max_ms <= {DAY_MS} has to hold")
    if tier.token_ms is not None and not 1 <= tier.token_ms <= tier.stream_idle_ms:
        raise BadDocument(
            file, f"{path}.token_ms", "1 <= token_ms <= stream_idle_ms has to hold; leave it out for none"
        )
    return Tier(
        name=name,
        band=tier.band,
        target_s=tier.target_ms / 1000.0,
        give_up_s=give_up_ms / 1000.0,
        stream_idle_s=tier.stream_idle_ms / 1000.0,
        stream_max_s=tier.stream_max_ms / 1000.0,
        objective=tier.objective,
        token_s=(tier.token_ms or 0) / 1000.0,
    )


def _pool(file: str, path: str, name: str, pool: object, probes: Mapping[str | None, str], tiers: set[str]) -> Pool:
    assert isinstance(pool, PoolTable)
    if bool(pool.endpoints) == bool(pool.discover):
        raise BadDocument(file, path, "a pool must have either endpoints, at least one host:port, or discover")
    if pool.grpc_endpoints and pool.grpc_discover:
        raise BadDocument(file, path, "a pool may have either grpc_endpoints or grpc_discover, not both")
    _known_tiers(file, f"{path}.triton_priorities", pool.triton_priorities, tiers)
    engine = ENGINES.get(pool.engine or "")
    if pool.triton_priorities and pool.engine not in (None, "triton"):
        raise BadDocument(
            file, f"{path}.triton_priorities", f'engine "{pool.engine}" does not read them: leave them out'
        )
    probe = pool.probe
    if probe is None:
        probe = (engine and engine.probe) or probes.get(name, "")
    if probe and not _PATH.match(probe):
        raise BadDocument(file, f"{path}.probe", 'a probe must be a path such as "/v2/health/ready", or "" for none')
    if pool.place_models and not probe:
        raise BadDocument(file, f"{path}.place_models", "needs `probe`, because the servers are asked for their models")
    return Pool(
        name=name,
        endpoints=tuple(_address(file, f"{path}.endpoints", text) for text in pool.endpoints),
        grpc_endpoints=tuple(_address(file, f"{path}.grpc_endpoints", text) for text in pool.grpc_endpoints),
        max_inflight=pool.max_inflight or (_ENGINE_INFLIGHT if engine and engine.metrics else _INFLIGHT),
        max_streams=pool.max_streams,
        max_queue=pool.max_queue,
        max_queue_bytes=pool.max_queue_bytes,
        max_body_bytes=pool.max_body_bytes,
        max_response_bytes=pool.max_response_bytes,
        learn_concurrency=pool.learn_concurrency,
        connect_timeout_s=pool.connect_timeout_ms / 1000.0,
        idle_timeout_s=pool.idle_timeout_ms / 1000.0,
        probe=probe,
        probe_interval_s=pool.probe_interval_ms / 1000.0,
        discover=_discover(file, f"{path}.discover", pool.discover),
        grpc_discover=_discover(file, f"{path}.grpc_discover", pool.grpc_discover),
        triton_priorities=dict(pool.triton_priorities),
        place_models=pool.place_models,
        scaling=_scaling(file, f"{path}.scaling", pool, tiers),
        engine=pool.engine if engine and pool.engine else "",
        metrics_port=pool.metrics_port or 0,
    )


def _scaling(file: str, path: str, pool: PoolTable, tiers: set[str]) -> Scaling | None:
    table = pool.scaling
    if table is None:
        return None
    if pool.discover is None and pool.grpc_discover is None:
        raise BadDocument(file, path, "a pool that scales must have discover or grpc_discover: servers come and go")
    if not 0 <= table.minimum <= table.maximum or not 1 <= table.maximum <= _MOST_REPLICAS:
        reason = f"0 <= minimum <= maximum has to hold, and maximum must be 1 to {_MOST_REPLICAS}"
        raise BadDocument(file, path, reason)
    if not 0 <= table.spare <= table.maximum:
        raise BadDocument(file, f"{path}.spare", f"must be from 0 to {table.maximum}, the maximum")
    _known_tiers(file, f"{path}.weights", table.weights, tiers)
    _known_tiers(file, f"{path}.tier_hold_ms", table.tier_hold_ms, tiers)
    return Scaling(
        minimum=table.minimum,
        maximum=table.maximum,
        spare=table.spare,
        start_s=table.start_ms / 1000.0,
        keep_alive_s=table.keep_alive_ms / 1000.0,
        capacity=table.capacity,
        call_s=None if table.call_ms is None else table.call_ms / 1000.0,
        miss_share=table.miss_share,
        weights=dict(table.weights),
        schedule=_schedule(file, f"{path}.schedule", table),
        hold_s=None if table.hold_ms is None else table.hold_ms / 1000.0,
        tier_hold_s={tier: held / 1000.0 for tier, held in table.tier_hold_ms.items()},
    )


def _known_tiers(file: str, path: str, names: Iterable[str], tiers: set[str]) -> None:
    for name in names:
        if name not in tiers:
            raise BadDocument(file, path, f"no tier is named {name!r}{nearest(name, tiers, list_all=True)}")


def _schedule(file: str, path: str, table: ScalingTable) -> tuple[Window, ...]:
    if len(table.schedule) > _MOST_WINDOWS:
        raise BadDocument(file, path, f"at most {_MOST_WINDOWS} windows of a schedule are allowed")
    windows = []
    for number, row in enumerate(table.schedule):
        where = f"{path}[{number}]"
        if not 1 <= row.minimum <= table.maximum:
            raise BadDocument(file, f"{where}.minimum", f"must be from 1 to {table.maximum}, the maximum of the pool")
        try:
            windows.append(read_window(row.begins, row.ends, row.zone, row.minimum))
        except ValueError as error:
            raise BadDocument(file, where, str(error)) from error
    return tuple(windows)


def _address(file: str, path: str, text: str) -> tuple[str, int]:
    match = _ADDRESS.match(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise BadDocument(file, path, f"{text!r} is not host:port")
    return match[1].strip("[]"), int(match[2])


def _discover(file: str, path: str, text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    scheme, _, address = text.partition(":")
    if scheme == "dns":
        return _address(file, path, address)
    service, _, port = address.rpartition(":")
    if scheme != "kubernetes" or not _SERVICE.match(service):
        raise BadDocument(file, path, f"{text!r} is not dns:host:port or kubernetes:service[.namespace]:port")
    host, number = _address(file, path, f"{service}:{port}")
    return f"{scheme}:{host}", number


def _pools_of(route: RouteTable) -> set[str | None]:
    further = [entry if isinstance(entry, str) else entry.pool for entry in route.fallback]
    return {route.pool, *(side.pool for side in route.split), *further}


def _route(
    file: str, path: str, route: RouteTable, pools: Mapping[str, Pool], bad_pools: set[str], names: set[str]
) -> Route:
    if (route.model is None) == (route.service is None):
        raise BadDocument(file, path, "a route must name either a model or a service")
    pattern = route.model if route.model is not None else route.service
    assert pattern is not None
    check_pattern(file, path, pattern)
    name = route.name or f"{'model' if route.model is not None else 'service'}:{pattern}"
    if route.name is not None and not _ROUTE_NAME.match(route.name):
        raise BadDocument(file, f"{path}.name", "a name must have 1 to 128 letters, digits, dots, dashes, underscores")
    if name in names and route.name is not None:
        raise BadDocument(file, f"{path}.name", f"another route is named {name!r}")
    names.add(name)
    if bool(route.pool) == bool(route.split):
        raise BadDocument(file, path, "a route must have either a pool or a split")
    for text in (route.version, *(side.version for side in route.split)):
        if text is not None and (route.model is None or not _VERSION.match(text)):
            raise BadDocument(file, path, "a version must be a number without leading zeros; only models have one")
    split = _split(file, path, route.split)
    for pool in [route.pool] if route.pool is not None else [side.pool for side in split]:
        _known_pool(file, f"{path}.pool", pool, pools, bad_pools)
    shadow = route.shadow or ShadowTable(pool="", percent=0.0)
    if route.shadow is not None:
        _known_pool(file, f"{path}.shadow.pool", shadow.pool, pools, bad_pools)
    headers = _conditions(file, f"{path}.headers", route)
    by = route.split_by
    if by not in ("tenant", "request"):
        by = _header_of(file, f"{path}.split_by", by, 'split_by is "tenant", "request" or "header:NAME"')
    sticky = route.sticky or ""
    if sequences := sticky == "sequence":
        _check_sequences(file, path, route)
        sticky = ""
    if sticky not in ("", "stream"):
        sticky = _header_of(file, f"{path}.sticky", sticky, 'sticky is "stream", "sequence" or "header:NAME"')
    if (route.cache_s or route.cache_shared) and not route.deterministic:
        raise BadDocument(file, path, "only a deterministic route can be cached: add deterministic = true")
    if route.hedge_ms and not (route.idempotent or route.deterministic):
        raise BadDocument(file, path, "a hedge runs a call twice: add idempotent = true if that does no harm")
    if route.above_tenant and route.tier is None:
        raise BadDocument(file, f"{path}.above_tenant", "above_tenant needs a tier, and the route has none")
    own = [side.pool for side in split] if split else [route.pool or ""]
    fallback = _fallback(file, f"{path}.fallback", route, own, pools, bad_pools)
    if fallback and sticky not in ("", "stream"):
        raise BadDocument(
            file, path, "a sticky route cannot have a fallback: only the servers of its pool know its callers"
        )
    if fallback and route.deterministic:
        raise BadDocument(
            file, path, "deterministic and fallback exclude each other: another pool's answers may differ"
        )
    return Route(
        name=name,
        pool=route.pool if route.pool is not None else split[0].pool,
        model=route.model,
        service=route.service,
        version=route.version,
        headers=headers,
        split=split,
        split_by=by,
        shadow_pool=shadow.pool,
        shadow_share=shadow.percent / 100.0,
        sticky=sticky,
        deterministic=route.deterministic,
        cache_s=route.cache_s,
        cache_shared=route.cache_shared,
        idempotent=route.idempotent or route.deterministic,
        stored_state=route.stored_state,
        hedge_s=route.hedge_ms / 1000.0,
        for_tiers=tuple(route.for_tiers),
        tier=route.tier or "",
        above_tenant=route.above_tenant,
        fallback=fallback,
        rollback=rollback(file, f"{path}.rollback", route, split),
        sequences=sequences,
        engines=any(name in pools and pools[name].engine for name in {*_pools_of(route), shadow.pool} if name),
    )


def _conditions(file: str, path: str, route: RouteTable) -> tuple[tuple[str, str], ...]:
    headers = tuple(sorted((name.lower(), value) for name, value in route.headers.items()))
    for header, value in headers:
        if not _HEADER.match(header) or len(value) > 256 or not value.isascii() or not value.isprintable():
            raise BadDocument(file, path, "a condition must be a header name and its exact ASCII value")
        if header in _CREDENTIALS:
            raise BadDocument(file, path, "a header with a credential cannot choose a route")
    return headers


def _check_sequences(file: str, path: str, route: RouteTable) -> None:
    """Refuse a route of sequences on which a step would run twice, or in another pool than its sequence."""
    if route.service is not None:
        raise BadDocument(file, f"{path}.sticky", "only models keep sequences")
    if route.split or route.fallback or route.shadow or route.idempotent or route.deterministic:
        message = "steps of sequences run once and in one pool: without split, fallback, shadow, "
        raise BadDocument(file, path, message + "idempotent and deterministic")


def _known_pool(file: str, path: str, name: str | None, pools: Mapping[str, Pool], bad_pools: set[str]) -> None:
    if name not in pools and name not in bad_pools:
        raise BadDocument(file, path, f"no pool is named {name!r}{nearest(name or '', pools, list_all=True)}")


def _fallback(
    file: str, path: str, route: RouteTable, own: list[str], pools: Mapping[str, Pool], bad_pools: set[str]
) -> tuple[Fallback, ...]:
    if len(route.fallback) > MOST_POOLS:
        raise BadDocument(file, path, f"at most {MOST_POOLS} pools are allowed, and there are {len(route.fallback)}")
    seen = set(own)
    found: list[Fallback] = []
    over_grpc = route.model is not None and any(_speaks_grpc(pools, name) for name in own)
    for entry in route.fallback:
        name, model = (entry, "") if isinstance(entry, str) else (entry.pool, entry.model or "")
        _known_pool(file, path, name, pools, bad_pools)
        if name in seen:
            raise BadDocument(file, path, f"calls would come to pool {name!r} a second time: name each pool once")
        seen.add(name)
        if over_grpc and name in pools and not _speaks_grpc(pools, name):
            reason = f"pool {name!r} has no grpc_endpoints, and gRPC calls of this route could not go there"
            raise BadDocument(file, path, reason)
        if not model and found and found[-1].model:
            raise BadDocument(
                file, path, "name pools without `model` first: after another model, calls never return to their own"
            )
        if model:
            _check_other_model(file, path, route, model)
        found.append(Fallback(pool=name, model=model))
    return tuple(found)


def _speaks_grpc(pools: Mapping[str, Pool], name: str) -> bool:
    pool = pools.get(name)
    return pool is not None and (bool(pool.grpc_endpoints) or pool.grpc_discover is not None)


def _check_other_model(file: str, path: str, route: RouteTable, model: str) -> None:
    if route.service is not None and not any(fits(route.service, name) for name in MODEL_IN_JSON):
        services = ", ".join(sorted(MODEL_IN_JSON))
        raise BadDocument(file, path, f"`model` is allowed only in routes of models and of the services {services}")
    if not (_MODEL if route.model is not None else _MODEL_OF_BODY).match(model):
        raise BadDocument(file, path, f"{model!r} is not the name of one model")


def _split(file: str, path: str, sides: list[SplitTable]) -> tuple[Split, ...]:
    if not sides:
        return ()
    if len(sides) > 64:
        raise BadDocument(file, f"{path}.split", "a split may have at most 64 sides")
    total = sum(side.weight for side in sides)
    if total <= 0.0:
        raise BadDocument(file, f"{path}.split", "at least one weight of a split must be above 0")
    edges = accumulate(side.weight / total for side in sides)
    out = []
    for side, until in zip(sides, edges, strict=True):
        if side.pool is None:
            raise BadDocument(file, f"{path}.split", "every side of a split must name its pool")
        out.append(Split(pool=side.pool, version=side.version or "", until=until))
    return tuple(out)


def _header_of(file: str, path: str, text: str, help_text: str) -> str:
    scheme, _, name = text.partition(":")
    if scheme != "header" or not _HEADER.match(name.lower()) or name.lower() in _CREDENTIALS:
        raise BadDocument(file, path, help_text)
    return name.lower()


def _http(file: str, http: HttpTable) -> Http:
    networks = []
    for text in http.trusted_proxies:
        try:
            networks.append(ip_network(text))
        except ValueError as error:
            raise BadDocument(file, "http.trusted_proxies", f"{text!r} is not a network such as 10.0.0.0/8") from error
    for origin in http.cors_origins:
        url = urlsplit(origin)
        if origin != "*" and not (
            url.scheme in ("http", "https") and url.netloc and origin == f"{url.scheme}://{url.netloc}"
        ):
            raise BadDocument(
                file, "http.cors_origins", f'{origin!r} is not an origin such as "https://app.example", nor "*"'
            )
    return Http(cors_origins=tuple(http.cors_origins), trusted_proxies=tuple(networks))
