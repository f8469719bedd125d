"""The object store through which servers that share no folder share their artefacts: for `--artefact-store`.

    <prefix>/<fingerprint>/...               the artefact, see `oriel_inference.artefacts.objects`
    <prefix>/<fingerprint>/lease/<number>    the records of its build, of which the highest number counts

No object is ever changed or removed. A record is stored on the condition that its number is not there, so that of
several servers that want to build one succeeds. The builder stores the next record every STORE_BEAT_S. Its last one
names no holder, and has the refusal if the build ended with one; after a build that succeeded there is the artefact
instead. When the same record has been the latest for STORE_EXPIRE_S of the clock of a server that waits, the builder is
gone and the next number is free.

The store saves work; nothing depends on it. A server that cannot use it builds by itself, and the models serve all the
while. The requests run on an event loop in a thread of its own, where bytes are also compared and files written.
"""

import asyncio
import logging
import os
import re
import socket
import time
from asyncio import sleep
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from oriel_inference.artefacts.folder import MANIFEST, MAX_FILES, MAX_TEXT, ArtefactDamaged, ArtefactFolder
from oriel_inference.artefacts.objects import fetch, push, read_small, stored_manifest
from oriel_inference.errors import StoreUnavailable
from oriel_inference.stores.loop_thread import LoopThread
from oriel_policies.artefacts.lease import STORE_BEAT_S, STORE_EXPIRE_S, LeaseRecord, LeaseVerdict, LeaseWatch
from oriel_policies.artefacts.refusals import Circumstances, Refusal, is_void
from oriel_wire.objects.client import ObjectClient, ObjectWriter, Stored
from oriel_wire.objects.errors import ObjectChanged, ObjectStoreError

_log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 5.0
REQUEST_S = 30.0  # for a listing, a record, or the end of a build
SEND_S = 600.0
MAX_SENT_FILE_BYTES = 512 << 20  # a file is sent in one piece, which is in memory meanwhile
MAX_RECORDS = 10_000
MAX_FETCHES = 3
MAX_RECORD_BYTES = 16 << 10
_RECORD = re.compile(r"lease/([0-9]{8})")


class GroupStoreFailed(Exception):
    """The store cannot be used now. The text is for the operator."""


class _Damaged(GroupStoreFailed):
    """The artefact in the store is not the one that was built."""


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record of a build. holder: "" if nobody builds any more. refusal: the end of the build, if it was refused."""

    holder: str
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the store has for one fingerprint.

    objects: by their keys below the fingerprint. number: of the latest record, 0 if there is none.
    lease: None if nobody builds.
    """

    objects: dict[str, Stored]
    number: int
    lease: LeaseRecord | None
    refusal: Refusal | None


