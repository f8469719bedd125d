"""`optimization.execution_accelerators`: turns names and parameters of a configuration into execution providers and
options.

Keys, values and the order of preference are those of Triton's ONNX Runtime backend: the GPU accelerators in the order
in which they are listed, CUDA, the CPU accelerators, the CPU. An unknown key is refused: the runtime would drop it or
the whole provider. No key may make the server load a library or write outside its own cache folder, because the author
of a configuration need not be the operator of the server.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from oriel_inference.backends.compilers import never, one_of, read_value
from oriel_inference.errors import ConfigInvalid
from oriel_wire.process.shared_settings import cache_folder
from oriel_wire.v2.proto import model_config_pb2 as pb

Convert = Callable[[str], str]
Options = Mapping[str, str]
_Accelerator = pb.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator

CUDA = "CUDAExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
PROVIDERS = {"tensorrt": TENSORRT, "cuda": CUDA, "openvino": OPENVINO}
MAX_VALUE = 4096
_FIELD = "optimization.execution_accelerators"
_TRUE, _FALSE = ("1", "true", "True", "TRUE"), ("0", "false", "False", "FALSE")


def _flag(text: str) -> str:
    if text not in (*_TRUE, *_FALSE):
        raise ValueError("must be 1, true, 0 or false")
    return "1" if text in _TRUE else "0"


def _true(text: str) -> str:
    return "True" if _flag(text) == "1" else "False"


def _number(text: str) -> str:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise ValueError("must be a whole number")
    return text


def _text(text: str) -> str:
    if "\0" in text or len(text) > MAX_VALUE:
        raise ValueError(f"must be text of at most {MAX_VALUE} characters")
    return text


def _file(text: str) -> str:
    if not text or "\0" in text or "/" in text or text in (".", ".."):
        raise ValueError("must be a file name without folders")
    return text


def _folder(text: str) -> str:
    parts = PurePosixPath(text).parts
    if not text or "\0" in text or ".." in parts:
        raise ValueError("must be a path without '..'")
    return str(cache_folder("engines").joinpath(*(part for part in parts if part != "/")))


def _numbered(*values: str) -> Convert:
    """Return the names of a value, and its numbers in Triton's older spelling."""

    def convert(text: str) -> str:
        if text.isascii() and text.isdigit() and int(text) < len(values):
            return values[int(text)]
        return one_of(*values)(text)

    return convert


def _off(reason: str) -> Convert:
    """Return a function that reads a switch which must not be on."""

    def convert(text: str) -> str:
        if _true(text) == "True":
            raise ValueError(reason)
        return "False"

    return convert


