"""Model control: what is loaded when, and how one set of versions takes the place of another.

Rules.
1. A version is loaded, checked and warmed before it is published; only then the one it replaces leaves. What leaves
   takes nothing new and finishes what it has.
2. What serves goes on serving when newer files of it are refused; the index names the reason.
3. Poll mode acts on a change when two looks in a row found the same: files that are still being copied are left alone.
   A repository that cannot be read changes nothing.
4. Loads happen one at a time, in a thread; everything else on the loop. A load that was begun is finished.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oriel_inference.backends import Backend
from oriel_inference.batching.batcher import Batcher
from oriel_inference.errors import ControlRefused, InferenceError, LoadFailed, LoadRefused, ServerStopping, UnknownModel
from oriel_inference.lifecycle import Catalog, Entry, ServingModel
from oriel_inference.model import ModelState
from oriel_inference.repository.check import CheckProcess
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.load import LoadedVersion, load_model
from oriel_inference.stores import Fingerprint, ModelStore
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = ["ModelControl"]

_log = logging.getLogger(__name__)

OUTAGE_POLL_S = 10.0
CHECK_IDLE_S = 3.0
LEAVE_POLL_S = 0.02

# A model's stores and what its files look like in them; None: in no store.
_Look = tuple[tuple[Fingerprint, ...], tuple[ModelStore, ...]] | None
_Versions = Mapping[int, LoadedVersion | LoadFailed | None]


class ModelControl:
    """mode: "none", "poll" or "explicit". leave_s: how long a version that leaves may take to finish its requests."""

    def __init__(
        self,
        catalog: Catalog,
        stores: Sequence[ModelStore],
        *,
        mode: str,
        poll_s: float,
        find_backend: Callable[[str], Backend],
        make_batcher: Callable[[LoadedVersion], Batcher],
        cores: int,
        leave_s: float,
        check: CheckProcess | None,
        defaults: LoadDefaults | None = None,
    ) -> None:
        self._catalog = catalog
        self._stores = stores
        self._mode = mode
        self._poll_s = poll_s
        self._find_backend = find_backend
        self._make_batcher = make_batcher
        self._cores = cores
        self._leave_s = leave_s
        self._check = check
        self._defaults = defaults
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._applied: dict[str, _Look] = {}
        self._seen: dict[str, _Look] = {}
        self._outage = False
        self._last_load = 0.0

    # Start and stop ---------------------------------------------------------------------------------------------

    async def start(self, load_models: Sequence[str] = ()) -> None:
        """Load what the mode says, then follow the repository in poll mode. Raises LoadFailed if it is unreadable."""
        looks = await asyncio.to_thread(self._survey)
        wanted = sorted(looks)
        if self._mode == "explicit":
            wanted = sorted(looks if "*" in load_models else set(load_models))
        self._catalog.required = set(wanted)
        for name in wanted:
            self._catalog.publish(name, [Entry(name=name, version=0, state=ModelState.LOADING)])
        for name in wanted:
            await self._apply(name, looks.get(name), models=len(wanted))
            self._applied[name] = looks.get(name)
        if self._check is not None:
            await asyncio.to_thread(self._check.end)
        self._catalog.loading = False
        if self._mode == "poll":
            self.spawn(self._watch())

    async def close(self) -> None:
        """End what is under way; nothing is loaded afterwards. What serves is left to the caller."""
        self._closed = True
        if self._check is not None:
            self._check.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._check is not None:
            await asyncio.to_thread(self._check.end)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that ends with this object."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        # A refusal is its caller's, who may have left.
        if error is not None and not isinstance(error, InferenceError):
            _log.error("model control failed unexpectedly", exc_info=error)

    # What clients ask for ---------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[Entry | str]:
        """The catalog's entries, and the names of models that lie in a repository and were never loaded."""
        entries: list[Entry | str] = [
            entry for entry in self._catalog.index() if not ready or entry.state is ModelState.READY
        ]
        if self._mode == "explicit" and not ready:
            known = set(self._catalog.names())
            try:
                names = await asyncio.to_thread(lambda: {n for store in self._stores for n in store.models()})
            except LoadFailed as failure:
                _log.warning("the model repository cannot be listed: %s", failure.reason)
                names = set()
            entries.extend(sorted(names - known))
        return entries

    async def load(
        self, name: str, *, config: pb.ModelConfig | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model. config: instead of its file. files: `<version>/<path>` -> bytes, instead of its
        version folders. Goes on if the caller is cancelled. Raises InferenceError.
        """
        self._permit("load")
        await asyncio.shield(self.spawn(self._load(name, config, files or {})))

    async def unload(self, name: str) -> None:
        """Take a model out of service; its requests in flight finish afterwards. Raises InferenceError."""
        self._permit("unload")
        async with self._loading:
            entries = self._catalog.entries(name)
            if not entries:
                raise UnknownModel(f"unknown model: {quoted(name)} is not loaded")
            self._catalog.required.discard(name)
            self._applied.pop(name, None)
            gone = [
                Entry(name=name, version=e.version, state=ModelState.UNAVAILABLE, reason="unloaded") for e in entries
            ]
            self._catalog.publish(name, gone)
            self._leave(entry.serving for entry in entries)
            _log.info("model %s is unloaded", name)

    def _permit(self, what: str) -> None:
        if self._closed:
            raise ServerStopping
        if self._mode != "explicit":
            raise ControlRefused(f"explicit model load / unload is not allowed: --model-control-mode is {self._mode}")

    async def _load(self, name: str, config: pb.ModelConfig | None, files: Mapping[str, bytes]) -> None:
        if files:
            folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="oriel-upload-"))
            try:
                try:
                    await asyncio.to_thread(_write, folder / name, files)
                except LoadFailed as failure:
                    raise LoadRefused(f"failed to load {quoted(name)}: {failure.reason}") from failure
                failure_text = await self._load_from(name, (LocalStore(folder),), config)
            finally:
                # The runtime has read or mapped what it needs.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        else:
            try:
                look = (await asyncio.to_thread(self._survey, name)).get(name)
            except LoadFailed as failure:
                raise LoadRefused(f"failed to load {quoted(name)}: {failure.reason}") from failure
            if look is None:
                raise UnknownModel(f"failed to load {quoted(name)}: no model repository has it")
            failure_text = await self._load_from(name, look[1], config)
        if failure_text:
            raise LoadRefused(f"failed to load {quoted(name)}: {failure_text}")

    async def _load_from(self, name: str, stores: Sequence[ModelStore], config: pb.ModelConfig | None) -> str:
        return await self._replace(name, stores, models=len({name, *self._catalog.names()}), override=config)

    # Following the repository -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        delay_s = self._poll_s
        while True:
            await asyncio.sleep(delay_s)
            try:
                delay_s = await self._poll()
            except Exception:
                # A surprise in one look must not end the looking.
                _log.exception("looking at the model repository failed")
                delay_s = max(self._poll_s, OUTAGE_POLL_S)

    async def _poll(self) -> float:
        """One look; seconds until the next."""
        try:
            looks = await asyncio.to_thread(self._survey)
        except LoadFailed as failure:
            if not self._outage:
                _log.error("the model repository cannot be read, what is loaded goes on serving: %s", failure.reason)
            self._outage = True
            return max(self._poll_s, OUTAGE_POLL_S)
        if self._outage:
            _log.info("the model repository can be read again")
        self._outage = False
        for name in sorted(looks.keys() | self._applied.keys()):
            look = looks.get(name)
            if name in self._applied and look == self._applied[name]:
                self._seen.pop(name, None)
            elif name not in self._seen or self._seen[name] != look:
                self._seen[name] = look
            else:
                del self._seen[name]
                await self._apply(name, look, models=len(looks))
                if look is None:
                    self._applied.pop(name, None)
                else:
                    self._applied[name] = look
        return self._poll_s

    def _survey(self, only: str = "") -> dict[str, _Look]:
        """Every model of every store. Blocks. Raises LoadFailed."""
        found: dict[str, list[ModelStore]] = {}
        for store in self._stores:
            for name in store.models():
                if only in ("", name):
                    found.setdefault(name, []).append(store)
        return {name: (tuple(s.fingerprint(name) for s in stores), tuple(stores)) for name, stores in found.items()}

    async def _apply(self, name: str, look: _Look, *, models: int) -> None:
        """Make what serves follow what the repository holds."""
        if look is None and self._catalog.loading:
            self._refuse(name, "no model repository has it")
        elif look is None:
            async with self._loading:
                entries = self._catalog.entries(name)
                self._catalog.required.discard(name)
                if entries:
                    self._catalog.remove(name)
                self._leave(entry.serving for entry in entries)
                _log.info("model %s has left its repository", name)
        else:
            await self._replace(name, look[1], models=models)

    # Loading ----------------------------------------------------------------------------------------------------

    async def _replace(
        self, name: str, stores: Sequence[ModelStore], *, models: int, override: pb.ModelConfig | None = None
    ) -> str:
        """Load `name` and publish the outcome. Returns why (part of) it was refused, empty if all went well."""
        async with self._loading:
            if len(stores) > 1:
                # Which one answers must not depend on their order.
                return self._refuse(name, f"model {name!r} is in more than one model repository")
            old = {e.version: e.serving for e in self._catalog.entries(name) if e.serving is not None}
            if not self._catalog.entries(name):
                self._catalog.publish(name, [Entry(name=name, version=0, state=ModelState.LOADING)])
            have = {version: serving.identity for version, serving in old.items() if override is None}
            began = time.monotonic()
            try:
                versions = await asyncio.to_thread(
                    load_model,
                    stores[0],
                    name,
                    find_backend=self._find_backend,
                    cores=self._cores,
                    models=models,
                    check=self._check,
                    override=override,
                    have=have,
                    defaults=self._defaults,
                )
            except LoadFailed as failure:
                return self._refuse(name, failure.reason)
            except Exception:
                # One model's surprise must not keep the others from serving.
                _log.exception("model %s could not be loaded", name)
                return self._refuse(name, "the model could not be loaded, the server's log says why")
            finally:
                self._end_check_later()
            return self._publish(name, versions, old, time.monotonic() - began)

    def _publish(self, name: str, versions: _Versions, old: Mapping[int, ServingModel], load_s: float) -> str:
        entries: dict[int, Entry] = {}
        reasons: list[str] = []
        for version, loaded in versions.items():
            if isinstance(loaded, LoadedVersion):
                entries[version] = self._ready(loaded, load_s)
            elif loaded is None:
                entries[version] = Entry(name=name, version=version, state=ModelState.READY, serving=old[version])
            else:
                reasons.append(loaded.reason)
                entries[version] = _refused(name, version, loaded.reason, old.get(version))
        if reasons:
            # Something was refused: the versions that would have made room for it stay.
            for version, serving in old.items():
                if version not in entries:
                    entries[version] = Entry(name=name, version=version, state=ModelState.READY, serving=serving)
        self._catalog.publish(name, list(entries.values()))
        kept = {id(entry.serving) for entry in entries.values()}
        self._leave(serving for serving in old.values() if id(serving) not in kept)
        return "; ".join(reasons)

    def _refuse(self, name: str, reason: str) -> str:
        """The model as a whole cannot be (re)loaded: what serves goes on."""
        ready = [e for e in self._catalog.entries(name) if e.serving is not None]
        entries = [_refused(name, entry.version, reason, entry.serving) for entry in ready]
        self._catalog.publish(name, entries or [_refused(name, 0, reason, None)])
        return reason

    def _ready(self, loaded: LoadedVersion, load_s: float) -> Entry:
        serving = ServingModel(
            loaded.spec, loaded.config, self._make_batcher(loaded), loaded.sessions, load_s, loaded.identity
        )
        bounds = loaded.spec.bounds
        _log.info(
            "model %s version %s is ready on %s: %d instance(s) of %d thread(s), %s",
            loaded.spec.name,
            serving.version,
            serving.provider,
            loaded.spec.instances,
            loaded.units,
            f"batches of up to {bounds.max_rows} rows" if bounds else "no batching",
        )
        return Entry(name=loaded.spec.name, version=loaded.spec.version, state=ModelState.READY, serving=serving)

    def _end_check_later(self) -> None:
        self._last_load = time.monotonic()
        if self._check is not None and not self._catalog.loading and not self._closed:
            self.spawn(self._end_check(self._check, self._last_load))

    async def _end_check(self, check: CheckProcess, since: float) -> None:
        await asyncio.sleep(CHECK_IDLE_S)
        if self._last_load == since:
            await asyncio.to_thread(check.end)

    # Leaving ----------------------------------------------------------------------------------------------------

    def _leave(self, servings: Iterable[ServingModel | None]) -> None:
        for serving in servings:
            if serving is not None:
                self._catalog.leaving.append(serving)
                self.spawn(self._finish(serving))

    async def _finish(self, serving: ServingModel) -> None:
        """Close a version when its last request has ended. A batch that hangs keeps its session."""
        batcher = serving.batcher
        ends = time.monotonic() + self._leave_s
        while True:
            if not (batcher.pending or batcher.running) or time.monotonic() >= ends:
                break
            await asyncio.sleep(LEAVE_POLL_S)
        batcher.close()
        if not batcher.running:
            for session in serving.sessions:
                session.close()
        self._catalog.leaving.remove(serving)
        _log.info("model %s version %s has left", serving.spec.name, serving.version)


def _refused(name: str, version: int, reason: str, serving: ServingModel | None) -> Entry:
    _log.error("model %s%s: %s", name, f" version {version}" if version else "", reason)
    if serving is None:
        return Entry(name=name, version=version, state=ModelState.UNAVAILABLE, reason=reason)
    kept = f"the files it was loaded from still serve, newer ones were refused: {reason}"
    return Entry(name=name, version=version, state=ModelState.READY, reason=kept, serving=serving)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Files a client sent with its load. Raises LoadFailed for a name that is not `<version>/<path>`."""
    for name, data in files.items():
        parts = name.split("/")
        inside = all(part not in ("", ".", "..") and "\0" not in part and len(part) <= 255 for part in parts)
        if not inside or not 2 <= len(parts) <= 16 or not parts[0].isdigit():
            raise LoadFailed(f"file {name[:100]!r} is not named <version>/<path>")
        path = folder.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise LoadFailed(f"file {name[:100]!r} cannot be written: {error.strerror}") from error
