"""Loading one model of a store: its versions, each with open sessions. Blocks; call it from a thread."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oriel_inference.backends import Backend, Session
from oriel_inference.errors import ConfigInvalid, InferenceError, LoadFailed
from oriel_inference.model import ModelSpec
from oriel_inference.repository.check import ModelCheck
from oriel_inference.repository.config import CONFIG_FILE, parse, select_versions, validate
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.spec import build_spec, check_against_file, complete, engine_options, instance_count
from oriel_inference.repository.warmup import run_warmup
from oriel_inference.repository.zeros import zeros
from oriel_inference.stores import ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = ["LoadedVersion", "load_model"]

_log = logging.getLogger(__name__)

DEFAULT_FILE = "model.onnx"
WARM_UP_RUNS = 3
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """Ready to serve. units: threads of one run. run_s: how long a warm run of one row took, None if unknown.

    identity: what its files looked like; equal identities need no second load.
    """

    spec: ModelSpec
    config: pb.ModelConfig
    sessions: tuple[Session, ...]
    units: int
    run_s: float | None
    identity: str = ""

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
) -> dict[int, LoadedVersion | LoadFailed | None]:
    """Every version the policy selects -> loaded, why not, or None if it is loaded already.

    cores, models: the machine's cores and how many models share them; they size the default number of threads.
    check: tries each file elsewhere first. override: takes the place of the configuration file. have: version ->
    identity of what serves. defaults: the operator's. Raises LoadFailed if the model as a whole is unusable (its
    configuration, no versions) or if its files changed meanwhile.
    """
    file = f"{model}/{CONFIG_FILE}"
    before = store.fingerprint(model)
    if override is not None:
        config = pb.ModelConfig()
        config.CopyFrom(override)
    else:
        text = store.text(model, CONFIG_FILE)
        config = parse(text, file) if text is not None else pb.ModelConfig()
    for warning in validate(config, model, file):
        _log.warning("%s: %s", file, warning)
    defaults = defaults or LoadDefaults()
    versions = select_versions(config, store.versions(model), file)
    backend = find_backend(config.backend)
    loaded: dict[int, LoadedVersion | LoadFailed | None] = {}
    for version in versions:
        identity = f"{before.shared}.{before.versions.get(version, '')}" if override is None else ""
        if identity and (have or {}).get(version) == identity:
            loaded[version] = None
            continue
        copy = pb.ModelConfig()
        copy.CopyFrom(config)
        try:
            loaded[version] = _load_version(
                store,
                backend,
                copy,
                version,
                file,
                cores=cores,
                models=models,
                check=check,
                identity=identity,
                defaults=defaults,
            )
        except LoadFailed as failure:
            loaded[version] = failure
    if store.fingerprint(model) != before:
        for each in loaded.values():
            if isinstance(each, LoadedVersion):
                each.close()
        raise LoadFailed(f"the files of {model} changed while they were being loaded")
    return loaded


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
    identity: str,
    defaults: LoadDefaults,
) -> LoadedVersion:
    instances = instance_count(config)
    # A lone model gets all cores. Several share: a long batch of one must leave room for the others.
    share = max(1, cores // max(instances, min(2, models)))
    options = engine_options(config, file, default_threads=share, defaults=defaults)
    filename = config.default_model_filename or DEFAULT_FILE
    path = store.artifact(config.name, version, filename)
    runs = True
    if check is not None:
        runs = check.check(path, f"{config.name}/{version}/{filename}", config.backend, options)
    sessions: list[Session] = []
    try:
        first = backend.open(path, options)
        sessions.append(first)
        decoupled = config.model_transaction_policy.decoupled
        if decoupled and not hasattr(first, "stream"):
            reason = f"backend {config.backend!r} gives exactly one response per request"
            raise ConfigInvalid(file, "model_transaction_policy.decoupled", reason)
        if decoupled and config.model_warmup:
            raise ConfigInvalid(file, "model_warmup", "warm-up of a decoupled model is not supported yet")
        complete(config, first.inputs, first.outputs, file, defaults=defaults)
        check_against_file(config, first.inputs, first.outputs, file)
        spec = build_spec(config, version, file, labels=lambda name: _labels(store, config.name, name))
        sessions.extend(backend.open(path, options) for _ in range(instances - 1))
        run_warmup(config, spec, sessions, file, read=lambda name: store.data(config.name, f"warmup/{name}"))
    except LoadFailed:
        for session in sessions:
            session.close()
        raise
    return LoadedVersion(
        spec=spec,
        config=config,
        sessions=tuple(sessions),
        units=options.intra_op_threads,
        run_s=_warm_up(first, spec) if runs and not decoupled else None,
        identity=identity,
    )


def _labels(store: ModelStore, model: str, filename: str) -> Sequence[str]:
    text = store.text(model, filename)
    if text is None:
        raise LoadFailed(f"{model}/{filename}, named as label_filename, is missing")
    return text.splitlines()


def _warm_up(session: Session, spec: ModelSpec) -> float | None:
    """Run one row of zeros a few times: the first request must not pay for lazy set-up. Seconds of the last run."""
    inputs = {info.name: zeros(info) for info in session.inputs}
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
