"""A row for every field of `config.pbtxt`: whether it works, is only shown, is warned about or refused, and with which
words. Also the pieces of configurations that tests put together.
"""

from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any, NamedTuple

from onnx import save_model

from oriel_inference.repository.load import LoadedVersion

from . import models

INPUT = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]'
OUTPUT = 'output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]'
BASE = f'backend: "onnxruntime" max_batch_size: 8 {INPUT} {OUTPUT} '
WORKS, SHOWN, WARNED, REFUSED = "works", "shown", "warned", "refused"


class Row(NamedTuple):
    """One field and what the server does with it.

    text: part of the refusal or of the warning.
    effect: returns whether the field works.
    alone: `snippet` is the whole configuration.
    """

    field: str
    snippet: str
    verdict: str
    text: str = ""
    effect: Callable[[LoadedVersion], Any] | None = None
    alone: bool = False


def shown(field: str, snippet: str, text: str = "", **more: Any) -> Row:
    return Row(field, snippet, SHOWN, text, **more)


def warned(field: str, snippet: str, text: str = "", **more: Any) -> Row:
    return Row(field, snippet, WARNED, text or field.partition(".")[0], **more)


def refused(field: str, snippet: str, text: str, **more: Any) -> Row:
    return Row(field, snippet, REFUSED, text, **more)


def works(field: str, snippet: str, effect: Callable[[LoadedVersion], Any], **more: Any) -> Row:
    return Row(field, snippet, WORKS, "", effect, **more)


def tensor(more: str, output: str = OUTPUT) -> str:
    start = 'backend: "onnxruntime" max_batch_size: 8 '
    return start + f'input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] {more} }} ] {output}'


def out(more: str) -> str:
    return tensor("", f'output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] {more} }} ]')


def group(more: str) -> str:
    return f"instance_group [ {{ {more} }} ]"


def optimization(more: str) -> str:
    return f"optimization {{ {more} }}"


def accelerator(kind: str, name: str, parameters: str = "") -> str:
    return optimization(
        f'execution_accelerators {{ {kind}_execution_accelerator [ {{ name: "{name}" {parameters} }} ] }}'
    )


def option(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: "{value}" }}'


CHECKSUM = 'model_repository_agents { agents { name: "checksum" parameters { key: "%s" value: "%s" } } }'
SUM = md5(models.double().SerializeToString()).hexdigest()
FAMILY = 'metric_identifier { family: "f" }'
SPEC = 'batch_size: 4 input { key: "x" value { dim: [ 4 ] } }'
NOT_YET = "is understood, but not executed by this server yet"

