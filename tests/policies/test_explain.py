"""The output of `explain` agrees with what the gateway does."""

from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Refused
from oriel_gateway.identity.keys import identify
from oriel_gateway.routing.targets import absent, resolve
from oriel_policies.documents import ApiKey, compile_documents, schema
from oriel_policies.errors import BadDocument
from oriel_policies.promise.explain import ExplainedCall, explain
from oriel_policies.promise.routing import RouteTable


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


SNAPSHOT = compile_documents(
    {
        "a.toml": f"""
[tiers.gold]
band = 0
target_ms = 100
[pools.p]
endpoints = ["127.0.0.1:1"]
triton_priorities = {{ gold = 1 }}
[pools.q]
discover = "dns:b:2"
[[routes]]
name = "canary"
model = "digits"
headers = {{ x-team = "blue" }}
split = [{{ pool = "p", weight = 3 }}, {{ pool = "q", version = "2", weight = 1 }}]
[[routes]]
model = "digits"
version = "7"
pool = "q"
[[routes]]
model = "d*"
pool = "p"
deterministic = true
cache_s = 5.0
hedge_ms = 10
shadow = {{ pool = "q", percent = 10.0 }}
sticky = "stream"
[tenants.t]
tier = "gold"
models = ["digits", "other"]
services = ["s"]
keys = [
  {{ sha256 = "{digest("k")}", name = "ci" }},
  {{ sha256 = "{digest("old")}", expires = 2020-01-01T00:00:00Z }},
]
limit = {{ requests_per_s = 5, burst = 2, concurrency = 3, bytes_per_s = 10, requests_per_day = 7 }}
limits = [{{ model = "other", concurrency = 1 }}, {{ route = "canary", compute_ms_per_month = 9 }}]
""".encode()
    }
)
NOW = 1_800_000_000.0


TIERS = {
    "tiers.toml": b"""
[tiers.gold]
band = 0
target_ms = 100
[tiers.silver]
band = 1
target_ms = 100
[tiers.bronze]
band = 2
target_ms = 100
""",
    "routes.toml": b"""
[pools.p]
endpoints = ["127.0.0.1:1"]
triton_priorities = { bronze = 9 }
[[routes]]
model = "plain"
pool = "p"
[[routes]]
model = "slow"
pool = "p"
tier = "silver"
[[routes]]
model = "urgent"
pool = "p"
tier = "gold"
above_tenant = true
""",
    "tenants.toml": f"""
[tenants.acme]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{digest("k")}" }}, {{ sha256 = "{digest("batch")}", name = "batch", tier = "bronze" }}]
limits = [{{ tier = "bronze", concurrency = 4 }}]
""".encode(),
    "more.ndjson": b"\n"
    + msgspec.json.encode({"name": "birch", "tier": "bronze", "models": ["*"], "keys": [{"sha256": digest("b")}]}),
}
OWN = "tenants.toml: tenants.acme.tier"


@pytest.mark.parametrize(
    ("key", "model", "asked", "tier", "decided"),
    [
        ("k", "plain", None, "gold", OWN),
        ("batch", "plain", None, "bronze", f"tenants.toml: tenants.acme.keys[1].tier, in place of {OWN} (gold)"),
        ("b", "plain", None, "bronze", "more.ndjson:2: tenants.birch.tier"),
        ("k", "slow", None, "silver", "routes.toml: routes[1].tier"),
        ("b", "urgent", None, "gold", "routes.toml: routes[2].tier"),
        ("k", "plain", "bronze", "bronze", "the request's x-request-tier"),
        ("k", "slow", "silver", "silver", "routes.toml: routes[1].tier"),
        ("k", "plain", "gold", "gold", OWN),
    ],
)
def test_it_names_the_document_and_the_field_that_decided_the_tier(
    key: str, model: str, asked: str | None, tier: str, decided: str
) -> None:
    snapshot = compile_documents(TIERS)
    stored = snapshot.keys[sha256(key.encode()).digest()]
    headers = {} if asked is None else {"x-request-tier": asked}
    steps = explain(snapshot, stored, ExplainedCall(model=model, headers=headers), now=NOW, documents=TIERS)
    last = [step.says for step in steps if step.stage == "tier"][-1]
    assert last.startswith(f"{tier}: band ") and last.endswith(f"; decided by {decided}")
    if stored.tenant.name == "acme":
        assert any(step.says.startswith("tier:bronze") for step in steps if step.stage == "limit") == (tier == "bronze")
    assert steps[-1].says.endswith("Triton priority 9 over gRPC") == (tier == "bronze")


