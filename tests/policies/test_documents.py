"""Policy documents: what compiles, and what a mistake says."""

import json
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oriel_policies.documents import compile_documents, schema
from oriel_policies.documents.promises import fits
from oriel_policies.errors import BadDocument
from oriel_policies.promise.routing import RouteTable

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


HIDDEN = [
    "x = {{ {key} = 1 }}",
    "x = {{ b = 'a', {key} = 1 }}",
    "x = {{ b = [1, 2], {key} = 1 }}",
    '"=".{key} = 1',
    "'#'.{key} = 1",
    "'\"'.{key} = '\"'",
    'x = {{ b = """\n"""", {key} = "x" }}',
    "x = {{ b = '''\n\"'''', {key} = 'x' }}",
    'x = {{ b = "\\"", {key} = "x" }}',
    '# "\n{key} = "x"',
]


@pytest.mark.parametrize(
    "text", ["{key} = 1", "[{key}]\nx = 1", " \t{key}.'a.b' = [1]", "a = 1\n  {key} . x=1", *HIDDEN]
)
def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(text: str) -> None:
    """The parser took 4.5 s for one of 20,000 parts, by the square of their number."""
    for parts in (32, 20_000):
        with pytest.raises(BadDocument, match="has more than 32 parts"):
            compile_documents({"a.toml": text.format(key=".".join(["a"] * (parts + 1))).encode()})
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": text.format(key=".".join(["a"] * 30)).encode()})
    assert "parts" not in caught.value.reason


def test_dots_in_values_and_quotes_are_no_parts_of_keys() -> None:
    names = ", ".join(f'"m{number}.v.x"' for number in range(40))
    long = ".".join(["a"] * 50)
    lines = f'models = [\n{names}\n]  # {long}\n\'{long}\' = "{long}"\nx = """\n{long}\n"""\ny = [{"1.5, " * 50}]\n'
    with pytest.raises(BadDocument, match="models"):  # of no known section: it was parsed
        compile_documents({"a.toml": lines.encode()})


def test_the_examples_compile() -> None:
    snapshot = compile_documents({path.name: path.read_bytes() for path in EXAMPLES.glob("*.toml")})
    assert sorted((t.name, t.tier.name) for t in snapshot.tenants.values()) == [
        ("acme", "gold"),
        ("birch", "silver"),
        ("cedar", "bronze"),
    ]
    routes = RouteTable(snapshot.routes)
    (service,), (model,) = routes.for_service("digits"), routes.for_model("mlp")
    assert service.pool == "logic" and model.pool == "inference"
    assert not snapshot.tenants["cedar"].may_use_model("mlp")


def test_give_up_is_four_targets_unless_said() -> None:
    assert compile_documents({"a.toml": GOOD}).tiers["gold"].give_up_s == 0.4


def test_patterns_decide_what_a_tenant_may_use() -> None:
    tenant = compile_documents({"a.toml": GOOD}).tenants["t"]
    assert [tenant.may_use_model(name) for name in ("a", "abc", "b", "bc", "")] == [True, True, True, False, False]
    assert not tenant.may_use_service("a")


@given(pattern=st.text("ab*", max_size=8), name=st.text("ab", max_size=8))
def test_a_pattern_fits_as_in_a_shell(pattern: str, name: str) -> None:
    assert fits(pattern, name) == fnmatchcase(name, pattern)


def test_names_are_looked_up_without_regular_expressions() -> None:
    """Eight stars in a route held the loop for a minute with a name of sixty letters, and more patterns than `fnmatch`
    remembers cost 7 ms per call of a tenant with 1,000 models past 1,000 routes."""
    document = GOOD.replace(b'"a*", "b"', b'"%b*b*"' % (b"*a" * 30)).replace(b'"a*"', b'"%b*b*"' % (b"*a" * 30))
    snapshot = compile_documents({"a.toml": document})
    routes = RouteTable(snapshot.routes)
    assert not routes.for_model("a" * 120) and not snapshot.tenants["t"].may_use_model("a" * 120)
    assert routes.for_model("a" * 120 + "b") and snapshot.tenants["t"].may_use_model("a" * 120 + "b")


