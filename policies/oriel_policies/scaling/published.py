"""The bytes in which a gateway publishes its records, one per pool. They hold ages and counts only."""

from collections.abc import Mapping, Sequence
from math import isfinite

import msgspec

from oriel_policies.errors import UnreadableRecords
from oriel_policies.scaling.records import CLASSES, WINDOW_S, PoolRecord, TierRecord

_VERSION = 2


class _Tier(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    arrivals: list[float]
    backlog: list[float]
    refused: float


class _Pool(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    tiers: dict[str, _Tier]
    held: float
    in_flight: float
    observed_s: float
    idle_s: float
    woken: int
    woken_s: float
    curve: dict[int, tuple[float, float]]


class _Published(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    pools: dict[str, _Pool]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Published).decode


def pack(records: Mapping[str, PoolRecord]) -> bytes:
    """Return what `unpack` turns into equal records. records: by pool."""
    pools = {
        name: _Pool(
            tiers={tier: _Tier(one.arrivals, one.backlog, one.refused) for tier, one in record.tiers.items()},
            held=record.held,
            in_flight=record.in_flight,
            observed_s=record.observed_s,
            idle_s=record.idle_s,
            woken=record.woken,
            woken_s=record.woken_s,
            curve=record.curve,
        )
        for name, record in records.items()
    }
    return _encode(_Published(_VERSION, pools))


def unpack(data: bytes) -> dict[str, PoolRecord]:
    """Return records by pool. Raises UnreadableRecords."""
    try:
        published = _decode(data)
    except msgspec.DecodeError as error:
        raise UnreadableRecords(str(error)) from error
    if published.version != _VERSION:
        raise UnreadableRecords(f"records of version {published.version}")
    return {name: _record(pool) for name, pool in published.pools.items()}


def _record(pool: _Pool) -> PoolRecord:
    record = PoolRecord()
    for name, tier in pool.tiers.items():
        if len(tier.arrivals) != WINDOW_S + 1 or len(tier.backlog) != CLASSES:
            raise UnreadableRecords("a window or a backlog of another length")
        _check([*tier.arrivals, *tier.backlog, tier.refused])
        made = record.tiers[name] = TierRecord()
        made.arrivals, made.backlog, made.refused = tier.arrivals, tier.backlog, tier.refused
    _check([pool.held, pool.in_flight, pool.observed_s, pool.woken, pool.woken_s])
    _check([number for point in pool.curve.values() for number in point])
    if not pool.idle_s >= 0.0 or min(pool.curve, default=1) < 1:
        raise UnreadableRecords("an idle time below 0, or an execution without rows")
    record.held, record.in_flight = pool.held, pool.in_flight
    record.observed_s, record.idle_s = pool.observed_s, pool.idle_s
    record.woken, record.woken_s = pool.woken, pool.woken_s
    record.curve = pool.curve
    return record


def _check(numbers: Sequence[float]) -> None:
    """Raise UnreadableRecords unless all are finite and at least 0."""
    if not isfinite(sum(numbers)) or min(numbers, default=0.0) < 0.0:
        raise UnreadableRecords("a count that is not a number of at least 0")
