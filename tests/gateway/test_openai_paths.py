"""The paths of the OpenAI API at the gateway: services are called by their own names, and learn which models the caller
may use.
"""

import json
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from oriel_gateway.identity.named_models import JUDGED_BYTES
from oriel_policies.documents import compile_documents

from .stack import BRONZE, GOLD, LIMITED, Client, Reply, Seen, Upstream, digest, documents, gateway, upstream

OPENAI = [
    ("POST", "/v1/embeddings", "embeddings"),
    ("POST", "/v1/completions", "completions"),
    ("POST", "/v1/chat/completions", "chat.completions"),
    ("POST", "/v1/responses", "responses"),
    ("POST", "/v1/moderations", "moderations"),
    ("POST", "/v1/images/generations", "images.generations"),
    ("POST", "/v1/audio/speech", "audio.speech"),
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/org/name-1:2@b", "models"),
]


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def one(extra: str) -> str:
    """Documents of a tenant with a list of models."""
    key = f'keys = [{{ sha256 = "{digest("one")}" }}]'
    return f'[tenants.one]\ntier = "gold"\nmodels = ["small-*", "org/name-1:2@b"]\n{key}\n{extra}\n'


async def call(client: Client, method: str, path: str, body: bytes = b"", *, key: str = "one", more: str = "") -> Reply:
    headers = f"content-type: application/json\r\n{more}" if body else more
    return await client.ask(path, body, method=method, key=key, headers=headers)


async def listed(seen: Seen) -> bytes:
    """Return the answer of another project's server at `/v1/models`."""
    entries: list[dict[str, Any]] = [
        {"id": name, "object": "model"} for name in ("small-1b", "big-70b", "org/name-1:2@b")
    ]
    entries[0] |= {"root": "big-70b", "parent": None, "max_model_len": 4096, "extra": {"a": [1]}}
    entries += [{"id": f"big-{number}", "object": "model"} for number in range(5000)]  # more than one read returns
    path = seen.head.split(" ")[1]
    answer = {"object": "list", "data": entries, "first_id": "small-1b", "models": [{"name": "big-70b"}]}
    data = json.dumps(entries[2] if path.startswith("/v1/models/") else answer).encode()
    if seen.head.startswith("HEAD"):
        data = b""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\netag: x\r\ncontent-length: %d\r\n\r\n%b" % (
        len(data),
        data,
    )


async def test_each_path_is_the_service_of_its_name(up: Upstream) -> None:
    for method, path, name in OPENAI:
        up.answer = listed if method == "GET" else up.ok
        body = b'{"model": "small-1b"}' if method == "POST" else b""
        extra = one(f'services = ["{name}"]')
        async with gateway(documents([up.port], extra=extra)) as (port, _), Client(port) as client:
            assert (await call(client, method, path, body)).status == 200
            assert up.seen[-1].head.split(" ")[:2] == [method, path]
            assert up.seen[-1].get("x-oriel-models") == "small-*,org/name-1:2@b"
            assert up.seen[-1].get("x-oriel-services") == name
            assert (await call(client, method, path, body, key=GOLD)).status == 200
            assert up.seen[-1].get("x-oriel-models") is None, "all models"
            assert up.seen[-1].get("x-oriel-services") is None, "all services"
            for other, elsewhere, theirs in OPENAI:
                if theirs != name:
                    assert (await call(client, other, elsewhere, body)).status == 404
            assert (await call(client, method, path, body, key=BRONZE)).status == 404
            assert (await call(client, "DELETE", path, key=GOLD)).status == 405


async def test_a_tenant_without_models_is_told_apart_from_one_with_all(up: Upstream) -> None:
    extra = f"""
[tenants.none]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{digest("none")}" }}]
"""
    async with gateway(documents([up.port], extra=extra)) as (port, _), Client(port) as client:
        assert (await client.ask("/v1/services/own", key="none", headers="x-oriel-models: *\r\n")).status == 200
        assert up.seen[-1].get("x-oriel-models") == "!"
        assert up.seen[-1].get("x-oriel-services") is None
        assert (await call(client, "POST", "/v1/embeddings", b'{"model": "small"}', key="none")).status == 404
        assert (await client.ask("/v1/embeddings", key=LIMITED)).status == 404, "no services at all"
        assert len(up.seen) == 1


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
        "/v1/files",
        "/v1/batches",
        "/v1/responses/resp_1",
        "/v1/fine_tuning/jobs",
        "/v1/assistants",
        "/v1/realtime",
    ],
)
async def test_no_other_spelling_passes(up: Upstream, path: str) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for method in ("GET", "POST"):
            assert (await client.ask(path, b"", method=method, key=GOLD)).status in (400, 404)
        assert not up.seen


