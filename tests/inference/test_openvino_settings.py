"""Configurations of OpenVINO models, without the package: parameters, files, and the names that lead to the engine."""

import pytest

from oriel_inference.backends.openvino_cpu import properties
from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.config import validate
from oriel_inference.repository.instances import Place, placements
from oriel_inference.repository.openvino import runs_on, with_openvino
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

IR = 'backend: "openvino" max_batch_size: 8 '
FILE = "net/config.pbtxt"


def parameters(**given: str) -> str:
    return "".join(f'parameters {{ key: "{key}" value {{ string_value: "{each}" }} }} ' for key, each in given.items())


def validated(config: str, *files: str) -> pb.ModelConfig:
    found = parse_config_text(config)
    validate(found, "net", FILE, files)
    return found


def placed(config: str, *, cores: int = 2) -> list[Place]:
    found = validated(config)
    return with_openvino(found, FILE, placements(found, FILE, threads=cores, gpus=()), cores)


@pytest.mark.parametrize(
    ("config", "files", "file"),
    [
        ("", ["model.xml", "model.bin"], "model.xml"),
        ("", ["model.savedmodel"], "model.savedmodel"),
        ("", ["model.tflite"], "model.tflite"),
        ('backend: "openvino"', ["model.pdiparams", "model.pdmodel"], "model.pdmodel"),
        ('backend: "openvino"', [], "model.xml"),
        ('backend: "openvino" default_model_filename: "net.onnx"', ["net.onnx"], "net.onnx"),
        ('platform: "tensorflow_savedmodel"', [], "model.savedmodel"),
        ('platform: "tensorflow_graphdef"', [], "model.graphdef"),
        ('backend: "tensorflow" platform: "tensorflow_savedmodel"', [], "model.savedmodel"),
        ('backend: "tensorflow"', ["model.graphdef"], "model.graphdef"),
    ],
)
def test_names_and_files_lead_to_openvino(config: str, files: list[str], file: str) -> None:
    found = validated(config, *files)
    assert (found.backend, found.default_model_filename) == ("openvino", file)
    reported = "" if file.endswith((".xml", ".onnx")) else f"{file} is executed by OpenVINO"
    assert runs_on(found) == reported


@pytest.mark.parametrize(
    ("config", "cores", "expected"),
    [
        ("", 4, {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "4"}),
        (parameters(intra_op_thread_count="1"), 4, {"NUM_STREAMS": "4", "INFERENCE_NUM_THREADS": "4"}),
        (parameters(NUM_STREAMS="2", INFERENCE_NUM_THREADS="2"), 8, {"NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"}),
        (parameters(PERFORMANCE_HINT="latency"), 2, {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "2"}),
        (parameters(NUM_STREAMS="auto", INFERENCE_NUM_THREADS="0"), 2, {"NUM_STREAMS": "AUTO"}),
        (parameters(HINT_BF16="YES"), 2, {"INFERENCE_PRECISION_HINT": "bf16"}),
        (parameters(TARGET_DEVICE="cpu"), 2, {"INFERENCE_PRECISION_HINT": "f32"}),
    ],
)
def test_parameters_become_properties_within_the_cores(config: str, cores: int, expected: dict[str, str]) -> None:
    (place,) = placed(IR + config, cores=cores)
    found = properties(place.options)
    assert {name: found[name] for name in expected} == expected
    assert place.options.intra_op_threads * place.options.concurrent_runs <= cores


def test_instances_are_runs_of_what_they_share() -> None:
    found = placed(IR + parameters(intra_op_thread_count="2") + "instance_group { count: 3 kind: KIND_CPU }", cores=6)
    assert [place.options.concurrent_runs for place in found] == [3, 3, 3]
    assert properties(found[0].options)["INFERENCE_NUM_THREADS"] == "6"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (parameters(NUM_STREAMS="many"), "parameters['NUM_STREAMS']: must be a number from 1 to 256"),
        (parameters(INFERENCE_NUM_THREADS="-1"), "['INFERENCE_NUM_THREADS']: must be a number from 0 to 256"),
        (parameters(PERFORMANCE_HINT="FAST"), "['PERFORMANCE_HINT']: must be one of LATENCY, THROUGHPUT"),
        (parameters(RESHAPE_IO_LAYERS="maybe"), "['RESHAPE_IO_LAYERS']: must be one of YES, NO"),
        (parameters(TARGET_DEVICE="GPU"), "['TARGET_DEVICE']: must be CPU"),
        (parameters(CPU_EXTENSION_PATH="/x.so"), "['CPU_EXTENSION_PATH']: would load a library into the server"),
        (parameters(TF_GRAPH_TAG="train"), "['TF_GRAPH_TAG']: must be one of serve"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(config: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        placed(IR + config)
    assert reason in caught.value.reason


def test_parameters_without_effect_are_named() -> None:
    given = parameters(COMPILATION_NUM_THREADS="2", NUM_STREAMS="1")
    for config, expected in ((IR, ["parameters['COMPILATION_NUM_THREADS'] has no effect here"]), ("", [])):
        assert validate(parse_config_text(config + given), "net", FILE, ["model.onnx"]) == expected


def test_accelerators_of_onnx_runtime_have_no_effect_on_openvino_models() -> None:
    listed = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
    found = parse_config_text(IR + listed)
    assert "optimization.execution_accelerators has no effect here" in validate(found, "net", FILE, [])
    assert [place.options.providers for place in placed(IR + listed)] == [()]
