"""Loads one model of a store: its versions, each with open sessions. Blocks, so call it from a thread."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

from oriel_inference.backends import Backend, CodeModel, ConfiguredBackend, RequestSession, Session
from oriel_inference.backends.hidden_tensors import first_shapes
from oriel_inference.batching.device import Device, Devices
from oriel_inference.batching.rate_limiter import RateLimiter
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import EngineOptions, InstanceLimit, ModelSpec
from oriel_inference.repository import forests, language_model, openvino
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.compiling import Compilation, CompileRequest, compiler_of, with_compiler
from oriel_inference.repository.config import (
    CONFIG_FILE,
    MAX_FALLBACKS,
    fallback_versions,
    instance_count,
    no_folder,
    read_config,
    select_versions,
    validate,
)
from oriel_inference.repository.cuda_graphs import capture_graphs, check_graph_specs, check_graphs
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.engines import default_file, names_engine
from oriel_inference.repository.ensembles import as_ensemble, is_ensemble
from oriel_inference.repository.instances import (
    Place,
    field_of,
    instances_by_demand,
    limits_of_processes,
    on_cpu_instead,
    on_one_thread,
    placements,
)
from oriel_inference.repository.onnx_files import operator_libraries
from oriel_inference.repository.outline import device_of
from oriel_inference.repository.plans import (
    ReserveModel,
    complete_batching,
    finds_tensorrt,
    opener,
    reference_file,
    unbounded,
    with_host_code,
    with_reference,
)
from oriel_inference.repository.python_model import check_python, judge_completed
from oriel_inference.repository.ragged import is_ragged, with_ragged
from oriel_inference.repository.sequences import INITIAL_STATES, with_sequences
from oriel_inference.repository.spec import build_spec, check_against_file, complete, fill_defaults, require_complete
from oriel_inference.repository.version_files import check_sums, private_files, read_reference
from oriel_inference.repository.warmup import run_warmup, time_warm_run
from oriel_inference.stores import Fingerprint, ModelStore
from oriel_policies.quality.reference import Reference
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loading:
    """The facts of one load of one model.

    store, model: the place where the model lies, and its name there.
    find_backend: returns the backend that a configuration names. Raises LoadFailed for a name it does not know.
    cores, models: the cores of the machine and how many models share them; they size the default number of threads.
    check: tries each model file in another process before it is opened here; None skips that.
    override: replaces the model's configuration file.
    have: version -> identity of the versions that serve already.
    defaults: the operator's values for what a configuration leaves out.
    devices: the server's, which count the time of first runs.
    slot: a context that is entered once the files of a version have been fetched, and left when it is loaded; it gives
    the seconds that it waited.
    reserve: called before a backend that knows how much memory it needs takes it.
    limiter: the rate limiter, if it is on.
    """

    store: ModelStore
    model: str
    _: KW_ONLY
    find_backend: Callable[[str], Backend]
    cores: int
    models: int
    check: CheckPool | None = None
    override: pb.ModelConfig | None = None
    have: Mapping[int, str] = field(default_factory=dict)
    defaults: LoadDefaults = LoadDefaults()
    devices: Devices = field(default_factory=Devices)
    slot: Callable[[], AbstractContextManager[float]] = lambda: nullcontext(0.0)
    reserve: ReserveModel = unbounded
    limiter: RateLimiter | None = None

    @property
    def file(self) -> str:
        """The configuration file, as errors and logs show it."""
        return f"{self.model}/{CONFIG_FILE}"

    def configuration(self) -> pb.ModelConfig:
        """A copy of the override, else the parsed file, which may be missing. Raises LoadFailed."""
        if self.override is not None:
            return _copy(self.override)
        return read_config(self.store, self.model, self.defaults.config_name)

    def labels(self, filename: str) -> Sequence[str]:
        """The lines of a label file. Raises LoadFailed if it is missing."""
        text = self.store.text(self.model, filename)
        if text is None:
            raise LoadFailed(f"{self.model}/{filename}, named as label_filename, is missing")
        return text.splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class _VersionLoading:
    """The facts of loading one version.

    config: the version's own copy of the configuration, which the load completes.
    identity: a text of how its files look now; "" if the configuration is not the store's.
    before: the fingerprint of the model when the load began.
    sharing: number of versions of all models that share the cores.
    """

    of: Loading
    version: int
    config: pb.ModelConfig
    identity: str
    before: Fingerprint
    sharing: int

    def threads(self, instances: int) -> int:
        """The default threads of one instance: all cores for a lone model, half of them at most beside others."""
        return max(1, self.of.cores // max(instances, min(2, self.sharing)))

    def unchanged(self) -> bool:
        """Returns whether the model's files look as they did when the load began."""
        return self.of.store.fingerprint(self.of.model) == self.before

    def spec(self, instances: int, limits: Sequence[InstanceLimit] = (), *, by_demand: bool = False) -> ModelSpec:
        """Builds the specification of the completed configuration. limits: one per session. Raises LoadFailed."""
        used = () if self.of.limiter is None else self.of.limiter.check(limits, self.of.file)
        check_graph_specs(self.config, self.of.file)
        spec = build_spec(self.config, self.version, self.of.file, instances=instances, labels=self.of.labels)
        found = with_ragged(replace(spec, by_demand=by_demand, limits=used), self.config)
        return with_sequences(found, self.config, self.of.file, read=self._initial_state)

    def _initial_state(self, name: str) -> bytes:
        return self.of.store.data(self.of.model, f"{INITIAL_STATES}/{name}")

    def warm_up(self, spec: ModelSpec, sessions: Sequence[Session], devices: Sequence[Device]) -> None:
        """Runs the samples of `model_warmup` on every session, each on its device. Raises LoadFailed."""
        of = self.of
        run_warmup(
            self.config,
            spec,
            sessions,
            of.file,
            read=lambda name: of.store.data(of.model, f"warmup/{name}"),
            on=devices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """A version that is ready to serve.

    sessions: each once, also if several instances are runs of one.
    units: threads of one run.
    run_s: seconds of a warm run of one row; None if unknown.
    identity: a text of how its files looked; a version with an equal identity needs no second load.
    tried: True if the model was executed, with zeros or with the samples of its configuration.
    devices: the device of each session.
    compilation: the way to make its artefact; None unless its configuration asks for one.
    reference: the samples that rows of it are compared with, if it has one.
    note: the index's text about it.
    load_s: seconds that its load took, the wait for a slot left out.
    """

    spec: ModelSpec
    config: pb.ModelConfig
    sessions: tuple[Session, ...]
    units: int
    run_s: float | None
    identity: str = ""
    tried: bool = True
    devices: tuple[Device, ...] = ()
    compilation: Compilation | None = None
    reference: Reference | None = None
    note: str = ""
    load_s: float = 0.0

    @property
    def placed(self) -> tuple[Device, ...]:
        """The device of each slot."""
        return self.devices * self.spec.instances if self.spec.by_demand else self.devices

    @property
    def slots(self) -> tuple[Session, ...]:
        """One session per instance: the only one of a model by demand stands for all of them."""
        return self.for_slots(self.sessions)

    def for_slots(self, sessions: tuple[Session, ...]) -> tuple[Session, ...]:
        """Other sessions, as many as `sessions`, for the slots of these."""
        return sessions * self.spec.instances if self.spec.by_demand else sessions

    def close(self) -> None:
        """Closes the sessions of a version that will not serve."""
        for session in self.sessions:
            session.close()


def load_model(loading: Loading) -> dict[int, LoadedVersion | LoadFailed | None]:
    """Loads every version that the policy selects; returns for each what was loaded, the error, or None if it serves
    already.

    With the policy `latest`, a version that cannot be loaded and does not serve is followed by the next older one, so
    that as many versions serve as the policy asks for, if enough of them work.

    Raises LoadFailed if the whole model is unusable (its configuration, no versions) or if its files changed during the
    load. The error carries the configuration as far as it was read.
    """
    before = loading.store.fingerprint(loading.model)
    config = loading.configuration()
    try:
        return _load_versions(loading, config, before)
    except LoadFailed as failure:
        failure.config = config
        raise


def _load_versions(
    loading: Loading, config: pb.ModelConfig, before: Fingerprint
) -> dict[int, LoadedVersion | LoadFailed | None]:
    store, model, file = loading.store, loading.model, loading.file
    available = store.versions(model)
    versions, warnings = choose_versions(loading, config, available)
    for warning in warnings:
        _log.warning("%s: %s", file, warning)
    check_sums(config, store, model, file)
    try:
        backend = None if is_ensemble(config) else loading.find_backend(config.backend)
    except LoadFailed as failure:
        raise ConfigInvalid(file, "backend", failure.reason) from failure
    older = fallback_versions(config, available, versions)
    loaded: dict[int, LoadedVersion | LoadFailed | None] = {}
    for version in versions:  # grows while it is walked
        identity = f"{before.shared}.{before.versions.get(version, '')}" if loading.override is None else ""
        if identity and loading.have.get(version) == identity:
            loaded[version] = None
            continue
        one = _VersionLoading(
            of=loading,
            version=version,
            config=_copy(config),
            identity=identity,
            before=before,
            sharing=loading.models * len(versions),
        )
        try:
            loaded[version] = _load_ensemble(one) if backend is None else _load_version(one, backend)
        except LoadFailed as failure:
            failure.config = one.config
            loaded[version] = failure
            if older and version not in loading.have:
                versions.append(older.pop(0))
    if store.fingerprint(model) != before:
        for each in loaded.values():
            if isinstance(each, LoadedVersion):
                each.close()
        raise LoadFailed(f"the files of {model} changed while they were being loaded")
    return loaded


def choose_versions(loading: Loading, config: pb.ModelConfig, available: Sequence[int]) -> tuple[list[int], list[str]]:
    """Validates a configuration, and completes it with what the names of the files say. Returns the versions to load,
    and one warning for each setting that has no effect. Raises LoadFailed.
    """
    warnings = validate(config, loading.model, loading.file, _files_naming_engine(loading, config, available))
    versions, missing = select_versions(config, available, loading.file)
    if loading.limiter is None and any(limit.needs or limit.priority > 1 for limit in limits_of_processes(config)):
        warnings.append("instance_group.rate_limiter has no effect here without --rate-limit=execution_count")
    return versions, [*warnings, *([f"version_policy.specific: {no_folder(missing)}"] if missing else [])]


def _files_naming_engine(loading: Loading, config: pb.ModelConfig, available: Sequence[int]) -> Sequence[str]:
    """Returns the file names of the newest version, from which the engine follows if the configuration names none.

    A folder from which no engine follows (it is empty, or holds something else) must not take the versions before it
    out of service: then the newest older folder that names an engine counts.
    """
    store, model, file = loading.store, loading.model, loading.file
    if not available:
        return ("model.onnx",)
    newest = store.files(model, available[-1])
    if names_engine(config, file, newest):
        return newest
    found = (store.files(model, version) for version in reversed(available[-1 - MAX_FALLBACKS : -1]))
    return next((names for names in found if names_engine(config, file, names)), newest)


def _load_ensemble(one: _VersionLoading) -> LoadedVersion:
    """Opens nothing. The models of its steps are checked when they are known."""
    compiler_of(one.config, one.of.file)
    fill_defaults(one.config)
    spec = as_ensemble(one.spec(instances=1), one.config)
    return LoadedVersion(spec=spec, config=one.config, sessions=(), units=0, run_s=None, identity=one.identity)


def _load_version(one: _VersionLoading, backend: Backend) -> LoadedVersion:
    began_s = time.monotonic()
    if isinstance(backend, ConfiguredBackend):
        with one.of.slot() as waited_s:
            loaded = _open_configured(one, backend)
        return replace(loaded, load_s=time.monotonic() - began_s - waited_s)
    config, file, defaults = one.config, one.of.file, one.of.defaults
    gpus, placed = backend.gpus(), config
    note = "" if gpus or defaults.require_accelerators else on_cpu_instead(config)
    if note:
        placed = _copy(config)
        del placed.optimization.execution_accelerators.gpu_execution_accelerator[:]
    instances = len(placements(placed, file, threads=1, gpus=gpus))
    threads, inter_threads = defaults.intra_op_threads or one.threads(instances), defaults.inter_op_threads or 1
    found = placements(placed, file, threads=threads, gpus=gpus, inter_threads=inter_threads)
    if config.backend == openvino.BACKEND:
        found = openvino.with_openvino(config, file, found, one.of.cores)
    elif config.backend == forests.BACKEND:
        found = forests.with_forest(config, file, found)
    if defaults.engine_host_code:
        found = with_host_code(found)
    if libraries := operator_libraries(config, file, defaults.custom_ops):
        found = [replace(place, options=replace(place.options, operators=libraries)) for place in found]
    found, wanted = with_compiler(config, file, found, backend.lacks)
    field = "sequence_batching" if config.HasField("sequence_batching") else "batch_input" if is_ragged(config) else ""
    if wanted is not None and field:
        reason = "does not go with a compiler: leave out the parameter or the accelerator that asks for one"
        raise ConfigInvalid(file, field, reason)
    if not check_graphs(config, file, found) and config.optimization.cuda.graphs and config.backend == "onnxruntime":
        _log.warning("%s: optimization.cuda has no effect, because no instance runs on a GPU", file)
    if note and wanted is not None and wanted.compiler.on_gpu and finds_tensorrt(one.of.find_backend):
        note = ""  # the model runs on the CPU until TensorRT has compiled it
    if note:
        _log.warning("%s: %s", file, note)
    for place in found:
        for name, _ in place.options.providers:
            if lack := backend.lacks(name):
                raise ConfigInvalid(file, field_of(config, name), lack)
    # Every file must exist before anything is copied or opened.
    store, model, version = one.of.store, one.of.model, one.version
    names = [*(place.filename for place in found), *filter(None, [reference_file(store, model, version, config)])]
    paths = {name: store.artifact(model, version, name) for name in names}
    if config.backend == "pytorch":
        from oriel_inference.repository.pytorch_model import with_program  # a server without such models never needs it

        found = with_program(config, file, store, found, paths)
    copied = nullcontext(paths) if backend.apart else private_files(store, model, version, paths)
    with one.of.slot() as waited_s, copied as files:
        loaded = _open_version(one, backend, found, files, wanted)
        brief = [] if defaults.intra_op_threads else on_one_thread(config, file, found, loaded.run_s)
        if brief:
            loaded.close()
            loaded = _open_version(one, backend, brief, files, wanted)
    note = note or openvino.runs_on(config)
    return replace(loaded, note=note, load_s=time.monotonic() - began_s - waited_s)


def _open_version(
    one: _VersionLoading,
    backend: Backend,
    found: Sequence[Place],
    paths: Mapping[str, Path],
    wanted: CompileRequest | None,
) -> LoadedVersion:
    config, file = one.config, one.of.file
    executed = True
    if (check := one.of.check) is not None and not backend.apart:
        for place in _distinct(found):
            path, shown = paths[place.filename], f"{one.of.model}/{one.version}/{place.filename}"
            runs = check.check(path, shown, config.backend, place.options, one.unchanged, first_shapes(config))
            executed = runs and executed
        if not one.unchanged():
            raise LoadFailed(f"the files of {one.of.model} changed while they were being checked")
    open_one = opener(backend, found, paths, partial(one.of.reserve, one.version))
    with _closed_on_failure() as sessions:
        first = open_one(found[0])
        sessions.append(first)
        if config.model_transaction_policy.decoupled and not isinstance(first, RequestSession):
            reason = f"backend {config.backend!r} returns exactly one response per request"
            raise ConfigInvalid(file, "model_transaction_policy.decoupled", reason)
        by_demand = instances_by_demand(config, found, one.of.cores)
        complete_batching(config, first, file)
        complete(config, first.inputs, first.outputs, file, defaults=one.of.defaults)
        if by_demand:
            config.instance_group[0].count = by_demand
        check_against_file(config, first.inputs, first.outputs, file)
        limits = [place.limit for place in found]
        spec = one.spec(by_demand or len(found), limits, by_demand=by_demand > 0)
        sessions.extend(open_one(place) for place in found[1:])
        if beside := reference_file(one.of.store, one.of.model, one.version, config):
            shown = f"{one.of.model}/{one.version}/{beside}"
            threads = one.of.defaults.intra_op_threads or one.threads(len(found))
            with_reference(
                sessions,
                paths[beside],
                shown,
                threads=threads,
                find_backend=one.of.find_backend,
                check=one.of.check,
            )
        capture_graphs(config, file, found, sessions)
        devices = [one.of.devices.find(device_of(place.options.providers)) for place in found]
        one.warm_up(spec, sessions, devices)
        return LoadedVersion(
            spec=spec,
            config=config,
            sessions=tuple(sessions),
            compilation=None if wanted is None else _compilation(one, spec, found[0], wanted),
            units=max(place.options.intra_op_threads for place in found),
            run_s=time_warm_run(sessions[0], spec, devices[0]) if executed and not spec.decoupled else None,
            identity=one.identity,
            devices=tuple(devices),
            reference=read_reference(one.of.store, one.of.model, one.version),
        )


def _open_configured(one: _VersionLoading, backend: ConfiguredBackend) -> LoadedVersion:
    """Opens a model that is code, or a language model, without a check in another process first: each of its instances
    is a process of its own. It is not executed with zeros either, because what code does with them is not known.
    """
    config, loading, version = one.config, one.of, one.version
    compiler_of(config, loading.file)
    options = EngineOptions(intra_op_threads=one.threads(instance_count(config)))
    if config.backend == language_model.BACKEND:
        options = language_model.complete_language(config, loading.store, version, loading.file, options)
    else:
        require_complete(config, loading.file, loading.defaults)
        check_python(config, loading.store, loading.file, sent=loading.override is not None)
    path = loading.store.artifact(loading.model, version, config.default_model_filename or default_file(config.backend))
    judge = partial(judge_completed, model=loading.model, file=loading.file)
    with _closed_on_failure() as sessions:
        code = CodeModel(path=path, config=config, options=options, version=version, judge=judge)
        sessions.extend(backend.open_all(code))
        spec = one.spec(len(sessions), limits_of_processes(config))
        devices = (loading.devices.host,) * len(sessions)  # the server does not know which devices its code uses
        one.warm_up(spec, sessions, devices)
        return LoadedVersion(
            spec=spec,
            config=config,
            sessions=tuple(sessions),
            devices=devices,
            units=options.intra_op_threads,
            run_s=None,
            identity=one.identity,
            tried=bool(config.model_warmup) or config.backend == language_model.BACKEND,
            reference=read_reference(loading.store, loading.model, version),
        )


def _compilation(one: _VersionLoading, spec: ModelSpec, place: Place, wanted: CompileRequest) -> Compilation:
    runs = spec.instances if spec.by_demand else 1
    options = replace(place.options, compiler_settings=wanted.settings, concurrent_runs=runs)
    return Compilation(
        compiler=wanted.compiler,
        store=one.of.store,
        model=one.of.model,
        version=one.version,
        files=one.before.versions.get(one.version, ""),
        place=replace(place, options=options),
        config=one.config,
        spec=spec,
        tolerance=wanted.tolerance,
    )


@contextmanager
def _closed_on_failure() -> Iterator[list[Session]]:
    """Gives a list for sessions; closes those in it if the block raises."""
    sessions: list[Session] = []
    try:
        yield sessions
    except BaseException:
        for session in sessions:
            session.close()
        raise


def _distinct(found: Sequence[Place]) -> list[Place]:
    """Returns one place per file and set of providers: equal instances need only one check."""
    return list({(p.filename, tuple(name for name, _ in p.options.providers)): p for p in reversed(found)}.values())


def _copy(config: pb.ModelConfig) -> pb.ModelConfig:
    copy = pb.ModelConfig()
    copy.CopyFrom(config)
    return copy
