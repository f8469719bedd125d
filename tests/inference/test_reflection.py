"""Server reflection on the gRPC port: what tools such as grpcurl learn from it, and the bounds of its streams."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from oriel_inference.app import Unit
from oriel_inference.servers import reflection
from oriel_wire.h2 import grpc as h2_grpc
from oriel_wire.h2.grpc import prefix
from oriel_wire.v2.grpc import HEALTH_SERVICE, METHODS, SERVICE
from oriel_wire.v2.proto import reflection_pb2
from oriel_wire.v2.reflection import MAX_REQUEST_BYTES, REFLECTION_SERVICES, SERVICES, answer

from ..waiting import until
from .grpc_port import Port, begin, ended, send

service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

Request = reflection_pb2.ServerReflectionRequest


@pytest.fixture
def channel(kept_unit: Unit) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{kept_unit.grpc_port}") as opened:
        yield opened


def call_method(channel: grpc.Channel, service: str, *requests: Request) -> list[Any]:
    method = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=Request.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return list(method(iter(requests), timeout=60))


# --- the judge: grpcio-reflection's client ---------------------------------------------------------------------------


def test_services_are_listed(channel: grpc.Channel) -> None:
    assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) == set(SERVICES)


def test_a_client_without_our_files_calls_a_model_by_what_it_learned(channel: grpc.Channel) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName(SERVICE).FindMethodByName("ModelMetadata")
    request = GetMessageClass(method.input_type)(name="double")
    call = channel.unary_unary(
        f"/{SERVICE}/ModelMetadata",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    found: Any = call(request, timeout=60)
    assert found.name == "double" and found.inputs[0].name == "x"


def test_methods_and_messages_are_those_of_another_client(channel: grpc.Channel) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    ours, theirs = pool.FindServiceByName(SERVICE), service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    facts = [
        {
            each.name: (
                each.input_type.full_name,
                each.output_type.full_name,
                each.client_streaming,
                each.server_streaming,
            )
            for each in service.methods
        }
        for service in (ours, theirs)
    ]
    assert facts[0] == facts[1] and facts[0].keys() == METHODS.keys()
    for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items():
        found = pool.FindMessageTypeByName(f"inference.{name}")
        assert {field.name: (field.number, field.type) for field in found.fields} == {
            field.name: (field.number, field.type) for field in message.fields
        }


@pytest.mark.parametrize("service", (HEALTH_SERVICE, *REFLECTION_SERVICES))
def test_other_services_are_described_too(channel: grpc.Channel, service: str) -> None:
    found = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(service)
    streams = {each.name: (each.client_streaming, each.server_streaming) for each in found.methods}
    if service == HEALTH_SERVICE:
        assert streams == {"Check": (False, False), "Watch": (False, True)}
    else:
        assert streams == {"ServerReflectionInfo": (True, True)}


# --- both versions, request by request -------------------------------------------------------------------------------


@pytest.mark.parametrize("service", REFLECTION_SERVICES)
def test_a_stream_answers_each_request_and_goes_on_after_an_error(channel: grpc.Channel, service: str) -> None:
    requests = [
        Request(host="h", file_containing_symbol=f"{SERVICE}.ModelInfer"),
        Request(file_containing_symbol="inference.Absent"),
        Request(),
        Request(file_by_filename="model_config.proto"),
        Request(file_by_filename="absent.proto"),
        Request(file_containing_extension=reflection_pb2.ExtensionRequest(containing_type="inference.ModelConfig")),
        Request(all_extension_numbers_of_type="inference.ModelConfig"),
        Request(all_extension_numbers_of_type="inference.Absent"),
        Request(list_services="*"),
    ]
    found = call_method(channel, service, *requests)
    assert [each.original_request for each in found] == requests and found[0].valid_host == "h"
    files = [
        [FileDescriptorProto.FromString(data).name for data in each.file_descriptor_response.file_descriptor_proto]
        for each in found
    ]
    assert files[0] == ["grpc_service.proto", "model_config.proto"] and files[3] == ["model_config.proto"]
    codes = {at: each.error_response.error_code for at, each in enumerate(found) if each.HasField("error_response")}
    assert codes == dict.fromkeys((1, 4, 5, 7), h2_grpc.NOT_FOUND) | {2: h2_grpc.INVALID_ARGUMENT}
    assert found[6].all_extension_numbers_response.base_type_name == "inference.ModelConfig"
    assert [each.name for each in found[8].list_services_response.service] == list(SERVICES)


def test_nested_messages_fields_and_enums_have_a_file() -> None:
    for symbol in (
        "inference.ModelInferRequest.InferInputTensor",
        "inference.ModelInferRequest.model_name",
        "inference.DataType",
        "grpc.health.v1.HealthCheckResponse.ServingStatus",
    ):
        assert answer(Request(file_containing_symbol=symbol)).HasField("file_descriptor_response"), symbol


# --- bounds ----------------------------------------------------------------------------------------------------------

PATH = f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo".encode()


async def test_a_request_that_is_too_large_or_no_message_ends_its_stream(port: Port) -> None:
    client = await port.client()
    for data, code in ((bytes(MAX_REQUEST_BYTES + 1), h2_grpc.RESOURCE_EXHAUSTED), (b"\x0a", h2_grpc.INVALID_ARGUMENT)):
        stream_id = begin(client, PATH)
        send(client, stream_id, prefix(len(data)) + data)
        assert (await ended(client, stream_id))[0] == code


async def test_a_silent_stream_is_given_up(port: Port) -> None:
    client = await port.client()
    stream_id = begin(client, PATH)
    data = Request(list_services="").SerializeToString()
    send(client, stream_id, prefix(len(data)) + data)
    await until(lambda: client.bodies.get(stream_id))
    port.sweep(reflection.SILENT_S - 5.0)
    assert stream_id not in client.ended
    port.sweep(reflection.SILENT_S + 5.0)
    assert (await ended(client, stream_id))[0] == h2_grpc.DEADLINE_EXCEEDED


async def test_a_client_that_does_not_read_is_not_read_either(port: Port) -> None:
    client = await port.client(window=10)
    stream_id = begin(client, PATH)
    data = Request(file_containing_symbol=SERVICE).SerializeToString()
    for _ in range(3):
        send(client, stream_id, prefix(len(data)) + data)
    await until(lambda: client.bodies.get(stream_id))
    (stream,) = next(iter(port.server.connections)).streams.values()  # type: ignore[attr-defined]
    assert stream._messages.has_room is False


async def test_streams_end_when_the_server_stops(port: Port) -> None:
    client = await port.client()
    open_ = begin(client, PATH)
    await until(lambda: any(port.frontend._reflection._open))
    port.frontend.stop(25.0)
    late = begin(client, PATH)
    for stream_id in (open_, late):
        assert (await ended(client, stream_id))[0] == h2_grpc.UNAVAILABLE
