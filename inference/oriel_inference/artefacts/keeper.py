"""Brings compiled artefacts into service, and out of it, while the reference serves.

A version that is published serves by its reference: the model as its owner uploaded it. If its configuration asks for
an artefact, a task follows it: finds or builds the artefact of its fingerprint, copies it where nobody else writes and
compares every byte with its checksum, checks its outputs in a child process, opens it and swaps the sessions of the
batcher between two batches. The sessions of the reference stay open beside it. When the artefact fails with a request
that the reference can answer, the caller gets that answer, the sessions are swapped back, and the artefact is refused
from then on.

One artefact at a time is obtained, checked and opened in a server. No server waits for another one: servers that start
together may build the same artefact, each of them once. The first to publish it wins, by a rename in the folder and by
a conditional put in the store that they share, and later ones take it. Owner and single writer: the loop.
"""

import asyncio
import logging
from asyncio import sleep
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from oriel_inference.artefacts.folder import ArtefactDamaged, Manifest, Refusal
from oriel_inference.artefacts.group_store import GroupStoreFailed
from oriel_inference.artefacts.process import (
    ArtefactRefused,
    ChildProcesses,
    Wanted,
    build,
    check_copy,
    lacks_memory,
    private_copy,
)
from oriel_inference.artefacts.records import ArtefactCounts, ArtefactSettings, Followed, recorded
from oriel_inference.artefacts.session import CompiledSession
from oriel_inference.backends import Session
from oriel_inference.batching.batcher import Batcher
from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.errors import CompilerMissing, InferenceError, LoadFailed
from oriel_inference.repository.compiling import Compilation, Samples
from oriel_policies.artefacts.lifecycle import ArtefactLife, ArtefactState, RefusalKind, is_remembered

_log = logging.getLogger(__name__)

LEAVE_POLL_S = 0.02
RETIRE_S = 3600.0
MAX_TRIES = 3  # builds of an artefact that is damaged after each of them


