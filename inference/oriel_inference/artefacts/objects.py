"""Copies artefacts between a folder and an object store: for `oriel engines push` and `pull`, and for servers.

    <prefix>/<fingerprint>/<SHA-256 of a file>      never changed
    <prefix>/<fingerprint>/manifest.json            last, so that what has one is whole

Two machines may build different bytes for the same fingerprint. Files are named by their digest, so that the manifest
that came first fits its files whoever else writes. A store is trusted no more than the folder: every byte is compared
with its checksum before it is published there, and a server checks the outputs before it serves.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from oriel_inference.artefacts.folder import (
    MANIFEST,
    MAX_RECORD_BYTES,
    ArtefactDamaged,
    ArtefactFolder,
    FileLine,
    Manifest,
    read_manifest,
)
from oriel_inference.artefacts.offline import unfit
from oriel_inference.stores.own_files import open_new
from oriel_policies.artefacts.fingerprint import is_fingerprint, key_of
from oriel_wire.objects.client import ObjectClient, ObjectWriter, Stored
from oriel_wire.objects.errors import ObjectChanged

MAX_OBJECTS = 100_000
MAX_FILE_BYTES = 4 << 30  # an object is sent in one piece
MAX_ARTEFACT_BYTES = 16 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The outcome of copying one artefact.

    state: "pushed", "pulled", "there", "damaged", "unfit" (for this machine) or "refused" (on this machine).
    reason: text of why it was not copied; "" if it was, or was there.
    """

    fingerprint: str
    model: str = ""
    state: str
    reason: str = ""


async def push(
    folder: ArtefactFolder,
    client: ObjectClient,
    writer: ObjectWriter,
    prefix: str,
    fingerprint: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Copied | None:
    """Store an artefact of the folder, unless the store has it; return None if the folder does not have it.

    prefix: beginning of all keys, empty or ending with "/".
    max_file_bytes: size above which a file makes the artefact "damaged".
    Raises ObjectStoreError.
    """
    try:
        manifest = folder.find(fingerprint)
        if manifest is None:
            return None
        if any(line.size_bytes > max_file_bytes for line in manifest.files.values()):
            raise ArtefactDamaged(f"it has a file of more than {max_file_bytes} bytes")
        await asyncio.to_thread(folder.copy, fingerprint, manifest, None)
    except ArtefactDamaged as damaged:
        return Copied(fingerprint=fingerprint, state="damaged", reason=str(damaged))
    base, state = f"{prefix}{fingerprint}/", "there"
    try:
        await client.head(base + MANIFEST)
    except ObjectChanged:  # there is none
        with suppress(ObjectChanged):  # another machine is storing the same object right now, and wins
            for name, line in manifest.files.items():
                data = await asyncio.to_thread((folder.root / fingerprint / name).read_bytes)
                await writer.put(base + line.sha256, data)
            if await writer.put(base + MANIFEST, (folder.root / fingerprint / MANIFEST).read_bytes()):
                state = "pushed"
    return Copied(fingerprint=fingerprint, model=manifest.model, state=state)


async def pull(
    folder: ArtefactFolder, client: ObjectClient, prefix: str, *, everything: bool = False
) -> AsyncIterator[Copied]:
    """Fetch the artefacts that the folder does not have; yield what became of each.

    everything: also those that do not fit this machine. Raises ObjectStoreError, and OSError where the folder cannot be
    written.
    """
    found: dict[str, dict[str, Stored]] = {}
    for stored in await client.list(prefix, limit=MAX_OBJECTS):
        fingerprint, _, name = stored.key.removeprefix(prefix).partition("/")
        if is_fingerprint(fingerprint):
            found.setdefault(fingerprint, {})[name] = stored
    for fingerprint, objects in found.items():
        if MANIFEST not in objects:
            continue  # it is being pushed, or was not pushed to the end
        try:
            yield await _pull(folder, client, fingerprint, objects, everything)
        except ArtefactDamaged as damaged:
            yield Copied(fingerprint=fingerprint, state="damaged", reason=str(damaged))


async def _pull(
    folder: ArtefactFolder, client: ObjectClient, fingerprint: str, objects: dict[str, Stored], everything: bool
) -> Copied:
    if (folder.root / fingerprint).exists():
        return Copied(fingerprint=fingerprint, state="there")
    if fingerprint in folder.refusals():
        reason = "its fingerprint was refused on this machine: oriel engines ls says why"
        return Copied(fingerprint=fingerprint, state="refused", reason=reason)
    manifest = await stored_manifest(client, objects[MANIFEST], fingerprint)
    if not everything and (why := unfit(key_of(manifest.key))):
        return Copied(fingerprint=fingerprint, model=manifest.model, state="unfit", reason=why)
    await fetch(folder, client, manifest, objects)
    return Copied(fingerprint=fingerprint, model=manifest.model, state="pulled")


async def fetch(
    folder: ArtefactFolder, client: ObjectClient, manifest: Manifest, objects: Mapping[str, Stored]
) -> None:
    """Publish an artefact of the store in the folder.

    objects: objects of the store below its fingerprint, by the last part of the key.
    Raises ArtefactDamaged, ObjectStoreError, and OSError where the folder cannot be written.
    """
    with folder.work() as work:
        for name, line in manifest.files.items():
            await _fetch(client, objects.get(line.sha256), line, work / name)
        folder.publish(work, manifest)


async def stored_manifest(client: ObjectClient, stored: Stored, fingerprint: str) -> Manifest:
    """Return the manifest of an artefact whose bytes may be fetched. Raises ArtefactDamaged."""
    if not 0 < stored.size <= MAX_RECORD_BYTES:
        raise ArtefactDamaged(f"its manifest has {stored.size} bytes")
    async with aclosing(_read(client, stored)) as pieces:
        manifest = read_manifest(b"".join([piece async for piece in pieces]), fingerprint)
    if manifest.size_bytes > MAX_ARTEFACT_BYTES:
        raise ArtefactDamaged(f"it has more than {MAX_ARTEFACT_BYTES} bytes")
    return manifest


async def _fetch(client: ObjectClient, stored: Stored | None, line: FileLine, target: Path) -> None:
    """Write one file, and compare it with its line. Raises ArtefactDamaged."""
    if stored is None or stored.size != line.size_bytes:
        raise ArtefactDamaged(f"{target.name} is not in the store as the manifest names it")
    digest = hashlib.sha256()
    with os.fdopen(open_new(target), "wb") as file:
        if stored.size:
            async with aclosing(_read(client, stored)) as pieces:
                async for piece in pieces:
                    digest.update(piece)
                    file.write(piece)
    if digest.hexdigest() != line.sha256:
        raise ArtefactDamaged(f"{target.name} is not the file that was built")


async def _read(client: ObjectClient, stored: Stored) -> AsyncGenerator[bytes, None]:
    async for piece in client.read(stored.key, start=0, end=stored.size, etag=stored.etag):
        yield piece
