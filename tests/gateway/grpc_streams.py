"""gRPC methods for tests of streams."""

INFER = "/inference.GRPCInferenceService/ModelInfer"

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
