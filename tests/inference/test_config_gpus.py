"""What a configuration says about GPUs, judged on a machine without one."""

from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.backends import find_backend
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import Gpu, TensorInfo
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.instances import placements
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.proto import model_config_pb2 as pb

from . import models
from .config_rows import REFUSED, WORKS, Row, accelerator, group, optimization, option, write

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
        named = {number for each in groups if each.kind in (0, 1) for number in each.gpus}
        assert named - numbers or (not numbers and any(each.kind == 1 for each in groups))
        return
    on: list[str] = []
    for each in groups or [pb.ModelInstanceGroup()]:
        cpu = each.kind in (2, 3) or not numbers
        on += [n for n in ([""] if cpu else map(str, each.gpus or sorted(numbers))) for _ in range(each.count or 1)]
    assert [dict(place.options.providers).get(CUDA, {}).get("device_id", "") for place in found] == on


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


@pytest.mark.parametrize("required", [False, True])
def test_without_a_gpu_a_model_that_wants_an_accelerator_runs_on_the_cpu_unless_a_flag_forbids_it(
    tmp_path: Path, required: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of the second case: an ONNX file, and TensorRT with FP16 as its accelerator."""
    snippet = accelerator("gpu", "tensorrt", option("precision_mode", "FP16"))
    write(tmp_path, Row("", snippet, WORKS))
    defaults = LoadDefaults(require_accelerators=required)
    (version,) = load_model(
        Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1, defaults=defaults)
    ).values()
    text = "wants 'tensorrt' on a GPU, and TensorRT is not available here: it takes an NVIDIA GPU"
    if required:
        assert isinstance(version, LoadFailed) and text.replace("wants", "asks for") in version.reason
        return
    assert isinstance(version, LoadedVersion), version
    assert version.note.startswith("runs on the CPU: optimization.execution_accelerators") and text in version.note
    assert version.note in caplog.text and version.sessions[0].provider == "CPUExecutionProvider"
    shown = version.config.optimization.execution_accelerators.gpu_execution_accelerator
    assert [each.name for each in shown] == ["tensorrt"], "shown as it was written"
    version.close()


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
