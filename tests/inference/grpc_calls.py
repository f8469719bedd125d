"""Unary gRPC calls with one tensor of ones."""

import grpc
import grpc.aio
import numpy as np

from oriel_wire.v2.grpc import SERVICE, encode_infer_request
from oriel_wire.v2.messages import InferRequest, tensor
from oriel_wire.v2.proto import v2_pb2


def infer(channel: grpc.aio.Channel):  # type: ignore[no-untyped-def]
    return channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        request_serializer=v2_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=v2_pb2.ModelInferResponse.FromString,
    )


def ones(model: str = "double") -> v2_pb2.ModelInferRequest:
    request = InferRequest(model_name=model, id="seven", inputs=[tensor("x", np.ones((1, 4), np.float32))])
    return encode_infer_request(request)
