"""Messages for tests of limits on streams."""

from tritonclient.grpc import service_pb2

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def infer(model: str, version: str = "") -> bytes:
    return service_pb2.ModelInferRequest(model_name=model, model_version=version).SerializeToString()
