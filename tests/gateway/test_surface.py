"""The public v2 surface over HTTP: what a tenant may ask for, and what needs the scope `operator`."""

from collections.abc import AsyncIterator

import pytest

from .gate import INFER
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, upstream

OPERATORS = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/digits/load"),
    ("POST", "/v2/repository/models/digits/unload"),
    ("POST", "/v2/repository/main/models/digits/load"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/models/digits/trace/setting"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/systemsharedmemory/region/r/status"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/cudasharedmemory/region/r/unregister"),
]


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def operator(port: int) -> dict[str, bytes]:
    text = documents([port])["all.toml"]
    return {"all.toml": text.replace(b"[tenants.g]", b'[tenants.g]\nscopes = ["operator"]')}


async def test_the_operators_paths_are_absent_for_everybody_else(up: Upstream) -> None:
    async with gateway(operator(up.port)) as (port, _), Client(port) as client:
        for method, path in OPERATORS:
            reply = await client.ask(path, method=method, key=BRONZE)
            assert reply.status == 404, path
        assert not up.seen
        for method, path in OPERATORS:
            assert (await client.ask(path, method=method)).status == 200, path
        assert [tuple(seen.head.split(" ")[:2]) for seen in up.seen] == OPERATORS


async def test_a_tenant_sees_its_models_and_the_server(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for path in ("", "/models/digits", "/models/digits/ready", "/models/digits/config", "/models/digits/stats"):
            assert (await client.ask(f"/v2{path}", method="GET", key=BRONZE)).status == 200, path
        for verb in ("infer", "generate", "generate_stream", "versions/3/infer"):
            assert (await client.ask(f"/v2/models/digits/{verb}", key=BRONZE)).status == 200, verb
        for path in (
            "/v2/models",
            "/v2/models/digits/load",
            "/metrics",
            "/v2/models/digits/versions/x/infer",
            "/v2/models/digits/versions/01",
        ):
            assert (await client.ask(path, method="GET", key=GOLD)).status == 404, path


async def test_nothing_of_the_clients_own_hop_reaches_the_upstream(up: Upstream) -> None:
    forged = (
        "x-oriel-tenant: other\r\nX-Oriel-Tier: forged\r\nx-oriel-models: *\r\nx_oriel_priority: forged\r\n"
        "x-oriel-timeout-ms: 999999\r\nx-oriel-anything: forged\r\nproxy-authorization: Basic c2VjcmV0\r\n"
    )
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for _ in range(3):  # the later requests have a recognised head
            assert (await client.ask(INFER, key=BRONZE, headers=forged)).status == 200
        for seen in up.seen:
            assert "forged" not in seen.head and "c2VjcmV0" not in seen.head and BRONZE not in seen.head
            lines = [line for line in seen.head.lower().split("\r\n") if line.startswith("x-oriel-t")]
            assert [line.partition(":")[0] for line in lines] == [
                "x-oriel-tier",
                "x-oriel-tenant",
                "x-oriel-timeout-ms",
            ]
            assert seen.get("x-oriel-tenant") == "b" and seen.get("x-oriel-models") == "digits"


@pytest.mark.parametrize(
    "credentials",
    [
        "authorization: Bearer key-gold\r\nx-api-key: key-gold\r\n",
        "authorization: Bearer key-gold\r\nauthorization: Bearer key-bronze\r\n",
        "x-api-key: key-gold\r\nx-api-key: key-gold\r\n",
        "authorization: Basic a2V5\r\nx-api-key: key-gold\r\n",
    ],
)
async def test_two_credentials_are_a_400_also_when_each_was_recognised_before(up: Upstream, credentials: str) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for key in (GOLD, BRONZE):
            for header in (f"x-api-key: {key}\r\n", f"authorization: Bearer {key}\r\n"):
                assert (await client.ask(INFER, key=None, headers=header)).status == 200
        seen = len(up.seen)
        reply = await client.ask(INFER, key=None, headers=credentials)
        assert reply.status == 400 and b"ambiguous_credentials" in reply.body and len(up.seen) == seen


@pytest.mark.parametrize("name", ["X_API_KEY", "x_api-key", "X-Api_Key", "Proxy_Authorization"])
async def test_a_key_under_a_name_that_some_servers_read_as_ours_does_not_travel(name: str) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        reply = await client.ask("/v2/models/digits/infer", b"x", headers=f"{name}: s3cret\r\n")
        assert reply.status == 200 and "s3cret" not in up.seen[0].head


async def test_a_version_of_a_service_is_allowed_by_the_services_name(up: Upstream) -> None:
    async def answer(seen: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\nx-oriel-service-version: 2\r\ncontent-length: 0\r\n\r\n"

    up.answer = answer
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for version in ("2", "v2", "1.10", "2026-11-21", "%32"):
            reply = await client.ask(f"/v1/services/digits/versions/{version}", key=BRONZE)
            assert reply.status == 200 and reply.headers["x-oriel-service-version"] == "2"
        assert up.seen[0].head.startswith("POST /v1/services/digits/versions/2 ")
        assert up.seen[-1].head.startswith("POST /v1/services/digits/versions/2 "), (
            "it is forwarded in the form in which it was judged"
        )
        seen = len(up.seen)
        for path in (
            "/v1/services/other/versions/2",
            "/v1/services/digits/versions/",
            "/v1/services/digits/versions/..",
            "/v1/services/digits/versions/.2",
            "/v1/services/digits/versions/2%2F..%2F..%2F..%2Fother",
            "/v1/services/digits/versions/2/x",
            "/v1/services/digits/versions/" + "1" * 65,
            "/v1/services/digits/other/2",
        ):
            assert (await client.ask(path, key=BRONZE)).status == 404, path
        assert (await client.ask("/v1/services/digits/versions/2", method="DELETE")).status == 405
        assert len(up.seen) == seen
