"""Extensions of v2 that this server does not have: their clients are told so in words, not by a bare "Not Found"."""

import re
from collections.abc import Awaitable, Callable

from google.protobuf.message import Message

from oriel_inference.errors import NotSupported
from oriel_inference.servers.grpc_call import Context

__all__ = ["METHODS_NOT_SERVED", "refusing", "why_not_served"]

_WHERE = "the server's metadata (GET /v2, ServerMetadata) lists the extensions it has"
_REASONS = {
    "system": f"system shared memory is not served, send tensors in the request: {_WHERE}",
    "cuda": f"CUDA shared memory is not served, send tensors in the request: {_WHERE}",
    "trace": f"trace settings are not served, traces leave over OTLP as set at the start: {_WHERE}",
}
_PATH = re.compile(
    r"/v2/(?:(system|cuda)sharedmemory(?:/region/[^/]+)?/(?:status|register|unregister)"
    r"|(?:models/[^/]+/)?(trace)/setting)\Z"
)
_METHODS = {"SystemSharedMemory": "system", "CudaSharedMemory": "cuda"}

# method of the gRPC service -> why not
METHODS_NOT_SERVED = {
    f"{prefix}{action}": _REASONS[name]
    for prefix, name in _METHODS.items()
    for action in ("Status", "Register", "Unregister")
} | {"TraceSetting": _REASONS["trace"]}


def why_not_served(path: str) -> str | None:
    """The sentence for a path of such an extension, None for any other path."""
    found = _PATH.match(path)
    return _REASONS[found[1] or found[2]] if found else None


def refusing(why: str) -> Callable[[Message, Context], Awaitable[Message]]:
    """A handler of one of `METHODS_NOT_SERVED`; it raises NotSupported."""

    async def refuse(request: Message, context: Context) -> Message:
        raise NotSupported(why)

    return refuse
