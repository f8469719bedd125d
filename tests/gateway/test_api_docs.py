"""The gateway's own descriptions at the public port, limited to what the caller's key may use.

These are `/`, `/docs`, `/openapi.json` and `/v1/services`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from oriel_gateway.api_docs import document, published, reading
from oriel_gateway.api_docs.document import common_document
from oriel_gateway.core import Gateway

from ..waiting import until
from .process import gateway_process
from .stack import BRONZE, GOLD, LIMITED, Client, Reply, Seen, Upstream, documents, gateway, nobody, upstream

PAGES = ("/", "/docs", "/openapi.json", "/v1/services")
ITEM = {"type": "object", "properties": {"n": {"type": "integer"}}}


def described(*names: str, **more: Any) -> dict[str, Any]:
    """Return a logic server's OpenAPI document with these services."""

    def operation(name: str) -> dict[str, Any]:
        schema = {"$ref": f"#/components/schemas/{name}.Item"}
        return {
            "summary": f"Does {name}",
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": {"n": 7}}}},
            "responses": {"200": {"description": "it", "content": {"application/json": {"schema": schema}}}},
            **more,
        }

    return {
        "paths": {f"/v1/services/{name}": {"post": operation(name)} for name in names},
        "components": {"schemas": {f"{name}.Item": ITEM for name in names}},
    }


class Publisher:
    """The answers of an upstream: an OpenAPI document, a repository index and metadata. asked: the paths that were
    requested.
    """

    def __init__(self, services: Any = None, models: tuple[str, ...] = ()) -> None:
        self.services = services
        self.models = models
        self.asked: list[str] = []

    async def __call__(self, seen: Seen) -> bytes:
        path = seen.head.split(" ")[1]
        self.asked.append(path)
        body: Any = None
        if path == "/openapi.json":
            body = self.services
        elif path == "/v2/repository/index":
            body = [{"name": name, "version": "1", "state": "READY"} for name in self.models]
            body.append({"name": "loading", "version": "1", "state": "LOADING"})
        elif path.startswith("/v2/models/"):
            tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
            body = {"name": path.split("/")[3], "versions": ["1"], "inputs": [tensor], "outputs": [tensor]}
        if body is None:
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        it.answer = Publisher(described("digits", "secret"), ("digits", "mlp"))
        yield it


async def turn(gate: Gateway) -> None:
    """Read the descriptions of all pools once, whether they are due or not."""
    for facts in gate.api_docs.published.pools.values():
        facts.due_s = 0.0
    await gate.api_docs.published.ask(gate.snapshot, gate.pools)


async def get(client: Client, path: str, key: str | None = None, **more: Any) -> Reply:
    return await client.ask(path, key=key, method="GET", **more)


async def paths(client: Client, key: str | None) -> dict[str, Any]:
    reply = await get(client, "/openapi.json", key)
    assert reply.status == 200
    return dict(valid(reply.body)["paths"])


@cache
def valid(document: bytes) -> dict[str, Any]:
    """Return the document after checking that it is valid OpenAPI."""
    made: dict[str, Any] = json.loads(document)
    OpenAPIV31SpecValidator(made).validate()
    return made


