"""The shared memory extension over HTTP and gRPC: status, register and unregister of regions."""

from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf.message import Message

from oriel_inference.errors import InvalidRequest
from oriel_inference.servers.http_call import answer, json_object
from oriel_inference.servers.regions import Regions
from oriel_wire.engine.buffered import Exchange
from oriel_wire.v2.proto import v2_pb2


def answer_http(regions: Regions, exchange: Exchange, action: str, name: str) -> None:
    """Answer a request for regions. Raises InferenceError."""
    if action == "status":
        listed = [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.size_bytes}
            for each in regions.status(name)
        ]
        answer(exchange, msgspec.json.encode(listed))
        return
    if action == "unregister":
        regions.unregister(name)
    else:
        body = json_object(bytes(exchange.body))
        key, offset, size = body.get("key"), body.get("offset", 0), body.get("byte_size")
        if type(key) is not str or type(offset) is not int or type(size) is not int:
            raise InvalidRequest("to register a region, send key (text), byte_size and offset (whole numbers)")
        regions.register(name, key, offset, size)
    answer(exchange, b"")


def grpc_handlers(regions: Regions) -> dict[str, Callable[[Any], Message]]:
    """Return the methods of the extension by name. They raise InferenceError."""

    def status(request: v2_pb2.SystemSharedMemoryStatusRequest) -> Message:
        response = v2_pb2.SystemSharedMemoryStatusResponse()
        for each in regions.status(request.name):
            listed = response.regions[each.name]
            listed.name, listed.key, listed.offset, listed.byte_size = each.name, each.key, each.offset, each.size_bytes
        return response

    def register(request: v2_pb2.SystemSharedMemoryRegisterRequest) -> Message:
        regions.register(request.name, request.key, request.offset, request.byte_size)
        return v2_pb2.SystemSharedMemoryRegisterResponse()

    def unregister(request: v2_pb2.SystemSharedMemoryUnregisterRequest) -> Message:
        regions.unregister(request.name)
        return v2_pb2.SystemSharedMemoryUnregisterResponse()

    return {f"SystemSharedMemory{each.__name__.title()}": each for each in (status, register, unregister)}
