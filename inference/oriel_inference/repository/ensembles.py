"""The configuration of an ensemble: its required and forbidden fields, and its steps as values."""

from dataclasses import replace

from oriel_inference.ensembles.graph import check_flow
from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import EnsembleStep, ModelSpec, is_model_name
from oriel_wire.v2.proto import model_config_pb2 as pb

PLATFORM = "ensemble"
MAX_STEPS = 256
MAX_MAPPED = 1024
LATEST = -1


def is_ensemble(config: pb.ModelConfig) -> bool:
    """Return whether a configuration is meant to be an ensemble in any way."""
    return PLATFORM in (config.platform, config.backend) or config.HasField("ensemble_scheduling")


def part_names(config: pb.ModelConfig) -> list[str]:
    """Return the models of an ensemble's steps, each once; empty for other models. The configuration need not be
    valid.
    """
    names = (step.model_name for step in config.ensemble_scheduling.step) if is_ensemble(config) else ()
    return [name for name in dict.fromkeys(names) if is_model_name(name)][:MAX_STEPS]


def check_ensemble(config: pb.ModelConfig, file: str) -> None:
    """Check everything that only ensembles have, and set `platform`. Raises ConfigInvalid."""
    if config.platform not in ("", PLATFORM):
        raise ConfigInvalid(file, "ensemble_scheduling", f"belongs to platform {PLATFORM!r}, not {config.platform!r}")
    if config.backend not in ("", PLATFORM):
        raise ConfigInvalid(file, "backend", f"{config.backend[:64]!r} contradicts platform {PLATFORM!r}")
    config.platform = PLATFORM
    refused = {
        "instance_group": (bool(config.instance_group), "scale the models of its steps instead"),
        "optimization": (config.HasField("optimization"), "set it for the models of its steps"),
        "model_warmup": (bool(config.model_warmup), "warm the models of its steps up"),
    }
    for field, (found, remedy) in refused.items():
        if found:
            raise ConfigInvalid(file, field, f"is not for ensembles: {remedy}")
    scheduling = config.ensemble_scheduling
    if not scheduling.step:
        raise ConfigInvalid(file, "ensemble_scheduling.step", "is missing")
    if len(scheduling.step) > MAX_STEPS:
        raise ConfigInvalid(file, "ensemble_scheduling.step", f"more than {MAX_STEPS} are given")
    for kind in ("input", "output"):
        if not getattr(config, kind):
            raise ConfigInvalid(file, kind, "is missing: an ensemble has no model file to read it from")
    for index, step in enumerate(scheduling.step):
        _check_step(step, config.name, file, f"ensemble_scheduling.step[{index}]")
    check_flow([each.name for each in config.input], [each.name for each in config.output], _steps(config), file)


def _check_step(step: pb.ModelEnsembling.Step, ensemble: str, file: str, field: str) -> None:
    if not is_model_name(step.model_name):
        reason = f"{step.model_name[:64]!r} is not a valid model name" if step.model_name else "is missing"
        raise ConfigInvalid(file, f"{field}.model_name", reason)
    if step.model_name == ensemble:
        raise ConfigInvalid(file, f"{field}.model_name", "is the ensemble itself")
    if step.model_namespace:
        raise ConfigInvalid(file, f"{field}.model_namespace", "is not supported: model names are unique here")
    if step.model_version < 1 and step.model_version != LATEST:
        raise ConfigInvalid(file, f"{field}.model_version", f"must be a version, or {LATEST} for the latest")
    for kind, given in (("input_map", step.input_map), ("output_map", step.output_map)):
        if not given:
            raise ConfigInvalid(file, f"{field}.{kind}", "is missing")
        if len(given) > MAX_MAPPED:
            raise ConfigInvalid(file, f"{field}.{kind}", f"more than {MAX_MAPPED} are given")


def as_ensemble(spec: ModelSpec, config: pb.ModelConfig) -> ModelSpec:
    """Return `spec`, which has the tensors, with the steps of a checked configuration."""
    return replace(
        spec, bounds=None, steps=_steps(config), max_inflight=config.ensemble_scheduling.max_inflight_requests
    )


def _steps(config: pb.ModelConfig) -> tuple[EnsembleStep, ...]:
    return tuple(
        EnsembleStep(
            model=step.model_name,
            version=max(0, step.model_version),
            inputs=dict(step.input_map),
            outputs=dict(step.output_map),
        )
        for step in config.ensemble_scheduling.step
    )