async def test_a_caller_without_a_key_sees_what_is_the_same_at_every_gateway(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        before = await get(client, "/openapi.json")
        await turn(gate)
        after = await get(client, "/openapi.json")
        assert before.body == after.body == common_document()
        assert b"digits" not in after.body and b"secret" not in after.body and b"mlp" not in after.body
        common = valid(after.body)
        assert {"/v1/services/{service}", "/v2/models/{model}/infer", "/v1/services"} <= common["paths"].keys()
        reply = await get(client, "/v1/services")
        assert reply.status == 401 and reply.headers["www-authenticate"] == 'Bearer realm="oriel"'
        for path in ("/openapi.json", "/v1/services"):
            assert (await get(client, path, "nobody")).status == 401


async def test_a_key_shows_its_services_and_models_and_no_others(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        await turn(gate)
        gold, bronze = await paths(client, GOLD), await paths(client, BRONZE)
        assert {"/v1/services/digits", "/v1/services/secret", "/v2/models/digits/infer", "/v2/models/mlp/infer"} <= (
            gold.keys()
        )
        assert "/v1/services/digits" in bronze and "/v2/models/digits/infer" in bronze
        text = (await get(client, "/openapi.json", BRONZE)).body
        assert b"secret" not in text and b"mlp" not in text and b"loading" not in text
        listed = json.loads((await get(client, "/v1/services", BRONZE)).body)
        assert listed == {"services": [{"name": "digits", "path": "/v1/services/digits", "description": "Does digits"}]}
        assert json.loads((await get(client, "/v1/services", LIMITED)).body) == {"services": []}
        names = [row["name"] for row in json.loads((await get(client, "/v1/services", GOLD)).body)["services"]]
        assert names == ["digits", "secret"]
        # A service that may not be used gets the same answer as one that does not exist.
        hidden, missing = [await client.ask(f"/v1/services/{name}", key=BRONZE) for name in ("secret", "nowhere")]
        assert hidden.status == missing.status == 404
        assert json.loads(hidden.body)["error"]["reason"] == json.loads(missing.body)["error"]["reason"]


async def test_an_operation_is_its_services_own_with_the_gateways_refusals(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        await turn(gate)
        made = json.loads((await get(client, "/openapi.json", GOLD)).body)
        post = made["paths"]["/v1/services/digits"]["post"]
        body = post["requestBody"]["content"]["application/json"]
        assert body == {"schema": {"$ref": "#/components/schemas/digits.Item"}, "example": {"n": 7}}
        assert made["components"]["schemas"]["digits.Item"] == ITEM
        assert {"200", "401", "403", "404", "429", "503", "504"} <= post["responses"].keys()
        assert {"x-request-timeout-ms", "x-request-tier"} <= {each["name"] for each in post["parameters"]}
        assert "x-request-tier" in made["components"]["responses"]["403"]["description"]
        refusal = made["components"]["responses"]["429"]
        assert refusal["headers"].keys() == {"Retry-After", "RateLimit", "RateLimit-Policy"}
        assert refusal["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
        assert "rate_limited" in refusal["description"]
        assert made["components"]["schemas"]["Error"]["properties"]["error"]["required"] == [
            *("message", "type", "param", "code", "reason", "request_id")
        ]
        infer = made["paths"]["/v2/models/mlp/infer"]["post"]
        assert infer["requestBody"]["content"]["application/json"]["example"] == {
            "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.0, 0.0]}]
        }
        v2 = made["components"]["responses"]["v2-401"]["content"]["application/json"]["schema"]
        assert v2 == {"$ref": "#/components/schemas/ErrorV2"}
        assert made["servers"][0]["url"] == "/" and made["security"] == [{"bearer": []}, {"apiKey": []}]
        assert made["components"]["securitySchemes"].keys() == {"bearer", "apiKey"}


async def test_a_refusals_body_is_as_the_document_says(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        schemas = json.loads(common_document())["components"]["schemas"]
        refusal = json.loads((await get(client, "/v1/services")).body)["error"]
        assert refusal.keys() == set(schemas["Error"]["properties"]["error"]["required"])
        refusal = json.loads((await client.ask("/v2/models/digits/infer", key=None)).body)
        assert refusal.keys() == schemas["ErrorV2"]["properties"].keys() and isinstance(refusal["error"], str)


async def test_browsers_get_pages_and_programs_json(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        links = await get(client, "/", headers="accept: */*\r\n")
        assert links.headers["content-type"] == "application/json" and links.headers["vary"] == "accept"
        assert json.loads(links.body)["links"]["docs"] == "/docs"
        for path in ("/", "/docs"):
            reply = await get(client, path, headers="accept: text/html,*/*;q=0.8\r\n")
            assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
            assert reply.headers["x-content-type-options"] == "nosniff" and "x-request-id" in reply.headers
            assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src '")
            assert not re.search(rb"""(?:src|href|url|import|fetch)\s*[=(]\s*["'`]?(?:https?:)?//""", reply.body)
        assert b'href="/docs"' in (await get(client, "/", headers="accept: text/html\r\n")).body


@pytest.mark.parametrize("path", PAGES)
async def test_pages_are_only_read(up: Upstream, path: str) -> None:
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        reply = await client.ask(path, b"x", key=GOLD)
        assert reply.status == 405 and reply.headers["allow"] == "GET, HEAD"
        client.send(path, key=GOLD, method="HEAD")
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("http/1.1 200") and re.search(r"content-length: [1-9]", head)
        # the answer to HEAD had no body, which would come before this answer
        assert (await get(client, path, GOLD)).status == 200
        assert up.seen == []


async def test_what_pools_say_is_asked_beside_the_calls_and_kept(up: Upstream) -> None:
    publisher = Publisher(described("digits"), ("digits",))
    up.answer = publisher
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        await turn(gate)
        asked = list(publisher.asked)
        assert sorted(asked) == ["/openapi.json", "/v2/models/digits", "/v2/repository/index"]
        for _ in range(20):
            await get(client, "/openapi.json", GOLD)
            await get(client, "/v1/services", GOLD)
        assert publisher.asked == asked  # no client's request causes one to an upstream
        publisher.services = described("digits", "new")
        await turn(gate)
        assert "/v1/services/new" in await paths(client, GOLD)
        publisher.services = described("new")
        await turn(gate)
        assert "/v1/services/digits" not in await paths(client, GOLD)
        publisher.services = b"gone mad"
        await turn(gate)
        assert "/v1/services/new" in await paths(client, GOLD)
    with nobody() as port_of_nobody:
        async with gateway(documents([port_of_nobody])) as (port, gate), Client(port) as client:
            await turn(gate)
            assert not [path for path in await paths(client, GOLD) if path.startswith("/v1/services/")]


async def test_a_gateway_names_its_page_at_start_and_asks_its_pools_by_itself(
    up: Upstream, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with gateway_process(tmp_path, documents([up.port])) as process, Client(process.port) as client:

        async def described_by_its_pools() -> bool:
            return b"secret" in (await get(client, "/v1/services", GOLD)).body

        await until(described_by_its_pools)
        assert "/v2/models/mlp/infer" in await paths(client, GOLD)
    assert f"API documentation: http://127.0.0.1:{process.port}/docs" in capfd.readouterr().err


async def test_pages_of_named_origins_may_read_them(up: Upstream) -> None:
    extra = '[http]\ncors_origins = ["https://app.example"]'
    async with gateway(documents([up.port], extra=extra)) as (port, _), Client(port) as client:
        for path, key in (("/openapi.json", GOLD), ("/v1/services", None), ("/docs", None)):
            for origin, allowed in (("https://app.example", "https://app.example"), ("https://other.example", None)):
                reply = await get(client, path, key, headers=f"origin: {origin}\r\n")
                assert reply.headers.get("access-control-allow-origin") == allowed
        assert (
            "www-authenticate"
            in (await get(client, "/", headers="origin: https://app.example\r\n")).headers[
                "access-control-expose-headers"
            ]
        )


async def test_a_service_that_only_its_route_names_is_listed(up: Upstream) -> None:
    up.answer = Publisher()
    text = documents([up.port])["all.toml"].replace(b'service = "*"', b'service = "foreign"')
    async with gateway({"all.toml": text}) as (port, gate), Client(port) as client:
        await turn(gate)
        post = (await paths(client, GOLD))["/v1/services/foreign"]["post"]
        assert post["requestBody"]["content"].keys() == {"application/json", "text/plain", "application/octet-stream"}
        assert "/v1/services/foreign" not in await paths(client, BRONZE)


async def test_paths_of_the_openai_api_are_there_with_models_the_key_may_use(up: Upstream) -> None:
    document = described("digits")
    names = ["tiny", "digits", "../x", 3, "org/model:1"]
    document["paths"]["/v1/completions"] = {"post": {"x-oriel-models": names}}
    document["paths"]["/v1/embeddings"] = {"post": {"x-oriel-models": ["tiny"]}}
    document["paths"]["/v1/chat/completions"] = {"post": []}
    up.answer = Publisher(document)
    text = documents([up.port])["all.toml"].replace(
        b'services = ["digits"]', b'services = ["embeddings", "completions"]'
    )
    async with gateway({"all.toml": text}) as (port, gate), Client(port) as client:
        await turn(gate)
        found = await paths(client, BRONZE)  # of its models only digits
        body = found["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["properties"]["model"]["enum"] == ["digits"] and body["example"]["model"] == "digits"
        assert not {"/v1/embeddings", "/v1/chat/completions"} & found.keys()
        body = (await paths(client, GOLD))["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["properties"]["model"]["enum"] == ["tiny", "digits", "org/model:1"]
        up.answer = Publisher(described("digits"))  # no pool serves them any longer
        await turn(gate)
        assert "/v1/completions" not in await paths(client, GOLD)


async def test_new_documents_are_in_force_at_once(up: Upstream) -> None:
    from oriel_policies.documents import compile_documents

    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        await turn(gate)
        assert "/v1/services/secret" not in await paths(client, BRONZE)
        text = documents([up.port])["all.toml"].replace(b'services = ["digits"]', b'services = ["secret"]')
        gate.adopt(compile_documents({"all.toml": text}))
        found = await paths(client, BRONZE)
        assert "/v1/services/secret" in found and "/v1/services/digits" not in found


def read(document: Any) -> dict[str, Any]:
    services = reading.read_services(document if isinstance(document, bytes) else json.dumps(document).encode())
    return {name: json.loads(bytes(facts.operation)) for name, facts in services.services.items()}


def test_nothing_of_a_description_can_send_a_key_elsewhere() -> None:
    elsewhere = [{"url": "https://evil.example"}]
    bad: dict[str, Any] = {"servers": elsewhere, "security": [], "callbacks": {"x": {}}, "externalDocs": elsewhere[0]}
    (operation,) = read(described("digits", **bad)).values()
    assert operation.keys() == {"summary", "requestBody", "responses"}
    document = described("digits")
    document["components"]["schemas"]["digits.Item"] = {"properties": {"a": {"$ref": "https://evil.example/schema"}}}
    (facts,) = reading.read_services(json.dumps(document).encode()).services.values()
    assert json.loads(bytes(facts.components["digits.Item"])) == {"properties": {"a": {}}}


def test_components_of_two_services_never_meet() -> None:
    document = described("a", "b")
    for name in ("a", "b"):
        content = document["paths"][f"/v1/services/{name}"]["post"]["requestBody"]["content"]
        content["application/json"]["schema"] = {"$ref": "#/components/schemas/Shared"}
    document["components"]["schemas"]["Shared"] = {"properties": {"next": {"$ref": "#/components/schemas/Shared"}}}
    found = reading.read_services(json.dumps(document).encode()).services
    assert set(found["a"].components) == {"a.Shared", "a.Item"} and set(found["b"].components) == {"b.Shared", "b.Item"}


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"{}",
        b'{"paths": []}',
        b'{"paths": 1}',
        b"[" * 100_000,
        b'{"paths":{"/v1/services/x":{"post":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}}}",
    ],
)
def test_what_is_no_description_is_refused(document: bytes) -> None:
    try:
        assert read(document) == {}
    except ValueError as error:
        assert "OpenAPI" in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"requestBody": {"content": {"application/json\r\nx: y": {}}}},
        {"requestBody": {"content": []}},
        {"requestBody": ["x"]},
        {"responses": {}},
        {"parameters": [{"in": "path", "name": "x"}]},
        {"parameters": 3},
    ],
)
def test_a_service_that_is_described_wrongly_is_left_out(wrong: dict[str, Any]) -> None:
    document = described("good", "bad")
    document["paths"]["/v1/services/bad"]["post"] |= wrong
    assert read(document).keys() == {"good"}


def test_descriptions_are_bounded() -> None:
    assert len(read(described(*[f"s{number}" for number in range(reading.MAX_NAMES + 50)]))) == reading.MAX_NAMES
    deep: dict[str, Any] = {}
    for _ in range(reading.MAX_DEPTH + 2):
        deep = {"items": deep}
    document = described("good", "bad")
    document["components"]["schemas"]["bad.Item"] = deep
    assert read(document).keys() == {"good"}
    rows = [{"name": f"m{number}", "version": "1", "state": "READY"} for number in range(reading.MAX_NAMES + 50)]
    rows += [{"name": "../x", "version": "1", "state": "READY"}]
    assert len(reading.read_index(json.dumps(rows).encode())) == reading.MAX_NAMES
    with pytest.raises(ValueError, match="metadata"):
        reading.read_model(json.dumps({"name": "m", "inputs": [{"name": "x"}]}).encode(), "m")


async def test_a_large_answer_and_a_slow_one_are_given_up(up: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(b" " * (reading.MAX_ANSWER_BYTES + 1), ("digits",))
    up.answer = publisher
    async with gateway(documents([up.port])) as (_, gate):
        await turn(gate)
        assert gate.api_docs.published.pools["p"].services is None
        hang = asyncio.Event()

        async def never(seen: Seen) -> bytes:
            await hang.wait()
            return b""

        up.answer = never
        gate.api_docs.published.answer_s = 0.05
        await turn(gate)
        assert gate.api_docs.published.pools["p"].misses >= 1


async def test_documents_of_many_tenants_are_not_kept_without_bound(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        first = await get(client, "/openapi.json", GOLD)
        kept = gate.api_docs._kept_bytes
        assert kept == len(first.body)
        assert (await get(client, "/openapi.json", GOLD)).body == first.body and gate.api_docs._kept_bytes == kept
        gate.api_docs.max_kept_bytes = kept - 1
        for key in (BRONZE, GOLD, BRONZE):
            size = len((await get(client, "/openapi.json", key)).body)
            assert gate.api_docs._kept_bytes == size


async def test_a_document_of_many_pools_is_bounded(up: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_LISTED", 1)
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        await turn(gate)
        found = await paths(client, GOLD)
        assert len([path for path in found if path.startswith("/v1/services/")]) == 1
        assert {path for path in found if path.startswith("/v2/models/") and "{" not in path} == {
            "/v2/models/digits",
            "/v2/models/digits/infer",
        }


async def test_new_models_are_asked_for_in_turns(up: Upstream) -> None:
    publisher = Publisher(None, tuple(f"m{number:02}" for number in range(published.MAX_METADATA + 8)))
    up.answer = publisher
    async with gateway(documents([up.port])) as (_, gate):
        await turn(gate)
        models = gate.api_docs.published.pools["p"].models
        assert models is not None and len(models) == len(publisher.models)
        assert sum(each is not None for each in models.values()) == published.MAX_METADATA
        await turn(gate)
        models = gate.api_docs.published.pools["p"].models
        assert models is not None and None not in models.values()


def schemas_within(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from schemas_within(each)


async def test_the_document_has_what_generators_of_clients_need(up: Upstream) -> None:
    up.answer = Publisher(described("digits"), models=("mlp", "model", "any-model"))
    async with gateway(documents([up.port])) as (port, gate), Client(port) as client:
        await turn(gate)
        for made in (json.loads((await get(client, "/openapi.json", GOLD)).body), json.loads(common_document())):
            assert not [*OpenAPIV31SpecValidator(made).iter_errors()]
            ids = [operation["operationId"] for methods in made["paths"].values() for operation in methods.values()]
            assert len(ids) == len(set(ids)) >= 20
            lists = [each for each in schemas_within(made) if each.get("type") == "array"]
            assert lists and all("items" in each or "prefixItems" in each for each in lists)
            assert {"/v1/usage", "/v1/limits"} <= made["paths"].keys()
            infer = next(each["post"] for path, each in made["paths"].items() if path.endswith("/infer"))
            for content in (infer["requestBody"]["content"], infer["responses"]["200"]["content"]):
                assert content["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
            assert "inference-header-content-length" in {each["name"] for each in infer["parameters"]}
