"""Fields whose meaning is known and checked, but which this server does not execute yet.

A wrong value is refused as wrong. A right value is refused too, because answers would differ without it. An entry is
removed when its feature is added.
"""

from collections.abc import Callable, Sequence

from oriel_inference.errors import ConfigInvalid
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import from_config_name
from oriel_wire.v2.proto import model_config_pb2 as pb

NOT_YET = "is understood, but not executed by this server yet"
_CHECKSUM = "checksum"
_TYPED = {"int32_false_true", "fp32_false_true", "bool_false_true"}
_Control = pb.ModelSequenceBatching.Control
_Refuse = Callable[[str, str], ConfigInvalid]


def refuse_not_executed(config: pb.ModelConfig, refuse: _Refuse) -> None:
    """Raise ConfigInvalid for the first such field."""
    inputs = {each.name for each in config.input}
    outputs = {each.name for each in config.output}
    for index, made in enumerate(config.batch_input):
        _batch_input(made, inputs, refuse, f"batch_input[{index}]")
    for index, split in enumerate(config.batch_output):
        _batch_output(split, inputs, outputs, refuse, f"batch_output[{index}]")
    if config.HasField("sequence_batching"):
        _sequence_batching(config.sequence_batching, refuse)
    for index, tensor in enumerate(config.input):
        if tensor.allow_ragged_batch:
            reason = f"{NOT_YET}: requests of unequal shapes never share a batch here, so leave it out"
            raise refuse(f"input[{index}].allow_ragged_batch", reason)
    for index, library in enumerate(config.model_operations.op_library_filename):
        field = f"model_operations.op_library_filename[{index}]"
        raise refuse(field, f"{NOT_YET}: the library {library[:64]!r} would be loaded into the server")
    for index, agent in enumerate(config.model_repository_agents.agents):
        if agent.name == _CHECKSUM:
            reason = f"{NOT_YET}: nothing would be compared, so the model is not loaded"
            raise refuse(f"model_repository_agents.agents[{index}]", reason)
    for index, group in enumerate(config.instance_group):
        _group(group, refuse, f"instance_group[{index}]")


def _batch_input(made: pb.BatchInput, inputs: set[str], refuse: _Refuse, field: str) -> None:
    if made.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
        raise refuse(f"{field}.data_type", "must be TYPE_INT32 or TYPE_FP32")
    if not made.target_name:
        raise refuse(f"{field}.target_name", "is missing")
    if not made.source_input:
        raise refuse(f"{field}.source_input", "is missing")
    _known(made.source_input, inputs, "input", refuse, f"{field}.source_input")
    raise refuse(field, NOT_YET)


def _batch_output(split: pb.BatchOutput, inputs: set[str], outputs: set[str], refuse: _Refuse, field: str) -> None:
    if len(split.source_input) != 1:
        raise refuse(f"{field}.source_input", "must name exactly one input")
    _known(split.source_input, inputs, "input", refuse, f"{field}.source_input")
    _known(split.target_name, outputs, "output", refuse, f"{field}.target_name")
    raise refuse(field, NOT_YET)


def _known(names: Sequence[str], known: set[str], kind: str, refuse: _Refuse, field: str) -> None:
    for name in names:
        if name not in known:
            raise refuse(field, f"the model has no {kind} {name[:128]!r}")


def _sequence_batching(batching: pb.ModelSequenceBatching, refuse: _Refuse) -> None:
    seen: set[int] = set()
    for index, tensor in enumerate(batching.control_input):
        field = f"sequence_batching.control_input[{index}]"
        if not tensor.name:
            raise refuse(f"{field}.name", "is missing")
        if not tensor.control:
            raise refuse(f"{field}.control", "is missing")
        for number, control in enumerate(tensor.control):
            if control.kind in seen:
                raise refuse(f"{field}.control[{number}].kind", f"{_Control.Kind.Name(control.kind)} is given twice")
            seen.add(control.kind)
            _control(control, refuse, f"{field}.control[{number}]")
    for index, state in enumerate(batching.state):
        field = f"sequence_batching.state[{index}]"
        if not state.input_name or not state.output_name:
            raise refuse(field, "needs input_name and output_name")
        _datatype(state.data_type, refuse, f"{field}.data_type")
        if len(state.initial_state) > 1:
            raise refuse(f"{field}.initial_state", "at most one is allowed")
        for initial in state.initial_state:
            if initial.WhichOneof("state_data") is None:
                raise refuse(f"{field}.initial_state[0]", "needs zero_data or data_file")
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        raise refuse("sequence_batching.direct.minimum_slot_utilization", "must lie between 0 and 1")
    if batching.oldest.max_candidate_sequences < 0:
        raise refuse("sequence_batching.oldest.max_candidate_sequences", "must not be negative")
    raise refuse("sequence_batching", NOT_YET)


def _control(control: pb.ModelSequenceBatching.Control, refuse: _Refuse, field: str) -> None:
    given = [name for name in sorted(_TYPED) if getattr(control, name)]
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        if given:
            raise refuse(f"{field}.{given[0]}", "does not go with CONTROL_SEQUENCE_CORRID, which has data_type")
        _datatype(control.data_type, refuse, f"{field}.data_type")
        return
    if len(given) != 1:
        raise refuse(field, f"needs exactly one of {', '.join(sorted(_TYPED))}")
    if len(getattr(control, given[0])) != 2:
        raise refuse(f"{field}.{given[0]}", "needs two values, for false and for true")


def _datatype(value: pb.DataType, refuse: _Refuse, field: str) -> None:
    try:
        from_config_name(pb.DataType.Name(value))
    except (BadMessage, ValueError) as error:
        raise refuse(field, "is missing or not a datatype") from error


def _group(group: pb.ModelInstanceGroup, refuse: _Refuse, field: str) -> None:
    if group.passive:
        raise refuse(f"{field}.passive", NOT_YET)
    if group.rate_limiter.resources or group.rate_limiter.priority > 1:
        for index, resource in enumerate(group.rate_limiter.resources):
            if not resource.name:
                raise refuse(f"{field}.rate_limiter.resources[{index}].name", "is missing")
        raise refuse(f"{field}.rate_limiter", f"{NOT_YET}: instances share the cores of --cores instead")
    if group.host_policy and not _is_default_policy(group.host_policy):
        reason = f"{NOT_YET}: no host policy {group.host_policy[:64]!r} can be defined, leave it out"
        raise refuse(f"{field}.host_policy", reason)


def _is_default_policy(name: str) -> bool:
    """Return whether a name is one that instances have without any policy: Triton writes it into the configurations it
    shows.
    """
    return name in ("cpu", "model") or (name.startswith("gpu_") and name[4:].isdigit())
