"""Every field of `config.pbtxt`: works, shown, warned about or refused, with which words. docs/model-repository.md says
the same."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from onnx import save_model

from oriel_inference.backends import find_backend
from oriel_inference.backends.fake import FakeBackend
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import Gpu, TensorInfo
from oriel_inference.repository.instances import placements
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.metadata import message_json
from oriel_wire.v2.proto import model_config_pb2 as pb

from . import models

DOCS = Path(__file__).parents[2] / "docs/model-repository.md"
INPUT = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]'
OUTPUT = 'output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]'
BASE = f'backend: "onnxruntime" max_batch_size: 8 {INPUT} {OUTPUT} '
WORKS, SHOWN, WARNED, REFUSED = "works", "shown", "warned", "refused"
# Judged by tests of their own; here only: the page has a line for them.
ELSEWHERE = ("ensemble_scheduling", "dynamic_batching", "model_warmup", "metric_tags", "model_metrics")


class Row(NamedTuple):
    """text: of the refusal or the warning. effect: what shows that it works. alone: the whole configuration."""

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


def sequence(more: str) -> str:
    return f"sequence_batching {{ {more} }}"


def control(more: str) -> str:
    return sequence(f'control_input [ {{ name: "START" control [ {{ {more} }} ] }} ]')


START = "kind: CONTROL_SEQUENCE_START"
STATE = 'input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: [ 1 ]'
BATCH_INPUT = 'kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "x"'
FAMILY = 'metric_identifier { family: "f" }'
SPEC = 'batch_size: 4 input { key: "x" value { dim: [ 4 ] } }'
NOT_YET = "is understood, but not executed by this server yet"

ROWS = [
    works("name", 'name: "double"', lambda v: v.spec.name == "double"),
    refused("name", 'name: "other"', "name: 'other' differs from the folder's name 'double'"),
    works("platform", 'platform: "onnxruntime_onnx"', lambda v: v.spec.platform == "onnxruntime_onnx"),
    refused("platform", 'platform: "tensorrt_plan"', "engine files are not executed by this version", alone=True),
    refused("platform", 'platform: "pytorch_libtorch"', "docs/convert-to-onnx.md", alone=True),
    refused("platform", 'platform: "torch_aoti"', "docs/convert-to-onnx.md", alone=True),
    refused("platform", 'platform: "tensorflow_graphdef"', "docs/convert-to-onnx.md", alone=True),
    refused("platform", 'platform: "tensorflow_savedmodel"', "docs/convert-to-onnx.md", alone=True),
    refused("platform", 'platform: "caffe2_netdef"', "docs/convert-to-onnx.md", alone=True),
    refused("platform", 'platform: "steam_engine"', "'steam_engine' is not supported", alone=True),
    refused("platform", 'platform: "tensorrt_plan"', "contradicts platform"),
    works("backend", "", lambda v: v.spec.backend == "onnxruntime"),
    refused("backend", 'backend: "tensorrt"', 'gpu_execution_accelerator { name: "tensorrt" }', alone=True),
    refused("backend", 'backend: "openvino"', 'cpu_execution_accelerator { name: "openvino" }', alone=True),
    refused("backend", 'backend: "pytorch"', "docs/convert-to-onnx.md", alone=True),
    refused("backend", 'backend: "tensorflow"', "docs/convert-to-onnx.md", alone=True),
    refused("backend", 'backend: "vllm"', "behind the gateway", alone=True),
    refused("backend", 'backend: "tensorrtllm"', "behind the gateway", alone=True),
    refused("backend", 'backend: "dali"', "logic service", alone=True),
    refused("backend", 'backend: "fil"', "docs/convert-to-onnx.md", alone=True),
    refused("backend", 'backend: "identity"', "example backends", alone=True),
    refused("backend", 'backend: "steam"', "'steam' is not supported", alone=True),
    warned("runtime", 'runtime: "libtriton_onnxruntime.so"'),
    works(
        "version_policy.latest.num_versions", "version_policy { latest { num_versions: 1 } }", lambda v: v.spec.version
    ),
    works("version_policy.all", "version_policy { all { } }", lambda v: v.spec.version == 1),
    works("version_policy.specific.versions", "version_policy { specific { versions: 1 } }", lambda v: v.spec.version),
    refused("version_policy.specific.versions", "version_policy { specific { versions: 0 } }", "positive numbers"),
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
    refused("input.is_shape_tensor", tensor("is_shape_tensor: true"), "only TensorRT engine files have", alone=True),
    refused("input.allow_ragged_batch", tensor("allow_ragged_batch: true"), NOT_YET, alone=True),
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
    refused("output.is_shape_tensor", out("is_shape_tensor: true"), "only TensorRT engine files have", alone=True),
    refused("output.is_non_linear_format_io", out("is_non_linear_format_io: true"), "row-major", alone=True),
    # ragged helpers: judged, then refused
    refused("batch_input.kind", f"batch_input [ {{ {BATCH_INPUT} }} ]", f"batch_input[0]: {NOT_YET}"),
    refused(
        "batch_input.target_name", 'batch_input { data_type: TYPE_FP32 source_input: "x" }', "target_name: is missing"
    ),
    refused("batch_input.data_type", "batch_input { data_type: TYPE_INT8 }", "must be TYPE_INT32 or TYPE_FP32"),
    refused("batch_input.source_input", f'batch_input {{ {BATCH_INPUT} source_input: "z" }}', "has no input 'z'"),
    refused("batch_output.kind", 'batch_output { target_name: "y" source_input: "x" }', f"batch_output[0]: {NOT_YET}"),
    refused("batch_output.target_name", 'batch_output { target_name: "z" source_input: "x" }', "has no output 'z'"),
    refused("batch_output.source_input", 'batch_output { target_name: "y" }', "must name exactly one input"),
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
    refused("instance_group.passive", group("passive: true"), NOT_YET),
    works("instance_group.host_policy", group('host_policy: "cpu"'), lambda v: v.spec.name),
    refused("instance_group.host_policy", group('host_policy: "numa1"'), NOT_YET),
    refused("instance_group.rate_limiter.priority", group("rate_limiter { priority: 2 }"), NOT_YET),
    refused(
        "instance_group.rate_limiter.resources.name",
        group("rate_limiter { resources { count: 1 } }"),
        "name: is missing",
    ),
    refused(
        "instance_group.rate_limiter.resources.count",
        group('rate_limiter { resources { name: "R" count: 1 } }'),
        NOT_YET,
    ),
    refused(
        "instance_group.rate_limiter.resources.global",
        group('rate_limiter { resources { name: "R" global: true } }'),
        NOT_YET,
    ),
    refused("instance_group.secondary_devices.kind", group("secondary_devices { kind: KIND_NVDLA }"), "NVDLA"),
    refused("instance_group.secondary_devices.device_id", group("secondary_devices { device_id: 0 }"), "NVDLA"),
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
    refused(
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        accelerator("gpu", "tensorrt"),
        "TensorRT is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[tensorrt]",
    ),
    refused(
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        accelerator("gpu", "cuda"),
        "CUDA is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[gpu]",
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
    refused(
        "optimization.execution_accelerators.cpu_execution_accelerator.name",
        accelerator("cpu", "openvino"),
        "pip install 'oriel-serving[openvino]'",
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
    # sequences: judged, then refused
    refused("sequence_batching.max_sequence_idle_microseconds", sequence("max_sequence_idle_microseconds: 1"), NOT_YET),
    refused("sequence_batching.control_input.name", sequence("control_input { }"), "control_input[0].name: is missing"),
    refused(
        "sequence_batching.control_input.control.kind",
        control(f"{START} int32_false_true: [ 0, 1 ]"),
        f"sequence_batching: {NOT_YET}",
    ),
    refused(
        "sequence_batching.control_input.control.int32_false_true",
        control(f"{START} int32_false_true: [ 0 ]"),
        "needs two values",
    ),
    refused(
        "sequence_batching.control_input.control.fp32_false_true",
        control(f"{START} fp32_false_true: [ 0 ]"),
        "needs two values",
    ),
    refused(
        "sequence_batching.control_input.control.bool_false_true",
        control(START),
        "needs exactly one of bool_false_true",
    ),
    refused(
        "sequence_batching.control_input.control.data_type", control("kind: CONTROL_SEQUENCE_CORRID"), "not a datatype"
    ),
    refused(
        "sequence_batching.state.input_name", sequence('state { output_name: "o" }'), "needs input_name and output_name"
    ),
    refused(
        "sequence_batching.state.output_name", sequence('state { input_name: "i" }'), "needs input_name and output_name"
    ),
    refused(
        "sequence_batching.state.data_type", sequence('state { input_name: "i" output_name: "o" }'), "not a datatype"
    ),
    refused("sequence_batching.state.dims", sequence(f"state {{ {STATE} }}"), f"sequence_batching: {NOT_YET}"),
    refused(
        "sequence_batching.state.initial_state.name",
        sequence(f'state {{ {STATE} initial_state {{ name: "s" }} }}'),
        "needs zero_data or data_file",
    ),
    refused(
        "sequence_batching.state.initial_state.data_type",
        sequence(f"state {{ {STATE} initial_state {{ data_type: TYPE_FP32 zero_data: true }} }}"),
        NOT_YET,
    ),
    refused(
        "sequence_batching.state.initial_state.dims",
        sequence(f"state {{ {STATE} initial_state {{ dims: 1 zero_data: true }} }}"),
        NOT_YET,
    ),
    refused(
        "sequence_batching.state.initial_state.zero_data",
        sequence(f"state {{ {STATE} initial_state {{ zero_data: true }} }}"),
        NOT_YET,
    ),
    refused(
        "sequence_batching.state.initial_state.data_file",
        sequence(f'state {{ {STATE} initial_state {{ data_file: "f" }} }}'),
        NOT_YET,
    ),
    refused(
        "sequence_batching.state.use_same_buffer_for_input_output",
        sequence(f"state {{ {STATE} use_same_buffer_for_input_output: true }}"),
        NOT_YET,
    ),
    refused(
        "sequence_batching.state.use_growable_memory",
        sequence(f"state {{ {STATE} use_growable_memory: true }}"),
        NOT_YET,
    ),
    refused(
        "sequence_batching.direct.max_queue_delay_microseconds",
        sequence("direct { max_queue_delay_microseconds: 1 }"),
        NOT_YET,
    ),
    refused(
        "sequence_batching.direct.minimum_slot_utilization",
        sequence("direct { minimum_slot_utilization: 2 }"),
        "between 0 and 1",
    ),
    refused(
        "sequence_batching.oldest.max_candidate_sequences",
        sequence("oldest { max_candidate_sequences: -1 }"),
        "negative",
    ),
    refused("sequence_batching.oldest.preferred_batch_size", sequence("oldest { preferred_batch_size: 4 }"), NOT_YET),
    refused(
        "sequence_batching.oldest.max_queue_delay_microseconds",
        sequence("oldest { max_queue_delay_microseconds: 1 }"),
        NOT_YET,
    ),
    refused("sequence_batching.oldest.preserve_ordering", sequence("oldest { preserve_ordering: true }"), NOT_YET),
    refused("sequence_batching.iterative_sequence", sequence("iterative_sequence: true"), NOT_YET),
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
    refused("model_operations.op_library_filename", 'model_operations { op_library_filename: "ops.so" }', NOT_YET),
    refused(
        "model_transaction_policy.decoupled", "model_transaction_policy { decoupled: true }", "exactly one response"
    ),
    refused("model_repository_agents.agents.name", 'model_repository_agents { agents { name: "checksum" } }', NOT_YET),
    warned("model_repository_agents.agents.name", 'model_repository_agents { agents { name: "mirror" } }', "mirror"),
    warned(
        "model_repository_agents.agents.parameters",
        'model_repository_agents { agents { name: "m" parameters { key: "a" value: "b" } } }',
        "(m)",
    ),
    warned("response_cache.enable", "response_cache { enable: true }", "there is no cache"),
    refused("metric_tags", 'metric_tags { key: "a b" value: "c" }', "must be a label name"),
    refused(
        "model_metrics.metric_control.metric_identifier.family",
        "model_metrics { metric_control { } }",
        "family: is missing",
    ),
    refused(
        "model_metrics.metric_control.histogram_options.buckets",
        f"model_metrics {{ metric_control {{ {FAMILY} histogram_options {{ buckets: [ 2, 1 ] }} }} }}",
        "must rise",
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.field}-{row.verdict}")
def test_field(row: Row, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, row)
    try:
        with caplog.at_level(logging.WARNING, "oriel_inference"):
            (version,) = load_model(
                Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1)
            ).values()
    except LoadFailed as failure:
        version = failure
    warnings = [record.getMessage() for record in caplog.records]
    if row.verdict == REFUSED:
        assert isinstance(version, LoadFailed), "it was loaded"
        assert row.text in version.reason and len(version.reason) <= 500 and str(tmp_path) not in version.reason
        assert version.reason.startswith(("double/", "file name")), "the file is not named"
        assert warnings in ([], [f"double/config.pbtxt: {row.field.partition('.graph_spec')[0]} has no effect here"])
        # Shown to clients all the same, if it could be read.
        if version.config is None:
            assert " column " in version.reason
        else:
            assert row.field.partition(".")[0] in {field.name for field, _ in version.config.ListFields()}
        return
    assert isinstance(version, LoadedVersion), version
    # Shown to clients as it was written, whatever it does.
    assert message_json(version.config)
    for top in {row.field.partition(".")[0]} - {""}:
        assert getattr(version.config, top) or top in ("version_policy",)
    if row.verdict == WARNED:
        assert len(warnings) == 1 and row.text in warnings[0] and warnings[0].startswith("double/config.pbtxt: ")
    else:
        assert warnings == []
    if row.effect is not None:
        assert row.effect(version)
    version.close()


def fields(message: Descriptor, path: str = "") -> Iterator[str]:
    """The leaves of the format."""
    for field in message.fields:
        name = f"{path}{field.name}"
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or not inner.fields:
            yield name
        else:
            yield from fields(inner, f"{name}.")


def test_every_field_of_the_format_has_a_row() -> None:
    known = {row.field for row in ROWS}
    missing = [name for name in fields(pb.ModelConfig.DESCRIPTOR) if name not in known]
    assert [name for name in missing if not name.startswith(ELSEWHERE)] == []


# --- GPUs, without one --------------------------------------------------------------------------------------------

TWO = (Gpu(number=0, capability="9.0"), Gpu(number=1, capability="8.6"))
CUDA, TENSORRT, OPENVINO = "CUDAExecutionProvider", "TensorrtExecutionProvider", "OpenVINOExecutionProvider"


def opened(root: Path, snippet: str) -> list[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """(file, providers) of every instance on a machine with two GPUs."""
    write(root, Row("", snippet, WORKS))
    x, y = (TensorInfo(name=name, datatype="FP32", shape=(-1, 4)) for name in "xy")
    backend = FakeBackend((x,), (y,), gpus=TWO)
    (version,) = load_model(
        Loading(LocalStore(root), "double", find_backend=lambda _: backend, cores=4, models=1)
    ).values()
    assert isinstance(version, LoadedVersion), version
    assert version.spec.instances == len(backend.opened)
    return [(file, [(name, dict(given)) for name, given in options.providers]) for file, options in backend.opened]


def cuda(device: int) -> tuple[str, dict[str, str]]:
    return CUDA, {"device_id": str(device)}


@pytest.mark.parametrize(
    ("snippet", "expected"),
    [
        ("", [[cuda(0)], [cuda(1)]]),
        (group("kind: KIND_GPU"), [[cuda(0)], [cuda(1)]]),
        (group("count: 2 gpus: [ 1 ]"), [[cuda(1)], [cuda(1)]]),
        (group("count: 2 kind: KIND_GPU gpus: [ 0, 1 ]"), [[cuda(0)], [cuda(0)], [cuda(1)], [cuda(1)]]),
        (group("kind: KIND_CPU"), [[]]),
        (group("kind: KIND_MODEL"), [[]]),
        (group("kind: KIND_GPU gpus: 0") + group("kind: KIND_CPU"), [[cuda(0)], []]),
    ],
)
def test_instances_on_gpus(tmp_path: Path, snippet: str, expected: list[Any]) -> None:
    assert [providers for _, providers in opened(tmp_path, snippet)] == expected


def test_order_of_preference_is_gpu_accelerators_cuda_cpu_accelerators(tmp_path: Path) -> None:
    snippet = optimization(
        'execution_accelerators { gpu_execution_accelerator [ { name: "tensorrt" parameters { key: "precision_mode" '
        'value: "FP16" } } ] cpu_execution_accelerator [ { name: "openvino" } ] }'
    ) + group("kind: KIND_GPU gpus: 1")
    (providers,) = [found for _, found in opened(tmp_path, snippet)]
    assert [name for name, _ in providers] == [TENSORRT, CUDA, OPENVINO]
    assert providers[0][1] == {"device_id": "1", "trt_fp16_enable": "True"}


GROUPS = st.lists(
    st.builds(
        pb.ModelInstanceGroup,
        kind=st.sampled_from([0, 1, 2, 3]),
        count=st.integers(0, 3),
        gpus=st.lists(st.integers(0, 3), max_size=3, unique=True),
    ),
    max_size=3,
)


@given(groups=GROUPS, numbers=st.sets(st.integers(0, 2)))
def test_places_are_those_asked_for_or_none(groups: list[pb.ModelInstanceGroup], numbers: set[int]) -> None:
    """Whatever the groups and the machine: as many slots as asked for, each where it was asked for, or a refusal."""
    config = pb.ModelConfig(backend="onnxruntime", instance_group=groups)
    gpus = [Gpu(number=number, capability="9.0") for number in sorted(numbers)]
    try:
        found = placements(config, "f", threads=2, gpus=gpus)
    except ConfigInvalid:
        named = {number for group in groups if group.kind in (0, 1) for number in group.gpus}
        assert named - numbers or (not numbers and any(group.kind == 1 for group in groups))
        return
    on: list[str] = []
    for group in groups or [pb.ModelInstanceGroup()]:
        cpu = group.kind in (2, 3) or not numbers
        on += [n for n in ([""] if cpu else map(str, group.gpus or sorted(numbers))) for _ in range(group.count or 1)]
    assert [dict(place.options.providers).get(CUDA, {}).get("device_id", "") for place in found] == on


@pytest.mark.parametrize("asked", ["graphs: true", f"graph_spec {{ {SPEC} }}"])
def test_cuda_graphs_are_refused_where_they_could_be_made(tmp_path: Path, asked: str) -> None:
    """On the CPU, where there are none, they are a warning; see the table."""
    snippet = optimization(f"cuda {{ {asked} }}")
    assert opened(tmp_path / "cpu", snippet + group("kind: KIND_CPU")) == [("model.onnx", [])]
    write(tmp_path / "gpu", Row("", snippet, REFUSED))
    store, backend = LocalStore(tmp_path / "gpu"), FakeBackend((), (), gpus=TWO)
    (version,) = load_model(Loading(store, "double", find_backend=lambda _: backend, cores=4, models=1)).values()
    assert isinstance(version, LoadFailed) and NOT_YET in version.reason and backend.opened == []
    assert f"optimization.cuda.{asked.split(':')[0].split()[0]}" in version.reason


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ('batch_size: 4 input { key: "x" value { dim: 4 } }', ""),
        ('batch_size: 4 input { key: "nope" value { dim: 4 } }', "the model has no input 'nope'"),
        ("batch_size: 5", "must lie between 0 and max_batch_size 4"),
    ],
)
def test_cuda_graphs_are_judged_by_what_was_completed(tmp_path: Path, spec: str, text: str) -> None:
    models.put(tmp_path, "double", models.double(), optimization(f"cuda {{ graph_spec {{ {spec} }} }}"))
    (version,) = load_model(
        Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1)
    ).values()
    assert isinstance(version, LoadFailed if text else LoadedVersion), version
    if isinstance(version, LoadFailed):
        assert text in version.reason and [each.name for each in (version.config or pb.ModelConfig()).input] == ["x"]


def test_file_for_a_compute_capability(tmp_path: Path) -> None:
    snippet = 'cc_model_filenames { key: "9.0" value: "h.onnx" }'
    assert [file for file, _ in opened(tmp_path, snippet)] == ["h.onnx", "model.onnx"]


def test_gpu_that_is_not_there_is_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="GPU 7 cannot be used here, only 0, 1"):
        opened(tmp_path, group("gpus: 7"))


def test_accelerators_for_gpus_are_said_to_rest_on_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [found for _, found in opened(tmp_path, accelerator("gpu", "tensorrt") + group("kind: KIND_CPU"))] == [[]]
    assert "gpu_execution_accelerator (every instance is on the CPU) has no effect here" in caplog.text


# Triton's keys and values -> the provider's, all that its ONNX Runtime backend documents.
TENSORRT_KEYS = [
    ("precision_mode", "FP32", {}),
    ("precision_mode", "FP16", {"trt_fp16_enable": "True"}),
    ("precision_mode", "BF16", {"trt_bf16_enable": "True"}),
    ("precision_mode", "INT8", {"trt_int8_enable": "True"}),
    ("max_workspace_size_bytes", "1073741824", {"trt_max_workspace_size": "1073741824"}),
    ("int8_calibration_table_name", "t.flatbuffers", {"trt_int8_calibration_table_name": "t.flatbuffers"}),
    ("int8_use_native_calibration_table", "0", {"trt_int8_use_native_calibration_table": "False"}),
    *((key, "true", {key: "True"}) for key in ("trt_dla_enable", "trt_engine_cache_enable", "trt_dump_subgraphs")),
    *((key, "1", {key: "True"}) for key in ("trt_force_sequential_engine_build", "trt_timing_cache_enable")),
    *((key, "0", {key: "False"}) for key in ("trt_context_memory_sharing_enable", "trt_layer_norm_fp32_fallback")),
    *((key, "1", {key: "True"}) for key in ("trt_force_timing_cache", "trt_detailed_build_log", "trt_sparsity_enable")),
    *((key, "false", {key: "False"}) for key in ("trt_build_heuristics_enable", "trt_cuda_graph_enable")),
    ("trt_dump_ep_context_model", "1", {"trt_dump_ep_context_model": "True"}),
    *((key, "3", {key: "3"}) for key in ("trt_max_partition_iterations", "trt_min_subgraph_size", "trt_dla_core")),
    *((key, "-1", {key: "-1"}) for key in ("trt_builder_optimization_level", "trt_auxiliary_streams")),
    ("trt_ep_context_embed_mode", "1", {"trt_ep_context_embed_mode": "1"}),
    ("trt_tactic_sources", "-CUDNN,+CUBLAS", {"trt_tactic_sources": "-CUDNN,+CUBLAS"}),
    *((key, "x:1x4", {key: "x:1x4"}) for key in ("trt_profile_min_shapes", "trt_profile_max_shapes")),
    ("trt_profile_opt_shapes", "x:1x4", {"trt_profile_opt_shapes": "x:1x4"}),
    ("trt_engine_cache_prefix", "m", {"trt_engine_cache_prefix": "m"}),
    *((key, "/tmp/e", {key: "CACHE/tmp/e"}) for key in ("trt_engine_cache_path", "trt_timing_cache_path")),
    ("trt_ep_context_file_path", "e", {"trt_ep_context_file_path": "CACHE/e"}),
]


@pytest.mark.parametrize(("key", "value", "expected"), TENSORRT_KEYS)
def test_tensorrt_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, expected: dict[str, str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = str(tmp_path / "cache/oriel/engines")
    snippet = accelerator("gpu", "tensorrt", option(key, value)) + group("kind: KIND_GPU gpus: 0")
    ((_, providers),) = opened(tmp_path / "root", snippet)
    wanted = {name: text.replace("CACHE", cache) for name, text in expected.items()}
    assert providers == [(TENSORRT, {"device_id": "0", **wanted}), cuda(0)]


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("tensorrt", "precision_mode", "FP8", "is not one of FP32, FP16, BF16, INT8"),
        ("tensorrt", "trt_dla_enable", "maybe", "must be 1, true, 0 or false"),
        ("tensorrt", "trt_tactic_sources", "x" * 4097, "must be text of at most 4096 characters"),
        ("tensorrt", "trt_dla_core", "one", "must be a whole number"),
        ("tensorrt", "trt_engine_cache_path", "../../etc", "without '..'"),
        ("tensorrt", "trt_engine_cache_prefix", "../x", "must be a file name"),
        ("tensorrt", "trt_extra_plugin_lib_paths", "/tmp/evil.so", "would load a library into the server"),
        ("cuda", "device_id", "1", "is given by instance_group.gpus"),
        ("cuda", "cudnn_conv_algo_search", "9", "must be one of EXHAUSTIVE"),
        ("cuda", "user_compute_stream", "1", "is not an option of cuda"),
    ],
)
def test_accelerator_parameters_are_judged_without_a_gpu(
    tmp_path: Path, name: str, key: str, value: str, reason: str
) -> None:
    write(tmp_path, Row("", accelerator("gpu", name, option(key, value)), REFUSED))
    with pytest.raises(LoadFailed) as caught:
        load_model(Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1))
    assert reason in caught.value.reason and f"parameters[{key!r}]" in caught.value.reason


def test_cuda_parameters_in_both_places(tmp_path: Path) -> None:
    old = 'parameters { key: "cudnn_conv_algo_search" value { string_value: "1" } }'
    new = accelerator("gpu", "cuda", option("use_tf32", "0")) + group("gpus: 0")
    ((_, providers),) = opened(tmp_path, old + new)
    assert providers == [(CUDA, {"device_id": "0", "cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"})]


# --- folders without a configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "model.pt",
            "PyTorch models are not executed by this server, export the model to ONNX: docs/convert-to-onnx.md",
        ),
        ("model.pt2", "docs/convert-to-onnx.md"),
        ("resnet.pth", "docs/convert-to-onnx.md"),
        ("model.savedmodel/saved_model.pb", "TensorFlow models are not executed by this server"),
        ("model.graphdef", "docs/convert-to-onnx.md"),
        ("model.plan", "TensorRT engine files are not executed by this version"),
        ("model.xml", "OpenVINO IR files are not executed by this version"),
        ("xgboost.json", "docs/convert-to-onnx.md"),
        ("notes.txt", "names no backend and holds no model.onnx"),
    ],
)
@pytest.mark.parametrize("config", [None, "max_batch_size: 4"])
def test_folder_of_another_framework_is_recognised(tmp_path: Path, file: str, text: str, config: str | None) -> None:
    path = models.put(tmp_path, "double", None, config) / "1" / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    with pytest.raises(LoadFailed) as caught:
        load_model(Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1))
    assert text in caught.value.reason and "double" in caught.value.reason


def test_optional_input_with_a_default_in_the_file_may_be_left_out(tmp_path: Path) -> None:
    bias = models.numpy_helper.from_array(models.np.full(4, 2, dtype=models.np.float32), "b")
    ends = [("x", models.FLOAT, ["n", 4]), ("b", models.FLOAT, [4])]
    model = models.graph(
        [models.helper.make_node("Add", ["x", "b"], ["y"])], ends, [("y", models.FLOAT, ["n", 4])], [bias]
    )
    config = f"""
        max_batch_size: 0 {OUTPUT.replace("[ 4 ]", "[ -1, 4 ]")}
        input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }},
                {{ name: "b" data_type: TYPE_FP32 dims: [ 4 ] optional: true }} ]
    """
    models.put(tmp_path, "double", model, config)
    (version,) = load_model(
        Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1)
    ).values()
    assert isinstance(version, LoadedVersion), version
    x = models.np.ones((2, 4), dtype=models.np.float32)
    (session,) = version.sessions
    assert session.run({"x": x}, ["y"])[0].tolist() == (x + 2).tolist()
    assert session.run({"x": x, "b": x[0]}, ["y"])[0].tolist() == (x + 1).tolist()


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_rows_say() -> None:
    page = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `") and line.count("|") >= 4:
            _, names, verdict, *_ = (cell.strip() for cell in line.split("|"))
            for name in names.replace("`", "").split(", "):
                page[name] = verdict
    verdicts: dict[str, set[str]] = {}
    for row in ROWS:
        if row.field:
            verdicts.setdefault(row.field, set()).add(row.verdict)
    wrong = {}
    for name in fields(pb.ModelConfig.DESCRIPTOR):
        # A line for a whole message covers its fields.
        said = next((page[p] for p in prefixes(name) if p in page), None)
        if said is None:
            wrong[name] = "has no line"
        elif not name.startswith(ELSEWHERE):
            found = verdicts[name]
            expected = next((v for v in (WORKS, WARNED, SHOWN) if v in found), REFUSED)
            if said.split()[0].rstrip(",") != expected:
                wrong[name] = f"page: {said}, rows: {expected}"
    assert wrong == {}


def prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
