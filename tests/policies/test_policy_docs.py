"""docs/policies.md: its examples are one good set, they set every field there is, and each has the effect it says."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.documents.schema import DocumentTable
from oriel_policies.errors import BadDocument
from oriel_policies.promise.routing import RouteTable

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
KEY_SET = b'{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}'


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    toml = {f"{number}.toml": text.encode() for number, text in enumerate(blocks("toml"))}
    return {**toml, "tenants.ndjson": "".join(blocks("json")).encode(), "login-keys.json": KEY_SET}


@pytest.fixture(scope="module")
def snapshot(files: dict[str, bytes]) -> Snapshot:
    return compile_documents(files)


def test_the_examples_are_one_good_set(snapshot: Snapshot) -> None:
    assert sorted(snapshot.tenants) == ["acme", "birch", "dune", "reed"]
    assert sorted(snapshot.pools) == ["canary", "inference", "triton"]
    assert len(snapshot.keys) == 3 and len(snapshot.routes) == 5


def fields_of(kind: Any, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Table name -> its fields, for every table a document may hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind.__name__ not in found:
            found[kind.__name__] = {field.encode_name for field in msgspec.structs.fields(kind)}
            for hint in get_type_hints(kind).values():
                fields_of(hint, found)
    else:
        for part in get_args(kind):
            fields_of(part, found)
    return found


def test_every_field_is_in_an_example(files: dict[str, bytes]) -> None:
    """A field that is left out of the page here would be known to nobody."""
    text = "\n".join(blocks("toml"))
    missing = [
        f"{table}.{name}"
        for table, names in fields_of(DocumentTable, {}).items()
        if table != "DocumentTable"
        for name in names
        if not re.search(rf"\b{name}( = |\]\]|\]\s)", text)
    ]
    assert missing == []


def test_tiers_and_tenants_have_the_effect_the_page_says(snapshot: Snapshot) -> None:
    gold, bronze = snapshot.tiers["gold"], snapshot.tiers["bronze"]
    assert (gold.band, gold.target_s, gold.give_up_s) == (0, 0.5, 2.0)
    assert (gold.stream_idle_s, gold.stream_max_s, gold.objective) == (60.0, 600.0, 0.99)
    assert bronze.give_up_s == 8.0
    acme, birch = snapshot.tenants["acme"], snapshot.tenants["birch"]
    assert (acme.tier, acme.weight, acme.scopes) == (gold, 2.0, {"operator"})
    assert [acme.may_use_model(name) for name in ("digits", "team-a-x", "team-b")] == [True, True, False]
    assert acme.may_use_service("anything") and not birch.may_use_service("anything")
    keys = sorted((key.tenant.name, key.name, key.expires_at) for key in snapshot.keys.values() if key.expires_at)
    assert keys == [("acme", "ci", 1893456000.0), ("birch", "", 1893456000.0)]
    names = [allowance.name for allowance in acme.allowances]
    assert names == ["all", "model:team-a-*", "route:digits-canary", "service:embed"]
    everything, some, route, _ = acme.allowances
    assert [(each.field, each.amount, each.burst) for each in everything.limits] == [
        ("requests_per_s", 50.0, 100),
        ("concurrency", 20, 0),
        ("bytes_per_s", 1e7, 20_000_000),
        ("tokens_per_minute", 90_000, 120_000),
    ]
    assert {each.field: each.amount for each in some.limits if not each.burst} == {
        "requests_per_day": 100_000,
        "requests_per_month": 2_000_000,
        "compute_ms_per_day": 3_600_000,
        "compute_ms_per_month": 72_000_000,
    }
    assert [each.burst for each in some.limits if each.burst] == [1]
    assert [(each.field, each.amount) for each in route.limits] == [("concurrency", 4)]
    assert acme.allowances_for("model", "team-a-x", "r") == (everything, some)
    assert acme.allowances_for("model", "digits", "digits-canary") == (everything, route)


def test_budgets_have_the_effect_the_page_says(snapshot: Snapshot) -> None:
    money, tokens = snapshot.tenants["reed"].budgets
    assert (money.unit, money.amount, money.period, money.warn, money.stop) == ("EUR", 250 * 10**9, "month", 0.8, True)
    assert (tokens.unit, tokens.amount, tokens.period) == ("tokens", 5_000_000, "day")
    assert (tokens.warn, tokens.stop) == (0.9, False)


def test_issuers_have_the_effect_the_page_says(snapshot: Snapshot) -> None:
    issuer = snapshot.issuers["login"]
    assert (issuer.issuer, issuer.audience) == ("https://login.example", ("oriel",))
    assert issuer.algorithms == ("RS256", "ES256", "EdDSA") and issuer.key_set == KEY_SET
    assert (issuer.leeway_s, issuer.refresh_s) == (60, 300)
    assert (issuer.tenant_claim, issuer.tier_claim) == ("tenant", "tier")


def test_pools_have_the_effect_the_page_says(snapshot: Snapshot) -> None:
    pool, canary = snapshot.pools["triton"], snapshot.pools["canary"]
    assert pool.endpoints == (("10.0.0.7", 8000), ("fd00::7", 8000)) and pool.grpc_endpoints == (("10.0.0.7", 8001),)
    assert (pool.max_inflight, pool.learn_concurrency, pool.max_queue) == (64, True, 1024)
    assert (pool.max_queue_bytes, pool.max_body_bytes, pool.max_response_bytes) == (2**28, 2**26, 2**30)
    assert (pool.connect_timeout_s, pool.idle_timeout_s) == (2.0, 45.0)
    assert (pool.probe, pool.probe_interval_s) == ("/v2/health/ready", 1.0)
    assert dict(pool.triton_priorities) == {"gold": 1, "bronze": 2}
    assert (pool.engine, pool.metrics_port) == ("triton", 8002)
    assert canary.discover == ("triton.models.svc", 8000) and canary.grpc_discover == ("triton.models.svc", 8001)
    inference = snapshot.pools["inference"]
    assert inference.discover == ("kubernetes:inference.models", 8000)
    assert inference.grpc_discover == ("kubernetes:inference.models", 8001)
    assert canary.endpoints == () and canary.probe == "/v2/health/ready"  # a pool of models
    scaling = inference.scaling
    assert scaling is not None and pool.scaling is None
    assert (scaling.minimum, scaling.maximum, scaling.start_s, scaling.keep_alive_s) == (0, 8, 60.0, 300.0)
    assert (scaling.capacity, scaling.miss_share, scaling.weights) == (1.0, 0.002, {"bronze": 0.0})
    assert (scaling.hold_for("gold"), scaling.hold_for("bronze")) == (90.0, 300.0)
    assert scaling.spare == 0
    (office,) = scaling.schedule
    assert str(office) == "Mon-Fri 08:00 to 18:00 Europe/Berlin" and office.minimum == 2


def test_routes_have_the_effect_the_page_says(snapshot: Snapshot) -> None:
    split, cached, sticky, model, service = snapshot.routes
    assert (split.name, split.version, split.headers) == ("digits-canary", "2", (("x-team", "blue"),))
    assert [(side.pool, side.version, side.until) for side in split.split] == [("triton", "", 0.95), ("canary", "3", 1)]
    assert (split.split_by, split.pool) == ("tenant", "triton")
    assert (cached.shadow_pool, cached.shadow_share, cached.cache_s, cached.cache_shared) == (
        "canary",
        0.1,
        30.0,
        False,
    )
    assert cached.deterministic and cached.idempotent
    assert (sticky.sticky, sticky.idempotent, sticky.hedge_s) == ("x-session", True, 0.2)
    assert model.plain and not any(route.plain for route in (split, cached, sticky))
    assert [(entry.pool, entry.model) for entry in service.fallback] == [("canary", ""), ("inference", "small")]
    routes = RouteTable(snapshot.routes)
    assert routes.for_service("anything")[-1] is service and routes.for_model("digits", "1")[-1] is model


def test_the_http_port_has_what_the_page_says(snapshot: Snapshot) -> None:
    assert snapshot.http.cors_origins == ("https://app.example",)
    assert [str(network) for network in snapshot.http.trusted_proxies] == ["10.0.0.0/8"]


def test_a_change_of_any_field_to_another_type_is_named(files: dict[str, bytes]) -> None:
    """Of every line `field = value` of the page: with a table in the place of the value, the path of the mistake."""
    tried = 0
    for file, data in files.items():
        if not file.endswith(".toml"):
            continue
        lines = data.decode().split("\n")
        for number, line in enumerate(lines):
            found = re.match(r"(\w+) = ", line)
            if found is None or line.endswith("["):
                continue
            wrong = [*lines[:number], f"{found[1]} = {{ x = [] }}", *lines[number + 1 :]]
            with pytest.raises(BadDocument) as caught:
                compile_documents({**files, file: "\n".join(wrong).encode()})
            paths = [bad.path for bad in (caught.value, *caught.value.others)]
            assert any(found[1] in path for path in paths), (line, paths)
            tried += 1
    assert tried > 50


def test_limits_have_the_scopes_the_page_says(snapshot: Snapshot) -> None:
    names = [allowance.name for allowance in snapshot.tenants["dune"].allowances]
    assert names == ["all", "model:llama-*", "service:ocr", "route:digits-canary", "tier:bronze"]