@pytest.mark.parametrize("name", ["a b", 'a"', "a/b", "für", "a\r\nx: y", "", "a" * 129, "a,b", "a;b"])
def test_a_routes_name_may_stand_in_headers(name: str) -> None:
    """It is the name of its limits: `RateLimit-Policy` carried whatever was written, or the answer failed on it."""
    document = GOOD.replace(b'model = "a*"', f'model = "a*"\nname = {json.dumps(name)}'.encode())
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": document})
    assert caught.value.path == "routes[0].name"


@pytest.mark.parametrize("rate", ["5e-324", "1e-300", "1e-15", "1e-7", "0.0", "-1.0", "nan", "inf"])
def test_a_rate_is_not_so_small_that_its_wait_is_no_number(rate: str) -> None:
    """One of 5e-324 made every call of its tenant an error; one of 1e-15 was more than Redis can expire, for all."""
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": GOOD + f"limit = {{ requests_per_s = {rate} }}\n".encode()})
    assert "requests_per_s" in caught.value.reason


def test_keys_do_not_appear_in_the_repr() -> None:
    assert "0000" not in repr(compile_documents({"a.toml": GOOD})) and "\\x00" not in repr(
        compile_documents({"a.toml": GOOD})
    )


ONE = b"minimum = 0\nmaximum = 1\n"


def window(more: bytes, begins: bytes = b"08:00") -> bytes:
    return b"[[pools.p.scaling.schedule]]\nfrom = '%b'\nto = '18:00'\n%b\n" % (begins, more)


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        (b"[tiers.gold", "", "not TOML"),
        (b"\xff", "", "not TOML"),
        (b"[tiers.gold]\nband = 0\n", "tiers.gold", "target_ms"),
        (b"[tiers.gold]\nband = 0\ntarget_ms = 5\ncolour = 1\n", "tiers.gold.colour", "colour"),
        (b"[tiers.gold]\nband = 0\ntarget_ms = 5\ngive_up_ms = 4\n", "tiers.gold", "target_ms <= give_up_ms"),
        (b"[pools.p]\nendpoints = []\n", "pools.p", "at least one"),
        (b"[pools.p]\nendpoints = ['nowhere']\n", "pools.p.endpoints", "'nowhere' is not host:port"),
        (b"[pools.p]\nendpoints = ['a:99999']\n", "pools.p.endpoints", "not host:port"),
        (b"[[routes]]\nmodel = 'a'\npool = 'q'\n", "routes[0].pool", "no pool is named 'q'"),
        (b"[pools.p]\nendpoints = ['a:1']\n[[routes]]\npool = 'p'\n", "routes[0]", "either a model or a service"),
        (b"[tenants.t]\ntier = 'no'\n", "tenants.t.tier", "no tier is named 'no'"),
        (GOOD.replace(b'"a*", "b"', b'"a b"'), "tenants.t", "is not a name"),
        (GOOD.replace(b"000", b"00"), "tenants.t.keys[0]", "64 lower-case hex"),
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


