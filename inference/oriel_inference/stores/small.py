"""Reads a small object into memory, with the same checks as for large ones."""

import asyncio
from contextlib import aclosing

from oriel_inference.errors import ObjectChanged, StoreUnavailable
from oriel_inference.stores.digests import digest_of
from oriel_inference.stores.fetch import Corrupt
from oriel_inference.stores.fetch_file import Counts
from oriel_inference.stores.gate import Gate
from oriel_wire.objects.client import ObjectClient, Stored

SMALL_S = 60.0
TRIES = 2


async def read_small(client: ObjectClient, gate: Gate, listed: Stored, *, shown: str, counts: Counts) -> bytes:
    """Return all bytes of `listed`. Raises LoadFailed: StoreUnavailable, ObjectChanged, or Corrupt if they are wrong
    twice.
    """
    for _ in range(TRIES):
        async with gate.attempt() as attempt:
            try:
                async with asyncio.timeout(SMALL_S):
                    stored = await client.head(listed.key)
                    if (stored.etag, stored.size) != (listed.etag, listed.size):
                        raise ObjectChanged(f"{shown} was overwritten since the store was listed")
                    data = bytearray()
                    if stored.size:
                        read = client.read(stored.key, start=0, end=stored.size, etag=stored.etag)
                        async with aclosing(read) as pieces:  # type: ignore[type-var]
                            async for piece in pieces:
                                attempt.brought(len(piece))
                                counts.read_bytes += len(piece)
                                data += piece
                                if len(data) >= stored.size:
                                    break
            except TimeoutError as error:
                raise StoreUnavailable(f"{shown} did not come within {SMALL_S:g} s") from error
            if len(data) != stored.size:
                raise StoreUnavailable(f"{shown}: {stored.size} bytes were announced, {len(data)} came")
        algorithm, expected = stored.checksum or ("", "")
        digest = digest_of(algorithm)
        if digest is None:
            return bytes(data)
        digest.update(bytes(data))
        if digest.hexdigest() == expected:
            return bytes(data)
        counts.failures["corrupt"] += 1
    raise Corrupt(f"{shown} does not match the {algorithm} that the object store reports")
