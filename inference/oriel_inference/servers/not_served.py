"""Extensions of v2 that this server does not have, said in words: their clients would only see "Not Found" otherwise.

What there is stands in the `extensions` of the server's metadata.
"""

from oriel_inference.errors import NotSupported
from oriel_inference.model import is_model_name
from oriel_inference.servers.grpc_call import Context
from oriel_wire.v2.proto import v2_pb2

__all__ = ["NOT_SERVED", "refuse_call", "why_not_served"]

_EXTENSIONS = "the extensions in the server's metadata (GET /v2, ServerMetadata) are those it serves"
_SYSTEM = f"system shared memory is not served: send tensors in the request; {_EXTENSIONS}"
_CUDA = f"CUDA shared memory is not served: send tensors in the request; {_EXTENSIONS}"
_TRACE = f"trace settings are not served: traces leave over OTLP as the server was started; {_EXTENSIONS}"

# method of the gRPC service -> why not
NOT_SERVED = {
    **{f"SystemSharedMemory{action}": _SYSTEM for action in ("Status", "Register", "Unregister")},
    **{f"CudaSharedMemory{action}": _CUDA for action in ("Status", "Register", "Unregister")},
    "TraceSetting": _TRACE,
}
