"""A snapshot as one read-only block of bytes; a tenant is decoded when it is first used.

A hundred thousand tenants as Python objects are some hundred megabytes and seconds of work; a process that serves
requests can afford neither at once. So the compiler packs the snapshot, and the gateway maps the result into memory:

    magic, sizes | head: all but the tenants | keys: rows by digest | tenants: rows by digest | records | documents

A row is a SHA-256 digest (of the credential; of the tenant's name) and the offset of its record; rows are sorted, so a
look-up is a binary search. Decoded objects are kept: a tenant is one object as long as its snapshot lives.
The documents are the compiled ones, for `renewed`; a server of the block never touches their pages. The bytes are this
package's own and are trusted: they never leave the machine, and every start creates them anew.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from ipaddress import ip_network
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from oriel_policies.documents.promises import (
    Allowance,
    ApiKey,
    Http,
    Issuer,
    Pool,
    Route,
    Served,
    Snapshot,
    Tenant,
    Tier,
    served_by,
)
from oriel_policies.documents.schema import ServiceTiers
from oriel_policies.metering.prices import Price

MAGIC = b"oriel\0p9"
_SIZES = Struct("<8sQQQQQQ")
_OFFSET = Struct("<Q")
_DIGEST = 32
ROW = _DIGEST + _OFFSET.size

K = TypeVar("K")
V = TypeVar("V")


class _Head(msgspec.Struct, array_like=True):
    tiers: dict[str, Tier]
    issuers: dict[str, Issuer]
    pools: dict[str, Pool]
    routes: list[Route]
    cors_origins: list[str]
    trusted_proxies: list[str]
    prices: dict[str, Price]


class _TenantRecord(msgspec.Struct, array_like=True):
    name: str
    tier: str
    weight: float
    allowances: tuple[Allowance, ...]
    scopes: tuple[str, ...]
    models: tuple[str, ...]
    services: tuple[str, ...]
    service_tiers: ServiceTiers


class _KeyRecord(msgspec.Struct, array_like=True):
    tenant: str
    expires_at: float | None
    name: str
    tier: str
    service_tiers: ServiceTiers


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_tenant = msgspec.msgpack.Decoder(_TenantRecord).decode
_decode_key = msgspec.msgpack.Decoder(_KeyRecord).decode


class _Sizes(NamedTuple):
    """The beginning of a block: how many bytes its parts have; rows of `keys` and `tenants`."""

    magic: bytes
    head: int
    keys: int
    tenants: int
    records: int
    fresh: int
    documents: int


class Parts(NamedTuple):
    """The parts of a block. fresh: bytes that `records` had when all of them were compiled together: those that rows
    name no more, or that came later, are beyond that. documents: file name -> content, encoded.
    """

    head: bytes | memoryview
    keys: bytes | memoryview
    tenants: bytes | memoryview
    records: bytes | memoryview
    fresh: int
    documents: bytes | memoryview

    def block(self) -> list[bytes | memoryview]:
        """The pieces to write, in order."""
        rows = len(self.keys) // ROW, len(self.tenants) // ROW
        sizes = _SIZES.pack(MAGIC, len(self.head), *rows, len(self.records), self.fresh, len(self.documents))
        return [sizes, self.head, self.keys, self.tenants, self.records, self.documents]


class Rows:
    """Rows of tenants and keys, not sorted, and their records, which begin at offset `start`."""

    def __init__(self, start: int = 0) -> None:
        self.tenants: list[bytes] = []
        self.keys: list[bytes] = []
        self.records = bytearray()
        self._start = start

    def add(self, tenants: Mapping[str, Tenant], keys: Mapping[bytes, ApiKey]) -> None:
        """Add one row and one record for each."""
        for name, tenant in tenants.items():
            self.tenants.append(sha256(name.encode()).digest() + self._next())
            self.records += _sized(
                _TenantRecord(
                    tenant.name,
                    tenant.tier.name,
                    tenant.weight,
                    tenant.allowances,
                    tuple(tenant.scopes),
                    tenant.models,
                    tenant.services,
                    tenant.service_tiers,
                )
            )
        for digest, key in keys.items():
            self.keys.append(digest + self._next())
            of = key.tenant
            self.records += _sized(_KeyRecord(of.name, key.expires_at, key.name, of.tier.name, of.service_tiers))

    def _next(self) -> bytes:
        return _OFFSET.pack(self._start + len(self.records))


def encode_head(snapshot: Snapshot) -> bytes:
    """Encode everything but the tenants and their keys."""
    http = snapshot.http
    return _encode(
        _Head(
            dict(snapshot.tiers),
            dict(snapshot.issuers),
            dict(snapshot.pools),
            list(snapshot.routes),
            list(http.cors_origins),
            [str(network) for network in http.trusted_proxies],
            dict(snapshot.prices),
        )
    )


def pack(snapshot: Snapshot, documents: Mapping[str, bytes] | None = None) -> bytes:
    """The bytes `unpack` reads. documents: the sources of the snapshot, needed if `renewed` is to start from it."""
    rows = Rows()
    rows.add(snapshot.tenants, snapshot.keys)
    keys, tenants, records = b"".join(sorted(rows.keys)), b"".join(sorted(rows.tenants)), bytes(rows.records)
    kept = _encode(documents or {})
    return b"".join(Parts(encode_head(snapshot), keys, tenants, records, len(records), kept).block())


def _sized(record: msgspec.Struct) -> bytes:
    data = _encode(record)
    return _OFFSET.pack(len(data)) + data


def parts(packed: memoryview) -> Parts:
    """The parts of a block, as views. Raises ValueError for bytes that `pack` did not make."""
    if len(packed) < _SIZES.size:
        raise ValueError("not a packed snapshot")
    sizes = _Sizes._make(_SIZES.unpack_from(packed))
    rows = (sizes.keys * ROW, sizes.tenants * ROW)
    ends = list(accumulate((_SIZES.size, sizes.head, *rows, sizes.records, sizes.documents)))
    if sizes.magic != MAGIC or ends[-1] != len(packed):
        raise ValueError("not a packed snapshot")
    head, keys, tenants, records, documents = (packed[start:end] for start, end in pairwise(ends))
    return Parts(head, keys, tenants, records, sizes.fresh, documents)


def pools_of(block: Parts) -> Mapping[str, Pool]:
    """The pools of a block, by name."""
    return _decode_head(block.head).pools


def unpack(packed: memoryview) -> Snapshot:
    """The snapshot in `packed`, which must not change as long as the snapshot lives.

    Raises ValueError for bytes that `pack` did not make.
    """
    block = parts(packed)
    records = memoryview(block.records)
    head = _decode_head(block.head)

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
            service_tiers=record.service_tiers,
        )

    def key(data: memoryview) -> ApiKey:
        record = _decode_key(data)
        by_key = served_by(by_name[record.tenant], head.tiers[record.tier], served, service_tiers=record.service_tiers)
        return ApiKey(tenant=by_key, expires_at=record.expires_at, name=record.name)

    served: Served = {}
    by_name = _Records(memoryview(block.tenants), records, tenant, digest=_digest_of_name, key_at=_name_at)
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
        keys=_Records(memoryview(block.keys), records, key, digest=bytes, key_at=_Records.digest_at),
        served=served,
        prices=head.prices,
    )


def decoded(snapshot: Snapshot) -> list[dict[Any, Any]]:
    """The decoded objects of a packed snapshot, so that they can be freed step by step. Empty for any other
    snapshot.
    """
    return [m.decoded for m in (snapshot.tenants, snapshot.keys) if isinstance(m, _Records)]


class _Records(Mapping[K, V], Generic[K, V]):
    """A read-only mapping over sorted rows.

    build: decodes the value of a record.
    digest: returns the digest of a key, by which the rows are sorted.
    key_at: returns the key of a row.
    """

    def __init__(
        self,
        rows: memoryview,
        records: memoryview,
        build: Callable[[memoryview], V],
        *,
        digest: Callable[[K], bytes],
        key_at: "Callable[[_Records[K, V], int], K]",
    ) -> None:
        self._rows = rows
        self._records = records
        self._build = build
        self._digest = digest
        self._key_at = key_at
        self._count = len(rows) // ROW
        self.decoded: dict[K, V] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: K) -> V:
        found = self.decoded.get(key)
        if found is None:
            digest = self._digest(key)
            row = bisect_left(range(self._count), digest, key=self.digest_at)
            if row == self._count or self.digest_at(row) != digest:
                raise KeyError(key)
            found = self.decoded[key] = self._build(self.record_at(row))
        return found

    def __iter__(self) -> Iterator[K]:
        return (self._key_at(self, row) for row in range(self._count))

    def digest_at(self, row: int) -> bytes:
        start = row * ROW
        return self._rows[start : start + _DIGEST].tobytes()

    def record_at(self, row: int) -> memoryview:
        (start,) = _OFFSET.unpack_from(self._rows, row * ROW + _DIGEST)
        (size,) = _OFFSET.unpack_from(self._records, start)
        start += _OFFSET.size
        return self._records[start : start + size]


def _digest_of_name(name: str) -> bytes:
    return sha256(name.encode("utf-8", "surrogatepass")).digest()


def _name_at(tenants: _Records[str, Tenant], row: int) -> str:
    return _decode_tenant(tenants.record_at(row)).name