OTHER = b"[pools.q]\nendpoints = ['a:1']\n[pools.s]\nendpoints = ['a:1']\n"
ROUTE = b"[[routes]]\nmodel = 'm'\n"
POOL = b"[pools.p]\nendpoints = ['a:1']\n"
ISSUER = b"[issuers.i]\nissuer = 'https://i'\naudience = ['a']\njwks = 'https://i/keys'\n"
TIER = b"[tiers.gold]\nband = 0\ntarget_ms = 100\n"


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        (TIER + b"stream_idle_ms = 10\nstream_max_ms = 9", "tiers.gold", "stream_idle_ms <= stream_max_ms"),
        (
            TIER + b"[tenants.a]\ntier = 'gold'\nservice_tiers = {priority = 'golt'}",
            "tenants.a.service_tiers.priority",
            "did you mean 'gold'",
        ),
        (
            b"[prices.p]\ncurrency = 'EUR'\nvalid_from = 2026-01-01\ntier = 'golt'\n" + TIER,
            "prices.p.tier",
            "did you mean 'gold'",
        ),
        (TIER + b"token_ms = 0", "tiers.gold.token_ms", "leave it out for none"),
        (b"[tiers.'a b']\nband = 0\ntarget_ms = 1", "tiers.a b", "1 to 128 letters"),
        (POOL + b"discover = 'dns:a:1'", "pools.p", "either endpoints"),
        (POOL + b"grpc_endpoints = ['a:1']\ngrpc_discover = 'dns:a:1'", "pools.p", "either grpc_endpoints"),
        (POOL + b"probe = 'health'", "pools.p.probe", "a probe must be a path"),
        (POOL + b"learn_concurrency = 'yes'", "pools.p.learn_concurrency", "Expected `bool`"),
        (POOL + b"grpc_endpoints = ['a']", "pools.p.grpc_endpoints", "not host:port"),
        (b"[pools.p]\ndiscover = 'a:1'", "pools.p.discover", "not dns:host:port"),
        (b"[pools.p]\ndiscover = 'dns:a'", "pools.p.discover", "not host:port"),
        (POOL + b"grpc_discover = 'srv:a:1'", "pools.p.grpc_discover", "not dns:host:port"),
        *(
            (b"[pools.p]\ndiscover = 'kubernetes:%b'" % bad, "pools.p.discover", "kubernetes:service[.namespace]:port")
            for bad in (b"a", b":1", b"A:1", b"a.b.c:1", b"a_b:1", b"10.0.0.1:1", b"a/b:1")
        ),
        (b"[pools.p]\ndiscover = 'kubernetes:a:0'", "pools.p.discover", "not host:port"),
        (POOL + b"triton_priorities = { gold = 1 }", "pools.p.triton_priorities", "no tier is named 'gold'"),
        (POOL + b"[pools.p.scaling]\nminimum = 0\nmaximum = 1", "pools.p.scaling", "discover or grpc_discover:"),
        *(
            (b"[pools.p]\ndiscover = 'dns:a:1'\n[pools.p.scaling]\n%b" % bad, f"pools.p.scaling{field}", why)
            for bad, field, why in (
                (b"maximum = 1", "", "minimum is missing"),
                (b"minimum = -1\nmaximum = 1", "", "0 <= minimum <= maximum"),
                (b"minimum = 2\nmaximum = 1", "", "0 <= minimum <= maximum"),
                (b"minimum = 0\nmaximum = 0", "", "maximum must be 1 to 10000"),
                (b"minimum = 0\nmaximum = 1\ntier_hold_ms = { gold = 1 }", ".tier_hold_ms", "no tier is named 'gold'"),
                (b"minimum = 0\nmaximum = 1\nweights = { gold = 1.0 }", ".weights", "no tier is named 'gold'"),
                (b"minimum = 0\nmaximum = 1\nspare = 2", ".spare", "must be from 0 to 1, the maximum"),
                (ONE + window(b"minimum = 2"), ".schedule[0].minimum", "must be from 1 to 1, the maximum"),
                (ONE + window(b"minimum = 1\nzone = 'Berlin'"), ".schedule[0]", "knows no time zone 'Berlin'"),
                (ONE + window(b"minimum = 1", b"Mo 08:00"), ".schedule[0]", "'Mo' is not a day"),
                (ONE + window(b""), ".schedule[0]", "minimum"),
                (ONE + window(b"minimum = 1") * 51, ".schedule", "at most 50 windows"),
            )
        ),
        (ISSUER.replace(b"['a']", b"[]"), "issuers.i.audience", "at least one audience"),
        (ISSUER + b"algorithms = ['HS256']", "issuers.i.algorithms", "one or more of RS256"),
        (ISSUER + b"algorithms = ['none']", "issuers.i.algorithms", "one or more of RS256"),
        (ISSUER + b"algorithms = []", "issuers.i.algorithms", "one or more of RS256"),
        (ISSUER.replace(b"https://i/keys", b"http://i/keys"), "issuers.i.jwks", "has to be https"),
        (ISSUER.replace(b"https://i/keys", b"https://a:b@i/keys"), "issuers.i.jwks", "a URL with a password"),
        (ISSUER.replace(b"https://i/keys", b"https://i:65536/keys"), "issuers.i.jwks", "is no URL: Port out of range"),
        (ISSUER.replace(b"https://i/keys", b"https://[i/keys"), "issuers.i.jwks", "is no URL: Invalid IPv6"),
        (ISSUER.replace(b"https://i/keys", b"../keys.json"), "issuers.i.jwks", "give its name"),
        (ISSUER.replace(b"https://i/keys", b"keys.json"), "issuers.i.jwks", "no file 'keys.json'"),
        (
            ISSUER + b'tenants = ["acme"]\n' + ISSUER.replace(b"issuers.i", b"issuers.j") + b'tenants = ["acme"]\n',
            "issuers.j.issuer",
            "another table has this issuer",
        ),
        (POOL + ROUTE, "routes[0]", "either a pool or a split"),
        (POOL + ROUTE + b"pool = 'p'\nsplit = [{ pool = 'p', weight = 1 }]", "routes[0]", "either a pool or a split"),
        (POOL + ROUTE + b"pool = 'p'\nservice = 's'", "routes[0]", "either a model or a service"),
        (POOL + b"[[routes]]\nmodel = 'a/b'\npool = 'p'", "routes[0]", "is not a name"),
        (POOL + ROUTE + b"pool = 'p'\nversion = 'x'", "routes[0]", "a version must be a number"),
        (POOL + b"[[routes]]\nservice = 's'\npool = 'p'\nversion = '1'", "routes[0]", "only models have one"),
        (POOL + 2 * (ROUTE + b"pool = 'p'\nname = 'r'\n"), "routes[1].name", "another route is named 'r'"),
        (POOL + ROUTE + b"split = [{ pool = 'p', weight = 0 }]", "routes[0].split", "must be above 0"),
        (POOL + ROUTE + b"split = [{ weight = 1 }]", "routes[0].split", "every side of a split must name its pool"),
        (POOL + ROUTE + b"split = [{ pool = 'q', weight = 1 }]", "routes[0].pool", "no pool is named 'q'"),
        (POOL + ROUTE + b"pool = 'p'\nsplit_by = 'user'", "routes[0].split_by", "split_by is"),
        (POOL + ROUTE + b"pool = 'p'\nshadow = { pool = 'q' }", "routes[0].shadow.pool", "no pool is named 'q'"),
        (POOL + ROUTE + b"pool = 'p'\nsticky = 'cookie'", "routes[0].sticky", "sticky is"),
        (POOL + b"[[routes]]\nservice = 's'\npool = 'p'\nsticky = 'sequence'", "routes[0].sticky", "only models keep"),
        *(
            (POOL + OTHER + ROUTE + b"sticky = 'sequence'\n" + other, "routes[0]", "steps of sequences run once and in")
            for other in (
                b"pool = 'p'\nidempotent = true", b"pool = 'p'\ndeterministic = true", b"pool = 'p'\nfallback = ['q']",
                b"pool = 'p'\nshadow = { pool = 'q' }", b"split = [{ pool = 'p', weight = 1 }]",
            )
        ),
        *(
            (POOL + OTHER + ROUTE + b"pool = 'p'\nfallback = " + bad, f"routes[0]{field}", why)
            for bad, field, why in (
                (b"['r']", ".fallback", "no pool is named 'r'"),
                (b"[{ pool = 'q', modell = 'm' }]", ".fallback[0].modell", "did you mean 'model'?"),
                (b"['p']", ".fallback", "calls would come to pool 'p' a second time: name each pool once"),
                (b"['q', { pool = 'q', model = 'm' }]", ".fallback", "calls would come to pool 'q' a second time"),
                (b"['p', 'q', 'p', 'q', 'p', 'q', 'p', 'q', 'p']", ".fallback", "at most 8 pools are allowed"),
                (b"[{ pool = 'q', model = 'a' }, 's']", ".fallback", "name pools without `model` first"),
                (b"[{ pool = 'q', model = 'a*' }]", ".fallback", "'a*' is not the name of one model"),
                (b"['q']\nsticky = 'header:x-session'", "", "a sticky route cannot have a fallback"),
                (b"['q']\ndeterministic = true", "", "deterministic and fallback exclude each other"),
            )
        ),
        (POOL + b"grpc_endpoints = ['a:2']\n" + OTHER + ROUTE + b"pool = 'p'\nfallback = ['q']",
         "routes[0].fallback", "pool 'q' has no grpc_endpoints, and gRPC calls of this route could not go there"),
        (POOL + OTHER + b"[[routes]]\nservice = 's'\npool = 'p'\nfallback = [{ pool = 'q', model = 'm' }]",
         "routes[0].fallback", "only in routes of models and of the services audio.speech, chat.completions"),
        (POOL + ROUTE + b"pool = 'p'\nheaders = { 'x y' = 'z' }", "routes[0].headers", "a condition must be"),
        (POOL + ROUTE + b"pool = 'p'\ncache_s = 1.0", "routes[0]", "only a deterministic route"),
        (POOL + ROUTE + b"pool = 'p'\ncache_shared = true", "routes[0]", "only a deterministic route"),
        (POOL + ROUTE + b"pool = 'p'\nhedge_ms = 5", "routes[0]", "add idempotent = true"),
        (b"[http]\ncors_origins = ['app.example']", "http.cors_origins", "is not an origin"),
        (b"[http]\ntrusted_proxies = ['10.0.0.1/8']", "http.trusted_proxies", "is not a network"),
        (b"[tiers.gold]\nband = 256\ntarget_ms = 500", "tiers.gold.band", "Expected `int` >= 0 and <= 255"),
        (GOOD + b"weight = 0.0", "tenants.t.weight", "Expected `float` >= 0.001 and <= 1000"),
        (GOOD + b"scopes = ['operators']", "tenants.t.scopes", "did you mean 'operator'?"),
        (GOOD + b"limit = {}", "tenants.t.limit", "sets no bound"),
        (GOOD + b"limit = { requests_per_s = 1.0, burst = 0 }", "tenants.t.limit", "and burst 1 to"),
        (GOOD + b"limit = { bytes_per_s = 0 }", "tenants.t.limit", "bytes_per_s"),
        (GOOD + b"limit = { bytes_per_s = 1, bytes_burst = 0 }", "tenants.t.limit", "bytes_burst"),
        (GOOD + b"limit = { concurrency = 0 }", "tenants.t.limit", "concurrency must be 1 to"),
        (GOOD + b"limit = { requests_per_day = 0 }", "tenants.t.limit", "requests_per_day must be 1 to"),
        (GOOD + b"limit = { requests_per_month = 0 }", "tenants.t.limit", "requests_per_month must be 1 to"),
        (GOOD + b"limit = { compute_ms_per_day = 0 }", "tenants.t.limit", "compute_ms_per_day must be 1 to"),
        (GOOD + b"limit = { tokens_per_minute = 0 }", "tenants.t.limit", "tokens_per_minute"),
        (
            GOOD + b'limits = [{ model = "m", tokens_per_minute = 5 }]',
            "tenants.t.limits[0].tokens_per_minute",
            "only calls of the services",
        ),
        (GOOD + b"limit = { compute_ms_per_month = 0 }", "tenants.t.limit", "compute_ms_per_month must be 1 to"),
        (GOOD + b"limits = [{ concurrency = 1 }]", "tenants.t.limits[0]", "must name one model"),
        (GOOD + b"limits = [{ model = 'a', service = 'b', burst = 1 }]", "tenants.t.limits[0]", "must name one model"),
        (GOOD + b"limits = [{ model = 'a/b', concurrency = 1 }]", "tenants.t.limits[0]", "is not a name"),
        (GOOD + b"limits = [{ route = 'model:a', concurrency = 1 }]", "tenants.t.limits[0].route", "'model:a*'?"),
        (GOOD + b"limits = [{ model = 'a', concurrency = 1 }, { model = 'a', concurrency = 2 }]", "tenants.t", "both"),
    ],
)  # fmt: skip
def test_every_check_names_its_field(text: bytes, path: str, reason: str) -> None:
    with pytest.raises(BadDocument) as caught:
        compile_documents({"x.toml": text})
    bad = caught.value
    assert bad.file == "x.toml" and bad.path.startswith(path) and reason in bad.reason, bad
    assert len(bad.reason) <= 300 and not bad.others, bad.others


