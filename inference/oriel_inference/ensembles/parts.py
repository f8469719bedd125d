"""Finds the serving models that an ensemble runs on, or the reason why it cannot run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.ensembles.graph import check_models
from oriel_inference.errors import ConfigInvalid, InferenceError
from oriel_inference.model import ModelSpec, ModelState
from oriel_wire.v2.datatypes import quoted

MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The models of the steps in their order if the state is READY; otherwise the reason. needs: the missing model."""

    state: ModelState
    models: tuple[ServingModel, ...] = ()
    reason: str = ""
    needs: str = ""


def judge(spec: ModelSpec, catalog: Catalog, file: str) -> Verdict:
    """Check whether an ensemble can run on the models that serve. LOADING means that a model it needs is being
    loaded.
    """
    models: list[ServingModel] = []
    for step in spec.steps:
        model, version = catalog.resolve(step.model), str(step.version) if step.version else ""
        try:
            models.append(catalog.get(model, version))
        except InferenceError:
            return _missing(spec.name, model, version, catalog)
    try:
        check_models(spec, [model.spec for model in models], file)
        _check_nesting(spec, catalog, file)
    except ConfigInvalid as invalid:
        return Verdict(state=ModelState.UNAVAILABLE, reason=invalid.reason)
    return Verdict(state=ModelState.READY, models=tuple(models))


def labelled(spec: ModelSpec, models: Sequence[ModelSpec]) -> ModelSpec:
    """Return an ensemble whose outputs without class names get those of the models that produce them. It is decoupled
    if one of its models is.
    """
    known = {
        step.outputs[output.name]: output.labels
        for step, model in zip(spec.steps, models, strict=True)
        for output in model.outputs
        if output.name in step.outputs
    }
    outputs = tuple(replace(each, labels=each.labels or known.get(each.name, ())) for each in spec.outputs)
    return replace(spec, outputs=outputs, decoupled=any(model.decoupled for model in models))


def _missing(ensemble: str, model: str, version: str, catalog: Catalog) -> Verdict:
    entries = catalog.entries(model)
    shown = f"model {quoted(model)}" + (f" version {version}" if version else "")
    awaited = _awaited(model, catalog, {ensemble})
    if awaited == ensemble:
        reason = f"needs {shown}, which waits for ensemble {quoted(ensemble)} itself"
        return Verdict(state=ModelState.UNAVAILABLE, reason=reason, needs=model)
    if awaited:
        return Verdict(state=ModelState.LOADING, reason=f"waits for {shown}", needs=model)
    why = next((entry.reason for entry in entries if entry.reason), "") if entries else "it is not loaded"
    reason = f"needs {shown}, which is not ready" + (f": {why}" if why else "")
    return Verdict(state=ModelState.UNAVAILABLE, reason=reason, needs=model)


def _awaited(model: str, catalog: Catalog, above: set[str]) -> str:
    """Return the model being loaded that `model` waits for, which may be itself; "" if there is none. One of `above`
    means a cycle.
    """
    while model not in above:
        entry = next((each for each in catalog.entries(model) if each.state is ModelState.LOADING), None)
        if entry is None or not entry.needs:
            return model if entry is not None else ""
        above.add(model)
        model = entry.needs
    return model


def _check_nesting(spec: ModelSpec, catalog: Catalog, file: str) -> None:
    """Check that ensembles within ensembles end, and within MAX_DEPTH. Raises ConfigInvalid."""
    names = {catalog.resolve(step.model) for step in spec.steps}
    for _ in range(MAX_DEPTH):
        if spec.name in names:
            raise ConfigInvalid(file, "ensemble_scheduling.step", "leads back to the ensemble itself")
        names = {
            catalog.resolve(step.model)
            for name in names
            for entry in catalog.entries(name)
            if entry.serving is not None
            for step in entry.serving.spec.steps
        }
        if not names:
            return
    raise ConfigInvalid(file, "ensemble_scheduling.step", f"ensembles are nested more than {MAX_DEPTH} deep")
