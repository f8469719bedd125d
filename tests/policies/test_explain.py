"""What `explain` says is what the gateway does."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Refused
from oriel_gateway.identity import identify
from oriel_gateway.targets import absent, resolve
from oriel_policies.documents import ApiKey, compile_documents
from oriel_policies.explain import Asked, explain
from oriel_policies.routing import RouteTable


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


def said(key: str, **asked: object) -> list[str]:
    found = SNAPSHOT.keys.get(sha256(key.encode()).digest())
    steps = explain(SNAPSHOT, found, Asked(**asked), now=NOW)  # type: ignore[arg-type]
    return [f"{step.room}: {step.says}{f' [{step.refused}]' if step.refused else ''}" for step in steps]


def test_a_call_that_is_served_is_followed_to_its_pool() -> None:
    lines = said("k", model="digits")
    assert lines[0] == "identify: tenant t by the key 'ci'"
    assert lines[1].startswith("tier: gold: band 0, on time within 100 ms, given up after 400 ms")
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
        "pool: p: 127.0.0.1:1; 32 permits at most, learned below that; 1024 calls and 268435456 bytes may wait; "
        "bodies up to 67108864 bytes; Triton priority 1 over gRPC",
    ]


def test_headers_and_versions_choose_other_routes() -> None:
    lines = said("k", model="digits", headers={"x-team": "blue"})
    assert "limit: route:canary: 9 compute-milliseconds a month" in lines
    assert "route: 75 % by tenant to pool p" in lines and "route: 25 % by tenant to pool q as version 2" in lines
    assert lines[-1].startswith("pool: q: what b:2 resolves to")
    assert "route: model:digits to pool q" in said("k", model="digits", version="7")


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
    asked = Asked(**{kind: name}, version=version if kind == "model" else "")  # type: ignore[arg-type]
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
        assert any(step.room == "pool" and step.says.startswith(f"{target.pool}:") for step in steps)
