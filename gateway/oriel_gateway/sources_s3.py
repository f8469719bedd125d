"""Policy documents in S3 and whatever speaks its protocol, through aiobotocore: `sources_object` for s3://.

Credentials, region and endpoint are found as AWS's own tools find them: AWS_*, ~/.aws, web identity, container and
instance roles. A store at an address of its own (AWS_ENDPOINT_URL) is spoken to with the bucket in the path. Each
request is sent once, and no redirect is followed: when the next one may be is the mirror's to say.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from oriel_gateway.mirror import MAX_OBJECTS, Listed, Moved, StoreFailed, document_name, to_disk
from oriel_gateway.s3_http import OddAnswer, elsewhere, s3_client
from oriel_gateway.sources import StoreUrl

__all__ = ["S3Documents"]

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0  # without a byte
KEEPALIVE_S = 4.0  # shorter than any store's, and than the pause between looks
MAX_CONNECTIONS = 4
CLOSE_S = 5.0
CHUNK_BYTES = 1024 * 1024
# How S3 says without a redirect that a request was meant for another region.
ELSEWHERE = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


class S3Documents:
    """See the module's head. Connections belong to the loop of the first call."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._prefix = f"{url.prefix}/" if url.prefix else ""
        self._stack = AsyncExitStack()
        self._client: Any = None

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._stack.aclose()
        self._client = None

    async def listing(self) -> dict[str, Listed]:
        """File name -> what lies there, of every document directly in the folder. Raises StoreFailed."""
        # One page holds all that may be there, and shows whether there is more.
        page = await self._send("be listed", "list_objects_v2", Prefix=self._prefix, MaxKeys=MAX_OBJECTS)
        objects = page.get("Contents", ())
        if "IsTruncated" not in page:  # an empty 200, say of a proxy, must not look like an empty bucket
            raise StoreFailed(f"{self._url} cannot be listed: its answer is not one of an object store")
        if page["IsTruncated"] or len(objects) > MAX_OBJECTS:
            raise StoreFailed(f"{self._url} holds more than {MAX_OBJECTS} objects: give policies a prefix alone")
        found: dict[str, Listed] = {}
        for each in objects:
            key, size, etag = each.get("Key", ""), each.get("Size", -1), each.get("ETag", "").strip('"')
            if not key or size < 0 or not etag:
                raise StoreFailed(f"{self._url} cannot be listed: an object there comes without its key, size or ETag")
            if name := document_name(self._url, key.removeprefix(self._prefix)):
                found[name] = Listed(etag=etag, size=size)
        return found

    async def fetch(self, name: str, listed: Listed, into: Path) -> None:
        """Write the document to the new file `into`. Raises StoreFailed; Moved if another one lies there by now."""
        condition = f'"{listed.etag}"'
        what = f"give {name}"
        found = await self._send(what, "get_object", Key=f"{self._prefix}{name}", IfMatch=condition)
        body: aiohttp.ClientResponse = found["Body"].raw_stream
        try:
            if found.get("ETag", "").strip('"') != listed.etag or found.get("ContentLength") != listed.size:
                raise Moved(name)
            left = listed.size
            with into.open("xb") as file:
                while left > 0 and (chunk := await body.content.read(min(left, CHUNK_BYTES))):
                    left -= len(chunk)
                    await asyncio.to_thread(file.write, chunk)
                if left:
                    raise StoreFailed(f"{self._url}: {name} came with another number of bytes than it is said to have")
                await asyncio.to_thread(to_disk, file)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StoreFailed(f"{self._url} cannot {what}: the connection broke") from error
        finally:
            # Back to the pool after the last byte; without it, this ends the connection.
            body.close() if not body.content.is_eof() else body.release()

    async def _send(self, what: str, operation: str, **words: Any) -> Mapping[str, Any]:
        try:
            if self._client is None:
                made = s3_client(
                    endpoint=os.environ.get("AWS_ENDPOINT", ""),
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    read_timeout_s=READ_TIMEOUT_S,
                    keepalive_s=KEEPALIVE_S,
                    connections=MAX_CONNECTIONS,
                )
                self._client = await self._stack.enter_async_context(made)
            said: Mapping[str, Any] = await getattr(self._client, operation)(Bucket=self._url.bucket, **words)
            return said
        except OddAnswer as error:
            raise StoreFailed(f"{self._url} {error}") from error
        except ClientError as error:
            if "Key" in words and _status(error) in (404, 412) and _code(error) != "NoSuchBucket":
                raise Moved(words["Key"]) from error
            raise StoreFailed(f"{self._url} cannot {what}: {_refusal(error)}") from error
        except (BotoCoreError, aiohttp.ClientError, OSError, KeyError, ValueError) as error:
            # Texts of these may quote a request with its signature.
            raise StoreFailed(f"{self._url} cannot {what}: {_why(error)}") from error


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _refusal(error: ClientError) -> str:
    status = _status(error)
    if _code(error) in ELSEWHERE:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region", "") or error.response["Error"].get("Region", "")
        return f"it {elsewhere(status, region)}"
    if status in (401, 403):
        return f"this gateway may not ({status}): its identity needs the right to list and to read objects there"
    if status == 404:
        return "there is no such bucket or container (404)"
    return f"it answered {status}"


def _why(error: Exception) -> str:
    if isinstance(error, NoCredentialsError | CredentialRetrievalError):
        return "no credentials were found in the environment of this gateway, or they were refused"
    if isinstance(error, ReadTimeoutError | TimeoutError):
        return "it did not answer in time"
    if isinstance(
        error, EndpointConnectionError | ConnectTimeoutError | ConnectionClosedError | aiohttp.ClientError | OSError
    ):
        return "no connection, or it broke"
    return "its answer is not one of an object store, or the credentials or the endpoint in the environment are none"
