import json

import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import metadata
from oriel_wire.v2.metadata import ModelMetadata, TensorMetadata
from oriel_wire.v2.proto import v2_pb2

CONFIG = """
name: "digits"
platform: "onnxruntime_onnx"
max_batch_size: 32
input [ { name: "x" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [
  { name: "label" data_type: TYPE_STRING dims: [ 1 ] label_filename: "labels.txt" },
  { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] }
]
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5000 }
  priority_levels: 3 default_priority_level: 2
  priority_queue_policy { key: 1 value: { max_queue_size: 7 } } }
version_policy: { specific { versions: [1, 3] } }
parameters { key: "oriel.batching" value: { string_value: "off" } }
model_warmup [ { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 64 zero_data: true } } } ]
"""


def test_configuration_text() -> None:
    config = metadata.parse_config_text(CONFIG)
    assert config.dynamic_batching.priority_queue_policy[1].max_queue_size == 7
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert config.parameters["oriel.batching"].string_value == "off"


def test_model_is_described_with_its_batch_dimension() -> None:
    config = metadata.parse_config_text(CONFIG)
    described = metadata.describe(config, ["1", "3"])
    assert described == ModelMetadata(
        name="digits",
        versions=("1", "3"),
        platform="onnxruntime_onnx",
        inputs=(TensorMetadata(name="x", datatype="FP32", shape=(-1, 64)),),
        outputs=(
            TensorMetadata(name="label", datatype="BYTES", shape=(-1, 1)),
            TensorMetadata(name="scores", datatype="FP32", shape=(-1, -1)),
        ),
    )
    config.max_batch_size = 0
    assert metadata.describe(config, []).inputs[0].shape == (64,)
    body = metadata.encode_metadata(described)
    assert json.loads(body)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
    assert metadata.decode_metadata(body) == described
    message = metadata.metadata_message(described)
    label = v2_pb2.ModelMetadataResponse.TensorMetadata(name="label", datatype="BYTES", shape=[-1, 1])
    assert message.outputs[0] == label
    assert list(message.versions) == ["1", "3"]


def test_configuration_json_reads_back() -> None:
    config = metadata.parse_config_text(CONFIG)
    body = metadata.message_json(config)
    assert metadata.parse_config_json(body) == config
    plain = json.loads(body)
    assert plain["input"][0] == {
        "name": "x",
        "data_type": "TYPE_FP32",
        "format": "FORMAT_NONE",
        "dims": [64],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert plain["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert plain["dynamic_batching"]["priority_queue_policy"]["1"]["max_queue_size"] == 7
    assert plain["version_policy"] == {"specific": {"versions": [1, 3]}}
    assert "sequence_batching" not in plain


def test_statistics_json() -> None:
    message = v2_pb2.ModelStatisticsResponse()
    stats = message.model_stats.add(name="m", version="1", inference_count=2**63)
    stats.response_stats["0"].success.count = 3
    plain = json.loads(metadata.message_json(message))["model_stats"][0]
    assert plain["inference_count"] == 2**63
    assert plain["response_stats"] == {"0": {"success": {"count": 3, "ns": 0}}}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('name: "m"\nbatch_size: 3', r'2:1 : Message type "ModelConfig" has no field named "batch_size"'),
        ("input [ { data_type: TYPE_FP8 } ]", "TYPE_FP8"),
        ("max_batch_size: 1e3", "max_batch_size|integer"),
        ("dynamic_batching { }\nsequence_batching { }", "scheduling_choice"),
        ("x" * 100_000, "model configuration"),
    ],
)
def test_configuration_that_is_refused(text: str, hint: str) -> None:
    with pytest.raises(BadMessage, match=hint) as caught:
        metadata.parse_config_text(text)
    assert len(caught.value.message) <= 500
    assert "oriel.v2" not in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", '{"batch_size": 1}', '{"name": 3}', "[" * 100_000, b"\xff"])
def test_configuration_json_that_is_refused(text: str | bytes) -> None:
    with pytest.raises(BadMessage, match="model configuration"):
        metadata.parse_config_json(text)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"name": "m", "inputs": [{}]}', b"\xff", b"[" * 100_000])
def test_metadata_that_is_refused(body: bytes) -> None:
    with pytest.raises(BadMessage, match="metadata of a model"):
        metadata.decode_metadata(body)
