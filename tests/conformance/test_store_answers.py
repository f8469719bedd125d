"""Answers of a store that must not cost a client anything: redirects, endless answers, listings that lack something.

The client runs against a stub that answers so, and against a sink that counts the requests it is led to. What it raises
is StoreFailed for policy documents: tests/gateway/test_stored_documents.py.
"""

import re
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from oriel_gateway.documents.source import store_location
from oriel_gateway.documents.stored import StoredDocuments, StoreFailed
from oriel_wire.objects import s3_http
from oriel_wire.objects.client import location_of
from oriel_wire.objects.errors import ObjectChanged, ObjectRefused, StoreUnavailable
from oriel_wire.objects.opening import open_client, open_writer

from .object_stores import client_of
from .store_answers import TOKEN, answering, pointed

MIB = 1024 * 1024
Look = Callable[[str], Awaitable[object]]


def said(status: str, body: str = "", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers, "", body]
    return "\r\n".join(lines).encode()


def empty(head: str) -> bytes:
    """Return an empty listing in the store's own format, which a client that follows a redirect would accept."""
    if "comp=list" in head:
        return said(
            "200 OK", '<?xml version="1.0"?><EnumerationResults><Blobs></Blobs><NextMarker/></EnumerationResults>'
        )
    return said("200 OK", "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")


async def models(url: str) -> object:
    client, _ = client_of(url)
    try:
        return await client.list("", limit=10)
    finally:
        await client.close()


async def model(url: str) -> object:
    client, _ = client_of(url)
    try:
        return await client.head("m/1/model.onnx")
    finally:
        await client.close()


async def part(url: str) -> object:
    client, _ = client_of(url)
    try:
        return [chunk async for chunk in client.read("m/1/model.onnx", start=0, end=4, etag="e")]
    finally:
        await client.close()


