"""The v2 (Open Inference) protocol: translates between tensors and JSON, binary or protobuf bytes.

No I/O here. `http` reads and writes REST bodies, `grpc` protobuf messages, `metadata` the
descriptions of models; all share `messages` and `datatypes`.
"""