ROWS = [
    works("name", 'name: "double"', lambda v: v.spec.name == "double"),
    refused("name", 'name: "other"', "name: 'other' differs from the folder's name 'double'"),
    works("platform", 'platform: "onnxruntime_onnx"', lambda v: v.spec.platform == "onnxruntime_onnx"),
    refused("platform", 'platform: "tensorrt_plan"', "plans need TensorRT, which is not installed", alone=True),
    refused("platform", 'platform: "pytorch_libtorch"', "double/1/model.pt is missing", alone=True),
    refused("platform", 'platform: "torch_aoti"', "double/1/model.pt2 is missing", alone=True),
    refused("platform", 'platform: "tensorflow_graphdef"', "oriel-serving[openvino-models]", alone=True),
    refused("platform", 'platform: "tensorflow_savedmodel"', "oriel-serving[openvino-models]", alone=True),
    refused("platform", 'platform: "caffe2_netdef"', "docs/convert-to-onnx.md", alone=True),
    refused("platform", 'platform: "steam_engine"', "'steam_engine' is not supported", alone=True),
    refused("platform", 'platform: "tensorrt_plan"', "contradicts platform"),
    works("backend", "", lambda v: v.spec.backend == "onnxruntime"),
    refused("backend", 'backend: "tensorrt"', "pip install 'oriel-serving[tensorrt]'", alone=True),
    refused("backend", 'backend: "pytorch"', "double/1/model.pt is missing", alone=True),
    refused("backend", 'backend: "openvino"', "oriel-serving[openvino-models]", alone=True),
    refused("backend", 'backend: "tensorflow"', "oriel-serving[openvino-models]", alone=True),
    refused("backend", 'backend: "vllm"', "behind the gateway", alone=True),
    refused("backend", 'backend: "tensorrtllm"', "behind the gateway", alone=True),
    refused("backend", 'backend: "dali"', "logic service", alone=True),
    refused("backend", 'backend: "fil"', "oriel-serving[forests]", alone=True),
    refused("backend", 'backend: "identity"', "example backends", alone=True),
    refused("backend", 'backend: "steam"', ", python: copy the model.py of a Python-based backend", alone=True),
    warned("runtime", 'runtime: "libtriton_onnxruntime.so"'),
    works(
        "version_policy.latest.num_versions", "version_policy { latest { num_versions: 1 } }", lambda v: v.spec.version
    ),
    works("version_policy.all", "version_policy { all { } }", lambda v: v.spec.version == 1),
    works("version_policy.specific.versions", "version_policy { specific { versions: 1 } }", lambda v: v.spec.version),
    refused("version_policy.specific.versions", "version_policy { specific { versions: -1 } }", "must not be negative"),
    works("max_batch_size", "", lambda v: v.spec.max_batch_size == 8),
    refused("max_batch_size", "max_batch_size: -1", "must not be negative", alone=True),
    works("default_model_filename", 'default_model_filename: "other.onnx"', lambda v: v.spec.name),
    refused("default_model_filename", 'default_model_filename: "../x.onnx"', "stay inside the model's folder"),
    works("cc_model_filenames", 'cc_model_filenames { key: "9.0" value: "h.onnx" }', lambda v: v.spec.name),
    refused("cc_model_filenames", 'cc_model_filenames { key: "new" value: "h.onnx" }', "compute capability"),
    refused("cc_model_filenames", 'cc_model_filenames { key: "9.0" value: "" }', "names no file"),
    # input and output
    works("input.name", "", lambda v: v.spec.inputs[0].name == "x"),
    works("input.data_type", "", lambda v: v.spec.inputs[0].datatype == "FP32"),
    works("input.dims", "", lambda v: v.spec.inputs[0].dims == (4,)),
    works(
        "input.reshape.shape", tensor("reshape { shape: [ 4 ] }"), lambda v: v.spec.inputs[0].engine_dims, alone=True
    ),
    refused("input.reshape.shape", tensor("reshape { shape: [ 5 ] }"), "number of elements", alone=True),
    works("input.format", tensor("format: FORMAT_NONE"), lambda v: v.spec.name, alone=True),
    refused("input.format", tensor("format: FORMAT_NCHW"), "FORMAT_NCHW needs three dims, not 1", alone=True),
    refused("input.is_shape_tensor", tensor("is_shape_tensor: true"), "plans with shape tensors are not", alone=True),
    refused(
        "input.allow_ragged_batch",
        tensor("allow_ragged_batch: true"),
        "input[0].dims: [] does not fit the model file's [4]",
        alone=True,
    ),
    works("input.optional", tensor("optional: true"), lambda v: v.spec.inputs[0].optional, alone=True),
    refused("input.is_non_linear_format_io", tensor("is_non_linear_format_io: true"), "row-major", alone=True),
    works("output.name", "", lambda v: v.spec.outputs[0].name == "y"),
    works("output.data_type", "", lambda v: v.spec.outputs[0].datatype == "FP32"),
    works("output.dims", "", lambda v: v.spec.outputs[0].dims == (4,)),
    works(
        "output.label_filename",
        out('label_filename: "l.txt"'),
        lambda v: v.spec.outputs[0].labels == ("a", "b"),
        alone=True,
    ),
    refused(
        "output.label_filename",
        out('label_filename: "no.txt"'),
        "no.txt, named as label_filename, is missing",
        alone=True,
    ),
    refused("output.label_filename", out('label_filename: "../l.txt"'), "stay inside the model's folder", alone=True),
    works("output.reshape.shape", out("reshape { shape: [ 4 ] }"), lambda v: v.spec.outputs[0].engine_dims, alone=True),
    refused("output.is_shape_tensor", out("is_shape_tensor: true"), "plans with shape tensors are not", alone=True),
    refused("output.is_non_linear_format_io", out("is_non_linear_format_io: true"), "row-major", alone=True),
    # instances
    works("instance_group.name", group('name: "front"'), lambda v: len(v.sessions) == 1),
    works("instance_group.count", group("count: 3"), lambda v: len(v.sessions) == 3 == v.spec.instances),
    refused("instance_group.count", group("count: -1"), "must not be negative"),
    works("instance_group.kind", group("kind: KIND_CPU"), lambda v: v.sessions[0].provider == "CPUExecutionProvider"),
    works("instance_group.kind", group("kind: KIND_AUTO"), lambda v: v.sessions[0].provider == "CPUExecutionProvider"),
    works("instance_group.kind", group("kind: KIND_MODEL"), lambda v: v.sessions[0].provider == "CPUExecutionProvider"),
    refused("instance_group.kind", group("kind: KIND_GPU"), "the extra oriel-serving[gpu]"),
    refused("instance_group.gpus", group("gpus: [ 0 ]"), "the extra oriel-serving[gpu]"),
    refused("instance_group.gpus", group("kind: KIND_CPU gpus: [ 0 ]"), "does not go with KIND_CPU"),
    refused("instance_group.gpus", group("gpus: [ 0, 0 ]"), "each once"),
    warned("instance_group.profile", group('profile: "0"')),
    refused("instance_group.profile", group('profile: "fast"'), "not the number of an optimisation profile"),
    warned(
        "instance_group.passive", group("count: 2 }, { passive: true"), "passive", effect=lambda v: len(v.sessions) == 2
    ),
    refused("instance_group.passive", group("passive: true"), "no instance would take requests"),
    works("", group('host_policy: "cpu"'), lambda v: v.spec.name),
    warned("instance_group.host_policy", group('host_policy: "numa1"')),
    warned("instance_group.rate_limiter.priority", group("rate_limiter { priority: 2 }")),
    *(
        warned(
            f"instance_group.rate_limiter.resources.{name}",
            group(f"rate_limiter {{ resources {{ {name}: {value} }} }}"),
        )
        for name, value in {"name": '"R"', "global": "true", "count": "1"}.items()
    ),
    refused("instance_group.secondary_devices", group("secondary_devices { kind: KIND_NVDLA }"), "NVDLA"),
    # optimisation
    works("optimization.graph.level", optimization("graph { level: -1 }"), lambda v: v.config.optimization.graph.level),
    works("optimization.graph.level", optimization("graph { level: 2 }"), lambda v: v.config.optimization.graph.level),
    refused(
        "optimization.graph.level", optimization("graph { level: 7 }"), "must be -1 (basic), 0 (all), 1 (extended)"
    ),
    warned("optimization.priority", optimization("priority: PRIORITY_MAX"), "optimization.priority"),
    warned("optimization.cuda.graphs", optimization("cuda { graphs: true }"), "optimization.cuda"),
    warned("optimization.cuda.busy_wait_events", optimization("cuda { busy_wait_events: true }"), "optimization.cuda"),
    warned(
        "optimization.cuda.output_copy_stream", optimization("cuda { output_copy_stream: true }"), "optimization.cuda"
    ),
    warned(
        "optimization.cuda.graph_spec.batch_size",
        optimization(f"cuda {{ graph_spec {{ {SPEC} }} }}"),
        "optimization.cuda",
    ),
    refused(
        "optimization.cuda.graph_spec.batch_size",
        optimization("cuda { graph_spec { batch_size: 9 } }"),
        "max_batch_size 8",
    ),
    refused(
        "optimization.cuda.graph_spec.input.dim",
        optimization('cuda { graph_spec { input { key: "x" value { dim: 0 } } } }'),
        "positive",
    ),
    refused(
        "optimization.cuda.graph_spec.input.dim",
        optimization('cuda { graph_spec { input { key: "z" value { dim: 1 } } } }'),
        "no input 'z'",
    ),
    refused(
        "optimization.cuda.graph_spec.graph_lower_bound.batch_size",
        optimization("cuda { graph_spec { batch_size: 2 graph_lower_bound { batch_size: 3 } } }"),
        "the batch_size above it",
    ),
    refused(
        "optimization.cuda.graph_spec.graph_lower_bound.input.dim",
        optimization('cuda { graph_spec { graph_lower_bound { input { key: "x" value { dim: 0 } } } } }'),
        "positive",
    ),
    warned(
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        accelerator("gpu", "tensorrt"),
        "TensorRT is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[tensorrt]",
    ),
    warned(
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        accelerator("gpu", "cuda"),
        "CUDA is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[gpu]",
    ),
    refused(
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        accelerator("gpu", "tensorrt") + group("kind: KIND_GPU"),
        "TensorRT is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[tensorrt]",
    ),
    refused(
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        accelerator("gpu", "steam"),
        "'steam' is not one of tensorrt, cuda",
    ),
    refused(
        "optimization.execution_accelerators.gpu_execution_accelerator.parameters",
        accelerator("gpu", "tensorrt", option("trt_flux", "1")),
        "parameters['trt_flux']: is not an option of tensorrt",
    ),
    works(
        "optimization.execution_accelerators.cpu_execution_accelerator.name",
        accelerator("cpu", "openvino"),
        lambda v: v.compilation is not None and v.compilation.compiler.name == "openvino",
    ),
    refused(
        "optimization.execution_accelerators.cpu_execution_accelerator.name",
        accelerator("cpu", "steam"),
        "'steam' is not one of openvino",
    ),
    refused(
        "optimization.execution_accelerators.cpu_execution_accelerator.parameters",
        accelerator("cpu", "openvino", option("num_streams", "many")),
        "must be a whole number",
    ),
    warned(
        "optimization.input_pinned_memory.enable",
        optimization("input_pinned_memory { enable: true }"),
        "optimization.input_pinned_memory",
    ),
    warned(
        "optimization.output_pinned_memory.enable",
        optimization("output_pinned_memory { enable: true }"),
        "optimization.output_pinned_memory",
    ),
    warned(
        "optimization.gather_kernel_buffer_threshold",
        optimization("gather_kernel_buffer_threshold: 1"),
        "gather_kernel_buffer",
    ),
    warned("optimization.eager_batching", optimization("eager_batching: true"), "optimization.eager_batching"),
    # the rest
    works(
        "parameters.string_value",
        'parameters { key: "k" value { string_value: "v" } }',
        lambda v: v.spec.parameters == {"k": "v"},
    ),
    works(
        "parameters.string_value",
        'parameters { key: "enable_mem_arena" value { string_value: "0" } }',
        lambda v: v.spec.name,
    ),
    refused(
        "parameters.string_value",
        'parameters { key: "enable_mem_arena" value { string_value: "no" } }',
        "must be 0 or 1",
    ),
    warned(
        "parameters.string_value",
        'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "x.so" } }',
        "TRITON_BATCH_STRATEGY_PATH",
    ),
    refused(
        "parameters.string_value",
        'parameters { key: "intra_op_thread_count" value { string_value: "257" } }',
        "must be a number from 0 to 256",
    ),
    refused(
        "model_operations.op_library_filename",
        'model_operations { op_library_filename: "ops.so" }',
        "op_library_filename[0]: 'ops.so' is not in a folder that --allow-custom-ops DIR names",
    ),
    refused(
        "model_transaction_policy.decoupled", "model_transaction_policy { decoupled: true }", "exactly one response"
    ),
    works("model_repository_agents.agents.name", CHECKSUM % ("md5:1/h.onnx", SUM), lambda v: v.spec.name),
    works(
        "model_repository_agents.agents.parameters",
        CHECKSUM % ("md5:l.txt", md5(b"a\nb\n").hexdigest()),
        lambda v: v.spec.name,
    ),
    works("response_cache.enable", "response_cache { enable: true }", lambda v: v.spec.cached),
    warned(
        "response_cache.enable",
        "response_cache { enable: true } dynamic_batching { preserve_ordering: true }",
        "response_cache",
        effect=lambda v: not v.spec.cached,
    ),
    refused(
        "response_cache.enable",
        "response_cache { enable: true } model_transaction_policy { decoupled: true }",
        "response_cache: does not go with model_transaction_policy.decoupled",
    ),
    refused(
        "response_cache.enable",
        "response_cache { enable: true } sequence_batching { }",
        "response_cache: does not go with sequence_batching",
    ),
    refused(
        "model_repository_agents.agents.parameters",
        CHECKSUM % ("MD5:1/other.onnx", "0f"),
        "Mismatched MD5 hash for file 1/other.onnx, expect: 0f, got: ",
    ),
    refused(
        "model_repository_agents.agents.parameters", CHECKSUM % ("l.txt", "0f"), "agents[0]: failed to parse key: l.txt"
    ),
    refused(
        "model_repository_agents.agents.parameters",
        CHECKSUM % ("SHA1:l.txt", "0f"),
        "agents[0]: Unsupported checksum algorithm: SHA1",
    ),
    refused("model_repository_agents.agents.parameters", CHECKSUM % ("MD5:no.txt", "0f"), "double/no.txt is missing"),
    refused("model_repository_agents.agents.parameters", CHECKSUM % ("MD5:../l", "0f"), "stay inside the model's"),
    warned("model_repository_agents.agents.name", 'model_repository_agents { agents { name: "mirror" } }', "mirror"),
    refused("metric_tags", 'metric_tags { key: "a-b" value: "c" }', "metric_tags['a-b']: the key must be a label name"),
    refused("metric_tags", 'metric_tags { key: "_a" value: "c" }', "metric_tags['_a']: the key must be a label name"),
    refused("metric_tags", f'metric_tags {{ key: "a" value: "{129 * "c"}" }}', "['a']: the value has 129 characters"),
    refused("metric_tags", "".join(f'metric_tags {{ key: "a{n}" value: "" }} ' for n in range(17)), "has 17 tags"),
    refused(
        "model_metrics.metric_control.metric_identifier.family",
        "model_metrics { metric_control { } }",
        "family: is missing",
    ),
    refused(
        "model_metrics.metric_control.histogram_options.buckets",
        f"model_metrics {{ metric_control {{ {FAMILY} histogram_options {{ buckets: [ 2, 1 ] }} }} }}",
        "ascending numbers",
    ),
    refused(
        "model_metrics.metric_control.histogram_options.buckets",
        f"model_metrics {{ metric_control {{ {FAMILY} histogram_options {{ buckets: {list(range(65))} }} }} }}",
        "at most 64",
    ),
    # what no field is
    refused("", "\n\nflux: 3", 'line 3, column 1: "ModelConfig" has no field named "flux"'),
    refused("", "optimization { flux: 3 }", 'has no field named "flux"'),
    refused("", "max_batch_size: many", "Couldn't parse integer: many", alone=True),
    refused("", group("kind: KIND_TPU"), "has no value named KIND_TPU, it is one of KIND_AUTO, KIND_GPU, KIND_CPU"),
    refused("", "max_batch_sise: 3", "did you mean 'max_batch_size'?"),
]


def write(root: Path, row: Row) -> None:
    folder = models.put(root, "double", models.double(), row.snippet if row.alone else BASE + row.snippet)
    for name in ("other.onnx", "h.onnx"):
        save_model(models.double(), str(folder / "1" / name))
    (folder / "l.txt").write_text("a\nb\n")