def test_a_tier_that_a_route_does_not_give_or_a_request_may_not_have_is_explained() -> None:
    snapshot = compile_documents(TIERS)
    stored = snapshot.keys[sha256(b"b").digest()]
    steps = explain(snapshot, stored, ExplainedCall(model="slow"), now=NOW, documents=TIERS)
    assert "stays bronze: routes.toml: routes[1].tier is silver, which is above" in [s.says for s in steps][-4]
    asked = ExplainedCall(model="slow", headers={"x-request-tier": "gold"})
    last = explain(snapshot, stored, asked, now=NOW, documents=TIERS)[-1]
    assert (last.stage, last.refused) == ("tier", "tier_not_allowed") and last.says.endswith("may ask for: bronze")


def said(key: str, **asked: object) -> list[str]:
    found = SNAPSHOT.keys.get(sha256(key.encode()).digest())
    steps = explain(SNAPSHOT, found, ExplainedCall(**asked), now=NOW)  # type: ignore[arg-type]
    return [f"{step.stage}: {step.says}{f' [{step.refused}]' if step.refused else ''}" for step in steps]


def test_a_call_that_is_served_is_followed_to_its_pool() -> None:
    lines = said("k", model="digits")
    assert lines[0] == "identify: tenant t by the key 'ci'"
    assert lines[1].startswith("tier: gold: band 0, on time within 100 ms, given up after 400 ms")
    assert lines[1].endswith("; decided by tenants.t.tier")
    assert lines[2:] == [
        "allow: model 'digits' fits digits, other",
        "route: not canary: it is for calls with the header x-team: blue",
        "route: not model:digits: it is for version 7",
        "limit: all: 5 requests per second, bursts of 2; 3 at once; 10 bytes per second, bursts of 10; "
        "7 requests a day",
        "route: model:d* to pool p",
        "route: copies of 10 % go to pool q",
        "route: one endpoint per stream",
        "route: equal calls at the same time are made once; answers are kept for 5 s",
        "route: a call may run twice: it is retried, hedged after 10 ms",
        "pool: p: 127.0.0.1:1; absent over gRPC; 32 permits at most, learned below that; 256 streams; 1024 calls "
        "and 268435456 bytes may wait; bodies up to 67108864 bytes, answers up to 1073741824; connections within "
        "2000 ms, kept for 45000 ms; /v2/health/ready probed every 1000 ms; Triton priority 1 over gRPC",
    ]


def test_headers_and_versions_choose_other_routes() -> None:
    lines = said("k", model="digits", headers={"x-team": "blue"})
    assert "limit: route:canary: 9 compute-milliseconds a month" in lines
    assert "route: 75 % by tenant to pool p" in lines and "route: 25 % by tenant to pool q as version 2" in lines
    assert lines[-1].startswith("pool: q: what b:2 resolves to")
    assert "route: model:digits to pool q" in said("k", model="digits", version="7")


