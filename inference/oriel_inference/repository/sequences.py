"""`sequence_batching` of a model configuration: checks it, and turns it into the values that the scheduler uses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oriel_inference.backends.hidden_tensors import control_type, hidden_inputs
from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import (
    ControlKind,
    ModelSpec,
    QueueRules,
    SequenceControl,
    SequenceRules,
    SequenceState,
    TensorSpec,
)
from oriel_inference.repository.warmup import array_of_bytes, zero_elements
from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import CONFIG_DATATYPES, DATATYPES, from_config_name
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

MAX_SEQUENCES = 1 << 16
MAX_STATE_BYTES = 256 << 20
IDLE_US = 1_000_000
INITIAL_STATES = "initial_state"  # the folder beside the versions
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_SECTION = "sequence_batching"

_Refuse = Callable[[str, str], ConfigInvalid]


def check_sequences(config: pb.ModelConfig, refuse: _Refuse) -> None:
    """Check the section, and set its defaults. Raises the exception that `refuse` makes of a field and a reason."""
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or IDLE_US
    if batching.WhichOneof("strategy_choice") is None:
        batching.direct.SetInParent()
    _check_strategy(batching, max(1, config.max_batch_size), refuse)
    names = {tensor.name for tensor in config.input}
    kinds: set[int] = set()
    for index, tensor in enumerate(batching.control_input):
        field = f"{_SECTION}.control_input[{index}]"
        _new_name(tensor.name, names, f"{field}.name", refuse)
        if len(tensor.control) != 1:
            raise refuse(f"{field}.control", f"has {len(tensor.control)} entries: write exactly one")
        _check_control(tensor.control[0], f"{field}.control[0]", refuse)
        if tensor.control[0].kind in kinds:
            raise refuse(f"{field}.control[0].kind", "is given twice")
        kinds.add(tensor.control[0].kind)
    outputs: set[str] = set()
    for index, state in enumerate(batching.state):
        field = f"{_SECTION}.state[{index}]"
        _new_name(state.input_name, names, f"{field}.input_name", refuse)
        _new_name(state.output_name, outputs, f"{field}.output_name", refuse)
        _check_state(state, field, refuse)
    python = config.backend == "python"
    if batching.state and python:
        reason = "is not for Python models: keep the state in the model's object, by the request's correlation_id()"
        raise refuse(f"{_SECTION}.state", reason)
    if batching.iterative_sequence and not python:
        raise refuse(f"{_SECTION}.iterative_sequence", "is for Python models, which release their requests themselves")
    if config.optimization.cuda.graphs:
        raise refuse("optimization.cuda.graphs", f"does not go with {_SECTION}")


def with_sequences(spec: ModelSpec, config: pb.ModelConfig, file: str, *, read: Callable[[str], bytes]) -> ModelSpec:
    """Return `spec` with the rules of a checked configuration and the bounds of its batches; as it is for other models.

    read: a file of `initial_state/` -> its bytes. Raises LoadFailed.
    """
    if not config.HasField(_SECTION):
        return spec
    batching, rows = config.sequence_batching, config.max_batch_size
    tensors = [_spec(tensor) for tensor in hidden_inputs(config)]
    count = len(batching.control_input)
    controls = tuple(
        _control(tensor, each.control[0]) for tensor, each in zip(tensors, batching.control_input, strict=False)
    )
    states = tuple(
        SequenceState(
            tensor=tensor,
            output=TensorSpec(name=each.output_name, datatype=tensor.datatype, dims=tensor.dims),
            initial=_initial(each, tensor, file, f"{_SECTION}.state[{index}].{INITIAL_STATES}[0]", read),
        )
        for index, (tensor, each) in enumerate(zip(tensors[count:], batching.state, strict=True))
    )
    direct = batching.HasField("direct")
    ready = any(control.kind is ControlKind.READY for control in controls)
    rules = SequenceRules(
        idle_s=batching.max_sequence_idle_microseconds / 1e6,
        slots=max(1, rows if direct else batching.oldest.max_candidate_sequences),
        padded=direct and rows > 0 and ready and config.backend != "python",  # which gets requests, no rows
        iterative=batching.iterative_sequence,
        controls=controls,
        states=states,
    )
    if rules.slots * spec.instances > MAX_SEQUENCES:
        reason = (
            f"asks for {rules.slots} sequences on each of {spec.instances} instances, at most {MAX_SEQUENCES} in all"
        )
        raise ConfigInvalid(file, f"{_SECTION}.{'direct' if direct else 'oldest'}", reason)
    return replace(
        spec,
        sequences=rules,
        bounds=_bounds(batching, rows) if spec.bounds is not None else None,
        queue=QueueRules(preserve_ordering=batching.oldest.preserve_ordering),
        sample_every=0,
    )


def _bounds(batching: pb.ModelSequenceBatching, rows: int) -> BatchBounds:
    if batching.HasField("oldest"):
        sizes, delay_us = batching.oldest.preferred_batch_size, batching.oldest.max_queue_delay_microseconds
        return BatchBounds(max_rows=rows, preferred_rows=tuple(sorted(set(sizes))), max_delay_s=delay_us / 1e6)
    least = math.ceil(batching.direct.minimum_slot_utilization * rows)
    if not least:
        return BatchBounds(max_rows=rows)
    delay_s = batching.direct.max_queue_delay_microseconds / 1e6
    return BatchBounds(max_rows=rows, preferred_rows=tuple(range(least, rows + 1)), max_delay_s=delay_s)


def _check_strategy(batching: pb.ModelSequenceBatching, rows: int, refuse: _Refuse) -> None:
    oldest, direct = batching.oldest, batching.direct
    if oldest.max_candidate_sequences < 0:
        raise refuse(f"{_SECTION}.oldest.max_candidate_sequences", "must not be negative")
    for index, size in enumerate(oldest.preferred_batch_size):
        if not 1 <= size <= rows:
            reason = f"{size} does not lie between 1 and max_batch_size {rows}"
            raise refuse(f"{_SECTION}.oldest.preferred_batch_size[{index}]", reason)
    if not 0.0 <= direct.minimum_slot_utilization <= 1.0:
        raise refuse(f"{_SECTION}.direct.minimum_slot_utilization", "must lie between 0 and 1")


def _new_name(name: str, names: set[str], field: str, refuse: _Refuse) -> None:
    if not name:
        raise refuse(field, "is missing")
    if name in names:
        raise refuse(field, f"{name[:128]!r} is given twice")
    names.add(name)


def _check_control(control: pb.ModelSequenceBatching.Control, field: str, refuse: _Refuse) -> None:
    values = (control.int32_false_true, control.fp32_false_true, control.bool_false_true)
    given: list[Sequence[Any]] = [pair for pair in values if pair]
    if control.kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
        if given:
            raise refuse(field, "CONTROL_SEQUENCE_CORRID has no values for false and true: give a data_type instead")
        if pb.DataType.Name(control.data_type) not in _CORRID_TYPES:
            raise refuse(f"{field}.data_type", f"must be one of {', '.join(_CORRID_TYPES)}")
        return
    if len(given) != 1 or len(given[0]) != 2:
        reason = "needs two values, for false and true, in one of int32_false_true, fp32_false_true, bool_false_true"
        raise refuse(field, reason)


def _check_state(state: pb.ModelSequenceBatching.State, field: str, refuse: _Refuse) -> None:
    try:
        from_config_name(pb.DataType.Name(state.data_type))
    except (BadMessage, ValueError) as error:
        raise refuse(f"{field}.data_type", f"is missing or not a datatype: {CONFIG_DATATYPES}") from error
    if not state.dims or any(dim < 1 and dim != -1 for dim in state.dims):
        raise refuse(f"{field}.dims", "must be given; each must be positive, or -1 for a variable dimension")
    if len(state.initial_state) > 1:
        raise refuse(f"{field}.{INITIAL_STATES}", "is given more than once")
    for initial in state.initial_state:
        where = f"{field}.{INITIAL_STATES}[0]"
        if initial.data_type != state.data_type:
            raise refuse(f"{where}.data_type", "differs from the state's")
        fits = len(initial.dims) == len(state.dims) and all(
            ours >= 0 and theirs in (-1, ours) for ours, theirs in zip(initial.dims, state.dims, strict=True)
        )
        if not fits:
            raise refuse(f"{where}.dims", f"{list(initial.dims)} does not fit the state's {list(state.dims)}")
        if initial.WhichOneof("state_data") is None:
            raise refuse(where, "needs zero_data or data_file")


def _spec(tensor: pb.ModelInput) -> TensorSpec:
    datatype = from_config_name(pb.DataType.Name(tensor.data_type))
    return TensorSpec(name=tensor.name, datatype=datatype, dims=tuple(tensor.dims))


def _control(tensor: TensorSpec, control: pb.ModelSequenceBatching.Control) -> SequenceControl:
    kind = ControlKind(pb.ModelSequenceBatching.Control.Kind.Name(control.kind))
    field, _ = control_type(control)
    empty: Any = b"" if tensor.datatype == "BYTES" else 0
    false, true = getattr(control, field) if field else (empty, empty)
    return SequenceControl(tensor=tensor, kind=kind, false=_row(false, tensor), true=_row(true, tensor))


def _row(value: Any, tensor: TensorSpec) -> Array:
    return np.array([value], DATATYPES[tensor.datatype].dtype)


def _initial(
    state: pb.ModelSequenceBatching.State, tensor: TensorSpec, file: str, field: str, read: Callable[[str], bytes]
) -> Array:
    """Return the value of a state before the first step: zeros, with 1 for variable dimensions, unless one is given."""
    given = state.initial_state[0] if state.initial_state else None
    dims = tuple(given.dims) if given is not None else tuple(max(1, dim) for dim in tensor.dims)
    elements = math.prod(dims)
    if elements * (DATATYPES[tensor.datatype].size or 16) > MAX_STATE_BYTES:
        raise ConfigInvalid(file, field, f"a state is larger than {MAX_STATE_BYTES >> 20} MiB")
    if given is None or given.WhichOneof("state_data") == "zero_data":
        return zero_elements(tensor.datatype, elements).reshape(dims)
    where, data, size = f"{field}.data_file", read(given.data_file), elements * DATATYPES[tensor.datatype].size
    if size and len(data) != size:
        raise ConfigInvalid(file, where, f"holds {len(data)} bytes, dims ask for {size}")
    return array_of_bytes(data, tensor.datatype, elements, file, where).reshape(dims)
