"""Policy documents: what compiles, and what a mistake says."""

from pathlib import Path

import pytest

from oriel_policies.documents import compile_documents
from oriel_policies.errors import BadDocument

EXAMPLES = Path(__file__).parents[2] / "policies" / "examples"
GOOD = b"""
[tiers.gold]
band = 0
target_ms = 100
[pools.p]
endpoints = ["127.0.0.1:1"]
[[routes]]
model = "a*"
pool = "p"
[tenants.t]
tier = "gold"
models = ["a*", "b"]
keys = [{ sha256 = "%s" }]
""" % (b"0" * 64)


def test_the_examples_compile() -> None:
    snapshot = compile_documents({path.name: path.read_bytes() for path in EXAMPLES.glob("*.toml")})
    assert sorted((t.name, t.tier.name) for t in snapshot.tenants.values()) == [
        ("acme", "gold"),
        ("birch", "silver"),
        ("cedar", "bronze"),
    ]
    service, model = snapshot.route_for_service("digits"), snapshot.route_for_model("mlp")
    assert service is not None and service.pool == "logic" and model is not None and model.pool == "inference"
    assert not snapshot.tenants["cedar"].may_use_model("mlp")


def test_give_up_is_four_targets_unless_said() -> None:
    assert compile_documents({"a.toml": GOOD}).tiers["gold"].give_up_s == 0.4


def test_patterns_decide_what_a_tenant_may_use() -> None:
    tenant = compile_documents({"a.toml": GOOD}).tenants["t"]
    assert [tenant.may_use_model(name) for name in ("a", "abc", "b", "bc", "")] == [True, True, True, False, False]
    assert not tenant.may_use_service("a")


def test_keys_do_not_appear_in_the_repr() -> None:
    assert "0000" not in repr(compile_documents({"a.toml": GOOD})) and "\\x00" not in repr(
        compile_documents({"a.toml": GOOD})
    )


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        (b"[tiers.gold", "", "not TOML"),
        (b"\xff", "", "not TOML"),
        (b"[tiers.gold]\nband = 0\n", "tiers.gold", "target_ms"),
        (b"[tiers.gold]\nband = 0\ntarget_ms = 5\ncolour = 1\n", "tiers.gold.colour", "colour"),
        (b"[tiers.gold]\nband = 300\ntarget_ms = 5\n", "tiers.gold.band", "0 (first) to 255"),
        (b"[tiers.gold]\nband = 0\ntarget_ms = 5\ngive_up_ms = 4\n", "tiers.gold", "target_ms <= give_up_ms"),
        (b"[pools.p]\nendpoints = []\n", "pools.p", "at least one"),
        (b"[pools.p]\nendpoints = ['nowhere']\n", "pools.p.endpoints", "'nowhere' is not host:port"),
        (b"[pools.p]\nendpoints = ['a:99999']\n", "pools.p.endpoints", "not host:port"),
        (b"[[routes]]\nmodel = 'a'\npool = 'q'\n", "routes[0].pool", "no pool is named 'q'"),
        (b"[pools.p]\nendpoints = ['a:1']\n[[routes]]\npool = 'p'\n", "routes[0]", "either a model or a service"),
        (b"[tenants.t]\ntier = 'no'\n", "tenants.t.tier", "no tier is named 'no'"),
        (GOOD.replace(b'"a*", "b"', b'"a/b"'), "tenants.t", "is not a name"),
        (GOOD.replace(b"000", b"00"), "tenants.t.keys[0]", "64 lower-case hex"),
        (GOOD + b"weight = 0.0\n", "tenants.t.weight", "0.001 to 1000"),
        (GOOD + b"limit = { requests_per_s = 0.0 }\n", "tenants.t.limit", "requests_per_s"),
    ],
)
def test_a_mistake_names_file_path_and_reason(text: bytes, path: str, reason: str) -> None:
    with pytest.raises(BadDocument) as caught:
        compile_documents({"x.toml": text})
    assert caught.value.file == "x.toml" and caught.value.path.startswith(path) and reason in caught.value.reason


def test_one_key_belongs_to_one_tenant_and_names_are_unique() -> None:
    again = GOOD.replace(b"[tenants.t]", b"[tenants.u]").replace(b"[tiers.gold]", b"[tiers.g2]")
    with pytest.raises(BadDocument, match=r"b\.toml: pools\.p: defined twice"):
        compile_documents({"a.toml": GOOD, "b.toml": again})
    with pytest.raises(BadDocument, match="belongs to tenant t already"):
        compile_documents({"a.toml": GOOD, "b.toml": b"[tenants.u]\n" + GOOD.partition(b"[tenants.t]\n")[2]})


def test_every_mistake_of_a_set_is_named_and_none_twice() -> None:
    text = b"""
[tiers.gold]
band = 300
target_ms = 1
[tiers.free]
band = 1
target_ms = 10
[pools.p]
endpoints = ["nowhere"]
[[routes]]
model = "*"
pool = "p"
[[routes]]
model = "a"
pool = "q"
[tenants.a]
tier = "gold"
[tenants.b]
tier = "p"
"""
    with pytest.raises(BadDocument) as caught:
        compile_documents({"x.toml": text})
    assert [bad.path for bad in (caught.value, *caught.value.others)] == [
        "tiers.gold.band",
        "pools.p.endpoints",
        "routes[1].pool",
        "tenants.b.tier",
    ]