_PRECISIONS = {"FP32": "", "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
_TRT_FLAGS = """
    trt_dla_enable trt_engine_cache_enable trt_dump_subgraphs trt_force_sequential_engine_build
    trt_context_memory_sharing_enable trt_layer_norm_fp32_fallback trt_timing_cache_enable trt_force_timing_cache
    trt_detailed_build_log trt_build_heuristics_enable trt_sparsity_enable trt_dump_ep_context_model
""".split()
_TRT_NUMBERS = """
    trt_max_partition_iterations trt_min_subgraph_size trt_dla_core trt_builder_optimization_level
    trt_auxiliary_streams trt_ep_context_embed_mode
""".split()
_TRT_TEXTS = "trt_tactic_sources trt_profile_min_shapes trt_profile_max_shapes trt_profile_opt_shapes".split()
_CUDA_FLAGS = """
    do_copy_in_default_stream cudnn_conv_use_max_workspace cudnn_conv1d_pad_to_nc1d enable_cuda_graph
    tunable_op_enable tunable_op_tuning_enable enable_skip_layer_norm_strict_mode prefer_nhwc
    use_ep_level_unified_stream use_tf32 fuse_conv_bias
""".split()
_STALE = "would answer from the tensors of an earlier batch: CUDA graphs are for the accelerator cuda alone"
LIBRARY = "would load a library into the server, which a model configuration may not do"

# accelerator -> parameter -> (option of the provider, function that reads its value)
_KEYS: dict[str, dict[str, tuple[str, Convert]]] = {
    "tensorrt": {
        "max_workspace_size_bytes": ("trt_max_workspace_size", _number),
        "int8_calibration_table_name": ("trt_int8_calibration_table_name", _file),
        "int8_use_native_calibration_table": ("trt_int8_use_native_calibration_table", _true),
        "trt_engine_cache_path": ("trt_engine_cache_path", _folder),
        "trt_engine_cache_prefix": ("trt_engine_cache_prefix", _file),
        "trt_timing_cache_path": ("trt_timing_cache_path", _folder),
        "trt_ep_context_file_path": ("trt_ep_context_file_path", _folder),
        "trt_extra_plugin_lib_paths": ("trt_extra_plugin_lib_paths", never(LIBRARY)),
        "trt_cuda_graph_enable": ("trt_cuda_graph_enable", _off(_STALE)),
        **{key: (key, _true) for key in _TRT_FLAGS},
        **{key: (key, _number) for key in _TRT_NUMBERS},
        **{key: (key, _text) for key in _TRT_TEXTS},
    },
    "cuda": {
        "gpu_mem_limit": ("gpu_mem_limit", _number),
        "arena_extend_strategy": ("arena_extend_strategy", _numbered("kNextPowerOfTwo", "kSameAsRequested")),
        "cudnn_conv_algo_search": ("cudnn_conv_algo_search", _numbered("EXHAUSTIVE", "HEURISTIC", "DEFAULT")),
        "tunable_op_max_tuning_duration_ms": ("tunable_op_max_tuning_duration_ms", _number),
        "sdpa_kernel": ("sdpa_kernel", _number),
        "device_id": ("device_id", never("is given by instance_group.gpus")),
        **{key: (key, _flag) for key in _CUDA_FLAGS},
    },
    "openvino": {
        "device_type": ("device_type", one_of("CPU")),
        "precision": ("precision", one_of("FP32", "FP16", "ACCURACY")),
        "num_of_threads": ("num_of_threads", _number),
        "num_streams": ("num_streams", _number),
        "cache_dir": ("cache_dir", _folder),
        "disable_dynamic_shapes": ("disable_dynamic_shapes", _true),
        "enable_qdq_optimizer": ("enable_qdq_optimizer", _true),
    },
}
# CUDA's options could once be given as parameters of the model.
OLD_CUDA_KEYS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")


def accelerators(config: pb.ModelConfig, file: str, *, gpu: bool) -> list[tuple[str, Options]]:
    """Return the providers of an instance on a GPU or on the CPU in order of preference, without the CPU itself.

    Raises ConfigInvalid that names the field.
    """
    listed = config.optimization.execution_accelerators
    found: list[tuple[str, Options]] = []
    if gpu:
        old = {key: config.parameters[key].string_value for key in OLD_CUDA_KEYS if key in config.parameters}
        options = _options("cuda", old, file, "parameters")
        found += _listed(listed.gpu_execution_accelerator, ("tensorrt", "cuda"), file, "gpu_execution_accelerator")
        found = [(name, {**options, **given} if name == CUDA else given) for name, given in found]
        if CUDA not in dict(found):
            found.append((CUDA, options))
    found += _listed(listed.cpu_execution_accelerator, ("openvino",), file, "cpu_execution_accelerator")
    return found


def check_accelerators(config: pb.ModelConfig, file: str) -> None:
    """Check every accelerator, also those that no instance uses. Raises ConfigInvalid."""
    accelerators(config, file, gpu=True)


def _listed(entries: Iterable[_Accelerator], known: Sequence[str], file: str, kind: str) -> list[tuple[str, Options]]:
    found: list[tuple[str, Options]] = []
    for index, entry in enumerate(entries):
        field = f"{_FIELD}.{kind}[{index}]"
        if entry.name not in known:
            reason = f"{entry.name[:64]!r} is not one of {', '.join(known)}"
            raise ConfigInvalid(file, f"{field}.name", reason)
        if PROVIDERS[entry.name] in dict(found):
            raise ConfigInvalid(file, f"{field}.name", f"{entry.name!r} is listed twice")
        found.append((PROVIDERS[entry.name], _options(entry.name, entry.parameters, file, f"{field}.parameters")))
    return found


def _options(accelerator: str, given: Options, file: str, field: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in sorted(given.items()):
        if accelerator == "tensorrt" and key == "precision_mode":
            if value not in _PRECISIONS:
                reason = f"{value[:64]!r} is not one of {', '.join(_PRECISIONS)}"
                raise ConfigInvalid(file, f"{field}[{key!r}]", reason)
            options |= {_PRECISIONS[value]: "True"} if _PRECISIONS[value] else {}
            continue
        if key not in _KEYS[accelerator]:
            raise ConfigInvalid(file, f"{field}[{key[:64]!r}]", f"is not an option of {accelerator}")
        name, convert = _KEYS[accelerator][key]
        options[name] = read_value(convert, value, file, f"{field}[{key!r}]")
    return options
