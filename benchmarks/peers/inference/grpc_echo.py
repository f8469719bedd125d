"""Cost of ModelInfer on grpc.aio when nothing is done: a message is parsed, its tensors go back. Argument: port."""

import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import v2_pb2


async def infer(request: v2_pb2.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    response = v2_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for each in request.inputs:
        response.outputs.add(name="y", datatype=each.datatype, shape=each.shape)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response


async def main() -> None:
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    method = grpc.unary_unary_rpc_method_handler(
        infer,
        request_deserializer=v2_pb2.ModelInferRequest.FromString,
        response_serializer=v2_pb2.ModelInferResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": method}),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
