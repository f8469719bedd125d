"""Extensions of v2 that this server does not have: their clients get a sentence, not a bare "Not Found"."""

import re

_WHERE = "the server's metadata (GET /v2, ServerMetadata) lists the extensions it has"
_REASONS = {
    "system": f"system shared memory is not served, send tensors in the request: {_WHERE}",
    "cuda": f"CUDA shared memory is not served, send tensors in the request: {_WHERE}",
    "trace": f"trace settings are not served, traces are exported over OTLP as configured at the start: {_WHERE}",
}
_PATH = re.compile(
    r"/v2/(?:(system|cuda)sharedmemory(?:/region/[^/]+)?/(?:status|register|unregister)"
    r"|(?:models/[^/]+/)?(trace)/setting)\Z"
)
_METHODS = {"SystemSharedMemory": "system", "CudaSharedMemory": "cuda"}

# method of the gRPC service -> the reason
METHODS_NOT_SERVED = {
    f"{prefix}{action}": _REASONS[name]
    for prefix, name in _METHODS.items()
    for action in ("Status", "Register", "Unregister")
} | {"TraceSetting": _REASONS["trace"]}


def why_not_served(path: str) -> str | None:
    """Return the sentence for a path of such an extension; None for any other path."""
    found = _PATH.match(path)
    return _REASONS[found[1] or found[2]] if found else None
