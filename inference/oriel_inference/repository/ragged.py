"""`allow_ragged_batch`, `batch_input` and `batch_output` of a model configuration: checks them, and turns them into the
values that batches are made with.
"""

from collections.abc import Callable
from dataclasses import replace

from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import BatchInput, ModelSpec, RaggedRules
from oriel_wire.v2.proto import model_config_pb2 as pb

_DTYPES: dict[int, str] = {pb.DataType.TYPE_FP32: "float32", pb.DataType.TYPE_INT32: "int32"}

_Refuse = Callable[[str, str], ConfigInvalid]


def is_ragged(config: pb.ModelConfig) -> bool:
    """Return whether batches of the model consist of requests of unequal shapes, or are described to it."""
    return bool(config.batch_input or config.batch_output or any(each.allow_ragged_batch for each in config.input))


def check_ragged(config: pb.ModelConfig, refuse: _Refuse) -> None:
    """Check the three fields of a model. Raises the exception that `refuse` makes of a field and a reason."""
    fields = ("batch_input", "batch_output")
    field = next((each for each in fields if getattr(config, each)), "allow_ragged_batch")
    if config.backend == "python" and field == "allow_ragged_batch":
        return
    if config.backend != "onnxruntime" or config.HasField("sequence_batching") or not config.max_batch_size:
        raise refuse(field, "is for ONNX models with a max_batch_size and without sequence_batching")
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for field, each in [(name, each) for name in fields for each in getattr(config, name)]:
        source = inputs.get(each.source_input[0]) if len(each.source_input) == 1 else None
        if source is None or source.optional:
            raise refuse(f"{field}.source_input", "must name one input that is not optional")
        if not each.target_name:
            raise refuse(f"{field}.target_name", "is missing")
        if field == "batch_input":
            if each.data_type not in _DTYPES or not inputs.keys().isdisjoint(each.target_name):
                raise refuse(field, "must be TYPE_FP32 or TYPE_INT32, and no input of clients")
        elif any(name not in outputs or len(outputs[name].dims) != len(source.dims) for name in each.target_name):
            raise refuse(f"{field}.target_name", "must name outputs with as many dims as the source_input")


def with_ragged(spec: ModelSpec, config: pb.ModelConfig) -> ModelSpec:
    """Return `spec` with the rules of a checked configuration; as it is for other models."""
    if config.backend == "python" or not is_ragged(config):
        return spec
    inputs = [
        BatchInput(pb.BatchInput.Kind.Name(e.kind), tuple(e.target_name), e.source_input[0], _DTYPES[e.data_type])
        for e in config.batch_input
    ]
    outputs = {name: each.source_input[0] for each in config.batch_output for name in each.target_name}
    return replace(spec, ragged=RaggedRules(inputs=tuple(inputs), outputs=outputs))
