"""The graph of an ensemble: which step makes which tensor, and whether it all fits together. Pure.

Judged twice. `check_flow` needs the ensemble's configuration alone: every tensor is made exactly once, everything made
is used, and there is no ring. `check_models` needs the models as they are now: their inputs are all given, and along
each edge datatype and shape agree. The rules are those of Triton, so that its ensembles load and its users' mistakes
are found at the same moment.

A tensor goes from a model with a batch dimension to one without, or back, if its whole shape fits, or if it is a batch
of one: then the first dimension is dropped or added on the way (`fit_rank`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from oriel_inference.errors import ConfigInvalid, InvalidRequest
from oriel_inference.model import EnsembleStep, ModelSpec, TensorSpec
from oriel_wire.v2.datatypes import quoted, shown
from oriel_wire.v2.messages import Array

__all__ = ["Graph", "check_flow", "check_models", "fit_rank"]

_SCHEDULING = "ensemble_scheduling"


class Graph:
    """What the scheduler looks up.

    consumers: tensor -> the steps that take it. needs: per step, how many different tensors it waits for. uses: tensor
    -> how many take it, the ensemble's answer included; it may be dropped after that.
    """

    __slots__ = ("consumers", "needs", "uses")

    def __init__(self, spec: ModelSpec) -> None:
        self.consumers: dict[str, list[int]] = {tensor.name: [] for tensor in spec.inputs}
        self.needs = [len(set(step.inputs.values())) for step in spec.steps]
        for index, step in enumerate(spec.steps):
            for tensor in step.outputs.values():
                self.consumers.setdefault(tensor, [])
            for tensor in sorted(set(step.inputs.values())):
                self.consumers.setdefault(tensor, []).append(index)
        answered = {output.name for output in spec.outputs}
        self.uses = {tensor: len(steps) + (tensor in answered) for tensor, steps in self.consumers.items()}


def check_flow(inputs: Collection[str], outputs: Collection[str], steps: Sequence[EnsembleStep], file: str) -> None:
    """Judge what the configuration says by itself. Raises ConfigInvalid."""
    made: dict[str, int] = dict.fromkeys(inputs, -1)
    used: set[str] = set()
    for index, step in enumerate(steps):
        used.update(step.inputs.values())
        for output, tensor in sorted(step.outputs.items()):
            if tensor in made:
                other = "an input of the ensemble" if made[tensor] < 0 else f"also made by step {made[tensor]}"
                raise ConfigInvalid(file, _field(index, "output_map", output), f"tensor {quoted(tensor)} is {other}")
            made[tensor] = index
    for index, step in enumerate(steps):
        for into, tensor in sorted(step.inputs.items()):
            if tensor not in made:
                reason = f"nothing makes tensor {quoted(tensor)}: it is no input of the ensemble and no step's output"
                raise ConfigInvalid(file, _field(index, "input_map", into), reason)
    for name in outputs:
        if name not in made:
            raise ConfigInvalid(file, "output", f"no step makes output {quoted(name)}")
    for name in inputs:
        if name not in used:
            raise ConfigInvalid(file, "input", f"no step uses input {quoted(name)}")
    for tensor, index in made.items():
        if tensor not in used and tensor not in outputs:
            reason = f"tensor {quoted(tensor)} is neither used by a step nor an output: leave it out"
            raise ConfigInvalid(file, f"{_SCHEDULING}.step[{index}].output_map", reason)
    _check_ring(inputs, steps, file)


def _check_ring(inputs: Collection[str], steps: Sequence[EnsembleStep], file: str) -> None:
    ready, waiting = set(inputs), dict(enumerate(steps))
    while waiting:
        able = [index for index, step in waiting.items() if ready.issuperset(step.inputs.values())]
        if not able:
            names = ", ".join(f"{index} ({step.model})" for index, step in waiting.items())
            raise ConfigInvalid(file, f"{_SCHEDULING}.step", f"steps {names[:200]} wait for one another")
        for index in able:
            ready.update(waiting.pop(index).outputs.values())


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a tensor comes from, and what it looks like there."""

    said: str
    datatype: str
    dims: tuple[int, ...]
    batched: bool


