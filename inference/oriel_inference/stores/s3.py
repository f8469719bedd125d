"""S3 and whatever speaks its protocol, through aiobotocore.

Credentials, region and endpoint are found as AWS's own tools find them: environment, files, web identity, container and
instance roles. A store at an address of its own (URL or AWS_ENDPOINT_URL) is spoken to with the bucket in the path:
few of them have a DNS name per bucket.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from oriel_inference.errors import LoadFailed, ObjectChanged, ObjectRefused, StoreUnavailable, TooManyObjects
from oriel_inference.stores.objects import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Location, Stored
from oriel_inference.stores.s3_http import OddAnswer, elsewhere, s3_client

__all__ = ["S3Client"]

PAGE_OBJECTS = 1000  # the protocol's own bound
MAX_CONNECTIONS = 32
CLOSE_S = 5.0
# Shorter than any store's: a connection that the store has just closed would look like an outage.
KEEPALIVE_S = 4.0

# The first that is there counts. An MD5 is the last resort, see `_checksum`.
_CHECKSUMS = ("SHA256", "SHA1", "CRC64NVME", "CRC32C", "CRC32")
# How S3 says without a redirect that a request was meant for another region.
ELSEWHERE = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_MD5 = re.compile(r"[0-9a-f]{32}")


class S3Client:
    """One bucket. Connections are made by the loop of the first call and belong to it."""

    def __init__(self, location: Location) -> None:
        self._bucket = location.bucket
        self._endpoint = location.endpoint
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._opening = asyncio.Lock()

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        found: list[Stored] = []
        more: dict[str, str] = {}
        while True:
            page = await self._send("list_objects_v2", Prefix=prefix, MaxKeys=min(PAGE_OBJECTS, limit + 1), **more)
            if "IsTruncated" not in page:  # an empty 200, say of a proxy, must not look like an empty bucket
                raise StoreUnavailable(f"s3://{self._bucket} does not answer with a listing")
            found.extend(map(self._listed, page.get("Contents", ())))
            if len(found) > limit:
                raise TooManyObjects(f"below s3://{self._bucket}/{prefix} are more than {limit} objects")
            if not page.get("IsTruncated"):
                return sorted(found, key=lambda each: each.key)
            token = page.get("NextContinuationToken", "")
            if not token or more.get("ContinuationToken") == token:
                raise StoreUnavailable(f"s3://{self._bucket} says there is more and not where")
            more = {"ContinuationToken": token}

    async def head(self, key: str) -> Stored:
        found = await self._send("head_object", Key=key, ChecksumMode="ENABLED")
        size, etag = found.get("ContentLength", -1), found.get("ETag", "").strip('"')
        if size < 0 or not etag:
            raise StoreUnavailable(f"s3://{self._bucket} tells of {key} without its size or ETag")
        return Stored(key=key, size=size, etag=etag, checksum=_checksum(found, etag))

    async def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        found = await self._send("get_object", Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=f'"{etag}"')
        body: aiohttp.ClientResponse = found["Body"].raw_stream
        try:
            if found.get("ETag", "").strip('"') != etag:
                raise ObjectChanged(f"{key} was written anew")
            said = found.get("ContentRange", "")
            if said.partition("/")[0] != f"bytes {start}-{end - 1}" and (said or start or body.content_length != end):
                raise StoreUnavailable(f"s3://{self._bucket} does not answer with the part that was asked for")
            left = end - start
            try:
                while left > 0 and (chunk := await body.content.readany()):
                    left -= len(chunk)
                    if left < 0:
                        raise StoreUnavailable(f"s3://{self._bucket} sends more than the part that was asked for")
                    yield chunk
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise StoreUnavailable(f"s3://{self._bucket} broke off: {type(error).__name__}") from error
            if left:
                raise StoreUnavailable(f"s3://{self._bucket} broke off, {left} bytes are missing")
        finally:
            # Back to the pool after the last byte; without it, this ends the connection.
            body.close() if not body.content.is_eof() else body.release()

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._stack.aclose()
        self._client = None

    def _listed(self, each: Mapping[str, Any]) -> Stored:
        key, size, etag = each.get("Key", ""), each.get("Size", -1), each.get("ETag", "").strip('"')
        if not key or size < 0 or not etag:
            named = f" ({key[:120]!r})" if key else ""
            raise StoreUnavailable(f"s3://{self._bucket} lists an object without its key, size or ETag{named}")
        return Stored(key=key, size=size, etag=etag)

    async def _send(self, operation: str, **what: Any) -> Any:
        """The answer's head. Raises StoreUnavailable, ObjectChanged."""
        try:
            client = self._client or await self._open()
            return await getattr(client, operation)(Bucket=self._bucket, **what)
        except ClientError as error:
            raise self._refusal(error, what.get("Key", "")) from error
        except OddAnswer as error:
            raise StoreUnavailable(f"s3://{self._bucket} {error}") from error
        except (EndpointConnectionError, ConnectTimeoutError) as error:
            raise StoreUnavailable(f"s3://{self._bucket} cannot be reached") from error
        except (ReadTimeoutError, TimeoutError) as error:
            raise StoreUnavailable(f"s3://{self._bucket} does not answer in time") from error
        except NoCredentialsError as error:
            raise StoreUnavailable(f"s3://{self._bucket}: the environment holds no AWS credentials") from error
        except (BotoCoreError, aiohttp.ClientError, OSError, KeyError, ValueError) as error:
            # Texts of these may quote a request with its signature.
            raise StoreUnavailable(f"s3://{self._bucket} cannot be used: {type(error).__name__}") from error

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                made = s3_client(
                    endpoint=self._endpoint,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    read_timeout_s=READ_TIMEOUT_S,
                    keepalive_s=KEEPALIVE_S,
                    connections=MAX_CONNECTIONS,
                )
                self._client = await self._stack.enter_async_context(made)
            return self._client

    def _refusal(self, error: ClientError, key: str) -> LoadFailed:
        about, said = error.response.get("ResponseMetadata", {}), error.response.get("Error", {})
        code = str(said.get("Code", ""))[:64]
        status = about.get("HTTPStatusCode", 0)
        if key and code != "NoSuchBucket" and status in (404, 412, 416):
            return ObjectChanged(f"{key} is gone" if status == 404 else f"{key} was written anew")
        if code == "NoSuchBucket":
            return StoreUnavailable(f"s3://{self._bucket}: there is no such bucket")
        if code in ELSEWHERE:
            region = about.get("HTTPHeaders", {}).get("x-amz-bucket-region", "") or said.get("Region", "")
            return StoreUnavailable(f"s3://{self._bucket} {elsewhere(status, region)}")
        shown = f"{status} {code}" if code.isalnum() and code != str(status) else str(status)
        if key and 400 <= status < 500 and status not in (401, 408, 429):
            # The others of the bucket may well be given: whether the store is there, a listing says.
            needs = ": it needs s3:GetObject of it, and kms:Decrypt of its key" if status == 403 else ""
            return ObjectRefused(f"s3://{self._bucket} does not give this server {key!r} ({shown}){needs}")
        if status == 403:
            return StoreUnavailable(
                f"s3://{self._bucket} does not let this server list it ({shown}): it needs s3:ListBucket"
            )
        return StoreUnavailable(f"s3://{self._bucket} answers {shown}")


def _checksum(found: Mapping[str, Any], etag: str) -> tuple[str, str] | None:
    """What a head says of the whole object. Checksums of checksums of parts are none."""
    if found.get("ChecksumType") != "COMPOSITE":
        for name in _CHECKSUMS:
            with suppress(binascii.Error, ValueError):
                if value := base64.b64decode(found.get(f"Checksum{name}", ""), validate=True):
                    return name.lower(), value.hex()
    # Of an object that came in one piece the ETag is its MD5, unless it is encrypted with a key of its own.
    plain = found.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in found
    return ("md5", etag) if plain and _MD5.fullmatch(etag) else None
