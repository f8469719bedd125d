"""Client for S3 and compatible stores, through aiobotocore.

Credentials, region and endpoint are found as AWS's own tools find them: environment, files, web identity, container and
instance roles. Requests to a store at its own address (in the URL, or AWS_ENDPOINT_URL) name the bucket in the path,
because few such stores have a DNS name per bucket.
"""

import asyncio
import base64
import binascii
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
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

from oriel_wire.objects.client import (
    BAD_ANSWER,
    NO_BUCKET,
    NO_CONNECTION,
    NO_CREDENTIALS,
    TIMED_OUT,
    ClientLimits,
    Location,
    Stored,
)
from oriel_wire.objects.errors import ObjectChanged, ObjectRefused, ObjectStoreError, StoreUnavailable, TooManyObjects
from oriel_wire.objects.s3_http import BadAnswer, s3_client, wrong_region

CLOSE_S = 5.0
# Shorter than any store's idle timeout: a connection that the store has just closed would look like an outage.
KEEPALIVE_S = 4.0

# In the order of preference. An MD5 is the last resort, see `_checksum`.
_CHECKSUMS = ("SHA256", "SHA1", "CRC64NVME", "CRC32C", "CRC32")
# Errors by which S3 reports, without a redirect, that a request was meant for another region.
_WRONG_REGION = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_MD5 = re.compile(r"[0-9a-f]{32}")


