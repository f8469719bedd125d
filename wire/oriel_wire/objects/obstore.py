"""Client for Google Cloud Storage and Azure Blob Storage, through obstore: one HTTP client in Rust, off the event loop.

Credentials are found by obstore's own search of the environment. Google: GOOGLE_APPLICATION_CREDENTIALS and the other
files of application default credentials, else the metadata server (GKE workload identity). Azure: workload identity,
managed identity, or a key or SAS in AZURE_STORAGE_*. An emulator is named as for the vendors' libraries:
STORAGE_EMULATOR_HOST (Google), AZURE_STORAGE_ENDPOINT or AZURE_STORAGE_USE_EMULATOR (Azure).

obstore reports no checksum of an object, and its listing fails at an object whose name has an empty part, "." or "..".
It follows redirects and reads each page of a listing as a whole, and neither can be turned off
(docs/model-repository.md, docs/policies.md).
"""

import os
import re
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, PreconditionError
from obstore.store import AzureStore, GCSStore

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
from oriel_wire.objects.errors import (
    ClientUnusable,
    ObjectChanged,
    ObjectRefused,
    ObjectStoreError,
    StoreUnavailable,
    TooManyObjects,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSConfig, RetryConfig

PAGE_OBJECTS = 1000
CHUNK_BYTES = 256 * 1024
_ENDPOINTS = {"gs": ("GOOGLE_BASE_URL",), "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")}
_STATUS = re.compile(r"status code: ([1-5][0-9]{2})")
_NOBODY = '{"disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'
_CREDENTIALS = re.compile("token request|performing credential")
_BAD_NAME = re.compile(r'Path "((?:[^"\\]|\\.)*)"')


def open_obstore(location: Location, limits: ClientLimits) -> "ObstoreClient":
    """A client for the bucket, or container, of `location`; nothing is sent yet. Raises ClientUnusable."""
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "read_timeout": timedelta(seconds=limits.read_s),
        "timeout": timedelta(seconds=limits.request_s),
    }
    once: RetryConfig = {"max_retries": 0}
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "") if location.kind == "gs" else ""
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    # Only an endpoint that the operator wrote with http:// is used without TLS.
    endpoints = (emulator, *(os.environ.get(name, "") for name in _ENDPOINTS[location.kind]))
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        options["allow_http"] = True
    bucket = location.bucket
    store: AzureStore | GCSStore
    try:
        if location.kind == "az":
            store = AzureStore(bucket, account_name=location.account, client_options=options, retry_config=once)
        elif emulator:
            config: GCSConfig = {
                "base_url": emulator.rstrip("/"),
                "skip_signature": True,
                # It asks for credentials for writing all the same; this is nobody's, which is not asked for a token.
                "service_account_key": _NOBODY,
            }
            store = GCSStore(bucket, config=config, client_options=options, retry_config=once)
        else:
            store = GCSStore(bucket, client_options=options, retry_config=once)
    except (BaseError, ValueError):
        # `from None` here and below: obstore's texts quote URLs, files and answers, which may hold credentials.
        raise ClientUnusable(f"{location}: the credentials or the endpoint in the environment cannot be used") from None
    return ObstoreClient(store, location)


class ObstoreClient:
    """Reads one bucket or container. location: the store's location for error texts."""

    def __init__(self, store: AzureStore | GCSStore, location: Location) -> None:
        self._store = store
        self._location = location

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        found: list[Stored] = []
        try:
            async for page in self._store.list(prefix or None, chunk_size=PAGE_OBJECTS):
                found += [self._stored(each) for each in page]
                if len(found) > limit:
                    raise TooManyObjects(f"{self._location} holds more than {limit} objects below {prefix!r}")
        except InvalidPathError as error:
            name = _BAD_NAME.search(str(error))
            named = f" ({name[1][:120]!r})" if name else ""
            raise StoreUnavailable(
                f"{self._location} cannot be listed: the name of an object there has an empty part, '.', '..' or a "
                f"control character{named}: remove it"
            ) from None
        except (BaseError, FileNotFoundError) as error:
            raise self._unavailable(error, "be listed") from None
        # A console marks an empty folder with an object "folder/", which obstore shows without the slash.
        folders = {each.key[:place] for each in found for place, letter in enumerate(each.key) if letter == "/"}
        return sorted((each for each in found if each.size or each.key not in folders), key=lambda each: each.key)

    async def head(self, key: str) -> Stored:
        try:
            return self._stored(await self._store.head_async(key))
        except FileNotFoundError:
            raise ObjectChanged(f"{self._location}: {key!r} is gone") from None
        except (BaseError, ValueError) as error:
            raise self._refusal(error, f"describe {key!r}") from None

    async def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        left = end - start
        try:
            result = await self._store.get_async(key, options={"range": (start, end), "if_match": f'"{etag}"'})
            if (result.meta["e_tag"] or "").strip('"') != etag:
                raise ObjectChanged(f"{self._location}: {key!r} was overwritten")
            async for chunk in result.stream(CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    break
                yield bytes(chunk)
        except FileNotFoundError:
            raise ObjectChanged(f"{self._location}: {key!r} is gone") from None
        except PreconditionError:
            raise ObjectChanged(f"{self._location}: {key!r} was overwritten") from None
        except (BaseError, ValueError) as error:
            raise self._refusal(error, f"give {key!r}") from None
        if left:
            raise StoreUnavailable(f"{self._location} sent another number of bytes of {key!r} than were requested")

    async def put(self, key: str, data: bytes) -> bool:
        try:
            await self._store.put_async(key, data, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, ValueError, FileNotFoundError) as error:
            raise self._refusal(error, f"take {key!r}") from None
        return True

    async def close(self) -> None:
        """Does nothing: connections end with the last reference to the store."""

    def _stored(self, meta: "obstore.ObjectMeta") -> Stored:
        etag = (meta["e_tag"] or "").strip('"')
        if not etag:
            raise StoreUnavailable(f"{self._location} describes {meta['path'][:120]!r} without its ETag")
        return Stored(key=meta["path"], size=meta["size"], etag=etag)

    def _refusal(self, error: Exception, what: str) -> ObjectStoreError:
        """The error of one object; only a listing tells whether the store itself is available."""
        text = str(error)
        status = 0 if _CREDENTIALS.search(text) else _status(text)
        if 400 <= status < 500 and status not in (401, 408, 429):
            return ObjectRefused(f"{self._location} does not {what}: {_reason(text)}")
        return self._unavailable(error, what)

    def _unavailable(self, error: Exception, what: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self._location} cannot {what}: {_reason(str(error))}")


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _reason(text: str) -> str:
    """One of a few sentences, chosen by the text of an obstore error."""
    status = _status(text)
    if _CREDENTIALS.search(text):
        return NO_CREDENTIALS
    if status in (401, 403):
        return f"access is denied ({status}): this process needs the right to list and to read objects there"
    if status == 404:
        return NO_BUCKET
    if status in (408, 429) or status >= 500:
        return f"it is busy or broken ({status})"
    if status:
        return f"it answered {status}"
    if "kind: Timeout" in text or "TimedOut" in text:
        return TIMED_OUT
    if "kind: Connect" in text:
        return NO_CONNECTION
    if "error sending request" in text or "kind: Request" in text or "kind: Decode" in text or "kind: Body" in text:
        return f"{NO_CONNECTION}, or it broke"
    return BAD_ANSWER
