"""The v2 (Open Inference) protocol: JSON, binary and protobuf bytes <-> tensors.

No I/O here. `http` reads and writes REST bodies, `grpc` protobuf messages, `metadata` the
descriptions of models; `messages` and `datatypes` are what they share.
"""