def check_models(spec: ModelSpec, models: Sequence[ModelSpec], file: str) -> None:
    """Judge the ensemble against the models of its steps, in their order. Raises ConfigInvalid."""
    origins = {each.name: _seen(each, spec, "the ensemble's input") for each in spec.inputs}
    for index, (step, model) in enumerate(zip(spec.steps, models, strict=True)):
        _check_step(index, step, model, spec, file)
        for tensor in model.outputs:
            if tensor.name in step.outputs:
                said = f"output {quoted(tensor.name)} of {quoted(model.name)}"
                origins[step.outputs[tensor.name]] = _Origin(said, tensor.datatype, tensor.dims, model.batched)
    for index, (step, model) in enumerate(zip(spec.steps, models, strict=True)):
        for tensor in model.inputs:
            if tensor.name in step.inputs:
                name = step.inputs[tensor.name]
                goal = _Origin(
                    f"input {quoted(tensor.name)} of {quoted(model.name)}", tensor.datatype, tensor.dims, model.batched
                )
                _check_edge(name, origins[name], goal, file, _field(index, "input_map", tensor.name))
    for number, output in enumerate(spec.outputs):
        goal = _seen(output, spec, "the ensemble's output")
        _check_edge(output.name, origins[output.name], goal, file, f"output[{number}]")


def _check_step(index: int, step: EnsembleStep, model: ModelSpec, spec: ModelSpec, file: str) -> None:
    name = f"{_SCHEDULING}.step[{index}].model_name"
    if model.decoupled:
        reason = f"model {quoted(model.name)} is decoupled (model_transaction_policy): it cannot be a step here"
        raise ConfigInvalid(file, name, reason)
    if model.batched and model.max_batch_size < spec.max_batch_size:
        reason = f"{spec.max_batch_size} is more than the {model.max_batch_size} of its model {quoted(model.name)}"
        raise ConfigInvalid(file, "max_batch_size", reason)
    for kind, given, known in (("input", step.inputs, model.inputs), ("output", step.outputs, model.outputs)):
        names = {tensor.name for tensor in known}
        for each in sorted(given):
            if each not in names:
                listed = ", ".join(sorted(names))[:200]
                reason = f"model {quoted(model.name)} has no {kind} {quoted(each)}, only {listed}"
                raise ConfigInvalid(file, _field(index, f"{kind}_map", each), reason)
    for tensor in model.inputs:
        if tensor.name not in step.inputs and not tensor.optional:
            reason = f"model {quoted(model.name)} also needs input {quoted(tensor.name)}"
            raise ConfigInvalid(file, f"{_SCHEDULING}.step[{index}].input_map", reason)


def _check_edge(tensor: str, origin: _Origin, goal: _Origin, file: str, field: str) -> None:
    if origin.datatype != goal.datatype:
        reason = f"tensor {quoted(tensor)} is {origin.datatype} as {origin.said} but {goal.datatype} as {goal.said}"
        raise ConfigInvalid(file, field, reason)
    theirs, ours = _whole(origin), _whole(goal)
    if not _agree(origin.dims, goal.dims) and not _agree(theirs, ours):
        reason = f"tensor {quoted(tensor)} is {shown(theirs)} as {origin.said} but {shown(ours)} as {goal.said}"
        raise ConfigInvalid(file, field, reason)


def _seen(tensor: TensorSpec, spec: ModelSpec, what: str) -> _Origin:
    dims = tensor.dims if tensor.engine_dims is None else tensor.engine_dims
    return _Origin(f"{what} {quoted(tensor.name)}", tensor.datatype, dims, spec.batched)


def _whole(tensor: _Origin) -> tuple[int, ...]:
    return (-1, *tensor.dims) if tensor.batched else tensor.dims


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(-1 in (a, b) or a == b for a, b in zip(one, other, strict=True))


def fit_rank(array: Array, dims: tuple[int, ...], *, batched: bool, tensor: str) -> Array:
    """A tensor as its next place wants it: a view with the batch dimension of one added or dropped, if it must be.

    dims: without the batch dimension. Raises InvalidRequest for a larger batch where there is no batch dimension.
    """
    rank = len(dims) + batched
    if array.ndim == rank - 1 and batched:
        return array.reshape((1, *array.shape))
    if array.ndim == rank + 1 and not batched:
        if array.shape[0] != 1:
            raise InvalidRequest(f"tensor {quoted(tensor)} has {array.shape[0]} rows where only one fits")
        return array.reshape(array.shape[1:])
    return array


def _field(index: int, kind: str, key: str) -> str:
    return f"{_SCHEDULING}.step[{index}].{kind}[{quoted(key)}]"
