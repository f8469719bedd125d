"""Which models there are and which of them serve: the catalog, and how it is filled at start.

Control mode "none": everything is loaded once. A model that cannot be loaded is listed UNAVAILABLE with its reason and
the others serve. Single writer: the loop; loading itself runs in a thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from oriel_inference.backends import Backend, Session
from oriel_inference.batching.batcher import Batcher
from oriel_inference.errors import LoadFailed, ModelNotReady, UnknownModel
from oriel_inference.fitting import RequestFitter
from oriel_inference.model import ModelSpec, ModelState
from oriel_inference.repository.load import LoadedVersion, load_model
from oriel_inference.stores import ModelStore
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.metadata import ModelMetadata, describe
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = ["Catalog", "Entry", "ServingModel", "load_all"]

_log = logging.getLogger(__name__)


class ServingModel:
    """One version that serves. provider: the execution provider in use, as the runtime says."""

    __slots__ = ("batcher", "config", "fitter", "load_s", "provider", "sessions", "spec", "version")

    def __init__(
        self, spec: ModelSpec, config: pb.ModelConfig, batcher: Batcher, sessions: Sequence[Session], load_s: float
    ) -> None:
        self.spec = spec
        self.version = str(spec.version)
        self.config = config
        self.batcher = batcher
        self.sessions = sessions
        self.provider = sessions[0].provider
        self.fitter = RequestFitter(spec)
        self.load_s = load_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the repository index. version 0: the model as a whole. serving: only in state READY."""

    name: str
    version: int
    state: ModelState
    reason: str = ""
    serving: ServingModel | None = None


class Catalog:
    """Models by name and version. `loading` is true until the first load of everything has ended."""

    def __init__(self) -> None:
        self.loading = True
        self._entries: dict[str, dict[int, Entry]] = {}
        self._by_request: dict[tuple[str, str], ServingModel] = {}

    def publish(self, name: str, entries: Sequence[Entry]) -> None:
        """Replace everything known about `name`."""
        self._entries[name] = {entry.version: entry for entry in entries}
        self._by_request = {key: serving for key, serving in self._by_request.items() if key[0] != name}
        ready = sorted((e.version, e.serving) for e in entries if e.serving is not None)
        for version, serving in ready:
            self._by_request[name, str(version)] = serving
        if ready:
            self._by_request[name, ""] = ready[-1][1]

    def get(self, name: str, version: str = "") -> ServingModel:
        """The version asked for, the latest one by default. Raises UnknownModel or ModelNotReady."""
        found = self._by_request.get((name, version))
        if found is not None:
            return found
        entries = self._entries.get(name)
        if entries is None and self.loading:
            raise ModelNotReady("the models are being loaded; it is not known yet whether this one is among them")
        if entries is None:
            raise UnknownModel(f"unknown model: {quoted(name)} is not found")
        if not version:
            raise ModelNotReady(f"model {quoted(name)} has no version that is ready")
        if version.isdigit() and int(version[:18]) in entries:
            raise ModelNotReady(f"model {quoted(name)} version {version[:18]} is not ready")
        raise UnknownModel(f"unknown model: {quoted(name)} has no version {quoted(version)}")

    def metadata(self, serving: ServingModel) -> ModelMetadata:
        """What clients are told about a model."""
        versions = [str(v) for v, entry in sorted(self._entries[serving.spec.name].items()) if entry.serving]
        return describe(serving.config, versions)

    def index(self) -> list[Entry]:
        """Every model and version, sorted."""
        return [entry for _, entries in sorted(self._entries.items()) for _, entry in sorted(entries.items())]

    def serving(self) -> Iterator[ServingModel]:
        """Every version that serves, sorted."""
        return (entry.serving for entry in self.index() if entry.serving is not None)


async def load_all(
    catalog: Catalog,
    stores: Sequence[ModelStore],
    *,
    find_backend: Callable[[str], Backend],
    make_batcher: Callable[[LoadedVersion], Batcher],
    cores: int,
) -> None:
    """Load every model of every store into `catalog`, one after the other. Raises LoadFailed if a store is unreadable.

    A name that two stores have is refused in both: which one answers must not depend on their order.
    """
    owners: dict[str, list[ModelStore]] = {}
    for store in stores:
        for name in await asyncio.to_thread(store.models):
            owners.setdefault(name, []).append(store)
    for name in owners:
        catalog.publish(name, [Entry(name=name, version=0, state=ModelState.LOADING)])
    for name, holders in sorted(owners.items()):
        if len(holders) > 1:
            _unavailable(catalog, name, LoadFailed(f"model {name!r} is in more than one model repository"))
            continue
        began = time.monotonic()
        try:
            versions = await asyncio.to_thread(
                load_model, holders[0], name, find_backend=find_backend, cores=cores, models=len(owners)
            )
        except LoadFailed as failure:
            _unavailable(catalog, name, failure)
            continue
        except Exception:
            # One model's surprise must not keep the others from serving.
            _log.exception("model %s could not be loaded", name)
            _unavailable(catalog, name, LoadFailed("the model could not be loaded, the server's log says why"))
            continue
        seconds = time.monotonic() - began
        catalog.publish(name, [_entry(name, n, loaded, make_batcher, seconds) for n, loaded in versions.items()])
    catalog.loading = False


def _entry(
    name: str,
    version: int,
    loaded: LoadedVersion | LoadFailed,
    make_batcher: Callable[[LoadedVersion], Batcher],
    load_s: float,
) -> Entry:
    if isinstance(loaded, LoadFailed):
        _log.error("model %s version %d is unavailable: %s", name, version, loaded.reason)
        return Entry(name=name, version=version, state=ModelState.UNAVAILABLE, reason=loaded.reason)
    batcher = make_batcher(loaded)
    serving = ServingModel(loaded.spec, loaded.config, batcher, loaded.sessions, load_s)
    bounds = loaded.spec.bounds
    _log.info(
        "model %s version %d is ready on %s: %d instance(s) of %d thread(s), %s",
        name,
        version,
        serving.provider,
        loaded.spec.instances,
        loaded.units,
        f"batches of up to {bounds.max_rows} rows" if bounds else "no batching",
    )
    return Entry(name=name, version=version, state=ModelState.READY, serving=serving)


def _unavailable(catalog: Catalog, name: str, failure: LoadFailed) -> None:
    _log.error("model %s is unavailable: %s", name, failure.reason)
    catalog.publish(name, [Entry(name=name, version=0, state=ModelState.UNAVAILABLE, reason=failure.reason)])
