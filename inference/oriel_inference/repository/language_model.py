"""The configuration of a language model: its settings, its tensors, and what it may not ask for."""

from collections.abc import Callable
from dataclasses import replace

from oriel_inference.backends.compilers import number, one_of
from oriel_inference.errors import ConfigInvalid
from oriel_inference.language.backend import CACHE, ENGINE, RUNNING, STEP_TOKENS
from oriel_inference.model import EngineOptions
from oriel_inference.repository.config import instance_count, read_parameters
from oriel_inference.repository.python_model import require_trusted
from oriel_inference.stores import ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

BACKEND = "language"
TOKENIZER = "openvino_tokenizer.xml"
_DEFAULTS = {ENGINE: "openvino-genai", CACHE: "1024", RUNNING: "16", STEP_TOKENS: "64"}
_PARAMETERS: dict[str, Callable[[str], str]] = {
    ENGINE: one_of("openvino-genai", "double"),
    CACHE: number(1, 1 << 20),
    RUNNING: number(1, 256),
    STEP_TOKENS: number(16, 1 << 16),
}
# The names are those of Triton's backend for vLLM, and ids beside the texts.
_FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs")
_COUNTS = ("num_input_tokens", "num_output_tokens")
_INPUTS = {
    **dict.fromkeys(("text_input", "sampling_parameters"), (pb.TYPE_STRING, 1)),
    "input_ids": (pb.TYPE_INT64, -1),
    **dict.fromkeys((*_FLAGS, *(f"return_{each}" for each in _COUNTS)), (pb.TYPE_BOOL, 1)),
}
_OUTPUTS = {
    **dict.fromkeys(("text_output", "finish_reason", "logprobs"), (pb.TYPE_STRING, 1)),
    "output_ids": (pb.TYPE_INT64, -1),
    **dict.fromkeys(_COUNTS, (pb.TYPE_UINT32, 1)),
}


def complete_language(
    config: pb.ModelConfig, store: ModelStore, version: int, file: str, options: EngineOptions
) -> EngineOptions:
    """Complete the configuration in place; return the options with the engine's settings. Raises LoadFailed."""
    require_trusted(store, file, "language models")
    if config.default_model_filename.endswith(".xml") and TOKENIZER not in store.files(config.name, version):
        reason = f"needs {TOKENIZER} beside it, as `optimum-cli export openvino` writes it: docs/language-models.md"
        raise ConfigInvalid(file, config.default_model_filename, reason)
    for field, found, reason in (
        ("max_batch_size", config.max_batch_size > 0, "must be 0: the engine batches by itself (oriel.max_running)"),
        ("instance_group", instance_count(config) > 1, "must have one instance, which runs many sequences"),
        ("instance_group", _on_gpu(config), "must have KIND_CPU: the engine runs on the CPU here"),
        ("sequence_batching", config.HasField("sequence_batching"), "does not go with a language model"),
        ("model_warmup", len(config.model_warmup) > 0, "is not needed: the engine makes a token when it loads a model"),
    ):
        if found:
            raise ConfigInvalid(file, field, reason)
    settings = _DEFAULTS | read_parameters(config, file, _PARAMETERS)
    for field, given, tensors in (("input", config.input, _INPUTS), ("output", config.output, _OUTPUTS)):
        for each in given:
            if tensors.get(each.name) != (each.data_type, *each.dims):
                reason = f"{each.name[:64]!r} is none of a language model's, leave all out: docs/language-models.md"
                raise ConfigInvalid(file, field, reason)
    del config.input[:], config.output[:]
    for name, (kind, dim) in _INPUTS.items():
        config.input.add(name=name, data_type=kind, dims=[dim], optional=True)
    for name, (kind, dim) in _OUTPUTS.items():
        config.output.add(name=name, data_type=kind, dims=[dim])
    config.model_transaction_policy.decoupled = True
    return replace(options, session_entries=settings)


def _on_gpu(config: pb.ModelConfig) -> bool:
    return any(group.kind == pb.ModelInstanceGroup.KIND_GPU or group.gpus for group in config.instance_group)