def test_tenants_of_a_tier_have_a_route_of_their_own() -> None:
    """Bronze goes to spot machines as long as there are any, and nobody else does."""
    spot = b'[pools.spot]\nendpoints = ["127.0.0.1:2"]\n[[routes]]\nmodel = "*"\nfor_tiers = ["bronze"]\n'
    spot += b'pool = "spot"\nfallback = ["p"]\n'
    snapshot = compile_documents({"a.toml": spot, **TIERS})
    for key, pool in (("k", "p"), ("batch", "spot"), ("b", "spot")):
        stored = snapshot.keys[sha256(key.encode()).digest()]
        target = resolve("POST", "/v2/models/plain/infer", "", stored.tenant, RouteTable(snapshot.routes))
        assert (target.pool, [each.pool for each in target.fallbacks]) == (pool, ["p"] if pool == "spot" else [])
        says = [each.says for each in explain(snapshot, stored, ExplainedCall(model="plain"), now=NOW)]
        assert any(each.startswith(f"{pool}: ") for each in says)
        assert ("not model:*: it is for tenants of bronze" in says) is (key == "k")
    with pytest.raises(BadDocument, match="no tier is named 'bronz'"):
        compile_documents({"a.toml": spot.replace(b"bronze", b"bronz"), **TIERS})


def test_the_pools_after_the_first_are_named_in_order_and_what_a_call_cannot_be_given() -> None:
    files = {
        "x.toml": b"""
[tiers.gold]
band = 0
target_ms = 100
[pools.large]
endpoints = ["127.0.0.1:1"]
[pools.other]
endpoints = ["127.0.0.1:2"]
[pools.small]
endpoints = ["127.0.0.1:3"]
[[routes]]
model = "large-*"
pool = "large"
fallback = ["other", { pool = "small", model = "small-1b" }]
[[routes]]
service = "*"
pool = "large"
fallback = [{ pool = "small", model = "meta/small" }]
[tenants.all]
tier = "gold"
models = ["*"]
services = ["*"]
[tenants.some]
tier = "gold"
models = ["large-*"]
"""
    }
    snapshot = compile_documents(files)
    for tenant, asked, why in (
        ("all", {"model": "large-7b"}, ""),
        (
            "all",
            {"model": "large-7b", "version": "2"},
            "; not for this call: the call names a version of its own model",
        ),
        ("some", {"model": "large-7b"}, "; not for this call: the tenant may not use it"),
    ):
        key = ApiKey(tenant=snapshot.tenants[tenant], expires_at=None)
        steps = explain(snapshot, key, ExplainedCall(**asked), now=NOW, documents=files)
        order = [step.says for step in steps if step.stage == "fallback"]
        assert order[0].startswith("a call that finds no usable server, no place in the queue or")
        assert order[1:] == ["1. pool other", f"2. pool small with the model 'small-1b'{why}"]
        assert [step.says.partition(":")[0] for step in steps if step.stage == "pool"] == ["large", "other", "small"]
    key = ApiKey(tenant=snapshot.tenants["all"], expires_at=None)
    for service, why in (
        ("chat.completions", ""),
        ("mine", "; not for this call: the gateway cannot change the model in calls of this service"),
    ):
        steps = explain(snapshot, key, ExplainedCall(service=service), now=NOW, documents=files)
        order = [step.says for step in steps if step.stage == "fallback"]
        assert order[1:] == [f"1. pool small with the model 'meta/small'{why}"]


@pytest.mark.parametrize(
    ("key", "asked", "last"),
    [
        ("wrong", {"model": "digits"}, "identify: no tenant of these documents has this credential [unauthenticated]"),
        ("old", {"model": "digits"}, "expired on 2020-01-01 00:00:00 UTC [unauthenticated]"),
        ("k", {"model": "secret"}, "fits none of the tenant's models (digits, other): it looks absent [not_found]"),
        ("k", {"model": "other"}, "no route serves model 'other' [not_found]"),
        ("k", {"service": "s"}, "no route serves service 's' [not_found]"),
    ],
)
def test_a_refusal_ends_it(key: str, asked: dict[str, str], last: str) -> None:
    assert said(key, **asked)[-1].endswith(last)


