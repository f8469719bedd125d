"""Loading one model of a store: its versions, each with open sessions. Blocks; call it from a thread."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from oriel_inference.backends import Backend, ConfiguredBackend, Session, lacks, usable_gpus
from oriel_inference.errors import ConfigInvalid, InferenceError, LoadFailed
from oriel_inference.model import EngineOptions, ModelSpec
from oriel_inference.repository.check import ModelCheck
from oriel_inference.repository.config import (
    CONFIG_FILE,
    MAX_FALLBACKS,
    fallback_versions,
    no_folder,
    parse,
    select_versions,
    validate,
)
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.engines import default_file, names_engine
from oriel_inference.repository.ensembles import as_ensemble, is_ensemble, part_names
from oriel_inference.repository.graphs import check_graph_specs, refuse_graphs
from oriel_inference.repository.instances import Place, field_of, places
from oriel_inference.repository.private import private_files
from oriel_inference.repository.python_model import check_python, instance_count, is_configured, open_first
from oriel_inference.repository.spec import build_spec, check_against_file, complete, fill_defaults, require_complete
from oriel_inference.repository.warmup import run_warmup
from oriel_inference.repository.zeros import row_of_zeros
from oriel_inference.stores import Fingerprint, ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = ["LoadedVersion", "load_model", "read_parts"]

_log = logging.getLogger(__name__)

WARM_UP_RUNS = 3
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """Ready to serve. units: threads of one run. run_s: how long a warm run of one row took, None if unknown.

    identity: what its files looked like; equal identities need no second load. tried: whether it was executed, with
    zeros or with the samples of its configuration.
    """

    spec: ModelSpec
    config: pb.ModelConfig
    sessions: tuple[Session, ...]
    units: int
    run_s: float | None
    identity: str = ""
    tried: bool = True

    def close(self) -> None:
        """For a version that shall not serve after all."""
        for session in self.sessions:
            session.close()


def load_model(
    store: ModelStore,
    model: str,
    *,
    find_backend: Callable[[str], Backend],
    cores: int,
    models: int,
    check: ModelCheck | None = None,
    override: pb.ModelConfig | None = None,
    have: Mapping[int, str] | None = None,
    defaults: LoadDefaults | None = None,
    taken: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[int, LoadedVersion | LoadFailed | None]:
    """Every version the policy selects -> loaded, why not, or None if it is loaded already.

    With the policy `latest`, one that cannot be loaded and does not serve is followed by the next older one, so that
    as many serve as were asked for if there are enough that work.

    cores, models: the machine's cores and how many models share them (versions that serve at once count each); they
    size the default number of threads. taken: entered for what is done once the files are here. check: tries each
    file elsewhere first. override: takes the place of the configuration file. have: version -> identity of what
    serves. defaults: the operator's. Raises LoadFailed if the model as a whole is unusable (its configuration, no
    versions) or if its files changed meanwhile. A failure carries the configuration as far as it was read.
    """
    file = f"{model}/{CONFIG_FILE}"
    before = store.fingerprint(model)
    if override is not None:
        config = pb.ModelConfig()
        config.CopyFrom(override)
    else:
        text = store.text(model, CONFIG_FILE)
        config = parse(text, file) if text is not None else pb.ModelConfig()
    try:
        return _load_versions(
            store,
            config,
            file,
            before,
            find_backend=find_backend,
            cores=cores,
            models=models,
            check=check,
            have=have or {},
            from_store=override is None,
            defaults=defaults or LoadDefaults(),
            taken=taken,
        )
    except LoadFailed as failure:
        failure.config = config
        raise


def _load_versions(
    store: ModelStore,
    config: pb.ModelConfig,
    file: str,
    before: Fingerprint,
    *,
    find_backend: Callable[[str], Backend],
    cores: int,
    models: int,
    check: ModelCheck | None,
    have: Mapping[int, str],
    from_store: bool,
    defaults: LoadDefaults,
    taken: Callable[[], AbstractContextManager[None]],
) -> dict[int, LoadedVersion | LoadFailed | None]:
    """from_store: whether the configuration is the store's, so that equal files need no second load."""
    model = file.partition("/")[0]
    available = store.versions(model)
    for warning in validate(config, model, file, _telling_files(store, config, file, available)):
        _log.warning("%s: %s", file, warning)
    versions, missing = select_versions(config, available, file)
    if missing:
        _log.warning("%s: version_policy.specific: %s", file, no_folder(missing))
    try:
        backend = None if is_ensemble(config) else find_backend(config.backend)
    except LoadFailed as failure:
        raise ConfigInvalid(file, "backend", failure.reason) from failure

    def unchanged() -> bool:
        return store.fingerprint(model) == before

    older = fallback_versions(config, available, versions)
    loaded: dict[int, LoadedVersion | LoadFailed | None] = {}
    for version in versions:  # grows while it is walked
        identity = f"{before.shared}.{before.versions.get(version, '')}" if from_store else ""
        if identity and have.get(version) == identity:
            loaded[version] = None
            continue
        copy = pb.ModelConfig()
        copy.CopyFrom(config)
        try:
            if backend is None:
                loaded[version] = _load_ensemble(store, copy, version, file, identity)
                continue
            loaded[version] = _load_version(
                store,
                backend,
                copy,
                version,
                file,
                cores=cores,
                models=models * len(versions),
                check=check,
                unchanged=unchanged,
                identity=identity,
                defaults=defaults,
                taken=taken,
            )
        except LoadFailed as failure:
            failure.config = copy
            loaded[version] = failure
            if older and version not in have:
                versions.append(older.pop(0))
    if not unchanged():
        for each in loaded.values():
            if isinstance(each, LoadedVersion):
                each.close()
        raise LoadFailed(f"the files of {model} changed while they were being loaded")
    return loaded


