"""Builds a `ModelSpec` from a checked configuration and the description in the model file."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

from oriel_inference.backends.hidden_tensors import hidden_inputs, hidden_outputs
from oriel_inference.errors import ConfigInvalid
from oriel_inference.fitting import matches
from oriel_inference.model import SAMPLE_EVERY, ModelSpec, TensorInfo, TensorSpec
from oriel_inference.repository.config import parameter
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.engines import default_file
from oriel_inference.repository.queueing import queue_rules
from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.v2.datatypes import from_config_name, to_config_name
from oriel_wire.v2.proto import model_config_pb2 as pb

BATCHING_KEY = "oriel.batching"
LOAD_KEY = "oriel.load"
LOAD_VALUES = ("demand", "pinned")
SAMPLE_KEY = "oriel.quality.every"
MAX_SAMPLE_EVERY = 1_000_000

Tensors = Sequence[TensorInfo]
_Tensor = TypeVar("_Tensor", pb.ModelInput, pb.ModelOutput)


def require_complete(config: pb.ModelConfig, file: str, defaults: LoadDefaults) -> None:
    """Raise ConfigInvalid if the operator requires complete configurations and this one is not."""
    if not defaults.auto_complete and not (config.input and config.output):
        missing = "output" if config.input else "input"
        raise ConfigInvalid(file, missing, "is missing, and --disable-auto-complete-config is given")


def complete(config: pb.ModelConfig, inputs: Tensors, outputs: Tensors, file: str, *, defaults: LoadDefaults) -> None:
    """Add to the configuration, in place, what it leaves out and the model file knows.

    `max_batch_size` is chosen only if the configuration names no tensor at all (otherwise its dims show what is meant)
    and every tensor of the file has a variable first dimension. Raises ConfigInvalid if the operator requires complete
    configurations.
    """
    require_complete(config, file, defaults)
    hidden = {tensor.name for tensor in hidden_inputs(config)} | {tensor.name for tensor in hidden_outputs(config)}
    inputs = [tensor for tensor in inputs if tensor.name not in hidden]
    outputs = [tensor for tensor in outputs if tensor.name not in hidden]
    if not config.input and not config.output and not config.max_batch_size:
        everything = (*(each for each in inputs if not each.optional), *outputs)
        if everything and all(tensor.shape and tensor.shape[0] == -1 for tensor in everything):
            config.max_batch_size = defaults.max_batch_size
            if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
                config.dynamic_batching.SetInParent()
    for tensor in (each for each in inputs if not each.optional) if not config.input else ():
        _complete_tensor(config.input.add(), tensor, batched=config.max_batch_size > 0)
    for tensor in outputs if not config.output else ():
        _complete_tensor(config.output.add(), tensor, batched=config.max_batch_size > 0)
    fill_defaults(config)


def fill_defaults(config: pb.ModelConfig) -> None:
    """Set the fields that clients find in every configuration that Triton shows, whoever wrote it."""
    if config.WhichOneof("scheduling_choice") != "ensemble_scheduling":
        if not config.instance_group:
            config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU)
        for index, group in enumerate(config.instance_group):
            group.name = group.name or f"{config.name}_{index}"
            group.count = group.count or 1
        config.default_model_filename = config.default_model_filename or default_file(config.backend)
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    config.optimization.SetInParent()


def check_against_file(config: pb.ModelConfig, inputs: Tensors, outputs: Tensors, file: str) -> None:
    """Refuse a configuration that contradicts the model file. Raises ConfigInvalid."""
    batched, hidden = config.max_batch_size > 0, hidden_inputs(config)
    flat = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
    flat |= {name for each in config.batch_output for name in each.target_name}
    _check("input", [_flattened(t) if t.name in flat else t for t in config.input], inputs, batched, file)
    _check("output", [_flattened(t) if t.name in flat else t for t in config.output], outputs, batched, file)
    section = "batch_input: " if config.batch_input else "sequence_batching: "
    _check("input", hidden, inputs, batched, file, section=section)
    _check("output", hidden_outputs(config), outputs, batched, file, section="sequence_batching: ")
    named = {tensor.name for tensor in (*config.input, *hidden)}
    for info in inputs:
        if info.name not in named and not info.optional:
            raise ConfigInvalid(file, "input", f"the model file also needs input {info.name[:128]!r}")


def _flattened(tensor: _Tensor) -> _Tensor:
    """Return a tensor as the model file has it if its elements come end to end."""
    copy = type(tensor).FromString(tensor.SerializeToString())
    copy.reshape.shape[:] = []
    copy.reshape.SetInParent()
    return copy


def build_spec(
    config: pb.ModelConfig, version: int, file: str, *, instances: int, labels: Callable[[str], Sequence[str]]
) -> ModelSpec:
    """Build the specification for the rest of the server. labels: label file name -> its lines."""
    bounds: BatchBounds | None = None
    batching = config.dynamic_batching
    switch = parameter(config, BATCHING_KEY) or "on"
    if switch not in ("on", "off"):
        raise ConfigInvalid(file, f"parameters[{BATCHING_KEY!r}]", 'must be "on" or "off"')
    if (load := parameter(config, LOAD_KEY)) and load not in LOAD_VALUES:
        raise ConfigInvalid(file, f"parameters[{LOAD_KEY!r}]", 'must be "demand" or "pinned"')
    every = parameter(config, SAMPLE_KEY) or str(SAMPLE_EVERY)
    if not (every.isascii() and every.isdigit() and len(every) <= 7 and int(every) <= MAX_SAMPLE_EVERY):
        text = f"must be a number from 0 (no samples) to {MAX_SAMPLE_EVERY}"
        raise ConfigInvalid(file, f"parameters[{SAMPLE_KEY!r}]", text)
    decoupled = config.model_transaction_policy.decoupled
    if config.max_batch_size > 1 and switch == "on" and not decoupled:
        bounds = BatchBounds(
            max_rows=config.max_batch_size,
            preferred_rows=tuple(sorted(set(batching.preferred_batch_size))),
            max_delay_s=batching.max_queue_delay_microseconds / 1e6,
        )
    return ModelSpec(
        name=config.name,
        version=version,
        platform=config.platform,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_tensor(each, optional=each.optional) for each in config.input),
        outputs=tuple(
            _tensor(each, labels=tuple(labels(each.label_filename)) if each.label_filename else ())
            for each in config.output
        ),
        bounds=bounds,
        queue=queue_rules(config),
        instances=instances,
        decoupled=decoupled,
        cached=config.response_cache.enable and not batching.preserve_ordering,
        sample_every=0 if decoupled else int(every),
        parameters={name: value.string_value for name, value in config.parameters.items()},
    )


def _tensor(
    tensor: pb.ModelInput | pb.ModelOutput, *, optional: bool = False, labels: tuple[str, ...] = ()
) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        datatype=from_config_name(pb.DataType.Name(tensor.data_type)),
        dims=tuple(tensor.dims),
        engine_dims=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        optional=optional,
        labels=labels,
        ragged=isinstance(tensor, pb.ModelInput) and tensor.allow_ragged_batch,
    )


def _complete_tensor(entry: pb.ModelInput | pb.ModelOutput, tensor: TensorInfo, *, batched: bool) -> None:
    entry.name = tensor.name
    entry.data_type = cast(pb.DataType, pb.DataType.Value(to_config_name(tensor.datatype)))
    dims = tensor.shape[1:] if batched else tensor.shape
    if dims:
        entry.dims.extend(dims)
    else:
        # A configuration has no scalars: they are shown as one element and reshaped.
        entry.dims.append(1)
        entry.reshape.SetInParent()


def _check(
    kind: str,
    entries: Iterable[pb.ModelInput | pb.ModelOutput],
    tensors: Tensors,
    batched: bool,
    file: str,
    *,
    section: str = "",
) -> None:
    known = {tensor.name: tensor for tensor in tensors}
    for index, entry in enumerate(entries):
        field = f"{section}{entry.name[:128]!r}" if section else f"{kind}[{index}]"
        tensor = known.get(entry.name)
        if tensor is None:
            names = ", ".join(sorted(known))[:200]
            raise ConfigInvalid(
                file, f"{field}.name", f"the model file has no {kind} {entry.name[:128]!r}, only {names}"
            )
        wanted = to_config_name(tensor.datatype)
        if pb.DataType.Name(entry.data_type) != wanted:
            raise ConfigInvalid(file, f"{field}.data_type", f"the model file has {wanted}")
        if not batched and not tensor.shape and set(entry.dims) == {1}:
            entry.reshape.SetInParent()  # the usual way to give a scalar dims
        dims = tuple(entry.reshape.shape if entry.HasField("reshape") else entry.dims)
        shape = (-1, *dims) if batched else dims
        if batched and tensor.shape and tensor.shape[0] != -1:
            reason = f"the model file fixes the first dimension of {kind} {entry.name[:128]!r} at {tensor.shape[0]}"
            raise ConfigInvalid(file, "max_batch_size", f"{reason}, so it cannot be batched: set 0")
        if not matches(shape, tensor.shape):
            shown = list(tensor.shape[1:] if batched else tensor.shape)
            raise ConfigInvalid(file, f"{field}.dims", f"{list(dims)} does not fit the model file's {shown}")
