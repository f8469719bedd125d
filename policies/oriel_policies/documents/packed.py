"""A snapshot as one read-only block of bytes, of which a tenant is decoded on first use.

A hundred thousand tenants as Python objects are some hundred megabytes and seconds of work; a process that serves
requests can afford neither at once. So whoever compiles a set packs it, and the gateway maps the result:

    magic, 4 sizes | head: all but the tenants | keys: rows by digest | tenants: rows by digest | records

A row is a SHA-256 digest (of the credential; of the tenant's name) and the offset of its record; rows are sorted, so a
look-up is a binary search. What was decoded is kept: a tenant is one object as long as its snapshot lives.
The bytes are this package's own and are trusted: they never leave the machine, and every start makes them anew.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from ipaddress import ip_network
from struct import Struct
from typing import Any, Generic, TypeVar

import msgspec

from oriel_policies.documents.promises import (
    Allowance,
    ApiKey,
    Http,
    Issuer,
    Pool,
    Route,
    Snapshot,
    Tenant,
    Tier,
)

__all__ = ["MAGIC", "decoded", "pack", "unpack"]

MAGIC = b"oriel\0p1"
_SIZES = Struct("<8sQQQQ")
_OFFSET = Struct("<Q")
_DIGEST = 32
_ROW = _DIGEST + _OFFSET.size

K = TypeVar("K")
V = TypeVar("V")


class _Head(msgspec.Struct, array_like=True):
    tiers: dict[str, Tier]
    issuers: dict[str, Issuer]
    pools: dict[str, Pool]
    routes: list[Route]
    cors_origins: list[str]
    trusted_proxies: list[str]


class _TenantRecord(msgspec.Struct, array_like=True):
    name: str
    tier: str
    weight: float
    allowances: tuple[Allowance, ...]
    scopes: tuple[str, ...]
    models: tuple[str, ...]
    services: tuple[str, ...]


class _KeyRecord(msgspec.Struct, array_like=True):
    tenant: str
    expires_at: float | None
    name: str


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_tenant = msgspec.msgpack.Decoder(_TenantRecord).decode
_decode_key = msgspec.msgpack.Decoder(_KeyRecord).decode


def pack(snapshot: Snapshot) -> bytes:
    """The bytes `unpack` reads."""
    http = snapshot.http
    head = _encode(
        _Head(
            dict(snapshot.tiers),
            dict(snapshot.issuers),
            dict(snapshot.pools),
            list(snapshot.routes),
            list(http.cors_origins),
            [str(network) for network in http.trusted_proxies],
        )
    )
    records = bytearray()
    tenants = []
    for name, tenant in snapshot.tenants.items():
        tenants.append(sha256(name.encode()).digest() + _OFFSET.pack(len(records)))
        records += _sized(
            _TenantRecord(
                tenant.name,
                tenant.tier.name,
                tenant.weight,
                tenant.allowances,
                tuple(tenant.scopes),
                tenant.models,
                tenant.services,
            )
        )
    keys = []
    for digest, key in snapshot.keys.items():
        keys.append(digest + _OFFSET.pack(len(records)))
        records += _sized(_KeyRecord(key.tenant.name, key.expires_at, key.name))
    sizes = _SIZES.pack(MAGIC, len(head), len(keys), len(tenants), len(records))
    return b"".join((sizes, head, *sorted(keys), *sorted(tenants), records))


def _sized(record: msgspec.Struct) -> bytes:
    data = _encode(record)
    return _OFFSET.pack(len(data)) + data


def unpack(packed: memoryview) -> Snapshot:
    """The snapshot behind `packed`, which has to stay as it is for as long as the snapshot lives.

    Raises ValueError for bytes that `pack` did not make.
    """
    if len(packed) < _SIZES.size:
        raise ValueError("not a packed snapshot")
    magic, head_size, keys, tenants, size = _SIZES.unpack_from(packed)
    first = _SIZES.size + head_size
    second, third = first + keys * _ROW, first + (keys + tenants) * _ROW
    if magic != MAGIC or third + size != len(packed):
        raise ValueError("not a packed snapshot")
    head = _decode_head(packed[_SIZES.size : first])
    records = packed[third:]

    def tenant(data: memoryview) -> Tenant:
        record = _decode_tenant(data)
        return Tenant(
            name=record.name,
            tier=head.tiers[record.tier],
            weight=record.weight,
            allowances=record.allowances,
            scopes=frozenset(record.scopes),
            models=record.models,
            services=record.services,
        )

    def key(data: memoryview) -> ApiKey:
        record = _decode_key(data)
        return ApiKey(tenant=by_name[record.tenant], expires_at=record.expires_at, name=record.name)

    by_name = _Names(packed[second:third], records, tenant)
    return Snapshot(
        tiers=head.tiers,
        tenants=by_name,
        issuers=head.issuers,
        pools=head.pools,
        routes=tuple(head.routes),
        http=Http(
            cors_origins=tuple(head.cors_origins),
            trusted_proxies=tuple(ip_network(network) for network in head.trusted_proxies),
        ),
        keys=_Keys(packed[first:second], records, key),
    )


def decoded(snapshot: Snapshot) -> list[dict[Any, Any]]:
    """What of a packed snapshot has become objects: for whoever lets go of it bit by bit. Empty for any other."""
    return [m.decoded for m in (snapshot.tenants, snapshot.keys) if isinstance(m, _Records)]


class _Records(Mapping[K, V], Generic[K, V]):
    """A read-only mapping over sorted rows."""

    __slots__ = ("_build", "_count", "_records", "_rows", "decoded")

    def __init__(self, rows: memoryview, records: memoryview, build: Callable[[memoryview], V]) -> None:
        self._rows = rows
        self._records = records
        self._build = build
        self._count = len(rows) // _ROW
        self.decoded: dict[K, V] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: K) -> V:
        found = self.decoded.get(key)
        if found is None:
            digest = self._digest(key)
            row = bisect_left(range(self._count), digest, key=self._digest_at)
            if row == self._count or self._digest_at(row) != digest:
                raise KeyError(key)
            found = self.decoded[key] = self._build(self._record_at(row))
        return found

    def __iter__(self) -> Iterator[K]:
        return map(self._key_at, range(self._count))

    def _digest_at(self, row: int) -> bytes:
        start = row * _ROW
        return self._rows[start : start + _DIGEST].tobytes()

    def _record_at(self, row: int) -> memoryview:
        (start,) = _OFFSET.unpack_from(self._rows, row * _ROW + _DIGEST)
        (size,) = _OFFSET.unpack_from(self._records, start)
        start += _OFFSET.size
        return self._records[start : start + size]

    def _digest(self, key: K) -> bytes:
        raise NotImplementedError

    def _key_at(self, row: int) -> K:
        raise NotImplementedError


class _Names(_Records[str, Tenant]):
    __slots__ = ()

    def _digest(self, key: str) -> bytes:
        return sha256(key.encode("utf-8", "surrogateescape")).digest()

    def _key_at(self, row: int) -> str:
        return _decode_tenant(self._record_at(row)).name


class _Keys(_Records[bytes, ApiKey]):
    __slots__ = ()

    def _digest(self, key: bytes) -> bytes:
        return key

    def _key_at(self, row: int) -> bytes:
        return self._digest_at(row)

    def __repr__(self) -> str:
        return f"<{self._count} keys>"
