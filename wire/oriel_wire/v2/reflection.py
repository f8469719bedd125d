"""The files of the gRPC services under their public names, as server reflection shows them to clients.

Our classes live in a package of our own (see `v2.proto`), so their descriptors are copied, renamed and completed with
the services here. Nothing is registered with protobuf: another v2 client in the process keeps its classes.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from oriel_wire.h2.grpc import INVALID_ARGUMENT, NOT_FOUND
from oriel_wire.v2.grpc import HEALTH_METHODS, HEALTH_SERVICE, METHODS, SERVICE
from oriel_wire.v2.proto import health_pb2, model_config_pb2, reflection_pb2, v2_pb2

REFLECTION_SERVICES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
SERVICES: Final = (SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES)
MAX_REQUEST_BYTES: Final = 4096  # an answer repeats its request
_OURS: Final = ".oriel.v2."
_REFLECTION_METHODS: Final = {
    "ServerReflectionInfo": (reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse)
}
_STREAMED: Final = frozenset({"ModelStreamInfer", "ServerReflectionInfo"})  # requests and answers
_STREAMED_ANSWERS: Final = _STREAMED | {"Watch"}
# our descriptors, the public name of the file, the service that it declares, and that service's methods
_FILES: Final[tuple[tuple[FileDescriptor, str, str, Mapping[str, Any]], ...]] = (
    (model_config_pb2.DESCRIPTOR, "model_config.proto", "inference.", {}),
    (v2_pb2.DESCRIPTOR, "grpc_service.proto", SERVICE, METHODS),
    (health_pb2.DESCRIPTOR, "grpc/health/v1/health.proto", HEALTH_SERVICE, HEALTH_METHODS),
    *(
        (reflection_pb2.DESCRIPTOR, f"grpc/reflection/{name.split('.')[2]}/reflection.proto", name, _REFLECTION_METHODS)
        for name in REFLECTION_SERVICES
    ),
)


def answer(request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
    """Answer one request of a reflection stream. An unknown name is an error in the answer; the stream goes on."""
    response = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
    kind = request.WhichOneof("message_request")
    if kind == "list_services":
        response.list_services_response.service.extend([reflection_pb2.ServiceResponse(name=name) for name in SERVICES])
        return response
    name: Any = getattr(request, kind) if kind else ""
    found: FileDescriptor | None = None
    if kind == "file_by_filename" or kind == "file_containing_symbol":
        found = _found(name, file=kind == "file_by_filename")
    elif kind == "file_containing_extension":
        name = name.containing_type  # messages of proto3 have no extensions
    elif kind == "all_extension_numbers_of_type" and _found(name) is not None:
        response.all_extension_numbers_response.base_type_name = name
        return response
    if found is not None:
        response.file_descriptor_response.file_descriptor_proto.extend(_with_needs(found))
    elif name:
        response.error_response.error_code = NOT_FOUND
        response.error_response.error_message = f"{name} is not known here"
    else:
        response.error_response.error_code = INVALID_ARGUMENT
        response.error_response.error_message = "the request names nothing"
    return response


def _found(name: str, *, file: bool = False) -> FileDescriptor | None:
    """Return the file of this name, or the one with the symbol of this name."""
    pool = _public_pool()
    try:
        return pool.FindFileByName(name) if file else pool.FindFileContainingSymbol(name)
    except KeyError:
        pass
    try:  # a pool does not count methods among its symbols
        service, _, method = name.rpartition(".")
        return pool.FindServiceByName(service).methods_by_name[method].containing_service.file
    except KeyError:
        return None


def _with_needs(file: FileDescriptor) -> list[bytes]:
    """Return the descriptors of a file and of those that it needs."""
    return [file.serialized_pb, *(each for need in file.dependencies for each in _with_needs(need))]


@cache
def _public_pool() -> DescriptorPool:
    public = {file.name: name for file, name, _, _ in _FILES}
    pool = DescriptorPool()
    for descriptor, name, service, methods in _FILES:
        package = service.rpartition(".")[0]
        file = FileDescriptorProto()
        descriptor.CopyToProto(file)
        file.name, file.package = name, package
        file.dependency[:] = [public[each] for each in file.dependency]
        for message in _messages(file.message_type):
            for field in message.field:
                if field.type_name:
                    field.type_name = f".{package}.{field.type_name.removeprefix(_OURS)}"
        if methods:
            declared = file.service.add(name=service.rpartition(".")[2])
            for method, (request, response) in methods.items():
                declared.method.add(
                    name=method,
                    input_type=f".{package}.{request.DESCRIPTOR.name}",
                    output_type=f".{package}.{response.DESCRIPTOR.name}",
                    client_streaming=method in _STREAMED,
                    server_streaming=method in _STREAMED_ANSWERS,
                )
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def _messages(found: Any) -> Iterator[DescriptorProto]:
    for message in found:
        yield message
        yield from _messages(message.nested_type)
