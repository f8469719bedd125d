"""One refused object is not taken for a store that refuses everything, and the error names the missing permission."""

import pytest

from oriel_wire.objects.errors import ObjectRefused, ObjectStoreError, StoreUnavailable

from .object_stores import client_of
from .store_answers import answering, pointed

KINDS = pytest.mark.parametrize("kind", ["s3", "gs", "az"])


async def failure_of(url: str, operation: str) -> ObjectStoreError:
    client, prefix = client_of(url)
    try:
        with pytest.raises(ObjectStoreError) as caught:
            if operation == "list":
                await client.list(prefix, limit=10)
            elif operation == "head":
                await client.head("p/m/1/model.onnx")
            else:
                async for _ in client.read("p/m/1/model.onnx", start=0, end=4, etag="e"):
                    pass
        return caught.value
    finally:
        await client.close()


def refusing(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()


@KINDS
@pytest.mark.parametrize("operation", ["head", "read"])
@pytest.mark.parametrize("status", ["403 Forbidden", "400 Bad Request"])
async def test_one_object_that_is_refused_is_not_an_outage(
    kind: str, operation: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(lambda head: refusing(status)) as (address, _):
        failure = await failure_of(pointed(monkeypatch, kind, address), operation)
    assert isinstance(failure, ObjectRefused) and "p/m/1/model.onnx" in str(failure) and status[:3] in str(failure)


@KINDS
@pytest.mark.parametrize("operation", ["head", "read"])
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Slow Down", "401 Unauthorized"])
async def test_what_concerns_the_whole_store_is_one(
    kind: str, operation: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(lambda head: refusing(status)) as (address, _):
        assert isinstance(await failure_of(pointed(monkeypatch, kind, address), operation), StoreUnavailable)


async def test_s3_names_the_right_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(lambda head: refusing("403 Forbidden")) as (address, _):
        url = pointed(monkeypatch, "s3", address)
        listing, reading = await failure_of(url, "list"), await failure_of(url, "head")
    assert isinstance(listing, StoreUnavailable) and str(listing).endswith("(403): it needs s3:ListBucket")
    assert "(403): it needs s3:GetObject of it, and kms:Decrypt of its key" in str(reading)