def test_an_unknown_field_is_named_with_the_nearest_one_at_every_depth() -> None:
    text = GOOD.replace(b"target_ms", b"tarrget_ms").replace(b"{ sha256", b"{ nane = 'x', sha256")
    with pytest.raises(BadDocument) as caught:
        compile_documents({"x.toml": text + b"limit = { request_per_s = 1.0 }\n[poools.q]\n"})
    said = [str(bad) for bad in (caught.value, *caught.value.others)]
    assert said == [
        "x.toml: tiers.gold.tarrget_ms: there is no field 'tarrget_ms' here, did you mean 'target_ms'?",
        "x.toml: tiers.gold: target_ms is missing",
        "x.toml: tenants.t.keys[0].nane: there is no field 'nane' here, did you mean 'name'?",
        "x.toml: tenants.t.limit.request_per_s: there is no field 'request_per_s' here, did you mean 'requests_per_s'?",
        "x.toml: poools: there is no field 'poools' here, did you mean 'pools'?",
    ]


def test_a_mistake_of_form_does_not_hide_those_of_meaning_and_keeps_the_numbers_of_routes() -> None:
    text = GOOD + b"[[routes]]\nmodell = 'b'\npool = 'p'\n[[routes]]\nmodel = 'b'\npool = 'pp'\n"
    with pytest.raises(BadDocument) as caught:
        compile_documents({"x.toml": text})
    said = [f"{bad.path}: {bad.reason}" for bad in (caught.value, *caught.value.others)]
    assert said == [
        "routes[1].modell: there is no field 'modell' here, did you mean 'model'?",
        "routes[2].pool: no pool is named 'pp', did you mean 'p'?",
    ]