class GroupStore:
    """One store. All but `close` belong to the loop that serves; none of them blocks it.

    prefix: of all keys, empty or ending with "/". shown: the store's URL, for logs.
    beat_s, expire_s, poll_s: of leases. request_s, send_s: for one request, and to send one artefact.
    """

    def __init__(
        self,
        client: ObjectClient,
        writer: ObjectWriter,
        *,
        prefix: str,
        shown: str,
        beat_s: float = STORE_BEAT_S,
        expire_s: float = STORE_EXPIRE_S,
        poll_s: float = POLL_S,
        request_s: float = REQUEST_S,
        send_s: float = SEND_S,
    ) -> None:
        self._client = client
        self._writer = writer
        self._prefix = prefix
        self._shown = shown
        self.beat_s = beat_s
        self._expire_s = expire_s
        self.poll_s = poll_s
        self._request_s = request_s
        self._send_s = send_s
        self._thread = LoopThread("oriel-artefact-store")
        self._sending = asyncio.Lock()
        self.holder = f"{socket.gethostname()[:64]}.{os.getpid()}.{uuid4().hex[:8]}"

    async def wait(
        self,
        folder: ArtefactFolder,
        fingerprint: str,
        under: Circumstances,
        *,
        fetch_s: float,
        left: Callable[[], bool],
        waits: Callable[[], None],
    ) -> int | Refusal | None:
        """Wait until this server has the artefact, or should build it.

        Returns None once the artefact is in the folder, or once `left` returns True; a refusal that holds under these
        circumstances; or else the number of the record with which a build begins. Raises GroupStoreFailed if the
        server should build without the store, and OSError where the folder cannot be written.

        fetch_s: for fetching the artefact. waits: called while another server builds.
        """
        watch, known, fetches = LeaseWatch(self._expire_s), None, 0
        while True:
            try:
                known = await self.find(fingerprint)
            except GroupStoreFailed:
                if known is None:
                    raise
                # The record that was read last counts; if the store stays away, it expires.
            if left():
                return None
            if MANIFEST in known.objects:
                try:
                    await self._fetch(folder, fingerprint, known.objects, fetch_s)
                except GroupStoreFailed as failure:
                    fetches += 1
                    if fetches == MAX_FETCHES or isinstance(failure, _Damaged):
                        raise
                    await sleep(self.poll_s)
                    continue
                return None
            if known.refusal is not None and not is_void(known.refusal, under):
                return known.refusal
            if watch.judge(known.lease, time.monotonic()) is not LeaseVerdict.WAIT:
                return known.number + 1
            waits()
            await sleep(self.poll_s)

    async def find(self, fingerprint: str) -> Known:
        """Return what the store has for a fingerprint. Raises GroupStoreFailed."""
        base = f"{self._prefix}{fingerprint}/"

        async def ask() -> Known:
            listed = await self._client.list(base, limit=MAX_FILES + MAX_RECORDS)
            objects = {each.key.removeprefix(base): each for each in listed}
            number = max((int(found[1]) for name in objects if (found := _RECORD.fullmatch(name))), default=0)
            # Once there is an artefact, nobody asks who built it.
            unfinished = number and MANIFEST not in objects
            record = await self._record(objects[_name(number)]) if unfinished else _Record("")
            return Known(
                objects=objects,
                number=number,
                lease=LeaseRecord(record.holder, number) if record.holder else None,
                refusal=record.refusal,
            )

        return await self._ask(ask, self._request_s)

    async def put(self, fingerprint: str, number: int, record: _Record) -> bool:
        """Store a record; return False if another one has its number. Raises GroupStoreFailed."""

        async def ask() -> bool:
            with suppress(ObjectChanged):
                return await self._writer.put(
                    f"{self._prefix}{fingerprint}/{_name(number)}", msgspec.json.encode(record)
                )
            return False

        return await self._ask(ask, self._request_s)

    async def send(self, folder: ArtefactFolder, fingerprint: str) -> None:
        """Store an artefact of the folder, one at a time. Raises GroupStoreFailed, and OSError for the folder."""

        async def ask() -> str:
            wrong = "it is not in the folder any more"
            async for copied in push(
                folder, self._client, self._writer, self._prefix, [fingerprint], max_file_bytes=MAX_SENT_FILE_BYTES
            ):
                wrong = copied.reason
            return wrong

        async with self._sending:
            if wrong := await self._ask(ask, self._send_s):
                raise GroupStoreFailed(f"an artefact is not sent to {self._shown}: {wrong}")

    def lease(self, fingerprint: str, number: int) -> "StoreLease":
        """Return the lease of a build that begins with the record of this number; `take` acquires it."""
        return StoreLease(self, fingerprint, number)

    def close(self) -> None:
        """End all requests and connections. Blocks."""
        self._thread.close(self._close())

    async def _close(self) -> None:
        await self._client.close()
        await self._writer.close()

    async def _record(self, stored: Stored) -> _Record:
        """Return a record. One that cannot be read counts as one whose holder does not renew it."""
        if 0 < stored.size <= MAX_RECORD_BYTES:
            with suppress(msgspec.MsgspecError):
                record = msgspec.json.decode(await read_small(self._client, stored), type=_Record)
                if record.refusal is None:
                    return record
                reason = " ".join(record.refusal.reason.split())[:MAX_TEXT]  # one line in a log, whoever wrote it
                return _Record(record.holder, replace(record.refusal, reason=reason))
        return _Record("unknown")

    async def _fetch(
        self, folder: ArtefactFolder, fingerprint: str, objects: dict[str, Stored], limit_s: float
    ) -> None:
        async def ask() -> None:
            manifest = await stored_manifest(self._client, objects[MANIFEST], fingerprint)
            if manifest.size_bytes > folder.max_bytes:
                raise ArtefactDamaged(f"its {manifest.size_bytes} bytes are more than this server's folder may have")
            await fetch(folder, self._client, manifest, objects)

        try:
            await self._ask(ask, limit_s)
        except ArtefactDamaged as damaged:
            text = f"the artefact {fingerprint} in {self._shown} cannot be used, remove it there: {damaged}"
            raise _Damaged(text) from damaged
        _log.info("the artefact %s was fetched from %s", fingerprint[:12], self._shown)

    async def _ask(self, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """Do work on the loop of the store. Raises GroupStoreFailed, and what the work raises about the folder."""

        async def bounded() -> T:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await work()
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise GroupStoreFailed(f"{self._shown} did not answer within {limit_s:g} s") from error
            except ObjectStoreError as error:
                raise GroupStoreFailed(str(error)) from error

        try:
            return await asyncio.wrap_future(self._thread.submit(bounded()))
        except StoreUnavailable as stopping:
            raise GroupStoreFailed(stopping.reason) from stopping


class StoreLease:
    """The lease of one build. Begin with `take`; `send` or `end` ends it."""

    def __init__(self, store: GroupStore, fingerprint: str, number: int) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._number = number
        self._beating: asyncio.Task[Any] | None = None

    async def take(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[Any]]) -> bool:
        """Acquire the lease, and renew it in a task until it ends. Returns False if another server was faster.

        Raises GroupStoreFailed.
        """
        if not await self._store.put(self._fingerprint, self._number, _Record(self._store.holder)):
            return False
        self._beating = spawn(self._beat())
        return True

    async def send(self, folder: ArtefactFolder) -> None:
        """Store the artefact that was built. If that fails, gives the lease back, and raises GroupStoreFailed or
        OSError.
        """
        try:
            await self._store.send(folder, self._fingerprint)
        except (GroupStoreFailed, OSError):
            await self.end()
            raise
        self._stop()

    async def end(self, refusal: Refusal | None = None) -> None:
        """Give the lease back. refusal: why the build failed, if nobody else should try. Does not raise."""
        if self._beating is None:
            return
        self._stop()
        if refusal is not None:
            refusal = replace(refusal, reason=refusal.reason[:MAX_TEXT])
        with suppress(GroupStoreFailed):  # it expires, then
            await self._write(_Record("", refusal))

    def _stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        kept = True
        while kept:
            await sleep(self._store.beat_s)
            with suppress(GroupStoreFailed):  # another server may take it over then
                kept = await self._write(_Record(self._store.holder))

    async def _write(self, record: _Record) -> bool:
        """Store the next record; return False if the lease is another server's by now."""
        if await self._store.put(self._fingerprint, self._number + 1, record):
            self._number += 1
            return True
        # That number may be our own: the store took a record before, and the answer was lost.
        known = await self._store.find(self._fingerprint)
        if known.lease is None or known.lease.holder != self._store.holder:
            return False
        self._number = known.number + 1
        return await self._store.put(self._fingerprint, self._number, record)


def _name(number: int) -> str:
    return f"lease/{number:08}"
