"""A packed snapshot equals the snapshot it was made of, and decodes a tenant only at its first use."""

import dataclasses
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.documents import ApiKey, Snapshot, Tenant, compile_documents
from oriel_policies.documents.packed import decoded, pack, unpack

from .packed_documents import DOCUMENT, said


def compiled(tenants: list[dict[str, Any]]) -> Snapshot:
    lines = b"\n".join(msgspec.json.encode(tenant) for tenant in tenants)
    return compile_documents({"a.toml": DOCUMENT, "t.ndjson": lines})


NAMES = st.text("abcdefgh0123456789.-", min_size=1, max_size=12).filter(lambda text: text[0] not in ".-")
LIMITS = st.fixed_dictionaries(
    {"requests_per_s": st.floats(0.1, 1e6), "burst": st.integers(1, 9)},
    optional={"concurrency": st.integers(1, 9), "requests_per_day": st.integers(1, 9)},
)
TENANTS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES, "tier": st.sampled_from(["gold", "free"]), "models": st.lists(NAMES, max_size=3)},
        optional={
            "scopes": st.just(["operator"]),
            "weight": st.floats(0.001, 1000.0),
            "services": st.just(["*"]),
            "limit": LIMITS,
        },
    ),
    max_size=20,
    unique_by=lambda tenant: tenant["name"],
)


@settings(max_examples=60, deadline=None)
@given(TENANTS)
def test_what_is_unpacked_is_what_was_packed(tenants: list[dict[str, Any]]) -> None:
    for number, tenant in enumerate(tenants):
        digests = [sha256(b"%d-%d" % (number, key)).hexdigest() for key in range(number % 3)]
        tenant["keys"] = [{"sha256": digest, "name": digest[:3], "expires": None} for digest in digests]
    snapshot = compiled(tenants)
    again = unpack(memoryview(pack(snapshot)))
    for part in ("tiers", "issuers", "pools", "http"):
        assert getattr(again, part) == getattr(snapshot, part)
    assert said(again.routes) == said(snapshot.routes)
    assert len(again.tenants) == len(snapshot.tenants) and set(again.tenants) == set(snapshot.tenants)
    assert set(again.keys) == set(snapshot.keys)
    assert [len(d) for d in decoded(again)] == [0, 0]
    for name, tenant in snapshot.tenants.items():
        assert said(again.tenants[name]) == said(tenant)
    for digest, key in snapshot.keys.items():
        assert said(again.keys[digest]) == said(key)
        assert again.keys[digest].tenant is again.tenants[key.tenant.name]  # one object, as its users rely on
    assert again.tenants.get("no such") is None and again.keys.get(sha256(b"no such").digest()) is None
    assert [len(d) for d in decoded(again)] == [len(snapshot.tenants), len(snapshot.keys)]


def test_nothing_of_a_tenant_or_a_key_is_left_out() -> None:
    """A field that is added to either has to be packed as well; of_token and delegated are false of every key of the
    documents, and served_as, caller and unbilled are "" of every tenant.
    """
    assert {f.name for f in dataclasses.fields(Tenant)} == {
        "name", "tier", "weight", "allowances", "scopes", "models", "services", "service_tiers", "served_as", "caller",
        "unbilled",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(ApiKey)} == {"tenant", "expires_at", "name", "of_token", "delegated"}


def test_a_name_nobody_can_have_is_absent() -> None:
    assert unpack(memoryview(pack(compiled([])))).tenants.get("\udcff") is None


@pytest.mark.parametrize("cut", [0, 7, 40, 100, -1])
def test_other_bytes_are_refused(cut: int) -> None:
    packed = pack(compiled([{"name": "t", "tier": "gold"}]))
    with pytest.raises((ValueError, msgspec.DecodeError)):
        unpack(memoryview(packed[:cut]))
    with pytest.raises(ValueError):
        unpack(memoryview(b"x" + packed))


def test_a_packed_snapshot_says_its_keys_to_nobody() -> None:
    tenant = {"name": "t", "tier": "gold", "keys": [{"sha256": "ab" * 32}]}
    again = unpack(memoryview(pack(compiled([tenant]))))
    assert "\\xab" not in repr(again) and "abab" not in repr(again)
