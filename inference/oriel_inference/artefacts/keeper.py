"""Brings compiled artefacts into service, and out of it, while the reference serves.

A version that is published serves by its reference: the model as its owner uploaded it. If its configuration asks for
an artefact, a task follows it: finds or builds the artefact of its fingerprint, copies it where nobody else writes and
compares every byte with its checksum, checks its outputs in a child process, opens it and swaps the sessions of the
batcher between two batches. The sessions of the reference stay open beside it. When the artefact fails with a request
that the reference can answer, the caller gets that answer, the sessions are swapped back, and the artefact is refused
from then on.

One artefact at a time is obtained, checked and opened in a server. Owner and single writer: the loop.
"""

import asyncio
import logging
from asyncio import sleep
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oriel_inference.artefacts.builder import ArtefactBuilder
from oriel_inference.artefacts.folder import ArtefactDamaged, Manifest, Refusal
from oriel_inference.artefacts.process import ArtefactRefused, ChildProcesses, Wanted, check_copy, lacks_memory
from oriel_inference.artefacts.records import ArtefactCounts, ArtefactSettings, Followed, recorded
from oriel_inference.artefacts.session import CompiledSession
from oriel_inference.backends import Session
from oriel_inference.backends.compilers import compiles_on_gpu
from oriel_inference.batching.batcher import Batcher
from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.errors import CompilerMissing, InferenceError, LoadFailed
from oriel_inference.repository.compiling import Compilation, Samples
from oriel_policies.artefacts.lifecycle import ArtefactLife, ArtefactState
from oriel_policies.artefacts.refusals import RefusalKind, is_remembered

_log = logging.getLogger(__name__)

LEAVE_POLL_S = 0.02
RETIRE_S = 3600.0
MAX_TRIES = 3  # of an artefact that is damaged whenever it was built


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
        self._catalog = catalog
        self._spawn = spawn
        self._from_thread = from_thread
        self._grow = grow
        self._turn = asyncio.Semaphore(1)
        self._children = ChildProcesses(settings.bounds)
        self._retiring = False
        self.counts = ArtefactCounts()
        self._builder = ArtefactBuilder(
            settings,
            children=self._children,
            counts=self.counts,
            spawn=spawn,
            from_thread=from_thread,
        )

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

    # Bringing one into service ----------------------------------------------------------------------------------

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
        if one.left:
            return
        refusal = await asyncio.to_thread(self._prepare, one)
        one.life.fingerprint = one.wanted.key.fingerprint
        if one.left:
            return
        if refusal is not None:
            one.life.become(ArtefactState.REFUSED, refusal.reason)
            self.counts.count(one, "remembered")
            _log.warning("%s: %s", one.shown, one.life.text)
            return
        for _ in range(MAX_TRIES):
            obtained = await self._builder.obtain(one)
            if obtained is None or one.left or await self._enter(one, *obtained):
                return
        raise ArtefactRefused(RefusalKind.NO_SPACE, "the artefact folder does not keep what is written to it")

    def _prepare(self, one: Followed) -> Refusal | None:
        """Read what the fingerprint and the check need. Returns the refusal that is remembered for it, if that holds.

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

    async def _enter(self, one: Followed, manifest: Manifest, built: bool) -> bool:
        """Copy, check and open an artefact, and swap it in. built: by this server just now, and checked.

        Returns False if it was damaged and is to be built again. Raises ArtefactRefused and OSError.
        """
        life = one.life
        if life.state is not ArtefactState.CHECKING:
            life.become(ArtefactState.CHECKING)
        try:
            with recorded(self._sink, one, "artefact check", "opened"):
                opened = await asyncio.to_thread(self._open, one, manifest, built)
        except ArtefactDamaged as damaged:
            if not one.left:
                life.become(ArtefactState.ABSENT, str(damaged))
            await self._builder.discard(one, damaged)
            return False
        if not built:
            self.counts.count(one, "found")
        if one.left:
            await asyncio.to_thread(_close, opened)
            return True
        life.become(ArtefactState.READY)
        # Only the sessions of one plan share what they hold.
        size_bytes = manifest.size_bytes * (1 if compiles_on_gpu(one.compilation.compiler) else len(opened))
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
        # The runtime has read or mapped what it needs when the copy is removed.
        with TemporaryDirectory(prefix="oriel-artefact-", ignore_cleanup_errors=True) as private:
            copy = Path(private)
            self._folder.copy(fingerprint, manifest, copy)
            self._folder.used(fingerprint)
            one.life.note = (
                manifest.errors if checked else check_copy(one.wanted, copy / manifest.entry, self._children)
            )
            try:
                opened.extend(
                    compilation.compiler.open(copy / manifest.entry, compilation.place.options) for _ in one.reference
                )
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

        def failed(error: InferenceError) -> None:
            self._from_thread(lambda: self._roll_back(one, opened, size_bytes, error))

        sessions = [CompiledSession(*pair, failed) for pair in zip(opened, one.reference, strict=True)]
        batcher.swap(_for_slots(serving, sessions))
        serving.sessions = (*sessions, *one.reference)
        one.life.become(ArtefactState.SERVING)
        _log.info("%s is served by its artefact %s: %s", one.shown, one.life.fingerprint[:12], one.life.text)

    # Out of service ---------------------------------------------------------------------------------------------

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
        if one.left:
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
            _log.warning("%s: the refusal of its artefact cannot be kept: %s", one.shown, error.strerror)

    # The folder -------------------------------------------------------------------------------------------------

    def in_use(self) -> set[str]:
        """Return the fingerprints of this server's models, serving or not."""
        return {life.fingerprint for life in self._lives() if life.fingerprint}

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
            _log.info("%d artefact(s) were removed from the folder, as too old or too much", len(gone))

    def _lives(self) -> Iterable[ArtefactLife]:
        return [model.artefact for model in self._catalog.serving() if model.artefact is not None]


def _for_slots(serving: ServingModel, sessions: "tuple[Session, ...] | list[CompiledSession]") -> list[Session]:
    return list(sessions) * (serving.spec.instances if serving.spec.by_demand else 1)


def _close(sessions: list[Session]) -> None:
    for session in sessions:
        session.close()
