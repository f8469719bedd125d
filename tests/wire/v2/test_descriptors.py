"""Our descriptors against those of another v2 client, field by field: on the wire they must be the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from oriel_wire.v2 import grpc, proto
from oriel_wire.v2.proto import health_pb2, model_config_pb2, v2_pb2

service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
their_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")

PROTO = Path(proto.__file__).parent
PAIRS = [(v2_pb2, service_pb2), (model_config_pb2, their_config_pb2)]
MESSAGES = [
    pytest.param(ours, theirs, name, id=name)
    for ours, theirs in PAIRS
    for name in sorted({*ours.DESCRIPTOR.message_types_by_name, *theirs.DESCRIPTOR.message_types_by_name})
]


def local(name: str) -> str:
    return name.removeprefix("oriel.v2.").removeprefix("inference.")


def enum_facts(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def field_facts(field: FieldDescriptor) -> dict[str, object]:
    oneof = field.containing_oneof
    return {
        "name": field.name,
        "number": field.number,
        "type": field.type,
        "repeated": field.is_repeated,
        "required": field.is_required,
        "packed": field.is_packed,
        "presence": field.has_presence,
        "json": field.json_name,
        "oneof": oneof.name if oneof else None,
        "message": local(field.message_type.full_name) if field.message_type else None,
        "enum": (local(field.enum_type.full_name), enum_facts(field.enum_type)) if field.enum_type else None,
    }


def facts(message: Descriptor) -> dict[str, object]:
    return {
        "fields": {field.number: field_facts(field) for field in message.fields},
        "nested": {name: facts(nested) for name, nested in message.nested_types_by_name.items()},
        "enums": {name: enum_facts(enum) for name, enum in message.enum_types_by_name.items()},
        "map": message.GetOptions().map_entry,
    }


@pytest.mark.parametrize(("ours", "theirs", "name"), MESSAGES)
def test_message_is_the_same_on_the_wire(ours: object, theirs: object, name: str) -> None:
    pair = [module.DESCRIPTOR.message_types_by_name[name] for module in (ours, theirs)]  # type: ignore[attr-defined]
    assert facts(pair[0]) == facts(pair[1])


def test_enums_of_the_files() -> None:
    for ours, theirs in PAIRS:
        pair = [module.DESCRIPTOR.enum_types_by_name for module in (ours, theirs)]
        assert {name: enum_facts(pair[0][name]) for name in pair[0]} == {
            name: enum_facts(pair[1][name]) for name in pair[1]
        }


def test_methods_are_those_of_the_service() -> None:
    [service] = service_pb2.DESCRIPTOR.services_by_name.values()
    assert grpc.SERVICE == service.full_name
    assert {
        name: (local(request.DESCRIPTOR.full_name), local(response.DESCRIPTOR.full_name))
        for name, (request, response) in grpc.METHODS.items()
    } == {
        method.name: (local(method.input_type.full_name), local(method.output_type.full_name))
        for method in service.methods
    }
    streams = {method.name for method in service.methods if method.client_streaming and method.server_streaming}
    assert streams == {"ModelStreamInfer"}


def test_health_messages_are_those_of_grpc() -> None:
    """Facts of grpc.health.v1; its package need not be installed."""
    assert grpc.HEALTH_SERVICE == "grpc.health.v1.Health"
    assert set(grpc.HEALTH_METHODS) == {"Check", "Watch"}
    assert health_pb2.HealthCheckRequest(service="m").SerializeToString() == b"\x0a\x01m"
    assert health_pb2.HealthCheckResponse(status="SERVING").SerializeToString() == b"\x08\x01"
    assert dict(health_pb2.HealthCheckResponse.ServingStatus.items()) == {
        "UNKNOWN": 0,
        "SERVING": 1,
        "NOT_SERVING": 2,
        "SERVICE_UNKNOWN": 3,
    }


@pytest.mark.parametrize("order", ["oriel_wire.v2.grpc, tritonclient.grpc", "tritonclient.grpc, oriel_wire.v2.grpc"])
def test_both_packages_live_in_one_process(order: str) -> None:
    code = f"import {order}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=PROTO.parents[2], timeout=60)


def test_their_configuration_text_reads_as_ours() -> None:
    theirs = their_config_pb2.ModelConfig(name="m", max_batch_size=4, cc_model_filenames={"9.0": "h.plan"})
    theirs.dynamic_batching.preferred_batch_size.extend([2, 4])
    theirs.dynamic_batching.priority_queue_policy[1].timeout_action = 1
    theirs.instance_group.add(kind=2, count=2)
    ours = text_format.Parse(text_format.MessageToString(theirs), model_config_pb2.ModelConfig())
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "oriel_wire.v2.proto.generate", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=PROTO.parents[2], timeout=60)
    written = sorted((tmp_path / "oriel_wire/v2/proto").iterdir())
    assert [path.name for path in written] == sorted(path.name for path in PROTO.glob("*_pb2.py*"))
    for path in written:
        assert path.read_text() == (PROTO / path.name).read_text(), f"{path.name}: run oriel_wire.v2.proto.generate"
