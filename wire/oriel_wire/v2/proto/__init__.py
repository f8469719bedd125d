"""Protobuf messages of the v2 gRPC service, of model configurations, of gRPC health checks and of KEDA.

The `*_pb2` modules are generated: `python -m oriel_wire.v2.proto.generate` writes them anew.
"""
