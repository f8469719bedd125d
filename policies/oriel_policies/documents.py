"""Policy documents (TOML) and the snapshot they compile to.

A set of documents is a mapping file name -> bytes. Every file may hold any of the tables `tiers`, `tenants`, `pools`
and the array `routes`; a name may be defined once in the whole set. Compilation is all or nothing: a bad document
raises and whoever holds the previous snapshot keeps it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase

import msgspec

from oriel_policies.errors import BadDocument

__all__ = ["ApiKey", "Pool", "RateLimit", "Route", "Snapshot", "Tenant", "Tier", "compile_documents"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,128}\Z")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_GIVE_UP_FACTOR = 4


class _Struct(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class _Tier(_Struct):
    band: int
    target_ms: int
    give_up_ms: int | None = None


class _Key(_Struct):
    sha256: str
    expires: datetime | None = None


class _Limit(_Struct):
    requests_per_s: float
    burst: int = 1


class _Tenant(_Struct):
    tier: str
    keys: list[_Key] = []
    models: list[str] = []
    services: list[str] = []
    scopes: list[str] = []
    weight: float = 1.0
    limit: _Limit | None = None


class _Pool(_Struct):
    endpoints: list[str]
    grpc_endpoints: list[str] = []
    max_inflight: int = 32
    max_queue: int = 1024
    max_queue_bytes: int = 256 * 1024 * 1024
    max_body_bytes: int = 64 * 1024 * 1024


class _Route(_Struct):
    pool: str
    model: str | None = None
    service: str | None = None


class _Document(_Struct):
    tiers: dict[str, _Tier] = {}
    tenants: dict[str, _Tenant] = {}
    pools: dict[str, _Pool] = {}
    routes: list[_Route] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A service level. band: 0 is served first. target_s orders and counts attainment; give_up_s is the deadline."""

    name: str
    band: int
    target_s: float
    give_up_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """At most `burst` at once and `requests_per_s` on average."""

    requests_per_s: float
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored credential: only its hash. expires_at: epoch seconds, None = never."""

    tenant: "Tenant"
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tenant:
    """Who asks and what was promised to them. Compared and hashed by identity: it lives as long as its snapshot."""

    name: str
    tier: Tier
    weight: float
    limit: RateLimit | None
    scopes: frozenset[str]
    models: tuple[str, ...]
    services: tuple[str, ...]

    def may_use_model(self, name: str) -> bool:
        """Whether a pattern of this tenant names the model."""
        return any(fnmatchcase(name, pattern) for pattern in self.models)

    def may_use_service(self, name: str) -> bool:
        """Whether a pattern of this tenant names the service."""
        return any(fnmatchcase(name, pattern) for pattern in self.services)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A group of equal endpoints. max_inflight: permits; max_queue, max_queue_bytes: what may wait for one."""

    name: str
    endpoints: tuple[tuple[str, int], ...]
    grpc_endpoints: tuple[tuple[str, int], ...]
    max_inflight: int
    max_queue: int
    max_queue_bytes: int
    max_body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which pool answers for the models or services of a pattern."""

    pool: str
    model: str | None
    service: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that was promised, at one moment. Swapped whole. keys: SHA-256 digest -> credential."""

    tiers: Mapping[str, Tier]
    tenants: Mapping[str, Tenant]
    pools: Mapping[str, Pool]
    routes: tuple[Route, ...]
    keys: Mapping[bytes, ApiKey] = field(repr=False)

    def pool_for_model(self, name: str) -> str | None:
        """The pool of the first route whose model pattern fits."""
        for route in self.routes:
            if route.model is not None and fnmatchcase(name, route.model):
                return route.pool
        return None

    def pool_for_service(self, name: str) -> str | None:
        """The pool of the first route whose service pattern fits."""
        for route in self.routes:
            if route.service is not None and fnmatchcase(name, route.service):
                return route.pool
        return None


def compile_documents(files: Mapping[str, bytes]) -> Snapshot:
    """Read and check a whole set of documents. Raises BadDocument for the first thing that is wrong."""
    documents = {name: _decode(name, data) for name, data in files.items()}
    tiers: dict[str, Tier] = {}
    pools: dict[str, Pool] = {}
    tenants: dict[str, Tenant] = {}
    routes: list[Route] = []
    keys: dict[bytes, ApiKey] = {}
    for file, document in documents.items():
        for name, tier in document.tiers.items():
            _unique(file, f"tiers.{name}", name, tiers)
            tiers[name] = _tier(file, name, tier)
        for name, pool in document.pools.items():
            _unique(file, f"pools.{name}", name, pools)
            pools[name] = _pool(file, name, pool)
    for file, document in documents.items():
        for number, route in enumerate(document.routes):
            routes.append(_route(file, f"routes[{number}]", route, pools))
        for name, tenant in document.tenants.items():
            _unique(file, f"tenants.{name}", name, tenants)
            tenants[name] = compiled = _tenant(file, name, tenant, tiers)
            for number, key in enumerate(tenant.keys):
                path = f"tenants.{name}.keys[{number}]"
                if not _SHA256.match(key.sha256):
                    raise BadDocument(file, path, "sha256 has to be 64 lower-case hex digits")
                digest = bytes.fromhex(key.sha256)
                if digest in keys:
                    raise BadDocument(file, path, f"this key belongs to tenant {keys[digest].tenant.name} already")
                keys[digest] = ApiKey(tenant=compiled, expires_at=_epoch(key.expires))
    return Snapshot(tiers=tiers, tenants=tenants, pools=pools, routes=tuple(routes), keys=keys)


