"""Policy documents at gs:// and az://, through obstore: list what lies in one folder of a bucket, fetch one of it.

Credentials and endpoint are obstore's own search of the environment: application default credentials and the metadata
server; AZURE_* with workload and managed identity. Emulators: STORAGE_EMULATOR_HOST, AZURE_STORAGE_ENDPOINT. Each
request is sent once: when the next one may be is the mirror's to say.

obstore follows redirects and reads a page of a listing whole, and can be told neither (docs/policies.md).
"""

import asyncio
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError, InvalidPathError, PreconditionError
from obstore.store import AzureStore, GCSStore

from oriel_gateway.mirror import MAX_OBJECTS, Listed, Moved, StoreFailed, document_name, to_disk
from oriel_gateway.sources import StoreUrl

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSConfig, RetryConfig

__all__ = ["ObjectDocuments"]

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0  # without a byte
REQUEST_TIMEOUT_S = 300.0
LISTING_S = 30.0  # what a page without end may cost in memory is only bounded by this
CHUNK_BYTES = 4 * 1024 * 1024
_ENDPOINTS = {
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_STATUS = re.compile(r"status code: ([1-5][0-9]{2})")


class ObjectDocuments:
    """See the module's head. Raises StoreFailed if the environment's credentials or endpoint cannot be used."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._prefix = f"{url.prefix}/" if url.prefix else ""
        try:
            self._store = _opened(url)
        except (BaseError, ValueError):
            # `from None` here and below: obstore's texts quote URLs, files and answers, which may hold credentials.
            raise StoreFailed(f"{url}: the credentials or the endpoint in the environment cannot be used") from None

    async def close(self) -> None:
        """Nothing to do: connections end with the last reference to the store."""

    async def listing(self) -> dict[str, Listed]:
        """File name -> what lies there, of every document directly in the folder. Raises StoreFailed."""
        try:
            async with asyncio.timeout(LISTING_S):
                return await self._listing()
        except TimeoutError:
            raise StoreFailed(
                f"{self._url} cannot be listed: its listing had not ended after {LISTING_S:g} s"
            ) from None

    async def _listing(self) -> dict[str, Listed]:
        found: dict[str, Listed] = {}
        count = 0
        try:
            async for page in self._store.list(self._prefix or None, chunk_size=MAX_OBJECTS):
                count += len(page)
                if count > MAX_OBJECTS:
                    raise StoreFailed(
                        f"{self._url} holds more than {MAX_OBJECTS} objects: give policies a prefix alone"
                    )
                for each in page:
                    name = document_name(self._url, each["path"].removeprefix(self._prefix))
                    etag = (each["e_tag"] or "").strip('"')
                    if name is not None and not etag:
                        raise StoreFailed(f"{self._url} cannot be listed: {name} comes without its ETag")
                    if name is not None:
                        found[name] = Listed(etag=etag, size=each["size"])
        except InvalidPathError:
            raise StoreFailed(
                f"{self._url} cannot be listed: an object's name there has an empty part, '.', '..' or a control "
                "character; remove it"
            ) from None
        except (BaseError, FileNotFoundError) as error:
            raise StoreFailed(f"{self._url} cannot be listed: {_why(str(error))}") from None
        return found

    async def fetch(self, name: str, listed: Listed, into: Path) -> None:
        """Write the document to the new file `into`. Raises StoreFailed; Moved if another one lies there by now."""
        try:
            condition = f'"{listed.etag}"'
            result = await self._store.get_async(f"{self._prefix}{name}", options={"if_match": condition})
            if (result.meta["e_tag"] or "").strip('"') != listed.etag or result.meta["size"] != listed.size:
                raise Moved(name)
            with into.open("xb") as file:
                left = listed.size
                async for chunk in result.stream(CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        break
                    await asyncio.to_thread(file.write, chunk)
                if left:
                    raise StoreFailed(f"{self._url}: {name} came with another number of bytes than it is said to have")
                await asyncio.to_thread(to_disk, file)
        except (FileNotFoundError, PreconditionError):
            raise Moved(name) from None
        except (BaseError, ValueError) as error:
            raise StoreFailed(f"{self._url}: {name} cannot be read: {_why(str(error))}") from None


def _opened(url: StoreUrl) -> GCSStore | AzureStore:
    once: RetryConfig = {"max_retries": 0}
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
    }
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[url.kind])), "")
    if url.kind == "gs" and endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    if endpoint.startswith("http://"):
        options["allow_http"] = True  # only an endpoint that the operator wrote so is spoken to in the clear
    if url.kind == "az":
        return AzureStore(url.bucket, account_name=url.account, client_options=options, retry_config=once)
    if not os.environ.get("STORAGE_EMULATOR_HOST"):
        return GCSStore(url.bucket, client_options=options, retry_config=once)
    config: GCSConfig = {"base_url": endpoint.rstrip("/"), "skip_signature": True}
    return GCSStore(url.bucket, config=config, client_options=options, retry_config=once)


def _why(text: str) -> str:
    """One of a few sentences for what obstore says."""
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if "token request" in text or "performing credential" in text:
        return "no credentials were found in the environment of this gateway, or they were refused"
    if status in (401, 403):
        return f"this gateway may not ({status}): its identity needs the right to list and to read objects there"
    if status == 404:
        return "there is no such bucket or container (404)"
    if status:
        return f"it answered {status}"
    if "kind: Timeout" in text or "TimedOut" in text:
        return "it did not answer in time"
    if "error sending request" in text or "kind: " in text:
        return "no connection, or it broke"
    return "its answer is not one of an object store"