def test_tenants_may_come_as_lines_of_json() -> None:
    line = (
        b'{"name": "u", "tier": "gold", "models": ["x"], "keys": [{"sha256": "%s", "expires": "2030-01-01T00:00:00Z"}]}'
    )
    snapshot = compile_documents({"a.toml": GOOD, "more.ndjson": b"\n" + line % (b"1" * 64) + b"\n\n"})
    key = snapshot.keys[bytes.fromhex("1" * 64)]
    assert key.tenant is snapshot.tenants["u"] and key.expires_at == 1893456000.0
    lines = [line % (b"2" * 64), b"{", b"[]", b'{"name": "v", "tier": "gld"}', b'{"tier": "gold"}', line % (b"3" * 64),
             b'{"name": "w", "tier": "gold", "wait": 1}']  # fmt: skip
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": GOOD, "more.ndjson": b"\n".join(lines)})
    said = [str(bad) for bad in (caught.value, *caught.value.others)]
    assert said[0].startswith("more.ndjson:2: not JSON")
    assert said[1:] == [
        "more.ndjson:3: tenants: Expected `object`, got `array`",
        "more.ndjson:4: tenants.v.tier: no tier is named 'gld', did you mean 'gold'?",
        "more.ndjson:5: tenants: name is missing",
        "more.ndjson:6: tenants.u: defined twice",
        "more.ndjson:7: tenants.w.wait: there is no field 'wait' here, did you mean 'weight'?",
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not a JSON Web Key Set"),
        (b'{"keys": []}', "1 to 64 keys"),
        (b'{"keys": [%s]}' % b", ".join([b"{}"] * 65), "1 to 64 keys"),
        (b'{"keys": [{"kty": "OKP", "d": "x"}]}', "secret or private key"),
        (b'{"keys": [{"kty": "oct", "k": "x"}]}', "secret or private key"),
        (b" " * 300_000, "at most"),
    ],
)
def test_a_key_set_is_checked_with_the_documents(data: bytes, reason: str) -> None:
    issuer = ISSUER.replace(b"https://i/keys", b"keys.json")
    with pytest.raises(BadDocument) as caught:
        compile_documents({"x.toml": issuer, "keys.json": data})
    assert caught.value.file == "keys.json" and reason in caught.value.reason