async def test_the_model_that_a_body_names_is_judged(up: Upstream) -> None:
    headers = "content-type: application/json; charset=utf-8\r\n"
    good, bad = b'{"model": "small-1b", "a": 1}', b'{"model": "big-70b"}'
    async with gateway(documents([up.port], extra=one('services = ["*"]'))) as (port, core), Client(port) as client:
        assert (await client.ask("/v1/chat/completions", good, key="one", headers=headers)).status == 200
        assert up.seen[0].body == good
        reply = await client.ask("/v1/chat/completions", bad, key="one", headers=headers)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["reason"] == "not_found" and len(up.seen) == 1 and core.pools["p"].held_bytes == 0
        assert (await client.ask("/v1/chat/completions", bad, key=GOLD)).status == 200, "may use all models"


@pytest.mark.parametrize(
    ("headers", "query", "status"),
    [
        ("content-type: application/json\r\n", "?api-version=1", 200),
        ("content-type: application/json\r\ncontent-encoding: identity\r\n", "", 200),
        ("content-type: application/json\r\n", "?model=big-70b", 400),
        ("content-type: application/json\r\n", "?%6dodel=big-70b", 400),
        ("content-type: application/json\r\nx-gateway-model-name: big-70b\r\n", "", 400),
        ("content-type: application/json\r\ncontent-encoding: gzip\r\n", "", 415),
        ("content-type: application/json\r\ncontent-type: text/plain\r\n", "", 415),
        ("content-type: application/json\r\nconnection: content-type\r\n", "", 415),
        ("content-type: application/json; charset=utf-16\r\n", "", 415),
        ("content-type: application/x-www-form-urlencoded\r\n", "", 415),
        ("content-type: multipart/form-data; boundary=b\r\n", "", 415),
        ("", "", 415),
    ],
)
async def test_a_head_that_changes_how_a_body_is_read_is_refused(
    up: Upstream, headers: str, query: str, status: int
) -> None:
    async with gateway(documents([up.port], extra=one('services = ["*"]'))) as (port, _), Client(port) as client:
        body = b'{"model": "small-1b", "x": "&model=big-70b&"}'
        for _ in range(3):  # the third head is recognised by its bytes
            reply = await client.ask(f"/v1/completions{query}", body, key="one", headers=headers)
            assert reply.status == status and len(up.seen) == (len(up.seen) if status == 200 else 0)


async def test_a_body_past_the_bounds_is_refused_before_it_is_read(up: Upstream) -> None:
    files = documents([up.port], extra=one('services = ["*"]'), pool='probe = ""')
    files["all.toml"] = files["all.toml"].replace(b"max_body_bytes = 1000000", b"max_body_bytes = 10000000")
    async with gateway(files) as (port, _):
        head = "content-type: application/json\r\n"
        async with Client(port) as client:
            client.send("/v1/completions", key="one", headers=head)
            assert (await client.reply()).status == 400
            line = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\n{head}"
            client.writer.write(f"{line}content-length: {JUDGED_BYTES + 1}\r\n\r\n".encode())
            reply = await client.reply()
            assert reply.status == 413 and b"read for its model" in reply.body
        async with Client(port) as client:
            client.writer.write(f"{line}transfer-encoding: chunked\r\n\r\n".encode())
            client.writer.write(b"%x\r\n" % (JUDGED_BYTES + 1) + b" " * (JUDGED_BYTES + 1) + b"\r\n0\r\n\r\n")
            assert (await client.reply()).status == 413
        assert not up.seen