@pytest.mark.parametrize("look", [models, model, part], ids=lambda look: look.__name__)
@pytest.mark.parametrize("status", ["301 X", "302 X", "307 X", "308 X"])
async def test_s3_follows_no_redirect(look: Look, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(empty, host="127.0.0.9") as (elsewhere, reached):
        to = f"location: http://{elsewhere}/repository?list-type=2"
        async with answering(lambda head: said(status, "", to)) as (address, asked):
            with pytest.raises(StoreUnavailable, match=rf"\({status[:3]}\).*AWS_REGION.*endpoint"):
                await look(pointed(monkeypatch, "s3", address))
            assert len(asked) == 1 and TOKEN in asked[0]
    assert reached == []


WRONG_REGION = (
    "<Error><Code>AuthorizationHeaderMalformed</Code><Message>m</Message><Region>eu-north-1</Region></Error>",
    "<Error><Code>IllegalLocationConstraintException</Code><Message>m</Message></Error>",
)


@pytest.mark.parametrize(
    "answer",
    [
        said("400 Bad Request", WRONG_REGION[0]),
        said("400 Bad Request", WRONG_REGION[1]),
        said("301 Moved", ""),
        said("307 Moved", ""),
    ],
)
async def test_a_bucket_of_another_region_is_said_to_be_and_not_turned_to(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = answer.replace(b"connection: close", b"connection: close\r\nx-amz-bucket-region: eu-north-1")
    async with answering(lambda head: answer) as (address, asked):
        with pytest.raises(StoreUnavailable, match="lies in another region .*set AWS_REGION to eu-north-1"):
            await models(pointed(monkeypatch, "s3", address))
        assert len(asked) == 1


async def test_a_region_that_is_none_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = said("301 Moved", "", "x-amz-bucket-region: evil.example/S3CRET")
    async with answering(lambda head: answer) as (address, _):
        with pytest.raises(StoreUnavailable, match="redirects") as caught:
            await models(pointed(monkeypatch, "s3", address))
        assert "evil" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gs", "az"])
async def test_what_gs_and_az_show_where_they_are_sent_is_no_authorization(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stops obstore from following a redirect: docs/model-repository.md and docs/policies.md say so."""
    async with answering(empty, host="127.0.0.9") as (elsewhere, reached):
        to = (
            f"location: http://{elsewhere}/x?restype=container&comp=list"
            if kind == "az"
            else f"location: http://{elsewhere}/x"
        )
        async with answering(lambda head: said("307 X", "", to)) as (address, asked):
            assert not await models(pointed(monkeypatch, kind, address))
    assert reached and not any("authorization" in head.lower() for head in reached)
    assert kind != "az" or "authorization: SharedKey" in asked[0]


BEGUN = (
    "HTTP/1.1 {}\r\nconnection: close\r\n\r\n<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
)


@pytest.mark.parametrize(
    ("look", "status"),
    [
        *((models, status) for status in ("200 OK", "403 Forbidden", "503 Slow Down")),
        # How far an answer of 200 is read: tests/conformance/test_object_clients.py
        *((part, status) for status in ("403 Forbidden", "503 Slow Down")),
    ],
)
async def test_an_answer_without_end_is_left_before_it_costs_memory(
    look: Look, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_http, "MAX_ANSWER_BYTES", MIB)
    async with answering(lambda head: BEGUN.format(status).encode(), endless=b" " * 65536) as (address, _):
        url = pointed(monkeypatch, "s3", address)
        with pytest.raises(StoreUnavailable, match=f"more than {MIB} bytes"):
            await look(url)  # the first call allocates what the client itself needs
        tracemalloc.start()
        try:
            with pytest.raises(StoreUnavailable, match=f"more than {MIB} bytes"):
                await look(url)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 64 * MIB


async def test_a_head_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"".join(b"x-%d: %s\r\n" % (place, b"y" * 8000) for place in range(8))
    async with answering(lambda head: b"HTTP/1.1 200 OK\r\n", endless=lines) as (address, _):
        with pytest.raises(StoreUnavailable):
            await models(pointed(monkeypatch, "s3", address))


GOOD = "<Key>p/a.toml</Key><Size>4</Size><ETag>&quot;e&quot;</ETag>"


@pytest.mark.parametrize(
    "entry",
    [
        GOOD.replace("<Size>4</Size>", ""),
        GOOD.replace("<Size>4</Size>", "<Size>-4</Size>"),
        GOOD.replace("<Size>4</Size>", "<Size>four</Size>"),
        GOOD.replace("<Size>4</Size>", "<Size></Size>"),
        GOOD.replace("<Key>p/a.toml</Key>", ""),
        GOOD.replace("<Key>p/a.toml</Key>", "<Key></Key>"),
        GOOD.replace("<ETag>&quot;e&quot;</ETag>", ""),
        "",
    ],
    ids=["no-size", "negative", "no-number", "empty-size", "no-key", "empty-key", "no-etag", "nothing"],
)
async def test_an_odd_listing_is_a_failure_of_the_store(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents>{}</Contents></ListBucketResult>"
    async with answering(lambda head: said("200 OK", body.format(entry))) as (address, _):
        with pytest.raises(StoreUnavailable):
            await models(pointed(monkeypatch, "s3", address))
    async with answering(lambda head: said("200 OK", body.format(GOOD))) as (address, _):
        assert await models(pointed(monkeypatch, "s3", address))


OF_GOOGLE = (
    "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>p/a.toml</Key><Size>4</Size><ETag>e</ETag>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
)


@pytest.mark.parametrize("tag", ["Key", "Size", "ETag"])
async def test_an_odd_listing_of_google_is_one_too(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = re.sub(f"<{tag}>.*?</{tag}>", "", OF_GOOGLE)
    async with answering(lambda head: said("200 OK", OF_GOOGLE if len(asked) == 1 else odd)) as (address, asked):
        url = pointed(monkeypatch, "gs", address)
        assert await models(url)
        with pytest.raises(StoreUnavailable):
            await models(url)


@pytest.mark.parametrize("headers", ['etag: "e"', "content-length: 4"])
async def test_a_head_without_size_or_etag_is_a_failure_of_the_store(
    headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = f"HTTP/1.1 200 OK\r\nconnection: close\r\n{headers}\r\n\r\n".encode()
    async with answering(lambda head: answer) as (address, _):
        with pytest.raises(StoreUnavailable, match="without its size or ETag"):
            await model(pointed(monkeypatch, "s3", address))


@pytest.mark.parametrize("kind", ["gs", "az"])
async def test_a_listing_of_gs_and_az_without_end_is_given_up_in_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n<ListBucketResult>"
    async with answering(lambda head: begun, endless=b" ") as (address, _):
        location = store_location(f"{pointed(monkeypatch, kind, address)}/p")
        documents = StoredDocuments(location, open_client(location), listing_s=0.3)
        with pytest.raises(StoreFailed, match="had not ended after 0.3 s"):
            await documents.listing()
        await documents.close()


def error(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>"


CONDITIONS = {"s3": "if-none-match: *", "gs": "x-goog-if-generation-match: 0", "az": "if-none-match: *"}
STORED = 'etag: "e"', "x-goog-generation: 1", "last-modified: Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        ("s3", said("200 OK", "", *STORED), True),
        ("s3", said("412 X", error("PreconditionFailed")), False),
        ("s3", said("409 X", error("ConditionalRequestConflict")), ObjectChanged),
        ("s3", said("501 X", error("NotImplemented")), StoreUnavailable),
        ("s3", said("403 X", error("AccessDenied")), ObjectRefused),
        ("gs", said("200 OK", "", *STORED), True),
        ("gs", said("412 X", error("PreconditionFailed")), False),
        ("gs", said("429 X", error("SlowDown")), StoreUnavailable),
        ("gs", said("403 X", error("AccessDenied")), ObjectRefused),
        ("az", said("201 Created", "", *STORED), True),
        ("az", said("409 X", error("BlobAlreadyExists"), "x-ms-error-code: BlobAlreadyExists"), False),
        ("az", said("503 X", error("ServerBusy")), StoreUnavailable),
        ("az", said("403 X", error("AuthorizationPermissionMismatch")), ObjectRefused),
    ],
    ids=lambda value: value.decode().split(" ", 2)[1] if isinstance(value, bytes) else None,
)
async def test_a_conditional_put_says_who_stored_the_object(
    kind: str, answer: bytes, expected: bool | type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(lambda head: answer) as (address, asked):
        writer = open_writer(location_of(pointed(monkeypatch, kind, address)))
        if isinstance(expected, bool):
            assert await writer.put("engines/f", b"data") is expected
        else:
            with pytest.raises(expected):
                await writer.put("engines/f", b"data")
        await writer.close()
    assert len(asked) == 1 and CONDITIONS[kind] in asked[0].lower(), asked