def test_no_mistake_repeats_what_may_be_a_secret() -> None:
    """People paste a key where its hash belongs."""
    for text in (GOOD.replace(b"0" * 64, b"oriel_secret"), GOOD.replace(b'sha256 = "', b'sha256 = 5 #"')):
        with pytest.raises(BadDocument) as caught:
            compile_documents({"x.toml": text})
        assert "oriel_secret" not in str(caught.value)


def test_lines_patterns_and_the_mistakes_that_are_named_are_bounded() -> None:
    long = b'{"name": "u", "tier": "gold", "models": ["%s"]}' % (b"x" * 1_100_000)
    with pytest.raises(BadDocument, match=r"more\.ndjson:1: .*longer than 1048576 bytes"):
        compile_documents({"a.toml": GOOD, "more.ndjson": long})
    many = ", ".join(['"abcdefgh"'] * 1025)
    for field in ("models", "services"):
        line = f'{{"name": "u", "tier": "gold", "{field}": [{many}]}}'.encode()
        with pytest.raises(BadDocument, match=f"tenants.u.{field}: the patterns may have at most 8192"):
            compile_documents({"a.toml": GOOD, "more.ndjson": line})
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": GOOD, "more.ndjson": b'{"name": "u", "tier": "%s"}\n' % (b"x" * 5000) * 5000})
    mistakes = (caught.value, *caught.value.others)
    assert len(mistakes) == 100 and max(len(bad.reason) for bad in mistakes) <= 300


