"""Policy documents in one folder of an object store: list them, and fetch one of them into a file.

Each request is sent once; the mirror decides when to send the next. The errors of the client become the mirror's here.
"""

import asyncio
import os
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from oriel_gateway.documents.source import KINDS
from oriel_wire.objects.client import ClientLimits, Location, ObjectClient
from oriel_wire.objects.errors import ObjectChanged, ObjectStoreError, TooManyObjects

LIMITS = ClientLimits(read_s=10.0, request_s=300.0, connections=4)
MAX_OBJECTS = 1000  # below the prefix, including those that are no documents
LISTING_S = 30.0  # the only bound on the memory of a gs:// or az:// listing whose page never ends


class StoreFailed(Exception):
    """The store cannot give its documents now. The text is for the operator and holds no credential."""


class Moved(Exception):
    """A document was written again or deleted since it was listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A document as the store lists it. size: bytes."""

    etag: str
    size: int


class StoredDocuments:
    """The documents directly below the prefix of `location`. Owns the client.

    listing_s: seconds allowed for a whole listing.
    """

    def __init__(self, location: Location, client: ObjectClient, *, listing_s: float = LISTING_S) -> None:
        self._location = location
        self._client = client
        self._listing_s = listing_s

    async def close(self) -> None:
        await self._client.close()

    async def listing(self) -> dict[str, Listed]:
        """File name -> its object, of every document. Raises StoreFailed."""
        try:
            async with asyncio.timeout(self._listing_s):
                objects = await self._client.list(self._location.prefix, limit=MAX_OBJECTS)
        except TimeoutError:
            text = f"{self._location} cannot be listed: its listing had not ended after {self._listing_s:g} s"
            raise StoreFailed(text) from None
        except TooManyObjects as error:
            text = f"{self._location} holds more than {MAX_OBJECTS} objects: give policies a prefix alone"
            raise StoreFailed(text) from error
        except ObjectStoreError as error:
            raise StoreFailed(str(error)) from error
        return {
            name: Listed(etag=each.etag, size=each.size)
            for each in objects
            if (name := _name_of(self._location, each.key))
        }

    async def fetch(self, name: str, listed: Listed, into: Path) -> None:
        """Write the document to the new file `into`. Raises StoreFailed; Moved if the object has changed by now."""
        with into.open("xb") as file:
            try:
                if listed.size:  # a range of no bytes cannot be requested
                    key = f"{self._location.prefix}{name}"
                    chunks = self._client.read(key, start=0, end=listed.size, etag=listed.etag)
                    async with aclosing(chunks):  # type: ignore[type-var]
                        async for chunk in chunks:
                            await asyncio.to_thread(file.write, chunk)
            except ObjectChanged as error:
                raise Moved(name) from error
            except ObjectStoreError as error:
                raise StoreFailed(str(error)) from error
            await asyncio.to_thread(_to_disk, file)


def _name_of(location: Location, key: str) -> str | None:
    """The file name of the object `key`, None if it is not a document of the folder. Raises StoreFailed."""
    path = key.removeprefix(location.prefix)
    if "/" in path or Path(path).suffix not in KINDS or path.startswith("."):
        return None
    if not path.isprintable() or len(path.encode()) > 200:
        raise StoreFailed(f"{location}: {path[:100]!r} cannot be the name of a file")
    return path


def _to_disk(file: BinaryIO) -> None:
    """Write the file's data through to the disk."""
    file.flush()
    os.fsync(file.fileno())