def _decode(file: str, data: bytes) -> _Document:
    try:
        return msgspec.toml.decode(data, type=_Document)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise BadDocument(file, path.rstrip("`"), reason) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadDocument(file, "", f"not TOML: {error}") from error


def _unique(file: str, path: str, name: str, known: Mapping[str, object]) -> None:
    if not _NAME.match(name):
        raise BadDocument(file, path, "a name has 1 to 128 letters, digits, dots, dashes or underscores")
    if name in known:
        raise BadDocument(file, path, "defined twice")


def _tier(file: str, name: str, tier: _Tier) -> Tier:
    give_up_ms = tier.target_ms * _GIVE_UP_FACTOR if tier.give_up_ms is None else tier.give_up_ms
    if not 0 <= tier.band <= 255:
        raise BadDocument(file, f"tiers.{name}.band", "a band is 0 (first) to 255")
    if not 1 <= tier.target_ms <= give_up_ms <= 24 * 3_600_000:
        raise BadDocument(file, f"tiers.{name}", "1 <= target_ms <= give_up_ms <= 86400000 has to hold")
    return Tier(name=name, band=tier.band, target_s=tier.target_ms / 1000.0, give_up_s=give_up_ms / 1000.0)


def _pool(file: str, name: str, pool: _Pool) -> Pool:
    path = f"pools.{name}"
    if not pool.endpoints:
        raise BadDocument(file, f"{path}.endpoints", "at least one host:port")
    if pool.max_inflight < 1 or pool.max_queue < 0 or pool.max_queue_bytes < 0 or pool.max_body_bytes < 0:
        raise BadDocument(file, path, "max_inflight is at least 1, the other bounds at least 0")
    return Pool(
        name=name,
        endpoints=tuple(_address(file, f"{path}.endpoints", text) for text in pool.endpoints),
        grpc_endpoints=tuple(_address(file, f"{path}.grpc_endpoints", text) for text in pool.grpc_endpoints),
        max_inflight=pool.max_inflight,
        max_queue=pool.max_queue,
        max_queue_bytes=pool.max_queue_bytes,
        max_body_bytes=pool.max_body_bytes,
    )


def _address(file: str, path: str, text: str) -> tuple[str, int]:
    match = _ADDRESS.match(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise BadDocument(file, path, f"{text!r} is not host:port")
    return match[1].strip("[]"), int(match[2])


def _route(file: str, path: str, route: _Route, pools: Mapping[str, Pool]) -> Route:
    if route.pool not in pools:
        raise BadDocument(file, f"{path}.pool", f"no pool is named {route.pool!r}")
    if (route.model is None) == (route.service is None):
        raise BadDocument(file, path, "a route names either a model or a service")
    pattern = route.model if route.model is not None else route.service
    assert pattern is not None
    _pattern(file, path, pattern)
    return Route(pool=route.pool, model=route.model, service=route.service)


def _pattern(file: str, path: str, pattern: str) -> None:
    if not _PATTERN.match(pattern):
        raise BadDocument(file, path, f"{pattern!r} is not a name or a pattern with *")


def _tenant(file: str, name: str, tenant: _Tenant, tiers: Mapping[str, Tier]) -> Tenant:
    path = f"tenants.{name}"
    if tenant.tier not in tiers:
        raise BadDocument(file, f"{path}.tier", f"no tier is named {tenant.tier!r}")
    if not 0.001 <= tenant.weight <= 1000.0:
        raise BadDocument(file, f"{path}.weight", "a weight is 0.001 to 1000")
    for pattern in (*tenant.models, *tenant.services):
        _pattern(file, path, pattern)
    limit = tenant.limit
    if limit is not None and not (0.0 < limit.requests_per_s <= 1e6 and 1 <= limit.burst <= 10**6):
        raise BadDocument(file, f"{path}.limit", "0 < requests_per_s <= 1000000 and 1 <= burst <= 1000000 has to hold")
    return Tenant(
        name=name,
        tier=tiers[tenant.tier],
        weight=tenant.weight,
        limit=RateLimit(requests_per_s=limit.requests_per_s, burst=limit.burst) if limit is not None else None,
        scopes=frozenset(tenant.scopes),
        models=tuple(tenant.models),
        services=tuple(tenant.services),
    )


def _epoch(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
