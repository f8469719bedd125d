"""Finds or builds the artefact of one version, once for all servers of a group.

Servers of a group share a folder, an object store, or both. Of those that share a folder, one holds its lease and is
the only one that asks the store. It fetches the artefact from there, waits for the server that builds it, or takes the
lease of the store and builds. See `oriel_policies.artefacts.lease` and `oriel_inference.artefacts.group_store`. Owner
and single writer: the loop.
"""

import asyncio
import logging
import os
import socket
import time
from asyncio import sleep
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from uuid import uuid4

from oriel_inference.artefacts.folder import ArtefactDamaged, Manifest
from oriel_inference.artefacts.group_store import GroupStore, GroupStoreFailed, StoreLease
from oriel_inference.artefacts.process import ArtefactRefused, ChildProcesses, build, refusal_of
from oriel_inference.artefacts.records import ArtefactCounts, ArtefactSettings, Followed, record_span
from oriel_policies.artefacts.lease import LeaseRecord
from oriel_policies.artefacts.lifecycle import ArtefactEvent, ArtefactState
from oriel_policies.artefacts.refusals import Refusal, is_remembered, is_void

_log = logging.getLogger(__name__)

MAX_TRIES = 10


class ArtefactBuilder:
    """The builds of one server.

    turn: held while an artefact is built, checked or opened.
    spawn: starts a task that ends with the server. from_thread: schedules a callback on the loop, from any thread.
    beat_s: of the leases of the folder.
    """

    def __init__(
        self,
        settings: ArtefactSettings,
        *,
        children: ChildProcesses,
        turn: asyncio.Semaphore,
        counts: ArtefactCounts,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[Any]],
        from_thread: Callable[[Callable[[], None]], None],
        beat_s: float,
    ) -> None:
        self._folder = settings.folder
        self._bounds = settings.bounds
        self._sink = settings.sink
        self._store = settings.store
        self._children = children
        self._turn = turn
        self._counts = counts
        self._spawn = spawn
        self._from_thread = from_thread
        self._beat_s = beat_s
        self.holder = f"{socket.gethostname()[:64]}.{os.getpid()}.{uuid4().hex[:8]}"

    def find(self, one: Followed) -> Manifest | Refusal | ArtefactDamaged | None:
        """Return what the folder has for a version. Blocks; raises OSError."""
        fingerprint = one.key.fingerprint
        kept = self._folder.refusal(fingerprint)
        if kept is not None and not is_void(kept[2], one.under):
            return kept[2]
        try:
            return self._folder.find(fingerprint)
        except ArtefactDamaged as damaged:
            return damaged

    async def build(self, one: Followed) -> Manifest | None:
        """Build with the lease of the folder in hand, and give it back.

        Returns None if the folder has an artefact or a refusal without that, or if the version left meanwhile. Raises
        ArtefactRefused and OSError.
        """
        fingerprint, tries = one.key.fingerprint, 0
        ended = asyncio.Event()
        beating = asyncio.get_running_loop().create_task(self._beat(fingerprint, ended))
        try:
            while not one.left and await asyncio.to_thread(self.find, one) is None:
                lease = await self._wait(one, self._store, tries) if self._store is not None else None
                async with self._turn:
                    if one.left or await asyncio.to_thread(self.find, one) is not None:
                        break
                    if lease is None or await self._take(one, lease):
                        return await self._build_with(one, lease)
                tries += 1
            return None
        except ArtefactRefused as refused:
            await self.remember(one, refused)  # before another server gets the lease
            raise
        finally:
            ended.set()
            await asyncio.wait([beating])  # a renewal under way would bring the lease back
            with suppress(OSError):
                await asyncio.to_thread(self._folder.release, fingerprint, self.holder)

    async def remember(self, one: Followed, refused: ArtefactRefused) -> None:
        """Keep a refusal for the other servers and for later, unless its reason may pass."""
        if refused.kept or not is_remembered(refused.kind):
            return
        refused.kept = True

        def keep() -> None:
            self._folder.remember(one.key, refusal_of(refused, one.under), one.serving.spec.name)
            self._folder.discard(one.key.fingerprint)

        try:
            await asyncio.to_thread(keep)
        except OSError as error:
            _log.warning("%s: the refusal of its artefact cannot be kept: %s", one.shown, error.strerror)

    # The store --------------------------------------------------------------------------------------------------

    async def _wait(self, one: Followed, store: GroupStore, tries: int) -> StoreLease | None:
        """Bring what the store has into the folder, or return the lease with which a build begins there.

        Returns None as well if the store cannot be used, so that there is nothing in the folder. Raises OSError.

        tries: how often another server took the lease that was returned.
        """
        fingerprint = one.key.fingerprint

        def waits() -> None:
            if one.life.state is not ArtefactState.WAITING:
                one.life.happened(ArtefactEvent.OTHER_BUILDS)
                _log.info("%s: another server builds its artefact", one.shown)

        try:
            if tries == MAX_TRIES:
                raise GroupStoreFailed(f"it denied the lease {tries} times")
            if tries:
                await sleep(store.poll_s)
            found = await store.wait(
                self._folder,
                fingerprint,
                one.under,
                fetch_s=self._bounds.seconds,
                left=lambda: one.left,
                waits=waits,
            )
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
            return None
        if isinstance(found, Refusal):
            await asyncio.to_thread(self._folder.remember, one.key, found, one.serving.spec.name)
            return None
        return store.lease(fingerprint, found) if found is not None else None

    async def _take(self, one: Followed, lease: StoreLease) -> bool:
        """Return False if another server builds. One that cannot use the store builds, whoever else does."""
        try:
            return await lease.take(self._spawn)
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
            return True

    async def _send(self, one: Followed, store: GroupStore, lease: StoreLease | None) -> None:
        try:
            if lease is not None:
                await lease.send(self._folder)
            else:
                await store.send(self._folder, one.key.fingerprint)
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
        except OSError as error:
            _log.warning("%s: its artefact cannot be read to be sent: %s", one.shown, error.strerror)

    def _store_failed(self, one: Followed, failure: GroupStoreFailed) -> None:
        self._counts.count(one, "store_failed")
        _log.warning("%s: the store of artefacts is not used: %s", one.shown, failure)

    # Builds -----------------------------------------------------------------------------------------------------

    async def _build_with(self, one: Followed, lease: StoreLease | None) -> Manifest | None:
        """Build, in turn; return None if the version has left. What was built is sent to the store while it goes into
        service here.
        """
        if one.left:
            if lease is not None:
                self._spawn(lease.end())
            return None
        if one.life.state is ArtefactState.WAITING:
            one.life.happened(ArtefactEvent.LEASE_FREE)
        one.life.happened(ArtefactEvent.BUILD_BEGUN)
        _log.info("%s: its artefact is being built by %s", one.shown, one.life.compiler)
        try:
            built = await self._build(one)
        except Exception as error:  # a server that stops leaves its lease to expire
            if lease is not None:
                refusal = None
                if isinstance(error, ArtefactRefused) and is_remembered(error.kind):
                    refusal = refusal_of(error, one.under)
                self._spawn(lease.end(refusal))
            raise
        if self._store is not None:
            self._spawn(self._send(one, self._store, lease))
        return built

    async def _build(self, one: Followed) -> Manifest | None:
        began = time.monotonic()

        def progress(phase: str) -> None:
            if phase == "checking":
                self._from_thread(lambda: self._built(one))

        outcome = "stopped"
        try:
            manifest = await asyncio.to_thread(
                build,
                one.compilation,
                one.key,
                self._folder,
                self._bounds,
                one.samples,
                self._children,
                progress,
            )
            outcome = "built"
        except ArtefactRefused as refused:
            outcome = refused.kind.value
            raise
        finally:
            record_span(self._sink, one, "artefact build", began, outcome)
        self._counts.count(one, "built")
        seconds = self._counts.build_s
        seconds[one.life.compiler] = seconds.get(one.life.compiler, 0.0) + manifest.build_s
        found = await asyncio.to_thread(self.find, one)
        if not isinstance(found, Manifest) or found == manifest:
            return manifest
        if not one.left:  # `oriel engines pull`, which takes no lease, has published one meanwhile
            one.life.happened(ArtefactEvent.INTERRUPTED)
        return None

    @staticmethod
    def _built(one: Followed) -> None:
        if not one.left:
            one.life.happened(ArtefactEvent.BUILT)

    async def _beat(self, fingerprint: str, ended: asyncio.Event) -> None:
        beat = 0
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._beat_s)
                return
            beat += 1
            with suppress(OSError):  # another server may take the lease over then
                await asyncio.to_thread(self._folder.renew, fingerprint, LeaseRecord(self.holder, beat))