async def test_the_model_that_a_form_names_is_judged(up: Upstream) -> None:
    headers = "content-type: multipart/form-data; boundary=b\r\n"
    async with gateway(documents([up.port], extra=one('services = ["*"]'))) as (port, _), Client(port) as client:
        for path in ("/v1/audio/transcriptions", "/v1/images/edits"):
            for model, status in (("small-1b", 200), ("big-70b", 404)):
                body = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--b--\r\n'
                assert (await client.ask(path, body.encode(), key="one", headers=headers)).status == status
        assert len(up.seen) == 2
        kind = "content-type: application/json\r\n"
        assert (await client.ask(path, b'{"model": "small-1b"}', key="one", headers=kind)).status == 415


async def test_the_list_of_a_server_of_others_is_cut_to_the_tenants_models(up: Upstream) -> None:
    up.answer = listed
    async with (
        gateway(documents([up.port], extra=one('services = ["models"]'))) as (port, core),
        Client(port) as client,
    ):
        for _ in range(3):
            more = "accept-encoding: gzip\r\nrange: bytes=0-5\r\nif-none-match: x\r\n"
            reply = await client.ask("/v1/models", method="GET", key="one", headers=more)
            small = {"id": "small-1b", "object": "model", "parent": None, "max_model_len": 4096, "extra": {"a": [1]}}
            del small["parent"]
            theirs = {"object": "list", "data": [small, {"id": "org/name-1:2@b", "object": "model"}]}
            assert reply.status == 200 and json.loads(reply.body) == theirs and "etag" not in reply.headers
            seen = up.seen[-1]
            assert (seen.get("accept-encoding"), seen.get("range"), seen.get("if-none-match")) == (None, None, None)
        assert b"big-70b" in (await client.ask("/v1/models", method="GET", key=GOLD)).body
        client.send("/v1/models", method="HEAD", key="one")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"content-length" not in head, (
            "the length would include models that the tenant may not use"
        )
    async with (
        gateway(documents([up.port], extra=one('services = ["models"]'))) as (port, core),
        Client(port) as client,
    ):
        found = await client.ask("/v1/models/org/name-1:2@b", method="GET", key="one")
        assert json.loads(found.body) == {"id": "org/name-1:2@b", "object": "model"}
        asked = len(up.seen)
        there, nowhere = [
            (await client.ask(f"/v1/models/{name}", method="GET", key="one", headers="x-request-id: r\r\n"))
            for name in ("big-70b", "big-99b")
        ]
        assert there.status == nowhere.status == 404 and len(up.seen) == asked
        assert there.body.replace(b"big-70b", b"X") == nowhere.body.replace(b"big-99b", b"X")
        # The tenant's name for a model stands for another model.
        assert (await client.ask("/v1/models/small-9", method="GET", key="one")).status == 200
        assert (await client.ask("/v1/models?limit=1%20", method="GET", key="one", body=b"x")).status == 400


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n["big-70b", 1]',
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n" + b'{"data": 1',
        b"HTTP/1.1 206 Partial Content\r\ncontent-length: 7\r\n\r\nbig-70b",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n100001\r\n" + b" " * 0x100001 + b"\r\n0\r\n\r\n",
    ],
)
async def test_what_cannot_be_filtered_is_not_passed_on(up: Upstream, answer: bytes) -> None:
    async def said(seen: Seen) -> bytes:
        return answer

    up.answer = said
    async with (
        gateway(documents([up.port], extra=one('services = ["models"]'))) as (port, core),
        Client(port) as client,
    ):
        for path in ("/v1/models", "/v1/models/small-1b"):
            reply = await client.ask(path, method="GET", key="one")
            assert reply.status == 502 and b"of models" in reply.body and b"big-70b" not in reply.body
        gate = core.pools["p"]
        assert gate.admission.inflight == 0 and all(each.outstanding == 0 for each in gate.endpoints)


