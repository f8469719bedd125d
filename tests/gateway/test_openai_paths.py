"""The paths of the OpenAI API at the gateway: services by their own names; what the tenant may use goes along."""

from collections.abc import AsyncIterator

import pytest

from .stack import BRONZE, GOLD, LIMITED, Client, Upstream, digest, documents, gateway, upstream

OPENAI = [
    ("POST", "/v1/embeddings", "embeddings"),
    ("POST", "/v1/completions", "completions"),
    ("POST", "/v1/chat/completions", "chat.completions"),
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/org/name-1:2@b", "models"),
]


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def test_each_path_is_the_service_of_its_name(up: Upstream) -> None:
    for method, path, name in OPENAI:
        extra = f"""
[tenants.one]
tier = "gold"
services = ["{name}"]
models = ["a-*", "b"]
keys = [{{ sha256 = "{digest("one")}" }}]
"""
        async with gateway(documents([up.port], extra=extra)) as (port, _), Client(port) as client:
            assert (await client.ask(path, b"", method=method, key="one")).status == 200
            assert up.seen[-1].head.split(" ")[:2] == [method, path] and up.seen[-1].get("x-oriel-models") == "a-*,b"
            assert up.seen[-1].get("x-oriel-services") == name
            assert (await client.ask(path, b"", method=method, key=GOLD)).status == 200
            assert up.seen[-1].get("x-oriel-models") is None, "all models"
            assert up.seen[-1].get("x-oriel-services") is None, "all services"
            for other, elsewhere, theirs in OPENAI:
                if theirs != name:
                    assert (await client.ask(elsewhere, b"", method=other, key="one")).status == 404
            assert (await client.ask(path, b"", method=method, key=BRONZE)).status == 404
            wrong = await client.ask(path, b"", method="DELETE", key=GOLD)
            assert wrong.status == 405


async def test_a_tenant_without_models_is_told_apart_from_one_with_all(up: Upstream) -> None:
    extra = f"""
[tenants.none]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{digest("none")}" }}]
"""
    async with gateway(documents([up.port], extra=extra)) as (port, _), Client(port) as client:
        assert (await client.ask("/v1/embeddings", key="none", headers="x-oriel-models: *\r\n")).status == 200
        assert up.seen[-1].get("x-oriel-models") == "!"
        assert up.seen[-1].get("x-oriel-services") is None
        assert (await client.ask("/v1/embeddings", key=LIMITED)).status == 404, "no services at all"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../services/secret",
        "/v1/models/..%2Fservices%2Fsecret",
        "/v1/models/a/./b",
        "/v1/models/",
        "/v1/models/a//b",
        "/v1/models/a%20b",
        "/v1/embeddings/",
        "/v1/chat",
        "/v1/chat/completions/x",
    ],
)
async def test_no_other_spelling_passes(up: Upstream, path: str) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for method in ("GET", "POST"):
            assert (await client.ask(path, b"", method=method, key=GOLD)).status in (400, 404)
        assert not up.seen
