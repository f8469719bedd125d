"""Which tier serves a call: never above the tenant's unless a document says so, and a request only ever lowers it."""

from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.documents import Tier, compile_documents
from oriel_policies.documents.packed import pack, unpack
from oriel_policies.documents.schema import ServiceTiers
from oriel_policies.errors import BadDocument
from oriel_policies.promise.tiers import by_service_tier, lowered, offered, on_route

DOCUMENT = """
[tiers.gold]
band = 0
target_ms = 100
[tiers.fast]
band = 0
target_ms = 50
[tiers.bronze]
band = 2
target_ms = 10
[pools.p]
endpoints = ["127.0.0.1:1"]
[[routes]]
model = "slow"
pool = "p"
tier = "bronze"
[[routes]]
model = "urgent"
pool = "p"
tier = "fast"
above_tenant = true
[[routes]]
model = "*"
pool = "p"
"""


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def tenant(tier: str, *keys: str) -> str:
    return f"""
[tenants.t]
tier = "{tier}"
models = ["*"]
keys = [{", ".join(f'{{ sha256 = "{digest(str(number))}"{more} }}' for number, more in enumerate(keys))}]
"""


def mistakes(text: str) -> list[str]:
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": text.encode()})
    bad = caught.value
    return [f"{each.path}: {each.reason}" for each in (bad, *bad.others)]


def test_a_key_carries_a_tier_of_its_own_packed_or_not() -> None:
    text = DOCUMENT + tenant(
        "gold", "", ', tier = "bronze"', ', tier = "fast", above_tenant = true', ', tier = "bronze"',
        ', service_tiers = { priority = "fast" }',
    )  # fmt: skip
    compiled = compile_documents({"a.toml": text.encode()})
    for snapshot in (compiled, unpack(memoryview(pack(compiled)))):
        keys = [snapshot.keys[bytes.fromhex(digest(str(number)))] for number in range(5)]
        assert [key.tenant.tier.name for key in keys] == ["gold", "bronze", "fast", "bronze", "gold"]
        assert [key.tenant.service_tiers.priority for key in keys] == [*[""] * 4, "fast"]
        assert keys[0].tenant is snapshot.tenants["t"] and keys[1].tenant is keys[3].tenant
        assert {key.tenant.name for key in keys} == {"t"}
        assert [(route.tier, route.above_tenant) for route in snapshot.routes] == [
            ("bronze", False), ("fast", True), ("", False)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "mistake"),
    [
        (
            ', tier = "fast"',
            "keys[0].tier: 'fast' is above the tenant's 'gold': add above_tenant = true if that is meant",
        ),
        (', tier = "bronce"', "keys[0].tier: no tier is named 'bronce', did you mean 'bronze'?"),
        (", above_tenant = true", "keys[0].above_tenant: above_tenant needs a tier, and the key has none"),
    ],
)
def test_a_key_that_is_above_its_tenant_by_mistake_is_refused(key: str, mistake: str) -> None:
    assert mistakes(DOCUMENT + tenant("gold", key)) == [f"tenants.t.{mistake}"]


def test_tiers_that_are_not_there_are_named_once_wherever_they_are_used() -> None:
    routes = DOCUMENT.replace('tier = "bronze"', 'tier = "bronce"').replace('tier = "fast"\n', "")
    limits = tenant("gold") + 'limits = [{ tier = "god", requests_per_s = 1 }]'
    assert mistakes(routes + limits) == [
        "routes[0].tier: no tier is named 'bronce', did you mean 'bronze'?",
        "routes[1].above_tenant: above_tenant needs a tier, and the route has none",
        "tenants.t.limits[0].tier: no tier is named 'god', did you mean 'gold'?",
    ]
    wrong = DOCUMENT.replace("target_ms = 10\n", "target_ms = 0\n") + tenant("gold", ', tier = "bronze"')
    assert len(mistakes(wrong)) == 1, "a tier whose own table is wrong is no unknown one, and above nobody"


def test_a_limit_counts_the_calls_of_one_tier() -> None:
    text = DOCUMENT + tenant("gold", "", ', tier = "bronze"') + 'limits = [{ tier = "bronze", requests_per_s = 1 }]'
    snapshot = compile_documents({"a.toml": text.encode()})
    by_key = [snapshot.keys[bytes.fromhex(digest(str(number)))].tenant for number in range(2)]
    counted = [[each.name for each in t.allowances_for("model", "m", "model:*")] for t in by_key]
    assert counted == [[], ["tier:bronze"]]


TIERS = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.5, 1.0])), min_size=1
).map(
    lambda found: {
        name: Tier(name=name, band=band, target_s=target_s, give_up_s=4.0) for name, (band, target_s) in found.items()
    }
)
ROUTE = compile_documents({"a.toml": DOCUMENT.encode()}).routes[2]


@given(tiers=TIERS, pinned=st.sampled_from(["", *"abcdef"]), above=st.booleans(), data=st.data())
def test_the_effective_tier_is_never_above_the_callers_unless_the_route_allows_it(
    tiers: dict[str, Tier], pinned: str, above: bool, data: st.DataObject
) -> None:
    own = tiers[data.draw(st.sampled_from(sorted(tiers)))]
    served = on_route(own, replace(ROUTE, tier=pinned, above_tenant=above), tiers)
    assert served in tiers.values()
    if above and pinned in tiers:
        assert served.name == pinned
    else:
        assert not served.above(own)
        assert pinned not in tiers or not served.above(tiers[pinned])


@given(tiers=TIERS, named=st.text(max_size=2) | st.sampled_from("abcdef"), data=st.data())
def test_asking_never_raises(tiers: dict[str, Tier], named: str, data: st.DataObject) -> None:
    own = tiers[data.draw(st.sampled_from(sorted(tiers)))]
    found = lowered(own, named, tiers)
    assert (found is not None) == (named in {tier.name for tier in offered(own, tiers)})
    if found is not None:
        assert found.name == named and not found.above(own) and found.band >= own.band
    elif named in tiers:
        assert tiers[named].above(own)
    assert lowered(own, own.name, tiers) is own


@given(TIERS, st.none() | st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.5, 1.0])), st.data())
def test_flex_is_never_above_the_callers_own(
    tiers: dict[str, Tier], named: tuple[int, float] | None, data: st.DataObject
) -> None:
    """A document may have a tier `flex` that is more urgent than the caller's."""
    own = tiers[data.draw(st.sampled_from(sorted(tiers)))]
    if named is not None:
        tiers["flex"] = Tier(name="flex", band=named[0], target_s=named[1], give_up_s=4.0)
    wanted = tiers.get("flex") or max(tiers.values(), key=lambda tier: (tier.band, tier.target_s))
    found = by_service_tier(own, ServiceTiers(), ROUTE, tiers)
    assert found == ({} if wanted.above(own) or wanted == own else {"flex": wanted})
    assert by_service_tier(own, ServiceTiers(), ROUTE, {}) == {}


@given(TIERS, st.sampled_from(["", *"abcdef"]), st.booleans(), st.data())
def test_priority_is_never_below_the_callers_own_and_never_above_the_routes(
    tiers: dict[str, Tier], pinned: str, above: bool, data: st.DataObject
) -> None:
    names = st.sampled_from(sorted(tiers))
    own, high = tiers[data.draw(names)], tiers[data.draw(names)]
    route = replace(ROUTE, tier=pinned, above_tenant=above)
    found = by_service_tier(own, ServiceTiers(priority=high.name), route, tiers).get("priority")
    if found is None:
        assert pinned in tiers and (above or not tiers[pinned].above(high))
    else:
        assert found == (own if own.above(high) else high)
