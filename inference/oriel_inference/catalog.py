"""The catalog: which models exist and which of them serve. `control` fills it. Single writer: the loop."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from operator import attrgetter

from oriel_inference.backends import RequestSession, Session
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.errors import InvalidRequest, ModelNotReady, NotLoaded, NoVersion, UnknownModel
from oriel_inference.fitting import RequestFitter, ScanFitter, scan_fitter
from oriel_inference.model import ModelSpec, ModelState, base_name, is_version
from oriel_inference.sequences.scheduler import SequenceScheduler
from oriel_policies.artefacts.lifecycle import ArtefactLife
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.metadata import ModelMetadata, describe
from oriel_wire.v2.proto import model_config_pb2 as pb
from oriel_wire.v2.recognise import Templates

UNLOADED = "unloaded"  # the reason of versions that were taken out of service on request
ON_DEMAND = "available on demand: it is loaded by the first call for it"

# Clients and gateways match on the beginning of the sentence, which is Triton's.
_UNKNOWN = "Request for unknown model:"
UNTRIED = "published untried: nothing has been executed yet, and no model_warmup is configured"


@dataclass(slots=True, eq=False, repr=False)
class ServingModel:
    """One version that serves.

    provider: the execution provider in use, as the runtime reports it.
    identity: a text of how its files looked when they were loaded, "" if they came with a request.
    recognises: True if `templates` may stand for the full decoder.
    takes_requests: its sessions take requests one by one.
    scans: checks its scans; None if it cannot be scanned.
    wants_source: they, models of its steps, or its sequences need the client's request.
    holds: calls of ensembles that began with it, and calls on their way to it; it does not close before these have
    ended. Writers: the ensembles and `servers.http_infer`.
    artefact: the life of its compiled artefact, if its configuration asks for one. sessions and artefact are written by
    whoever brings the artefact into service, on the loop.
    note: the index's text about it beside its state.
    sizes: device -> bytes that it occupies, as far as they are counted. Writer: the memory budget.
    """

    spec: ModelSpec
    config: pb.ModelConfig
    batcher: Scheduler
    sessions: Sequence[Session]
    load_s: float
    identity: str = ""
    _: KW_ONLY
    tried: InitVar[bool] = True
    note: str = ""
    _answered_before: int = field(init=False)
    version: str = field(init=False)
    provider: str = field(init=False)
    takes_requests: bool = field(init=False)
    wants_source: bool = field(init=False)
    recognises: bool = field(init=False)
    fitter: RequestFitter = field(init=False)
    scans: ScanFitter | None = field(init=False)
    holds: int = field(default=0, init=False)
    artefact: ArtefactLife | None = field(default=None, init=False)
    sizes: dict[str, int] = field(default_factory=dict, init=False)
    templates: Templates = field(default_factory=Templates, init=False)

    def __post_init__(self, tried: bool) -> None:
        spec, sessions = self.spec, self.sessions
        self._answered_before = -1 if tried else self.batcher.statistics.success.count
        self.version = str(spec.version)
        self.provider = sessions[0].provider if sessions else ""
        self.takes_requests = isinstance(next(iter(sessions), None), RequestSession)
        self.wants_source = self.takes_requests or bool(spec.steps) or spec.sequences is not None
        # The id makes the text of each sequence another one, and learning it costs more than it saves.
        self.recognises = not spec.decoupled and not self.takes_requests and spec.sequences is None
        self.fitter = RequestFitter(spec)
        self.scans = scan_fitter(spec, takes_requests=self.takes_requests)

    @property
    def is_leased(self) -> bool:
        """Return whether calls wait for it, run on it, or are on their way to it, or it holds states of sequences."""
        batcher = self.batcher
        holds = self.holds or (isinstance(batcher, SequenceScheduler) and batcher.table.holding)
        return bool(holds or batcher.pending or batcher.running)

    @property
    def untried(self) -> bool:
        """Return whether it was published without having been executed, and has not answered a request since."""
        return self.batcher.statistics.success.count == self._answered_before

    def close(self) -> None:
        """Close the sessions at the same time; blocks. Nothing may run, unless the sessions take requests one by
        one.
        """
        if self.takes_requests:
            with ThreadPoolExecutor(len(self.sessions)) as closers:
                list(closers.map(lambda session: session.close(), self.sessions))
            return
        for session in self.sessions:
            session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the repository index.

    version: 0 for the model as a whole.
    serving: set only in state READY.
    reason: why it cannot serve; also set for a READY version if newer files of it were refused.
    needs: the model that an ensemble lacks.
    config: the configuration of a version that failed to load, or is not loaded, as far as it was read.
    on_demand: True if it is not loaded and a call loads it.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    needs: str = ""
    serving: ServingModel | None = None
    config: pb.ModelConfig | None = None
    on_demand: bool = False

    @property
    def shown_version(self) -> str:
        """Return the version as clients see it; "" for the model as a whole."""
        return str(self.version) if self.version or self.serving is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """An older version of a model serves because the newest one cannot be loaded."""

    name: str
    serving: int
    newest: int

    @property
    def reason(self) -> str:
        """Return the text for the version that serves, with the reason why it does."""
        return f"serves in place of version {self.newest}, which is unavailable"


class Catalog:
    """Models by name and version.

    loading: true until the first load of all models has ended.
    required: models without which a strict server is not ready.
    unseen: repositories of the start that could not be read yet.
    leaving: versions that accept nothing new and finish their requests.
    on_demand: models that a call loads while they are not loaded. Writer: the control.
    """

    def __init__(self) -> None:
        self.loading = True
        self.required: set[str] = set()
        self.unseen: list[str] = []
        self.leaving: list[ServingModel] = []
        self.on_demand: set[str] = set()
        self._entries: dict[str, dict[int, Entry]] = {}
        self._by_request: dict[tuple[str, str], ServingModel] = {}

    def publish(self, name: str, entries: Sequence[Entry]) -> None:
        """Replace everything known about `name`."""
        before = self._entries.get(name, {})
        self._entries[name] = {entry.version: entry for entry in entries}
        ready = {str(e.version): e.serving for e in sorted(entries, key=attrgetter("version")) if e.serving is not None}
        if ready:
            ready[""] = [*ready.values()][-1]
        # Only this model's keys are touched: a start publishes every model several times. None is missing meanwhile.
        for version, serving in ready.items():
            self._by_request[name, version] = serving
        for version in {"", *map(str, before)} - ready.keys():
            self._by_request.pop((name, version), None)

    def remove(self, name: str) -> None:
        """Forget a model that has left its repository."""
        self.publish(name, ())
        del self._entries[name]

    def knows(self, name: str) -> bool:
        """Return whether a model has that name, serving or not."""
        return name in self._entries

    def serves(self, name: str, version: int | str) -> bool:
        """Return whether that version serves; "" for any."""
        return (name, str(version)) in self._by_request

    def identities(self) -> set[str]:
        """Return the identities of everything that serves or still finishes. Any thread may call this."""
        serving = [*tuple(self._by_request.values()), *tuple(self.leaving)]
        return {each.identity for each in serving if each.identity}

    def resolve(self, name: str) -> str:
        """Return the name of the model that an ensemble's step means: the one of its own repository, if there is
        one.
        """
        return name if name in self._entries else base_name(name)

    def names(self) -> list[str]:
        """Return the names of all known models, sorted."""
        return sorted(self._entries)

    def entries(self, name: str) -> list[Entry]:
        """Return the versions of one model, sorted; empty if it is unknown."""
        return [entry for _, entry in sorted(self._entries.get(name, {}).items())]

    def missing(self) -> str:
        """Return a required model of which no version serves; "" if there is none."""
        return next((name for name in sorted(self.required) if not self.is_ready(name)), "")

    def serves_any(self) -> bool:
        """Return whether any model serves, whether loaded at the start or later, or would be loaded by a call."""
        return bool(self._by_request or self.on_demand)

    def is_ready(self, name: str) -> bool:
        """Return whether a version of it serves."""
        return (name, "") in self._by_request

    def get(self, name: str, version: str = "") -> ServingModel:
        """Return a version, by default the latest one. Raises UnknownModel, NoVersion or ModelNotReady; NotLoaded if a
        call loads the model.
        """
        found = self._by_request.get((name, version))
        if found is not None:
            return found
        if name in self.on_demand and not self.is_ready(name):
            raise NotLoaded(name)
        entries = self._entries.get(name)
        if entries is None and self.loading:
            raise ModelNotReady("the models are being loaded; it is not known yet whether this one is among them")
        if entries is None and self.unseen:
            raise ModelNotReady("a model repository could not be read yet; it is not known whether it has this model")
        if entries is None and (same := [each for each in self._entries if base_name(each) == name]):
            raise InvalidRequest(
                f"There are {len(same)} identifiers of model {quoted(name)} in global map, model namespace must be "
                f"provided to resolve ambiguity. They are {', '.join(sorted(same)[:8])}"
            )
        if entries is None:
            raise UnknownModel(f"{_UNKNOWN} {quoted(name)} is not found", requested=name, known=self._entries)
        if not version:
            needed = next((entry.needs for entry in entries.values() if entry.needs), "")
            states = [entry.state for entry in entries.values()]
            states += [ModelState.UNLOADING for each in self.leaving if each.spec.name == name]
            if not needed and all(state is ModelState.UNAVAILABLE for state in states):
                raise NoVersion(f"{_UNKNOWN} {quoted(name)} has no available versions: the repository index says why")
            lacks = f": it needs model {quoted(needed)}, which is not ready" if needed else ""
            raise ModelNotReady(f"model {quoted(name)} has no version that is ready{lacks}")
        if not is_version(version):
            wanted = f"from specified version string {quoted(version)}, version should be an integral value > 0"
            raise InvalidRequest(f"failed to get model version {wanted}")
        if int(version) in entries:
            raise ModelNotReady(f"{_UNKNOWN} {quoted(name)} version {version} is not at ready state")
        raise UnknownModel(f"{_UNKNOWN} {quoted(name)} version {version} is not found")

    def config(self, name: str, version: str = "") -> pb.ModelConfig:
        """Return the configuration of the version that `get` returns, or else of one that failed to load. Raises as
        `get`.
        """
        try:
            return self.get(name, version).config
        except ModelNotReady:
            failed = [entry for entry in self.entries(name) if entry.config is not None]
            wanted = [entry for entry in failed if not version or entry.version == int(version)]
            if not wanted or wanted[-1].config is None:
                raise
            return wanted[-1].config

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Return the model metadata for clients. Raises as `get`, but describes a model that is not loaded if its
        configuration names its tensors.
        """
        try:
            serving = self.get(name, version)
        except NotLoaded:
            config = self.config(name, version)
            if not config.input or not config.output:
                raise
            return describe(config, [str(v) for v in sorted(self._entries[name]) if v])
        versions = [str(v) for v, entry in sorted(self._entries[name].items()) if entry.serving]
        return describe(serving.config, versions)

    def fallback(self, name: str) -> Fallback | None:
        """Return the fallback if an older version of a model serves because the newest one cannot be loaded."""
        entries = self.entries(name)
        ready = [entry.version for entry in entries if entry.serving is not None]
        if not ready or entries[-1].state is not ModelState.UNAVAILABLE:
            return None
        return Fallback(name=name, serving=ready[-1], newest=entries[-1].version)

    def fallbacks(self) -> list[Fallback]:
        """Return every model of which an older version than the newest serves, sorted."""
        return [found for name in self.names() if (found := self.fallback(name)) is not None]

    def unavailable(self) -> list[str]:
        """Return every model of which no version serves because one could not be loaded, sorted; unloaded models are
        left out.
        """
        return [
            name
            for name in self.names()
            if not self.is_ready(name)
            and any(
                e.state is ModelState.UNAVAILABLE and e.reason != UNLOADED and not e.on_demand
                for e in self._entries[name].values()
            )
        ]

    def index(self) -> list[Entry]:
        """Return every model and version, sorted; a version that is leaving has a line unless another one took its
        place.
        """
        lines = {(entry.name, entry.version): entry for name in self.names() for entry in self.entries(name)}
        for found in self.fallbacks():
            entry = lines[found.name, found.serving]
            lines[found.name, found.serving] = replace(entry, reason=entry.reason or found.reason)
        for key, entry in lines.items():
            if entry.serving is not None:
                artefact = entry.serving.artefact
                untried = UNTRIED if entry.serving.untried else ""
                remarks = (entry.serving.note, untried, artefact.text if artefact is not None else "")
                lines[key] = replace(entry, reason="; ".join(each for each in (entry.reason, *remarks) if each))
        for each in self.leaving:
            key = (each.spec.name, each.spec.version)
            if key not in lines or lines[key].serving is None:
                lines[key] = Entry(name=key[0], version=key[1], state=ModelState.UNLOADING)
        return [entry for _, entry in sorted(lines.items())]

    def serving(self) -> Iterator[ServingModel]:
        """Return every version that serves, sorted."""
        return (e.serving for name in self.names() for e in self.entries(name) if e.serving is not None)
