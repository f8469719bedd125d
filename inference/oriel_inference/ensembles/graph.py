"""The graph of an ensemble: which step produces which tensor, and whether everything fits together. Pure.

It is checked twice. `check_flow` needs only the ensemble's configuration: every tensor is produced exactly once,
everything produced is used, and there is no cycle. `check_models` needs the models as they are now: all their inputs
are given, and datatype and shape agree along each edge. The rules are those of Triton, so that its ensembles load and
mistakes are reported at the same moment.

A tensor may pass between a model with a batch dimension and one without if its whole shape fits, or if it is a batch of
one: then the first dimension is dropped or added (`fit_rank`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oriel_inference.errors import ConfigInvalid, InvalidRequest
from oriel_inference.model import EnsembleStep, ModelSpec, TensorSpec
from oriel_wire.v2.datatypes import quoted, shown
from oriel_wire.v2.messages import Array

_SCHEDULING = "ensemble_scheduling"
MAX_CHOICES = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """The part of the graph that a choice of outputs needs.

    steps: the steps that run.
    uses: tensor -> how many steps need it, the answer included; it may be dropped after that.
    """

    steps: frozenset[int]
    uses: Mapping[str, int]


class Graph:
    """The relations that the scheduler needs.

    consumers: tensor -> the steps that take it.
    made: tensor -> the step that makes it.
    needs: per step, how many different tensors it waits for.
    makers: step -> the steps that produce its tensors, in an order in which producers come first.
    """

    __slots__ = ("_choices", "_steps", "consumers", "made", "makers", "needs")

    def __init__(self, spec: ModelSpec) -> None:
        self._steps = spec.steps
        self._choices: dict[frozenset[str], Choice] = {}
        self.consumers: dict[str, list[int]] = {tensor.name: [] for tensor in spec.inputs}
        self.needs = [len(set(step.inputs.values())) for step in spec.steps]
        for index, step in enumerate(spec.steps):
            for tensor in step.outputs.values():
                self.consumers.setdefault(tensor, [])
            for tensor in sorted(set(step.inputs.values())):
                self.consumers.setdefault(tensor, []).append(index)
        self.made = {tensor: index for index, step in enumerate(spec.steps) for tensor in step.outputs.values()}
        makers = [{self.made[each] for each in step.inputs.values() if each in self.made} for step in spec.steps]
        self.makers: dict[int, set[int]] = {}
        while len(self.makers) < len(makers):
            able = [i for i, each in enumerate(makers) if i not in self.makers and each <= self.makers.keys()]
            self.makers.update({index: makers[index] for index in able})

    def choice(self, outputs: frozenset[str]) -> Choice:
        """Return the part of the graph for these outputs of the ensemble."""
        found = self._choices.get(outputs)
        if found is None:
            found = self._choose(outputs)
            if len(self._choices) < MAX_CHOICES:
                self._choices[outputs] = found
        return found

    def _choose(self, outputs: frozenset[str]) -> Choice:
        wanted, steps = set(outputs), set[int]()
        for index in reversed(self.makers):
            if not wanted.isdisjoint(self._steps[index].outputs.values()):
                wanted.update(self._steps[index].inputs.values())
                steps.add(index)
        # No step produces an output that is an input of the ensemble: then all steps run.
        steps = steps or set(self.makers)
        uses = {tensor: len(steps.intersection(by)) + (tensor in outputs) for tensor, by in self.consumers.items()}
        return Choice(frozenset(steps), uses)


def check_flow(inputs: Collection[str], outputs: Collection[str], steps: Sequence[EnsembleStep], file: str) -> None:
    """Check the configuration by itself. Raises ConfigInvalid."""
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
                what = "it is neither an input of the ensemble nor the output of a step"
                reason = f"nothing makes tensor {quoted(tensor)}: {what}"
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
    """A place in the graph that a tensor comes from or goes to, with the tensor's type there. place: for error
    texts.
    """

    place: str
    datatype: str
    dims: tuple[int, ...]
    batched: bool


def check_models(spec: ModelSpec, models: Sequence[ModelSpec], file: str) -> None:
    """Check the ensemble against the models of its steps, in their order. Raises ConfigInvalid."""
    origins = {each.name: _seen(each, spec, "the ensemble's input") for each in spec.inputs}
    for index, (step, model) in enumerate(zip(spec.steps, models, strict=True)):
        _check_step(index, step, model, spec, file)
        for tensor in model.outputs:
            if tensor.name in step.outputs:
                place = f"output {quoted(tensor.name)} of {quoted(model.name)}"
                origins[step.outputs[tensor.name]] = _Origin(place, tensor.datatype, tensor.dims, model.batched)
    for index, (step, model) in enumerate(zip(spec.steps, models, strict=True)):
        for tensor in model.inputs:
            if tensor.name in step.inputs:
                name = step.inputs[tensor.name]
                goal = _Origin(
                    f"input {quoted(tensor.name)} of {quoted(model.name)}", tensor.datatype, tensor.dims, model.batched
                )
                _check_edge(name, origins[name], goal, file, _field(index, "input_map", tensor.name))
    origins_of(spec, models, file)
    for number, output in enumerate(spec.outputs):
        goal = _seen(output, spec, "the ensemble's output")
        _check_edge(output.name, origins[output.name], goal, file, f"output[{number}]")


def origins_of(spec: ModelSpec, models: Sequence[ModelSpec], file: str) -> tuple[dict[int, int], int]:
    """Return, for each step, the decoupled step on each of whose responses it runs, -1 for the request itself; and the
    same for the outputs of the ensemble. Raises ConfigInvalid where tensors of different origins would meet.
    """
    of_tensor = {tensor.name: -1 for tensor in spec.inputs}
    found: dict[int, int] = {}
    for index in Graph(spec).makers:
        step = spec.steps[index]
        found[index] = _origin(step.inputs.values(), of_tensor, file, f"{_SCHEDULING}.step[{index}].input_map")
        made_by = index if models[index].decoupled else found[index]
        of_tensor |= dict.fromkeys(step.outputs.values(), made_by)
    return found, _origin([tensor.name for tensor in spec.outputs], of_tensor, file, "output")


def _origin(tensors: Iterable[str], of_tensor: Mapping[str, int], file: str, field: str) -> int:
    origin, *others = {of_tensor[tensor] for tensor in tensors}
    if others:
        reason = "takes tensors of different decoupled models, or of one and of the request"
        raise ConfigInvalid(file, field, reason)
    return origin


def _check_step(index: int, step: EnsembleStep, model: ModelSpec, spec: ModelSpec, file: str) -> None:
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
        reason = f"tensor {quoted(tensor)} is {origin.datatype} as {origin.place} but {goal.datatype} as {goal.place}"
        raise ConfigInvalid(file, field, reason)
    theirs, ours = _whole(origin), _whole(goal)
    if not _agree(origin.dims, goal.dims) and not _agree(theirs, ours):
        reason = f"tensor {quoted(tensor)} is {shown(theirs)} as {origin.place} but {shown(ours)} as {goal.place}"
        raise ConfigInvalid(file, field, reason)


def _seen(tensor: TensorSpec, spec: ModelSpec, what: str) -> _Origin:
    dims = tensor.dims if tensor.engine_dims is None else tensor.engine_dims
    return _Origin(f"{what} {quoted(tensor.name)}", tensor.datatype, dims, spec.batched)


def _whole(tensor: _Origin) -> tuple[int, ...]:
    return (-1, *tensor.dims) if tensor.batched else tensor.dims


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(-1 in (a, b) or a == b for a, b in zip(one, other, strict=True))


def fit_rank(array: Array, dims: tuple[int, ...], *, batched: bool, tensor: str) -> Array:
    """Return a view of a tensor with the batch dimension of one added or dropped, if its next place needs that.

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
