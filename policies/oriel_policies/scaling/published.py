"""The bytes in which a gateway publishes its records, one per pool. They hold ages and counts only."""

from collections.abc import Mapping
from itertools import chain
from math import isfinite

import msgspec

from oriel_policies.errors import UnreadableRecords
from oriel_policies.scaling.records import CLASSES, WINDOW_S, PoolRecord

_VERSION = 2


class _Published(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    pools: dict[str, PoolRecord]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Published).decode


def pack(records: Mapping[str, PoolRecord]) -> bytes:
    """Return bytes that `unpack` turns into equal records. records: the records by pool."""
    return _encode(_Published(_VERSION, dict(records)))


def unpack(data: bytes) -> dict[str, PoolRecord]:
    """Return records by pool. Raises UnreadableRecords."""
    try:
        published = _decode(data)
    except msgspec.DecodeError as error:
        raise UnreadableRecords(str(error)) from error
    if published.version != _VERSION:
        raise UnreadableRecords(f"records of version {published.version}")
    for record in published.pools.values():
        _check(record)
    return published.pools


def _check(record: PoolRecord) -> None:
    """Raise UnreadableRecords unless lists have their length, and all counts are finite and at least 0."""
    numbers = [record.held, record.in_flight, record.observed_s, record.woken, record.woken_s]
    numbers += chain.from_iterable(record.curve.values())
    for tier in record.tiers.values():
        if len(tier.arrivals) != WINDOW_S + 1 or len(tier.backlog) != CLASSES:
            raise UnreadableRecords("a window or a backlog of another length")
        numbers += [*tier.arrivals, *tier.backlog, tier.refused]
    if not isfinite(sum(numbers)) or min(numbers) < 0.0:
        raise UnreadableRecords("a count that is not a number of at least 0")
