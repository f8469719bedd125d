"""Extensions of v2 that this server does not have, or not for a caller: clients get a sentence, not "Not Found"."""

import re
from urllib.parse import unquote

_WHERE = "the server's metadata (GET /v2, ServerMetadata) lists the extensions it has"
_REASONS = {
    "system": f"system shared memory is not served (see --allow-client-shm), send tensors in the request: {_WHERE}",
    "cuda": f"CUDA shared memory is not served, send tensors in the request: {_WHERE}",
}
_PATH = re.compile(r"/v2/(system|cuda)sharedmemory(/region/[^/]+)?/(status|register|unregister)\Z")
SHARED_MEMORY = {"SystemSharedMemory": _REASONS["system"], "CudaSharedMemory": _REASONS["cuda"]}

# method of the gRPC service -> the reason
METHODS_NOT_SERVED = {f"{kind}Register": why for kind, why in SHARED_MEMORY.items()}


def without_regions(path: str) -> str:
    """Return "status" or "unregister" for a path that asks for all regions of shared memory, or releases some.

    Programs begin with these requests to be sure that none is left, and there is none. Returns "" for other paths.
    """
    found = _PATH.match(path)
    if found is None or found[3] == "register" or (found[3] == "status" and found[2]):
        return ""
    return found[3]


def system_region(path: str) -> tuple[str, str] | None:
    """Return the action of a path of system shared memory and the name of the region, "" for all of them; None for any
    other path.
    """
    found = _PATH.match(path)
    if found is None or found[1] != "system":
        return None
    return found[3], unquote((found[2] or "").removeprefix("/region/"), errors="replace")


def why_not_served(path: str) -> str | None:
    """Return the sentence for a path of such an extension; None for any other path."""
    found = _PATH.match(path)
    return _REASONS[found[1]] if found else None
