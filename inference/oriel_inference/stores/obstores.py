"""Google Cloud Storage and Azure Blob Storage through obstore: one HTTP client in Rust, off the loop.

Credentials are obstore's own search of the environment. Google: GOOGLE_APPLICATION_CREDENTIALS and the other files of
application default credentials, else the metadata server (GKE workload identity). Azure: workload identity, managed
identity, or a key or SAS in AZURE_STORAGE_*. An emulator is named as for the vendors' libraries: STORAGE_EMULATOR_HOST
(Google), AZURE_STORAGE_ENDPOINT or AZURE_STORAGE_USE_EMULATOR (Azure).

obstore shows no checksum of an object, and its listing ends at an object whose name has an empty part, "." or "..". It
follows redirects and reads a page of a listing whole, and can be told neither (docs/model-repository.md).
"""

import os
import re
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, InvalidPathError, PreconditionError
from obstore.store import AzureStore, GCSStore

from oriel_inference.errors import LoadFailed, ObjectChanged, ObjectRefused, StoreUnavailable, TooManyObjects
from oriel_inference.stores.objects import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Location, ObjectClient, Stored

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

__all__ = ["ObstoreClient", "open_obstore"]

REQUEST_TIMEOUT_S = 600.0  # from connecting to the last byte, however it trickles
PAGE_OBJECTS = 1000
CHUNK_BYTES = 256 * 1024
_ENDPOINTS = ("GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_STATUS = re.compile(r"status code: ([1-5][0-9]{2})")
_ODD_NAME = re.compile(r'Path "((?:[^"\\]|\\.)*)"')


def open_obstore(location: Location) -> ObjectClient:
    """A client for the bucket, or container, of `location`; nothing is sent yet. Raises LoadFailed."""
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
    }
    once: RetryConfig = {"max_retries": 0}
    # Only an endpoint that the operator wrote with http:// is spoken to in the clear.
    if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):
        options["allow_http"] = True
    store: AzureStore | GCSStore
    try:
        if location.kind == "az":
            where = f"az://{location.account}/{location.bucket}"
            store = AzureStore(
                location.bucket, account_name=location.account, client_options=options, retry_config=once
            )
        else:
            where = f"gs://{location.bucket}"
            emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
            if emulator:
                base = emulator if "://" in emulator else f"http://{emulator}"
                options["allow_http"] = True
                store = GCSStore(
                    location.bucket,
                    config={"base_url": base.rstrip("/"), "skip_signature": True},
                    client_options=options,
                    retry_config=once,
                )
            else:
                store = GCSStore(location.bucket, client_options=options, retry_config=once)
    except (BaseError, ValueError):
        # `from None` here and below: obstore's texts quote URLs, files and answers, which may hold credentials.
        raise LoadFailed(f"{where}: the credentials or the endpoint in the environment cannot be used") from None
    return ObstoreClient(store, where)


class ObstoreClient(ObjectClient):
    """See the module's head. where: the bucket's URL, for errors."""

    def __init__(self, store: AzureStore | GCSStore, where: str) -> None:
        self._store = store
        self._where = where

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        """prefix: ends with "/" unless empty."""
        found: list[Stored] = []
        try:
            async for page in self._store.list(prefix or None, chunk_size=PAGE_OBJECTS):
                found += [self._stored(each) for each in page]
                if len(found) > limit:
                    raise TooManyObjects(f"{self._where} holds more than {limit} objects below {prefix!r}")
        except InvalidPathError as error:
            name = _ODD_NAME.search(str(error))
            named = f" ({name[1][:120]!r})" if name else ""
            raise StoreUnavailable(
                f"{self._where} cannot be listed for an object whose name has an empty part, '.', '..' or a control "
                f"character{named}: remove it"
            ) from None
        except (BaseError, FileNotFoundError) as error:
            raise self._unavailable(error, "be listed") from None
        # What a console keeps for an empty folder is an object "folder/"; obstore shows it without the slash.
        folders = {each.key[:place] for each in found for place, letter in enumerate(each.key) if letter == "/"}
        return sorted((each for each in found if each.size or each.key not in folders), key=lambda each: each.key)

    async def head(self, key: str) -> Stored:
        try:
            return self._stored(await self._store.head_async(key))
        except FileNotFoundError:
            raise ObjectChanged(f"{self._where}: {key!r} is gone") from None
        except (BaseError, ValueError) as error:
            raise self._refusal(error, f"tell of {key!r}") from None

    async def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        left = end - start
        try:
            result = await self._store.get_async(key, options={"range": (start, end), "if_match": f'"{etag}"'})
            if (result.meta["e_tag"] or "").strip('"') != etag:
                raise ObjectChanged(f"{self._where}: {key!r} was written anew")
            async for chunk in result.stream(CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    break
                yield bytes(chunk)
        except FileNotFoundError:
            raise ObjectChanged(f"{self._where}: {key!r} is gone") from None
        except PreconditionError:
            raise ObjectChanged(f"{self._where}: {key!r} was written anew") from None
        except (BaseError, ValueError) as error:
            raise self._refusal(error, f"give {key!r}") from None
        if left:
            raise StoreUnavailable(f"{self._where} gave another number of bytes of {key!r} than were asked for")

    async def close(self) -> None:
        """Nothing to do: connections end with the last reference to the store."""

    def _stored(self, meta: "obstore.ObjectMeta") -> Stored:
        etag = (meta["e_tag"] or "").strip('"')
        if not etag:
            raise StoreUnavailable(f"{self._where} tells of {meta['path'][:120]!r} without its ETag")
        return Stored(key=meta["path"], size=meta["size"], etag=etag)

    def _refusal(self, error: Exception, what: str) -> LoadFailed:
        """Of one object: whether the store is there, a listing says."""
        text = str(error)
        found = _STATUS.search(text)
        status = int(found[1]) if found and "token request" not in text else 0
        if 400 <= status < 500 and status not in (401, 408, 429):
            return ObjectRefused(f"{self._where} does not {what}: {_why(text)}")
        return self._unavailable(error, what)

    def _unavailable(self, error: Exception, what: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self._where} cannot {what}: {_why(str(error))}")


def _why(text: str) -> str:
    """One of a few sentences for what obstore says."""
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if "token request" in text:
        return "no credentials were found in the environment of this server, or they were refused"
    if status in (401, 403):
        return f"this server may not ({status}): its identity needs the right to list and to read objects there"
    if status == 404:
        return "there is no such bucket or container (404)"
    if status in (408, 429) or status >= 500:
        return f"it is busy or broken ({status})"
    if status:
        return f"it answered {status}"
    if "kind: Timeout" in text or "TimedOut" in text:
        return "it did not answer in time"
    if "kind: Connect" in text:
        return "no connection"
    if "error sending request" in text or "kind: Request" in text or "kind: Decode" in text or "kind: Body" in text:
        return "the connection broke"
    return "its answer is not one of an object store"