@given(
    key=st.sampled_from(["k", "old", "wrong"]),
    name=st.sampled_from(["digits", "d", "other", "secret", "s"]),
    kind=st.sampled_from(["model", "service"]),
    version=st.sampled_from(["", "7", "8"]),
)
def test_it_agrees_with_the_gateway(key: str, name: str, kind: str, version: str) -> None:
    stored: ApiKey | None = SNAPSHOT.keys.get(sha256(key.encode()).digest())
    asked = ExplainedCall(**{kind: name}, version=version if kind == "model" else "")  # type: ignore[arg-type]
    steps = explain(SNAPSHOT, stored, asked, now=NOW)
    path = f"/v1/services/{name}" if kind == "service" else f"/v2/models/{name}"
    path += f"/versions/{version}" if version and kind == "model" else ""
    try:
        tenant = identify([("x-api-key", key)], SNAPSHOT).tenant
        target = resolve("GET", path, "", tenant, RouteTable(SNAPSHOT.routes))
        if target.choices is not None:
            chosen = target.choices.pick(asked.headers.get, "any id")
            if chosen is None:
                raise absent(target.kind, target.name)
            target = chosen
    except Refused as refused:
        assert steps[-1].refused == refused.outcome.value
    else:
        assert not steps[-1].refused
        assert any(step.stage == "pool" and step.says.startswith(f"{target.pool}:") for step in steps)


# Of each table, one line that says something else than its default, beside what makes it mean something.
LINES = {
    "tiers.t": [
        "band = 7", "target_ms = 50", "give_up_ms = 77", "stream_idle_ms = 5", "stream_max_ms = 900000",
        "token_ms = 40", "objective = 0.5"
    ],
    "tenants.t": [
        "tier = 'u'", "models = ['digits', 'x']", "services = ['y']", "scopes = ['operator']", "weight = 3.0",
        "limit = {concurrency = 3}", "limits = [{model = 'digits', concurrency = 3}]",
        "budgets = [{amount = 3, unit = 'tokens'}]",
        "keys = [{sha256 = 'SHA', name = 'n'}]", "service_tiers = {priority = 'above'}",
    ],
    "pools.p": [
        "endpoints = ['127.0.0.1:9']", "discover = 'dns:b:2'", "discover = 'kubernetes:b.c:2'",
        "grpc_endpoints = ['127.0.0.1:8']",
        "grpc_discover = 'dns:b:3'", "learn_concurrency = false", "max_inflight = 3", "max_streams = 9",
        "max_queue = 4",
        "max_queue_bytes = 5", "max_body_bytes = 6", "max_response_bytes = 7", "connect_timeout_ms = 8",
        "idle_timeout_ms = 9", "probe = ''", "probe_interval_ms = 500", "triton_priorities = {t = 3}",
        "place_models = true", "engine = 'triton'", "metrics_port = 5",
        "scaling = {minimum = 0, maximum = 9}",
    ],
    "routes": [
        "pool = 'q'", "name = 'n'", "model = 'd*'", "service = 's'", "version = '3'",
        "headers = {a = 'b'}", "for_tiers = ['u']",
        "split = [{pool = 'p', weight = 1}, {pool = 'q', weight = 3}]", "split_by = 'header:a'",
        "shadow = {pool = 'q'}",
        "sticky = 'header:a'", "sticky = 'sequence'",
        "deterministic = true", "cache_s = 3.0", "cache_shared = true", "idempotent = true",
        "hedge_ms = 5", "tier = 'u'", "above_tenant = true", "stored_state = true",
        "fallback = [{pool = 'q', model = 'x'}]",
        "rollback = {canary = 'q'}",
    ],
    "limit": [
        "requests_per_s = 3", "burst = 3", "concurrency = 3", "bytes_per_s = 3", "bytes_burst = 3",
        "requests_per_day = 3", "requests_per_month = 3", "compute_ms_per_day = 3", "compute_ms_per_month = 3",
        "tokens_per_minute = 3", "tokens_burst = 3",
    ],
}  # fmt: skip
BESIDE = {
    "burst": "requests_per_s = 5",
    "bytes_burst": "bytes_per_s = 5",
    "tokens_per_minute": "requests_per_s = 5",
    "tokens_burst": "requests_per_s = 5\ntokens_per_minute = 5",
    "split_by": "split = [{pool = 'p', weight = 1}, {pool = 'q', weight = 1}]",
    "rollback": "split = [{pool = 'p', weight = 1}, {pool = 'q', weight = 1}]",
    "cache_s": "deterministic = true",
    "cache_shared": "deterministic = true\ncache_s = 5.0",
    "hedge_ms": "idempotent = true",
    "above_tenant": "tier = 'above'",
    "scaling": "discover = 'dns:b:2'",
}
PLAIN = {
    "tiers.t": {"band": "band = 0", "target_ms": "target_ms = 10"},
    "tenants.t": {"tier": "tier = 't'", "models": "models = ['digits']", "keys": "keys = [{sha256 = 'SHA'}]"},
    "pools.p": {"endpoints": "endpoints = ['127.0.0.1:1']"},
    "routes": {"pool": "pool = 'p'", "model": "model = 'digits'"},
    "limit": {},
}


