"""The tensors that a configuration names outside of `input` and `output`: controls and states of sequences, and inputs
that describe a batch.

The engine takes and returns them like any other tensor; the server fills them in and keeps them, and clients do not see
them.
"""

from oriel_wire.v2.proto import model_config_pb2 as pb

_FLAG_TYPES = (
    ("int32_false_true", pb.DataType.TYPE_INT32),
    ("fp32_false_true", pb.DataType.TYPE_FP32),
    ("bool_false_true", pb.DataType.TYPE_BOOL),
)


def control_type(control: pb.ModelSequenceBatching.Control) -> tuple[str, "pb.DataType"]:
    """Return the field that holds the two values of a flag, "" for CORRID, and the datatype of a control."""
    for field, datatype in _FLAG_TYPES:
        if getattr(control, field):
            return field, datatype
    return "", control.data_type


def hidden_inputs(config: pb.ModelConfig) -> list[pb.ModelInput]:
    """Return the inputs that the server fills in. The configuration has been checked."""
    batching = config.sequence_batching
    controls = [
        pb.ModelInput(name=each.name, data_type=control_type(each.control[0])[1], dims=[1])
        for each in batching.control_input
    ]
    states = [pb.ModelInput(name=s.input_name, data_type=s.data_type, dims=s.dims) for s in batching.state]
    return controls + states + _batch_inputs(config)


def _batch_inputs(config: pb.ModelConfig) -> list[pb.ModelInput]:
    ranks = {tensor.name: [len(tensor.dims)] for tensor in config.input}
    found: list[pb.ModelInput] = []
    for each in config.batch_input:
        dims = ranks[each.source_input[0]] if each.kind == pb.BatchInput.BATCH_ITEM_SHAPE else []
        found += [pb.ModelInput(name=name, data_type=each.data_type, dims=dims) for name in each.target_name]
    return found


def first_shapes(config: pb.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the states that a configuration begins with, for one row."""
    rows = (1,) if config.max_batch_size > 0 else ()
    states = [state for state in config.sequence_batching.state if state.initial_state]
    return {state.input_name: (*rows, *state.initial_state[0].dims) for state in states}


def hidden_outputs(config: pb.ModelConfig) -> list[pb.ModelOutput]:
    """Return the outputs that the server keeps, without those that clients get too."""
    visible = {output.name for output in config.output}
    return [
        pb.ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
        for state in config.sequence_batching.state
        if state.output_name not in visible
    ]
