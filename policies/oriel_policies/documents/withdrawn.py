"""Withdraws keys, tenants and issuers that the documents on disk no longer name, while those documents have a mistake.

Documents are adopted as a whole or not at all. But a key may be removed because the wrong person has it, and that must
not wait until somebody else has fixed another file. So while there is a mistake, the last good documents stay in force
without the keys, tenants (with all their keys and tokens) and issuers that the files on disk no longer name. A key
whose expiry was moved to an earlier time expires then, and a key that moved to another tenant is refused. Everything
else stays, and nothing new is adopted.

A file that cannot be read (not TOML, not JSON, tables of another form) may be half written. Its last good version
counts, so nothing is withdrawn because of it. A file that was deleted names nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from math import inf
from typing import Any, NamedTuple

import msgspec

from oriel_policies.documents.packed import Parts, Rows, encode_head, parts, unpack
from oriel_policies.documents.promises import ApiKey
from oriel_policies.documents.reading import read_toml
from oriel_policies.documents.renewed import old_documents, spliced, unlike
from oriel_policies.documents.tenants import epoch


class Withdrawn(NamedTuple):
    """The result of a withdrawal.

    parts: the block without what was withdrawn. names: the names that were withdrawn, for the log. keys: number of
    withdrawn keys.
    mark: "" if nothing was withdrawn, else equal for equal results.
    """

    parts: Parts
    names: list[str]
    keys: int
    mark: str


class _Key(msgspec.Struct):
    sha256: str
    expires: datetime | None = None


class _Tenant(msgspec.Struct):
    keys: list[_Key] = []


class _Line(_Tenant, kw_only=True):
    name: str


class _Document(msgspec.Struct):
    tenants: dict[str, _Tenant] = {}
    issuers: dict[str, Any] = {}


_decode_line = msgspec.json.Decoder(_Line).decode


class _Named:
    """The names in the files. keys: (digest in hex, tenant) -> end of validity in epoch seconds."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, str], float] = {}
        self.tenants: set[str] = set()
        self.issuers: set[str] = set()

    def read(self, file: str, data: bytes) -> None:
        """Add the names of one file. Raises DecodeError or UnicodeDecodeError; then nothing of the file is added."""
        found: list[tuple[str, _Tenant]]
        if file.endswith(".ndjson"):
            lines = [_decode_line(line) for line in data.split(b"\n") if line.strip()]
            found = [(line.name, line) for line in lines]
        else:
            document = read_toml(data, _Document)
            found = list(document.tenants.items())
            self.issuers |= document.issuers.keys()
        for name, tenant in found:
            self.tenants.add(name)
            for key in tenant.keys:
                ends = epoch(key.expires)
                self.keys[key.sha256.lower(), name] = inf if ends is None else ends


def withdrawn(packed: memoryview, documents: Mapping[str, bytes], unreadable: Collection[str] = ()) -> Withdrawn:
    """The rest of `packed`, whose documents were good, while `documents` have a mistake.

    unreadable: files that exist but are not in `documents`. Raises ValueError if `packed` is no block.
    """
    block = parts(packed)
    before, after = _Named(), _Named()
    old = old_documents(block)
    for file in sorted(old.keys() | documents.keys()):
        if file.endswith(".json") or file in unreadable:
            continue
        was, now = bytes(old.get(file, b"")), documents.get(file, b"")
        if was == now:
            continue
        if file.endswith(".ndjson"):
            was, now = unlike(memoryview(was), now)
        try:
            after.read(file, now)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        before.read(file, was)
    return _without(packed, block, before, after)


def _without(packed: memoryview, block: Parts, before: _Named, after: _Named) -> Withdrawn:
    snapshot = unpack(packed)
    gone_tenants = sorted(before.tenants - after.tenants)
    gone_issuers = sorted(before.issuers - after.issuers)
    gone_keys = sorted(before.keys.keys() - after.keys.keys())
    earlier = {key: after.keys[key] for key in before.keys if after.keys.get(key, inf) < before.keys[key]}
    if not (gone_tenants or gone_issuers or gone_keys or earlier):
        return Withdrawn(block._replace(documents=b"\x80"), [], 0, "")
    ending: dict[bytes, ApiKey] = {}
    names = [f"tenant {name}" for name in gone_tenants] + [f"issuer {name}" for name in gone_issuers]
    for (digest, tenant), ends in sorted((*dict.fromkeys(gone_keys, inf).items(), *earlier.items())):
        key = snapshot.keys[bytes.fromhex(digest)]
        if ends < inf:
            ending[bytes.fromhex(digest)] = replace(key, expires_at=ends)
        if tenant not in gone_tenants:
            names.append(f"key {key.name!r} of {tenant}" if key.name else f"a key of {tenant}")
    rows = Rows(len(block.records))
    rows.add({}, ending)
    digests = [bytes.fromhex(digest) for digest, _ in (*gone_keys, *earlier)]
    keys = spliced(block.keys, digests, rows.keys)
    tenants = spliced(block.tenants, [sha256(name.encode()).digest() for name in gone_tenants], ())
    if keys is None or tenants is None:
        raise ValueError("the compiled block lacks a name that its documents have")
    kept = {name: issuer for name, issuer in snapshot.issuers.items() if name not in gone_issuers}
    head = encode_head(replace(snapshot, issuers=kept)) if gone_issuers else block.head
    mark = sha256(repr((gone_tenants, gone_issuers, gone_keys, sorted(earlier.items()))).encode()).hexdigest()
    left_over = Parts(head, keys, tenants, b"".join((block.records, rows.records)), block.fresh, b"\x80")
    return Withdrawn(left_over, names, len(digests), mark)
