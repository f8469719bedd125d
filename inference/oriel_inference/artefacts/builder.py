"""Obtains the artefact of one version: from the folder, from the store that servers share, or by a build.

No server waits for another one. Servers that start together may build the same artefact, each of them once. The first
to publish it wins, by a rename in the folder and by a conditional put in the store, and later ones take it. Owner and
single writer: the loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from oriel_inference.artefacts.folder import ArtefactDamaged, Manifest
from oriel_inference.artefacts.group_store import GroupStore, GroupStoreFailed
from oriel_inference.artefacts.process import ArtefactRefused, ChildProcesses, build
from oriel_inference.artefacts.records import ArtefactCounts, ArtefactSettings, Followed, recorded
from oriel_policies.artefacts.lifecycle import ArtefactState

_log = logging.getLogger(__name__)


class ArtefactBuilder:
    """The builds of one server, one at a time.

    spawn: starts a task that ends with the server. from_thread: schedules a callback on the loop, from any thread.
    """

    def __init__(
        self,
        settings: ArtefactSettings,
        *,
        children: ChildProcesses,
        counts: ArtefactCounts,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[Any]],
        from_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self._folder = settings.folder
        self._sink = settings.sink
        self._store = settings.store
        self._children = children
        self._counts = counts
        self._spawn = spawn
        self._from_thread = from_thread

    async def obtain(self, one: Followed) -> tuple[Manifest, bool] | None:
        """Return the manifest of an artefact in the folder, and whether it was built and checked here just now.

        Returns None if the version left meanwhile. Raises ArtefactRefused and OSError.
        """
        found = await self._find(one)
        if found is None and self._store is not None and await self._fetch(one, self._store):
            found = await self._find(one)
        if one.left:
            return None
        if found is not None:
            return found, False
        try:
            built = await self._build(one)
        except ArtefactRefused:
            if (found := await self._find(one)) is not None:
                return found, False  # another server has built it meanwhile
            raise
        found = await self._find(one)
        if found is not None and found != built:
            return found, False  # another server, or `oriel engines`, was faster
        if self._store is not None:
            self._spawn(self._send(one, self._store))
        return built, True

    async def discard(self, one: Followed, damaged: ArtefactDamaged) -> None:
        """Remove an artefact from the folder."""
        self._counts.count(one, "damaged")
        _log.warning("%s: an artefact is removed: %s", one.shown, damaged)
        await asyncio.to_thread(self._folder.discard, one.life.fingerprint)

    async def _find(self, one: Followed) -> Manifest | None:
        try:
            return await asyncio.to_thread(self._folder.find, one.life.fingerprint)
        except ArtefactDamaged as damaged:
            await self.discard(one, damaged)
            return None

    async def _build(self, one: Followed) -> Manifest:
        one.life.become(ArtefactState.BUILDING)
        _log.info("%s: its artefact is being built by %s", one.shown, one.life.compiler)

        def progress(phase: str) -> None:
            if phase == "checking":
                self._from_thread(lambda: self._built(one))

        with recorded(self._sink, one, "artefact build", "built"):
            manifest = await asyncio.to_thread(build, one.wanted, self._folder, self._children, progress)
        self._counts.count(one, "built")
        seconds = self._counts.build_s
        seconds[one.life.compiler] = seconds.get(one.life.compiler, 0.0) + manifest.build_s
        return manifest

    @staticmethod
    def _built(one: Followed) -> None:
        if not one.left:
            one.life.become(ArtefactState.CHECKING)

    async def _fetch(self, one: Followed, store: GroupStore) -> bool:
        try:
            return await store.fetch(self._folder, one.life.fingerprint, self._children.bounds.seconds)
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
            return False

    async def _send(self, one: Followed, store: GroupStore) -> None:
        try:
            await store.send(self._folder, one.life.fingerprint)
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
        except OSError as error:
            _log.warning("%s: its artefact cannot be read to be sent: %s", one.shown, error.strerror)

    def _store_failed(self, one: Followed, failure: GroupStoreFailed) -> None:
        self._counts.count(one, "store_failed")
        _log.warning("%s: the store of artefacts is not used: %s", one.shown, failure)