class ArtefactKeeper:
    """The artefacts of one server.

    spawn: starts a task that ends with the server.
    from_thread: schedules a callback on the loop, from any thread.
    grow: counts further bytes of a version's memory on a device; returns False if there is no room.
    """

    def __init__(
        self,
        settings: ArtefactSettings,
        *,
        catalog: Catalog,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[Any]],
        from_thread: Callable[[Callable[[], None]], None],
        grow: Callable[[ServingModel, str, int], bool],
    ) -> None:
        self._folder = settings.folder
        self._sink = settings.sink
        self._store = settings.store
        self._catalog = catalog
        self._spawn = spawn
        self._from_thread = from_thread
        self._grow = grow
        self._turn = asyncio.Semaphore(1)
        self._children = ChildProcesses(settings.bounds)
        self._retiring = False
        self.counts = ArtefactCounts()

    def close(self) -> None:
        """End builds and checks under way."""
        self._children.close()

    def published(self, serving: ServingModel, compilation: Compilation) -> None:
        """Follow a new version."""
        serving.artefact = life = ArtefactLife(compilation.compiler.name)
        self._spawn(self._follow(Followed(serving, compilation, life)))
        if not self._retiring:
            self._retiring = True
            self._spawn(self._retire())

    # Bringing an artefact into service --------------------------------------------------------------------------

    async def _follow(self, one: Followed) -> None:
        async with self._turn:
            try:
                await self._bring(one)
            except ArtefactRefused as refused:
                await self._refuse(one, refused)
            except OSError as error:
                text = f"the artefact folder cannot be used: {error.strerror}"
                await self._refuse(one, ArtefactRefused(RefusalKind.NO_SPACE, text))
            except Exception:
                # An unexpected error in one artefact must not keep the others from serving; the reference serves.
                _log.exception("%s: its artefact could not be brought into service", one.shown)
                with suppress(ValueError):  # it serves, or the version has left
                    text = "it could not be brought into service, the server's log says why"
                    one.life.become(ArtefactState.ABSENT, text)
            await self._tidy()

    async def _bring(self, one: Followed) -> None:
        if one.retired:
            return
        refusal = await asyncio.to_thread(self._prepare, one)
        one.life.fingerprint = one.wanted.key.fingerprint
        if one.retired:
            return
        if refusal is not None:
            one.life.become(ArtefactState.REFUSED, refusal.reason)
            self.counts.count(one, "remembered")
            _log.warning("%s: %s", one.shown, one.life.text)
            return
        for _ in range(MAX_TRIES):
            obtained = await self._obtain(one)
            if obtained is None or one.retired or await self._enter(one, *obtained):
                return
        raise ArtefactRefused(
            RefusalKind.NO_SPACE, "artefacts are lost or damaged once written: find the process that does it"
        )

    def _prepare(self, one: Followed) -> Refusal | None:
        """Read the inputs of the fingerprint and of the check. Returns a remembered refusal, if it still holds.

        Raises ArtefactRefused and OSError.
        """
        if wrong := self._folder.open():
            raise ArtefactRefused(RefusalKind.NO_SPACE, wrong)
        try:
            one.wanted = Wanted.of(one.compilation, self._children.bounds)
        except CompilerMissing as missing:
            raise ArtefactRefused(RefusalKind.NOT_INSTALLED, missing.reason) from missing
        except LoadFailed as failure:
            raise ArtefactRefused(RefusalKind.CHANGED, failure.reason) from failure
        refusal = self._folder.refusal(one.wanted.key.fingerprint)
        return refusal if refusal is not None and refusal.conditions == one.wanted.conditions else None

    # Obtaining one: from the folder, from the store, or by a build ----------------------------------------------

    async def _obtain(self, one: Followed) -> tuple[Manifest, bool] | None:
        """Return the manifest of an artefact in the folder, and whether it was built and checked here just now.

        Returns None if the version left meanwhile. Raises ArtefactRefused and OSError.
        """
        if (found := await self._find(one)) is None and await self._fetch(one):
            found = await self._find(one)
        if one.retired:
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
        self._spawn(self._send(one))
        return built, True

    async def _find(self, one: Followed) -> Manifest | None:
        try:
            return await asyncio.to_thread(self._folder.find, one.life.fingerprint)
        except ArtefactDamaged as damaged:
            await self._discard(one, damaged)
            return None

    async def _discard(self, one: Followed, damaged: ArtefactDamaged) -> None:
        self.counts.count(one, "damaged")
        _log.warning("%s: a damaged artefact is removed: %s", one.shown, damaged)
        await asyncio.to_thread(self._folder.discard, one.life.fingerprint)

    async def _build(self, one: Followed) -> Manifest:
        one.life.become(ArtefactState.BUILDING)
        _log.info("%s: its artefact is being built by %s", one.shown, one.life.compiler)

        def built() -> None:
            if not one.retired:
                one.life.become(ArtefactState.CHECKING)

        def progress(phase: str) -> None:
            if phase == "checking":
                self._from_thread(built)

        with recorded(self._sink, one, "artefact build", "built"):
            manifest = await asyncio.to_thread(build, one.wanted, self._folder, self._children, progress)
        self.counts.count(one, "built")
        self.counts.build_s[one.life.compiler] += manifest.build_s
        return manifest

    async def _fetch(self, one: Followed) -> bool:
        if self._store is None:
            return False
        try:
            return await self._store.fetch(self._folder, one.life.fingerprint, self._children.bounds.seconds)
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
            return False

    async def _send(self, one: Followed) -> None:
        if self._store is None:
            return
        try:
            await self._store.send(self._folder, one.life.fingerprint)
        except GroupStoreFailed as failure:
            self._store_failed(one, failure)
        except OSError as error:
            _log.warning(
                "%s: its artefact is not sent to the artefact store, because it cannot be read: %s",
                one.shown,
                error.strerror,
            )

    def _store_failed(self, one: Followed, failure: GroupStoreFailed) -> None:
        self.counts.count(one, "store_failed")
        _log.warning("%s: the artefact store could not be used: %s", one.shown, failure)

    # Checking and opening an artefact ---------------------------------------------------------------------------

    async def _enter(self, one: Followed, manifest: Manifest, built: bool) -> bool:
        """Copy, check and open an artefact, and swap it in. built: True if this server has just built and checked it.

        Returns False if it was damaged and is to be built again. Raises ArtefactRefused and OSError.
        """
        life = one.life
        if life.state is not ArtefactState.CHECKING:
            life.become(ArtefactState.CHECKING)
        try:
            with recorded(self._sink, one, "artefact check", "opened"):
                opened = await asyncio.to_thread(self._open, one, manifest, built)
        except ArtefactDamaged as damaged:
            if not one.retired:
                life.become(ArtefactState.ABSENT, str(damaged))
            await self._discard(one, damaged)
            return False
        if not built:
            self.counts.count(one, "found")
        if one.retired:
            await asyncio.to_thread(_close, opened)
            return True
        life.become(ArtefactState.READY)
        # Only the sessions of one plan share what they hold.
        size_bytes = manifest.size_bytes * (1 if one.compilation.compiler.on_gpu else len(opened))
        device = one.compilation.device
        if not self._grow(one.serving, device, size_bytes):
            await asyncio.to_thread(_close, opened)
            text = f"there is no room in the memory budget of {device} for its {size_bytes} bytes beside the model"
            raise ArtefactRefused(RefusalKind.NO_SPACE, text)
        self._swap_in(one, opened, size_bytes)
        return True

    def _open(self, one: Followed, manifest: Manifest, checked: bool) -> list[Session]:
        """Return one session for each of the reference's; in a thread. Raises ArtefactDamaged and ArtefactRefused."""
        compilation, fingerprint = one.compilation, one.life.fingerprint
        opened: list[Session] = []
        self._folder.used(fingerprint)
        # The runtime has read or mapped what it needs when the copy is removed.
        with private_copy(self._folder, fingerprint, manifest) as copy:
            one.life.note = manifest.errors if checked else check_copy(one.wanted, copy, self._children)
            try:
                opened.extend(compilation.compiler.open(copy, compilation.place.options) for _ in one.reference)
                names = [output.name for output in compilation.spec.outputs]
                for session in opened:
                    self._warm(session, one.wanted.samples, names)
            except (LoadFailed, InferenceError) as error:
                _close(opened)
                kind = RefusalKind.NO_SPACE if lacks_memory(str(error)) else RefusalKind.NOT_OPENED
                raise ArtefactRefused(kind, str(error)) from error
        return opened

    @staticmethod
    def _warm(session: Session, samples: Samples, names: list[str]) -> None:
        """Run one sample, so that the first request does not pay for it. Some models refuse some samples."""
        for sample in samples:
            with suppress(InferenceError):
                session.run(sample, names)
                return

    def _swap_in(self, one: Followed, opened: list[Session], size_bytes: int) -> None:
        serving = one.serving
        batcher = serving.batcher
        assert isinstance(batcher, Batcher)  # only such a model has a compilation

        def note_failure(error: InferenceError) -> None:
            self._from_thread(lambda: self._roll_back(one, opened, size_bytes, error))

        sessions = [CompiledSession(*pair, note_failure) for pair in zip(opened, one.reference, strict=True)]
        batcher.swap(_for_slots(serving, sessions))
        serving.sessions = (*sessions, *one.reference)
        one.life.become(ArtefactState.SERVING)
        _log.info("%s is served by its artefact %s: %s", one.shown, one.life.fingerprint[:12], one.life.text)

    # Retiring artefacts -----------------------------------------------------------------------------------------

    def _roll_back(self, one: Followed, opened: list[Session], size_bytes: int, error: InferenceError) -> None:
        """Swap the reference in again: the artefact failed in a run that the reference could do."""
        serving, batcher = one.serving, one.serving.batcher
        if one.life.state is not ArtefactState.SERVING or not isinstance(batcher, Batcher):
            return
        runs = batcher.swap(_for_slots(serving, one.reference))
        serving.sessions = one.reference
        reason = f"it failed in service, where the model answers: {error.detail or error.message}"
        one.life.become(ArtefactState.REFUSED, reason)
        self.counts.rollbacks[serving.spec.name] += 1
        self.counts.count(one, RefusalKind.FAILED.value)
        _log.error("%s: rolled back to the model itself: %s", one.shown, one.life.text)
        self._grow(serving, one.compilation.device, -size_bytes)
        self._spawn(self._after_rollback(one, opened, runs, reason))

    async def _after_rollback(
        self, one: Followed, opened: list[Session], runs: Callable[[], bool], reason: str
    ) -> None:
        kind = RefusalKind.NO_SPACE if lacks_memory(reason) else RefusalKind.FAILED
        await self._remember(one, ArtefactRefused(kind, reason))
        while True:
            if not runs():
                break
            await sleep(LEAVE_POLL_S)
        await asyncio.to_thread(_close, opened)

    async def _refuse(self, one: Followed, refused: ArtefactRefused) -> None:
        self.counts.count(one, refused.kind.value)
        await self._remember(one, refused)
        if one.retired:
            return
        state = ArtefactState.REFUSED if is_remembered(refused.kind) else ArtefactState.ABSENT
        one.life.become(state, refused.reason)
        _log.warning("%s is served by the model itself: %s", one.shown, one.life.text)

    async def _remember(self, one: Followed, refused: ArtefactRefused) -> None:
        """Keep a refusal for later, and for servers with the same folder, unless its reason may pass."""
        if not is_remembered(refused.kind):
            return

        def keep() -> None:
            self._folder.remember(one.wanted.refusal(refused))
            self._folder.discard(one.life.fingerprint)

        try:
            await asyncio.to_thread(keep)
        except OSError as error:
            _log.warning("%s: cannot save that its artefact was refused: %s", one.shown, error.strerror)

    # The folder -------------------------------------------------------------------------------------------------

    def in_use(self) -> set[str]:
        """Return the fingerprints of this server's models, serving or not."""
        lives = [model.artefact for model in self._catalog.serving() if model.artefact is not None]
        return {life.fingerprint for life in lives if life.fingerprint}

    async def _retire(self) -> None:
        while True:
            await sleep(RETIRE_S)
            await self._tidy()

    async def _tidy(self) -> None:
        try:
            gone = await asyncio.to_thread(self._folder.retire, self.in_use())
            stored = await asyncio.to_thread(self._folder.stored)
        except OSError as error:
            _log.warning("the artefact folder cannot be read: %s", error.strerror)
            return
        self.counts.size_bytes = sum(each.size_bytes for each in stored)
        if gone:
            _log.info(
                "%d artefact(s) were removed from the folder: they were too old, or the folder too large", len(gone)
            )


def _for_slots(serving: ServingModel, sessions: "tuple[Session, ...] | list[CompiledSession]") -> list[Session]:
    return list(sessions) * (serving.spec.instances if serving.spec.by_demand else 1)


def _close(sessions: list[Session]) -> None:
    for session in sessions:
        session.close()