def _telling_files(store: ModelStore, config: pb.ModelConfig, file: str, available: Sequence[int]) -> Sequence[str]:
    """The names in the newest version's folder that tell which engine is meant.

    A folder that tells none (it is empty, or holds something else) must not take away the versions before it.
    """
    model = file.partition("/")[0]
    if not available:
        return ("model.onnx",)
    newest = store.files(model, available[-1])
    if names_engine(config, file, newest):
        return newest
    found = (store.files(model, version) for version in reversed(available[-1 - MAX_FALLBACKS : -1]))
    return next((names for names in found if names_engine(config, file, names)), newest)


def _load_ensemble(store: ModelStore, config: pb.ModelConfig, version: int, file: str, identity: str) -> LoadedVersion:
    """Nothing to open: what it is made of is judged when it is known what the models of its steps are."""
    fill_defaults(config)
    check_graph_specs(config, file)
    spec = build_spec(config, version, file, instances=1, labels=lambda name: _labels(store, config.name, name))
    return LoadedVersion(
        spec=as_ensemble(spec, config), config=config, sessions=(), units=0, run_s=None, identity=identity
    )


def _load_version(
    store: ModelStore,
    backend: Backend,
    config: pb.ModelConfig,
    version: int,
    file: str,
    *,
    cores: int,
    models: int,
    check: ModelCheck | None,
    unchanged: Callable[[], bool],
    identity: str,
    defaults: LoadDefaults,
    taken: Callable[[], AbstractContextManager[None]],
) -> LoadedVersion:
    if is_configured(backend):
        share = max(1, cores // max(instance_count(config), min(2, models)))
        options = EngineOptions(intra_op_threads=share)
        return _open_configured(store, backend, config, version, file, options, identity=identity, defaults=defaults)
    gpus = usable_gpus(backend)
    instances = len(places(config, file, threads=1, gpus=gpus))
    # A lone model gets all cores. Several share: a long batch of one must leave room for the others.
    share = max(1, cores // max(instances, min(2, models)))
    threads, inter_threads = defaults.intra_op_threads or share, defaults.inter_op_threads or 1
    found = places(config, file, threads=threads, gpus=gpus, inter_threads=inter_threads)
    refuse_graphs(config, file, [name for place in found for name, _ in place.options.providers])
    for place in found:
        for name, _ in place.options.providers:
            if lack := lacks(backend, name):
                raise ConfigInvalid(file, field_of(config, name), lack)
    # Looked at before anything is copied or opened.
    paths = {place.filename: store.artifact(config.name, version, place.filename) for place in found}
    with taken(), private_files(store, config.name, version, paths) as files:
        return _open_version(
            store,
            backend,
            config,
            version,
            file,
            found,
            files,
            check=check,
            unchanged=unchanged,
            identity=identity,
            defaults=defaults,
        )


def _open_version(
    store: ModelStore,
    backend: Backend,
    config: pb.ModelConfig,
    version: int,
    file: str,
    found: Sequence[Place],
    paths: Mapping[str, Path],
    *,
    check: ModelCheck | None,
    unchanged: Callable[[], bool],
    identity: str,
    defaults: LoadDefaults,
) -> LoadedVersion:
    instances = len(found)
    runs = True
    if check is not None:
        for place in _distinct(found):
            shown = f"{config.name}/{version}/{place.filename}"
            runs = check.check(paths[place.filename], shown, config.backend, place.options) and runs
        if not unchanged():
            raise LoadFailed(f"the files of {config.name} changed while they were being checked")
    first = backend.open(paths[found[0].filename], found[0].options)

    def settle() -> None:
        if config.model_transaction_policy.decoupled and not hasattr(first, "stream"):
            reason = f"backend {config.backend!r} gives exactly one response per request"
            raise ConfigInvalid(file, "model_transaction_policy.decoupled", reason)
        complete(config, first.inputs, first.outputs, file, defaults=defaults)
        check_against_file(config, first.inputs, first.outputs, file)

    loaded = _opened(
        store,
        config,
        version,
        file,
        first,
        (backend.open(paths[place.filename], place.options) for place in found[1:]),
        settle=settle,
        instances=instances,
        units=max(place.options.intra_op_threads for place in found),
        identity=identity,
    )
    return replace(loaded, run_s=_warm_up(first, loaded.spec)) if runs and not loaded.spec.decoupled else loaded


def _open_configured(
    store: ModelStore,
    backend: ConfiguredBackend,
    config: pb.ModelConfig,
    version: int,
    file: str,
    options: EngineOptions,
    *,
    identity: str,
    defaults: LoadDefaults,
) -> LoadedVersion:
    """Code is not tried elsewhere first: each of its instances is a process of its own anyway.

    Nor is it executed with zeros: what it does with them, and to whom, is not known.
    """
    require_complete(config, file, defaults)
    check_python(config, store, file)
    path = store.artifact(config.name, version, config.default_model_filename or default_file(config.backend))
    validated = partial(validate, model=config.name, file=file)
    first = open_first(backend, path, config, options, version, file, validated)
    loaded = _opened(
        store,
        config,
        version,
        file,
        first,
        (backend.open_next(path, config, options, version, index) for index in range(1, instance_count(config))),
        settle=lambda: fill_defaults(config),
        instances=instance_count(config),
        units=options.intra_op_threads,
        identity=identity,
    )
    return replace(loaded, tried=bool(config.model_warmup))


def _opened(
    store: ModelStore,
    config: pb.ModelConfig,
    version: int,
    file: str,
    first: Session,
    others: Iterable[Session],
    *,
    settle: Callable[[], None],
    instances: int,
    units: int,
    identity: str,
) -> LoadedVersion:
    """From the first instance to a version that is ready. settle: completes the configuration and judges it.

    others: opens the other instances, one after the other; instances: how many there are in all.
    Raises LoadFailed, and then every session is closed.
    """
    sessions = [first]
    try:
        settle()
        check_graph_specs(config, file)
        spec = build_spec(
            config, version, file, instances=instances, labels=lambda name: _labels(store, config.name, name)
        )
        sessions.extend(others)
        run_warmup(config, spec, sessions, file, read=lambda name: store.data(config.name, f"warmup/{name}"))
    except LoadFailed:
        for session in sessions:
            session.close()
        raise
    return LoadedVersion(spec=spec, config=config, sessions=tuple(sessions), units=units, run_s=None, identity=identity)


def _distinct(found: Sequence[Place]) -> list[Place]:
    """One place per file and set of providers: an instance like another needs no trial of its own."""
    return list({(p.filename, tuple(name for name, _ in p.options.providers)): p for p in reversed(found)}.values())


def read_parts(store: ModelStore, model: str, override: pb.ModelConfig | None) -> list[str]:
    """The models that `model` needs if it is an ensemble; what is wrong with it is for `load_model` to say."""
    try:
        text = store.text(model, CONFIG_FILE) if override is None else None
        config = override or (parse(text, CONFIG_FILE) if text is not None else pb.ModelConfig())
    except LoadFailed:
        return []
    return part_names(config)


def _labels(store: ModelStore, model: str, filename: str) -> Sequence[str]:
    text = store.text(model, filename)
    if text is None:
        raise LoadFailed(f"{model}/{filename}, named as label_filename, is missing")
    return text.splitlines()


def _warm_up(session: Session, spec: ModelSpec) -> float | None:
    """Run one row of zeros a few times: the first request must not pay for lazy set-up. Seconds of the last run."""
    inputs = row_of_zeros(session.inputs)
    names = [output.name for output in spec.outputs]
    began = time.monotonic()
    duration: float | None = None
    try:
        for _ in range(WARM_UP_RUNS):
            started = time.monotonic()
            session.run(inputs, names)
            ended = time.monotonic()
            duration = ended - started
            if ended - began > WARM_UP_S:
                break
    except InferenceError as error:
        # Zeros need not be valid values for a model.
        _log.debug("model %s: the warm-up failed: %s", spec.name, error)
        return None
    return duration