def _tables() -> list[type[msgspec.Struct]]:
    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return [kind for kind in kinds if not kind.__name__.startswith("_")]


WORDS = sorted(
    {"tiers", "tenants", "pools", "routes", "issuers", "http", "a", "gold"}
    | {f.encode_name for kind in _tables() for f in msgspec.structs.fields(kind)}
)
VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**66), 2**66),
        st.floats(),
        st.sampled_from(["", "gold", "*", "a:1", "dns:a:1", "0" * 64, "header:x", "https://a", "k.json", "stream"]),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    max_leaves=12,
)


def toml(value: Any) -> str:
    """As an inline value."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value).replace("\\ud", "?")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=5), st.lists(VALUES, max_size=3))
def test_whatever_a_document_holds_it_compiles_or_its_mistakes_are_named(
    tables: dict[str, Any], lines: list[Any]
) -> None:
    text = "\n".join(f"{json.dumps(name)} = {toml(value)}" for name, value in tables.items())
    ndjson = "\n".join(json.dumps(line) for line in lines)
    try:
        compile_documents({"a.toml": text.encode("utf-8", "replace"), "b.ndjson": ndjson.encode("utf-8", "replace")})
    except BadDocument as bad:
        for each in (bad, *bad.others):
            assert each.file.startswith(("a.toml", "b.ndjson:")) and 0 < len(each.reason) <= 300


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_good_document_with_one_value_changed_compiles_or_is_named(data: st.DataObject) -> None:
    whole = tomllib.loads(GOOD.decode())
    places = [whole["tiers"]["gold"], whole["pools"]["p"], whole["routes"][0], whole["tenants"]["t"]]
    table = places[data.draw(st.integers(0, 3))]
    table[data.draw(st.sampled_from(WORDS))] = data.draw(VALUES)
    text = "\n".join(f"{name} = {toml(value)}" for name, value in whole.items())
    try:
        compile_documents({"a.toml": text.encode("utf-8", "replace")})
    except BadDocument as bad:
        assert all(0 < len(each.reason) <= 300 for each in (bad, *bad.others))
