"""The configuration of a PyTorch program: its parameters, and the tensors that the file does not describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oriel_inference.backends.python.backend import START_KEY, seconds, tensor_infos
from oriel_inference.backends.pytorch.form import form_of
from oriel_inference.backends.pytorch.process import LIMITS, SHARING_KEY
from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import TensorInfo
from oriel_inference.repository.instances import Place, count, switch
from oriel_inference.repository.python_model import require_trusted
from oriel_inference.stores import ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

_SWITCHES = (
    *("DISABLE_OPTIMIZED_EXECUTION", "DISABLE_CUDNN", "INFERENCE_MODE", SHARING_KEY),
    *("ENABLE_CACHE_CLEANING", "ENABLE_TENSOR_FUSER", "ENABLE_JIT_PROFILING", "ENABLE_JIT_EXECUTOR"),
)


def with_program(
    config: pb.ModelConfig, file: str, store: ModelStore, found: Sequence[Place], paths: Mapping[str, Path]
) -> list[Place]:
    """Return the same instances with the parameters and the tensors of the configuration. Raises LoadFailed.

    paths: the files of the instances by name.
    """
    require_trusted(store, file, "PyTorch programs")
    for path in paths.values():
        form_of(path)  # what is wrong with a file is reported before what its configuration lacks
    inputs, outputs = tensor_infos(config, config.input), tensor_infos(config, config.output)
    _check_tensors(inputs, file, "input")
    _check_tensors(outputs, file, "output")
    if "MODEL_INIT_LIBRARY" in config.parameters:
        reason = "would load a library, which a model configuration may not do"
        raise ConfigInvalid(file, "parameters['MODEL_INIT_LIBRARY']", reason)
    entries = {key: "1" if switch(config, key, file) else "0" for key in _SWITCHES if key in config.parameters}
    entries["max_batch_size"] = str(config.max_batch_size)
    entries[START_KEY] = str(seconds(config, START_KEY, LIMITS.start_s))
    intra = count(config, "INTRA_OP_THREAD_COUNT", file) or count(config, "NUM_THREADS", file)
    inter = count(config, "INTER_OP_THREAD_COUNT", file) or count(config, "NUM_INTEROP_THREADS", file)
    placed = []
    for place in found:
        options = replace(place.options, session_entries=entries, inputs=inputs, outputs=outputs)
        options = replace(options, intra_op_threads=intra or options.intra_op_threads)
        placed.append(replace(place, options=replace(options, inter_op_threads=inter or options.inter_op_threads)))
    return placed


def _check_tensors(tensors: Sequence[TensorInfo], file: str, kind: str) -> None:
    if not tensors:
        reason = "is missing: a PyTorch file does not describe its tensors, name them in config.pbtxt: docs/pytorch.md"
        raise ConfigInvalid(file, kind, reason)
    for index, tensor in enumerate(tensors):
        if tensor.datatype == "BYTES":
            reason = "is TYPE_STRING, and PyTorch has no tensors of text: encode it in the client or in a Python model"
            raise ConfigInvalid(file, f"{kind}[{index}].data_type", reason)