async def test_kept_answers_and_lists_do_not_pass_a_list_of_models(up: Upstream) -> None:
    """An answer that was kept while a model was allowed is not for those who may not use it, even within the same
    tenant.
    """
    files = documents([up.port], extra=one('services = ["*"]'))
    kept = b'service = "*"\npool = "p"\ndeterministic = true\ncache_s = 60.0\ncache_shared = true'
    files["all.toml"] = files["all.toml"].replace(b'service = "*"\npool = "p"', kept)
    async with gateway(files) as (port, core), Client(port) as client:
        up.answer = listed
        assert b"big-70b" in (await call(client, "GET", "/v1/models", key=GOLD)).body
        assert b"big-70b" not in (await call(client, "GET", "/v1/models")).body
        assert b"big-70b" in (await call(client, "GET", "/v1/models", key=GOLD)).body
        up.answer = up.ok
        body = b'{"model": "big-70b"}'
        assert (await call(client, "POST", "/v1/completions", body, key=GOLD)).status == 200
        assert (await call(client, "POST", "/v1/completions", body)).status == 404
        assert (await call(client, "POST", "/v1/services/own", body)).status == 200
        narrower = files["all.toml"].replace(b'models = ["small-*", "org/name-1:2@b"]', b'models = ["small-*"]')
        core.adopt(compile_documents({"all.toml": narrower}))
        before = len(up.seen)
        assert (await call(client, "POST", "/v1/services/own", body)).headers["x-oriel-cache"] == "miss"
        assert len(up.seen) == before + 1


class Foreign:
    """A server of another project: it serves any model that a body names, and lists all of its models."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def __call__(self, seen: Seen) -> bytes:
        path = seen.head.split(" ")[1]
        if path.startswith("/v1/models"):
            return await listed(seen)
        if (seen.get("content-type") or "").startswith("multipart/"):
            self.ran.append(re.findall(rb'name="model"\r\n\r\n(.*)\r\n', seen.body)[0].decode())
            answer: dict[str, object] = {"text": "hello"}
        else:
            asked = json.loads(seen.body)
            self.ran.append(asked["model"])
            if asked.get("stream"):
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
                data = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(chunk).encode()
                return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (
                    len(data),
                    data,
                )
            answer = {"id": "x", "object": "list", "created": 1, "model": asked["model"], "choices": [], "output": []}
            answer["data"] = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
            answer["results"] = []
        data = json.dumps(answer).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


async def test_the_openai_client_in_front_of_a_server_of_others(up: Upstream) -> None:
    up.answer = foreign = Foreign()
    said: list[Any] = [{"role": "user", "content": "?"}]
    async with gateway(documents([up.port], extra=one('services = ["*"]'))) as (port, _), AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
            )
            for key in ("one", GOLD)
        ]

        def calls(client: openai.AsyncOpenAI, model: str) -> list[Awaitable[Any]]:
            return [
                client.chat.completions.create(model=model, messages=said),
                client.chat.completions.create(model=model, messages=said, stream=True),
                client.completions.create(model=model, prompt="a"),
                client.embeddings.create(model=model, input=["a", "b"]),
                client.responses.create(model=model, input="a"),
                client.moderations.create(model=model, input="a"),
                client.images.generate(model=model, prompt="a"),
                client.images.edit(model=model, prompt="a", image=("a.png", b"\x89PNG\r\n--x")),
                client.audio.transcriptions.create(model=model, file=("a.wav", b"RIFF\r\n\r\n")),
                client.audio.speech.create(model=model, input="a", voice="x"),
                client.models.retrieve(model),
            ]

        limited, everything = clients
        for client, model in ((limited, "small-1b"), (everything, "big-70b")):
            for call in calls(client, model):
                assert await call is not None
        assert foreign.ran == ["small-1b"] * 10 + ["big-70b"] * 10
        before = len(up.seen)
        for call in calls(limited, "big-70b"):
            with pytest.raises(openai.NotFoundError) as error:
                await call
            assert error.value.code == "model_not_found" and "'big-70b'" in error.value.message
        assert len(up.seen) == before, "no server has received the name"
        assert [each.id async for each in await limited.models.list()] == ["small-1b", "org/name-1:2@b"]
        assert "big-70b" in [each.id async for each in await everything.models.list()]
        with pytest.raises(openai.NotFoundError):
            await everything.batches.create(
                completion_window="24h", endpoint="/v1/chat/completions", input_file_id="file-of-others"
            )
        with pytest.raises(openai.NotFoundError):
            await everything.files.create(file=("a.jsonl", b'{"body": {"model": "big-70b"}}\n'), purpose="batch")
