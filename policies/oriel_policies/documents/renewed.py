"""Incremental compilation: a packed snapshot from the previous one when little has changed, so that a revoked key takes
effect at once even among 100,000 tenants.

A full compilation takes seconds for a large set, most of them for lines that have not changed. A line of NDJSON can be
checked alone, except for the names of tiers and routes that it uses, the order of the tiers, and its tenant's name and
keys, which have to be unique. While tiers and routes stay the same, only added and removed lines have to be read: their
rows are added to or removed from the previous block, and the rest is copied. Everything but the tenants is compiled
anew.

`renewed` gives up whenever it cannot be sure, and never reports a mistake: `compile_documents` does.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import TypeVar

import msgspec

from oriel_policies.documents.compile import MAX_MISTAKES, compile_documents
from oriel_policies.documents.packed import ROW, Parts, Rows, encode_head, parts
from oriel_policies.documents.promises import Snapshot
from oriel_policies.documents.reading import Reading
from oriel_policies.documents.schema import TenantTable
from oriel_policies.documents.tenants import Tenants
from oriel_policies.errors import BadDocument

T = TypeVar("T")

_DIGEST = 32
_FEW = 16  # this many changed lines always count as few
_MANY = 10_000
_CHUNK = 32 * 1024  # bytes compared at a time
_decode_documents = msgspec.msgpack.Decoder(dict[str, memoryview]).decode
_encode = msgspec.msgpack.Encoder().encode


def renewed(packed: memoryview, documents: Mapping[str, bytes]) -> Parts | None:
    """The result of `pack(compile_documents(documents), documents)`, made from the previous block.

    None: too much has changed, or something is wrong with the documents. Raises ValueError if `packed` is no block.
    """
    before = parts(packed)
    old = old_documents(before)
    old_rest = {name: bytes(data) for name, data in _without_lines(old).items()}
    new_rest = _without_lines(documents)
    if not old_rest:
        return None
    try:
        was = compile_documents(old_rest)
        now = was if new_rest == old_rest else compile_documents(new_rest)
        if _ranks(was) != _ranks(now) or _route_names(was) != _route_names(now):
            return None
        came, went = _changed(old, documents)
        if came is None:
            return None
        compiled = Tenants(now.tiers, set(), _route_names(now), _currencies(now))
        for file, name, table in _tables(came):
            compiled.add(file, name, name, table)
    except BadDocument:
        return None
    gone_tenants, gone_keys = [], []
    for _, name, table in _tables(went):
        gone_tenants.append(name)
        gone_keys += [bytes.fromhex(key.sha256) for key in table.keys]
    rows = Rows(len(before.records))
    rows.add(compiled.compiled, compiled.keys)
    if now is not was:
        gone_tenants += was.tenants
        gone_keys += was.keys
        rows.add(now.tenants, now.keys)
    records = b"".join((before.records, rows.records))
    tenants = spliced(before.tenants, [sha256(name.encode()).digest() for name in gone_tenants], rows.tenants)
    keys = spliced(before.keys, gone_keys, rows.keys)
    if tenants is None or keys is None or len(records) > 2 * before.fresh:
        return None
    return Parts(encode_head(now), keys, tenants, records, before.fresh, _encode(documents))


def old_documents(block: Parts) -> dict[str, memoryview]:
    """The documents that `block` was compiled from: file name -> content. Empty if it has none."""
    return _decode_documents(block.documents)


def wrong_lines(packed: memoryview, documents: Mapping[str, bytes], rest: Snapshot) -> list[BadDocument]:
    """The mistakes in single lines added since `packed`, if they are few. rest: the documents without lines.

    Each line is checked alone. It is not known here if two lines contradict each other: one of them may name a tenant
    that is defined twice, and then it counts for nothing.
    """
    old = old_documents(parts(packed))
    reading_of = {}
    count = 0
    for file, new in documents.items():
        if file.endswith(".ndjson"):
            before = old.get(file, memoryview(b""))
            first, was, now = _window(before, new)
            known = set(bytes(before[first:was]).split(b"\n"))
            came = [b"" if line in known else line for line in new[first:now].split(b"\n")]
            count += len(came) - came.count(b"")
            # Empty lines stand for those that are left out, so that each line keeps its number.
            reading_of[file] = b"\n" * new.count(b"\n", 0, first) + b"\n".join(came)
    if count > _MANY:
        return []
    reading = Reading(reading_of)
    tenants = Tenants(rest.tiers, set(), _route_names(rest), _currencies(rest))
    wrong: list[tuple[BadDocument, str]] = []
    for file, name, table in reading.tenants():
        if len(wrong) >= MAX_MISTAKES:
            break
        if name in rest.tenants:
            continue  # the tenant is defined twice
        tenants.compiled.clear()
        tenants.keys.clear()
        try:
            tenants.add(file, f"tenants.{name}", name, table)
        except BadDocument as error:
            wrong.append((error, name))
    found = [error for error, name in wrong if not _named_before(documents, error.file, name)]
    return (reading.mistakes + found)[:MAX_MISTAKES]


def _named_before(documents: Mapping[str, bytes], place: str, name: str) -> bool:
    """Return whether a line before `place`, which is FILE:LINE, names the tenant too.

    Then the line at `place` may be the second that does.
    """
    file, _, number = place.rpartition(":")
    quoted = msgspec.json.encode(name)
    for other, data in documents.items():
        if other == file:
            before = data.split(b"\n", int(number) - 1)[: int(number) - 1]
            return any(quoted in line for line in before)
        if other.endswith(".ndjson") and quoted in data:
            return True
    return False


def _without_lines(documents: Mapping[str, T]) -> dict[str, T]:
    return {name: data for name, data in documents.items() if not name.endswith(".ndjson")}


def _ranks(snapshot: Snapshot) -> dict[str, tuple[int, float]]:
    """The names and the order of the tiers; unchanged keys were checked against that order."""
    return {tier.name: (tier.band, tier.target_s) for tier in snapshot.tiers.values()}


def _route_names(snapshot: Snapshot) -> set[str]:
    return {route.name for route in snapshot.routes}


def _currencies(snapshot: Snapshot) -> set[str]:
    return {price.currency for price in snapshot.prices.values()}


def _changed(old: Mapping[str, memoryview], new: Mapping[str, bytes]) -> tuple[set[bytes] | None, set[bytes]]:
    """The added and the removed lines; (None, nothing) if they are many or one occurs twice."""
    before: set[bytes] = set()
    after: set[bytes] = set()
    count = 0
    for name in old.keys() | new.keys():
        if name.endswith(".ndjson"):
            was, now = unlike(old.get(name, memoryview(b"")), new.get(name, b""))
            before.update(was.split(b"\n"))
            lines = now.split(b"\n")
            after.update(lines)
            count += len(lines) - lines.count(b"")
    before.discard(b"")
    after.discard(b"")
    came, went = after - before, before - after
    total = sum(data.count(b"\n") for name, data in new.items() if name.endswith(".ndjson"))
    if count != len(after) or len(came) + len(went) > total // 2 + _FEW:
        return None, set()
    return came, went


def unlike(old: memoryview, new: bytes) -> tuple[bytes, bytes]:
    """Both texts without the whole lines that they have in common at the beginning and at the end."""
    first, was, now = _window(old, new)
    return bytes(old[first:was]), new[first:now]


def _window(old: memoryview, new: bytes) -> tuple[int, int, int]:
    """The first difference, and the ends of the differing parts in `old` and in `new`."""
    most = min(len(old), len(new))
    first = _alike(most, lambda at, to: bytes(old[at:to]) == new[at:to])
    first = new.rfind(b"\n", 0, first) + 1
    was, now = len(old), len(new)
    last = _alike(most - first, lambda at, to: bytes(old[was - to : was - at]) == new[now - to : now - at])
    if last < now - first or last < was - first:  # the line in which the tails begin may differ before them
        cut = new.find(b"\n", now - last)
        last = 0 if cut < 0 else now - cut
    return first, was - last, now - last


def _alike(most: int, same: Callable[[int, int], bool]) -> int:
    """The number of equal whole chunks in `most` bytes."""
    at = 0
    while at < most and same(at, min(at + _CHUNK, most)):
        at = min(at + _CHUNK, most)
    return at


def _tables(lines: set[bytes]) -> Iterable[tuple[str, str, TenantTable]]:
    reading = Reading({"tenants.ndjson": b"\n".join(sorted(lines))})
    yield from reading.tenants()
    if reading.mistakes:
        raise reading.mistakes[0]


def spliced(section: bytes | memoryview, gone: Iterable[bytes], came: Iterable[bytes]) -> bytes | None:
    """The sorted rows without the removed digests and with the added ones.

    None if a removed digest was not there, or an added one exists already.
    """
    view = memoryview(section)
    count = len(view) // ROW

    def digest_at(row: int) -> bytes:
        return view[row * ROW : row * ROW + _DIGEST].tobytes()

    edits: dict[bytes, bytes] = dict.fromkeys(gone, b"")
    missing = set(edits)
    for row in came:
        digest = row[:_DIGEST]
        if edits.get(digest):
            return None
        edits[digest] = row
    pieces: list[bytes | memoryview] = []
    at = 0
    for digest in sorted(edits):
        place = bisect_left(range(count), digest, key=digest_at)
        there = place < count and digest_at(place) == digest
        if there != (digest in missing):
            return None
        pieces += (view[at * ROW : place * ROW], edits[digest])
        at = place + there
    pieces.append(view[at * ROW :])
    return b"".join(pieces)