def whole(table: str, more: str) -> list[str]:
    """What is said with these lines in one table, and the plain ones in all others."""
    field = more.rpartition("\n")[2].partition(" ")[0]
    left_out = {field, *(line.partition(" ")[0] for line in more.splitlines())}
    left_out |= {"endpoints"} if "discover = " in more.replace("grpc_discover", "") else set()
    left_out |= {"pool"} if "split" in more else set()
    left_out |= {"model"} if field == "service" else set()
    parts = [
        "[tiers.u]\nband = 1\ntarget_ms = 1",
        "[tiers.above]\nband = 0\ntarget_ms = 1",
        "[pools.q]\nendpoints = ['127.0.0.1:2']",
    ]
    for name, plain in PLAIN.items():
        lines = [line for each, line in plain.items() if name != table or each not in left_out]
        title = {"routes": "[[routes]]", "limit": "[tenants.t.limit]"}.get(name, f"[{name}]")
        lines += more.splitlines() if name == table else []
        if lines:
            parts.append("\n".join([title, *lines]))
    text = "\n".join(parts).replace("SHA", digest("k"))
    snapshot = compile_documents({"a.toml": text.encode()})
    key, asked = snapshot.keys[sha256(b"k").digest()], (ExplainedCall(model="digits"), ExplainedCall(service="y"))
    return [step.says for each in asked for step in explain(snapshot, key, each, now=NOW)]


@pytest.mark.parametrize(("table", "line"), [(table, line) for table, lines in LINES.items() for line in lines])
def test_every_field_that_applies_is_told(table: str, line: str) -> None:
    """Of a pool, its bounds on answers and connections, its probes and its gRPC were kept silent; of a tier, its
    objective."""
    beside = BESIDE.get(line.partition(" ")[0], "")
    assert whole(table, f"{beside}\n{line}".strip()) != whole(table, beside)


def test_hours_with_a_larger_minimum_and_spare_replicas_are_told() -> None:
    window = "{from = 'Mon-Fri 22:00', to = '06:00', zone = 'Europe/Berlin', minimum = 2}"
    scaling = f"scaling = {{minimum = 0, maximum = 9, spare = 1, schedule = [{window}]}}"
    text = "\n".join(whole("pools.p", f"discover = 'dns:b:2'\n{scaling}"))
    assert "0 to 9 replicas, at least 2 from Mon-Fri 22:00 to 06:00 Europe/Berlin, 1 spare while in use" in text


def test_the_lines_name_every_field() -> None:
    tables = {
        "tiers.t": schema.TierTable, "tenants.t": schema.TenantTable, "pools.p": schema.PoolTable,
        "routes": schema.RouteTable, "limit": schema.LimitTable,
    }  # fmt: skip
    for name, table in tables.items():
        assert {line.partition(" ")[0] for line in LINES[name]} == {f.name for f in msgspec.structs.fields(table)}
