"""Which models there are and which of them serve: the catalog. `control` fills it. Single writer: the loop."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from oriel_inference.backends import Session, takes_requests
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.errors import ModelNotReady, NoVersion, UnknownModel
from oriel_inference.fitting import RequestFitter
from oriel_inference.model import ModelSpec, ModelState, is_version
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.metadata import ModelMetadata, describe
from oriel_wire.v2.proto import model_config_pb2 as pb
from oriel_wire.v2.recognise import Templates

__all__ = ["UNLOADED", "UNTRIED", "Catalog", "Entry", "Fallback", "ServingModel"]

UNLOADED = "unloaded"  # the reason of versions that somebody took out of service


UNTRIED = "published untried: nothing has been executed yet, and no model_warmup is configured"


class ServingModel:
    """One version that serves. provider: the execution provider in use, as the runtime says.

    identity: what its files looked like when they were loaded, "" if they came with a request. recognises: whether
    `templates` may stand for the full decoder. takes_requests: its sessions take requests one by one. wants_source:
    they, or models of its steps, want to know what the client sent. holds: requests of ensembles that began with it
    and calls on their way to it; it does not close before these have come. Writers: the ensembles, `servers.gather`.
    """

    __slots__ = (
        "_answered_before",
        "_tried",
        "batcher",
        "config",
        "fitter",
        "holds",
        "identity",
        "load_s",
        "provider",
        "recognises",
        "sessions",
        "spec",
        "takes_requests",
        "templates",
        "version",
        "wants_source",
    )

    def __init__(
        self,
        spec: ModelSpec,
        config: pb.ModelConfig,
        batcher: Scheduler,
        sessions: Sequence[Session],
        load_s: float,
        identity: str = "",
        *,
        tried: bool = True,
    ) -> None:
        self._tried = tried
        self._answered_before = 0 if tried else batcher.statistics.success.count
        self.spec = spec
        self.version = str(spec.version)
        self.config = config
        self.batcher = batcher
        self.sessions = sessions
        self.provider = sessions[0].provider if sessions else ""
        self.takes_requests = bool(sessions) and takes_requests(sessions[0])
        self.wants_source = self.takes_requests or bool(spec.steps)
        self.fitter = RequestFitter(spec)
        self.load_s = load_s
        self.identity = identity
        self.holds = 0
        self.recognises = not spec.decoupled and not self.takes_requests
        self.templates = Templates()

    @property
    def untried(self) -> bool:
        """Whether it was published without having been executed, and no request has been answered since."""
        return not self._tried and self.batcher.statistics.success.count == self._answered_before

    def close(self) -> None:
        """Close the sessions, together; blocks. Nothing may run, unless they take requests one by one."""
        if self.takes_requests:
            with ThreadPoolExecutor(len(self.sessions)) as closers:
                list(closers.map(lambda session: session.close(), self.sessions))
            return
        for session in self.sessions:
            session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the repository index. version 0: the model as a whole. serving: only in state READY.

    reason: also of a READY version, if newer files of it were refused. needs: the model that an ensemble lacks.
    config: of a version that failed to load, as far as it was read.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    needs: str = ""
    serving: ServingModel | None = None
    config: pb.ModelConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """An older version of a model serves because the newest one cannot be loaded."""

    name: str
    serving: int
    newest: int

    @property
    def reason(self) -> str:
        """Says of the version that serves why it does."""
        return f"serves in place of version {self.newest}, which is unavailable"


class Catalog:
    """Models by name and version. `loading` is true until the first load of everything has ended.

    required: models without which a strict server is not ready. unseen: repositories of the start that could not be
    read yet. leaving: versions that take nothing new and finish
    what they have.
    """

    def __init__(self) -> None:
        self.loading = True
        self.required: set[str] = set()
        self.unseen: list[str] = []
        self.leaving: list[ServingModel] = []
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

    def remove(self, name: str) -> None:
        """Forget a model that has left its repository."""
        self.publish(name, ())
        del self._entries[name]

    def knows(self, name: str) -> bool:
        """Whether a model has that name, serving or not."""
        return name in self._entries

    def serves(self, name: str, version: int) -> bool:
        """Whether that version serves."""
        return (name, str(version)) in self._by_request

    def identities(self) -> set[str]:
        """What the files of everything that serves, or still finishes, looked like. Any thread may ask."""
        serving = [*tuple(self._by_request.values()), *tuple(self.leaving)]
        return {each.identity for each in serving if each.identity}

    def names(self) -> list[str]:
        """Every model known, sorted."""
        return sorted(self._entries)

    def entries(self, name: str) -> list[Entry]:
        """The versions of one model, sorted; empty if it is unknown."""
        return [entry for _, entry in sorted(self._entries.get(name, {}).items())]

    def missing(self) -> str:
        """A required model of which no version serves; empty if there is none."""
        return next((name for name in sorted(self.required) if not self.is_ready(name)), "")

    def serves_any(self) -> bool:
        """Whether any model serves, of the start or later."""
        return bool(self._by_request)

    def is_ready(self, name: str) -> bool:
        """Whether a version of it serves."""
        return (name, "") in self._by_request

    def get(self, name: str, version: str = "") -> ServingModel:
        """The version asked for, the latest one by default. Raises UnknownModel, NoVersion or ModelNotReady."""
        found = self._by_request.get((name, version))
        if found is not None:
            return found
        entries = self._entries.get(name)
        if entries is None and self.loading:
            raise ModelNotReady("the models are being loaded; it is not known yet whether this one is among them")
        if entries is None and self.unseen:
            raise ModelNotReady("a model repository could not be read yet; it is not known whether it has this model")
        if entries is None:
            raise UnknownModel(f"unknown model: {quoted(name)} is not found", asked=name, known=self._entries)
        if not version:
            needed = next((entry.needs for entry in entries.values() if entry.needs), "")
            states = [entry.state for entry in entries.values()]
            states += [ModelState.UNLOADING for each in self.leaving if each.spec.name == name]
            if not needed and all(state is ModelState.UNAVAILABLE for state in states):
                raise NoVersion(f"model {quoted(name)} has no available version: the repository index says why")
            lacks = f": it needs model {quoted(needed)}, which is not ready" if needed else ""
            raise ModelNotReady(f"model {quoted(name)} has no version that is ready{lacks}")
        if is_version(version) and int(version) in entries:
            raise ModelNotReady(f"model {quoted(name)} version {version[:18]} is not ready")
        raise UnknownModel(f"unknown model: {quoted(name)} has no version {quoted(version)}")

    def config(self, name: str, version: str = "") -> pb.ModelConfig:
        """The configuration of what `get` gives, or else of what failed to load. Raises as `get`."""
        try:
            return self.get(name, version).config
        except ModelNotReady:
            failed = [entry for entry in self.entries(name) if entry.config is not None]
            wanted = [entry for entry in failed if not version or entry.version == int(version)]
            if not wanted or wanted[-1].config is None:
                raise
            return wanted[-1].config

    def metadata(self, serving: ServingModel) -> ModelMetadata:
        """What clients are told about a model."""
        versions = [str(v) for v, entry in sorted(self._entries[serving.spec.name].items()) if entry.serving]
        return describe(serving.config, versions)

    def fallback(self, name: str) -> Fallback | None:
        """Whether an older version of a model serves because the newest one cannot be loaded."""
        entries = self.entries(name)
        ready = [entry.version for entry in entries if entry.serving is not None]
        if not ready or entries[-1].state is not ModelState.UNAVAILABLE:
            return None
        return Fallback(name=name, serving=ready[-1], newest=entries[-1].version)

    def fallbacks(self) -> list[Fallback]:
        """Every model of which an older version serves than the newest, sorted."""
        return [found for name in self.names() if (found := self.fallback(name)) is not None]

    def unavailable(self) -> list[str]:
        """Every model of which no version serves because one could not be loaded, sorted; unloaded ones are none."""
        return [
            name
            for name in self.names()
            if not self.is_ready(name)
            and any(e.state is ModelState.UNAVAILABLE and e.reason != UNLOADED for e in self._entries[name].values())
        ]

    def index(self) -> list[Entry]:
        """Every model and version, sorted; a version that is leaving has its line unless another took its place."""
        lines = {(entry.name, entry.version): entry for name in self.names() for entry in self.entries(name)}
        for found in self.fallbacks():
            entry = lines[found.name, found.serving]
            lines[found.name, found.serving] = replace(entry, reason=entry.reason or found.reason)
        for key, entry in lines.items():
            if entry.serving is not None and entry.serving.untried:
                reason = f"{entry.reason}; {UNTRIED}" if entry.reason else UNTRIED
                lines[key] = replace(entry, reason=reason)
        for each in self.leaving:
            key = (each.spec.name, each.spec.version)
            if key not in lines or lines[key].serving is None:
                lines[key] = Entry(name=key[0], version=key[1], state=ModelState.UNLOADING)
        return [entry for _, entry in sorted(lines.items())]

    def serving(self) -> Iterator[ServingModel]:
        """Every version that serves, sorted."""
        return (e.serving for name in self.names() for e in self.entries(name) if e.serving is not None)
