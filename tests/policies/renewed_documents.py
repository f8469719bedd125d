"""NDJSON documents in which single lines change."""

from hashlib import sha256
from typing import Any

import msgspec
from hypothesis import strategies as st

from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.documents.packed import pack

from .packed_documents import said


def line(name: str, *keys: int, tier: str = "gold", **more: Any) -> bytes:
    digests = [{"sha256": sha256(b"%d" % key).hexdigest()} for key in keys]
    return msgspec.json.encode({"name": name, "tier": tier, "keys": digests, **more})


def block(documents: dict[str, bytes]) -> memoryview:
    return memoryview(pack(compile_documents(documents), documents))


def same(one: Snapshot, other: Snapshot) -> None:
    for part in ("tiers", "issuers", "pools", "http"):
        assert getattr(one, part) == getattr(other, part)
    assert said(one.routes) == said(other.routes)
    assert {name: said(tenant) for name, tenant in one.tenants.items()} == {
        name: said(tenant) for name, tenant in other.tenants.items()
    }
    assert {digest: said(key) for digest, key in one.keys.items()} == {
        digest: said(key) for digest, key in other.keys.items()
    }


def lines_of(tenants: dict[str, tuple[int, float, str]]) -> list[bytes]:
    """Generate valid documents, in which no key occurs twice."""
    keys = {key: name for name, (key, _, _) in tenants.items()}
    return [
        line(name, *([key] if keys[key] == name else []), weight=weight, tier=tier)
        for name, (key, weight, tier) in tenants.items()
    ]


ODD = st.sampled_from(
    [b"", b" ", b"{", b"\r", line("n3", 3), line("n4") + b"\r", line("n9", tier="none"), line("n9", 3)]
)