class S3Client:
    """Reads one bucket. Connections are opened on the event loop of the first call and belong to it."""

    def __init__(self, location: Location, limits: ClientLimits) -> None:
        self._location = location
        self._limits = limits
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._opening = asyncio.Lock()
        # A server may forget its variables before the first call.
        self._keys = {argument: os.environ.get(argument.upper()) for argument in _KEYS}

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        found: list[Stored] = []
        more: dict[str, str] = {}
        while True:
            size = min(self._limits.page_objects, limit + 1)
            page = await self._send("be listed", "list_objects_v2", Prefix=prefix, MaxKeys=size, **more)
            if "IsTruncated" not in page:  # an empty 200, say of a proxy, must not look like an empty bucket
                raise self._unavailable("be listed", BAD_ANSWER)
            found.extend(map(self._listed, page.get("Contents", ())))
            if len(found) > limit:
                raise TooManyObjects(f"{self._location} holds more than {limit} objects below {prefix!r}")
            if not page.get("IsTruncated"):
                return sorted(found, key=lambda each: each.key)
            token = page.get("NextContinuationToken", "")
            if not token or more.get("ContinuationToken") == token:
                raise self._unavailable("be listed", "it announces another page without the token for it")
            more = {"ContinuationToken": token}

    async def head(self, key: str) -> Stored:
        found = await self._send(f"describe {key!r}", "head_object", Key=key, ChecksumMode="ENABLED")
        size, etag = found.get("ContentLength", -1), found.get("ETag", "").strip('"')
        if size < 0 or not etag:
            raise StoreUnavailable(f"{self._location} describes {key!r} without its size or ETag")
        return Stored(key=key, size=size, etag=etag, checksum=_checksum(found, etag))

    async def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        what, part = f"give {key!r}", f"{start}-{end - 1}"
        found = await self._send(what, "get_object", Key=key, Range=f"bytes={part}", IfMatch=f'"{etag}"')
        body: aiohttp.ClientResponse = found["Body"].raw_stream
        try:
            if found.get("ETag", "").strip('"') != etag:
                raise ObjectChanged(f"{key} was overwritten")
            given = found.get("ContentRange", "")
            if given.partition("/")[0] != f"bytes {part}" and (given or start or body.content_length != end):
                raise self._unavailable(what, "it answers with another range of bytes: check the proxies on the way")
            left = end - start
            try:
                while left > 0 and (chunk := await body.content.readany()):
                    left -= len(chunk)
                    if left < 0:
                        raise self._unavailable(what, "it sends more bytes than were requested")
                    yield chunk
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._unavailable(what, f"the connection broke ({type(error).__name__})") from error
            if left:
                raise self._unavailable(what, f"the connection broke, {left} bytes are missing")
        finally:
            # `release` returns the connection to the pool, which only works after the last byte; `close` ends it.
            body.close() if not body.content.is_eof() else body.release()

    async def put(self, key: str, data: bytes) -> bool:
        try:
            await self._send(f"take {key!r}", "put_object", Key=key, Body=data, IfNoneMatch="*")
        except ObjectChanged as error:
            cause = error.__cause__
            status = cause.response["ResponseMetadata"]["HTTPStatusCode"] if isinstance(cause, ClientError) else 0
            if status != 412:
                raise
            return False  # it is there already
        return True

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._stack.aclose()
        self._client = None

    def _listed(self, each: Mapping[str, Any]) -> Stored:
        key, size, etag = each.get("Key", ""), each.get("Size", -1), each.get("ETag", "").strip('"')
        if not key or size < 0 or not etag:
            named = f" ({key[:120]!r})" if key else ""
            raise self._unavailable("be listed", f"it shows an object without its key, size or ETag{named}")
        return Stored(key=key, size=size, etag=etag)

    async def _send(self, what: str, operation: str, **arguments: Any) -> Any:
        """The head of the answer, parsed. what: completes "<location> cannot ..." in errors.

        Raises StoreUnavailable, ObjectChanged, ObjectRefused.
        """
        try:
            client = self._client or await self._open()
            return await getattr(client, operation)(Bucket=self._location.bucket, **arguments)
        except ClientError as error:
            raise self._refusal(error, what, arguments.get("Key", "")) from error
        except BadAnswer as error:
            raise StoreUnavailable(f"{self._location} {error}") from error
        except (BotoCoreError, aiohttp.ClientError, OSError, KeyError, ValueError) as error:
            # Texts of these may quote a request with its signature.
            raise self._unavailable(what, _reason(error)) from error

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                made = s3_client(
                    endpoint=self._location.endpoint,
                    connect_timeout_s=self._limits.connect_s,
                    read_timeout_s=self._limits.read_s,
                    keepalive_s=KEEPALIVE_S,
                    connections=self._limits.connections,
                    keys=self._keys,
                )
                self._client = await self._stack.enter_async_context(made)
            return self._client

    def _unavailable(self, what: str, reason: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self._location} cannot {what}: {reason}")

    def _refusal(self, error: ClientError, what: str, key: str) -> ObjectStoreError:
        about, details = error.response.get("ResponseMetadata", {}), error.response.get("Error", {})
        code = str(details.get("Code", ""))[:64]
        status = about.get("HTTPStatusCode", 0)
        if code == "NoSuchBucket" or (status == 404 and not key):
            return self._unavailable(what, NO_BUCKET)
        if key and status in (404, 409, 412, 416):
            happened = {404: "is gone", 409: "is being written by another process"}
            return ObjectChanged(f"{key} {happened.get(status, 'was overwritten')}")
        if code in _WRONG_REGION:
            region = about.get("HTTPHeaders", {}).get("x-amz-bucket-region", "") or details.get("Region", "")
            return StoreUnavailable(f"{self._location} {wrong_region(status, region)}")
        shown = f"{status} {code}" if code.isalnum() and code != str(status) else str(status)
        if key and 400 <= status < 500 and status not in (401, 408, 429):
            # Other objects may still be readable: only a listing shows whether the store itself is available.
            if what.startswith("take"):
                needs = ": it needs s3:PutObject, and kms:GenerateDataKey of its key" if status == 403 else ""
                return ObjectRefused(f"{self._location} does not take {key!r} from this process ({shown}){needs}")
            needs = ": it needs s3:GetObject of it, and kms:Decrypt of its key" if status == 403 else ""
            return ObjectRefused(f"{self._location} does not give this process {key!r} ({shown}){needs}")
        if status == 403:
            return self._unavailable(what, f"access is denied to this process ({shown}): it needs s3:ListBucket")
        return self._unavailable(what, f"it answers {shown}")


def _reason(error: Exception) -> str:
    if isinstance(error, NoCredentialsError | CredentialRetrievalError):
        return NO_CREDENTIALS
    if isinstance(error, ReadTimeoutError | TimeoutError):
        return TIMED_OUT
    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        return NO_CONNECTION
    if isinstance(error, ConnectionClosedError | aiohttp.ClientError | OSError):
        return f"{NO_CONNECTION}, or it broke"
    return f"{BAD_ANSWER}, or the environment's credentials or endpoint cannot be used ({type(error).__name__})"


def _checksum(found: Mapping[str, Any], etag: str) -> tuple[str, str] | None:
    """The checksum of the whole object in the answer to a HEAD. Checksums of checksums of parts do not count."""
    if found.get("ChecksumType") != "COMPOSITE":
        for name in _CHECKSUMS:
            with suppress(binascii.Error, ValueError):
                if value := base64.b64decode(found.get(f"Checksum{name}", ""), validate=True):
                    return name.lower(), value.hex()
    # The ETag of an object that was uploaded in one piece is its MD5, unless it is encrypted with a key of its own.
    plain = found.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in found
    return ("md5", etag) if plain and _MD5.fullmatch(etag) else None
