"""Names of spans and of their attributes by OpenTelemetry's semantic conventions, for all units. Pure.

HTTP is stable there, RPC and generative AI are not: a name that changes is changed here.
Source: opentelemetry.io/docs/specs/semconv, version 1.44.0.
"""

import re
from functools import lru_cache

from oriel_wire.h2.grpc import CODES
from oriel_wire.observe.trace import Scalar

__all__ = [
    "GEN_AI",
    "GRPC_SERVICE",
    "NOWHERE",
    "OPERATIONS",
    "Attributes",
    "gen_ai_use",
    "grpc_code",
    "grpc_failed",
    "grpc_request",
    "grpc_server",
    "http_route",
    "http_server",
]

Attributes = dict[str, Scalar]

MAX_PATH = 256
NOWHERE = ("", 0)  # the address and the port of a listener that is not known
GRPC_SERVICE = "inference.GRPCInferenceService"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})
OTHER_METHOD = "_OTHER"
_GRPC_SERVER_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
# The attributes of generative AI, whose names are not stable yet.
GEN_AI = {
    "operation": "gen_ai.operation.name",
    "model": "gen_ai.request.model",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}

_NAME = r"[A-Za-z0-9._-]+"
_ROUTES = (
    (re.compile(rf"/v2/models/{_NAME}/versions/{_NAME}(/[a-z_]+)?\Z"), "/v2/models/{model}/versions/{version}"),
    (re.compile(rf"/v2/models/(?!stats\Z){_NAME}(/[a-z_/]+)?\Z"), "/v2/models/{model}"),
    (re.compile(rf"/v2/repository/models/{_NAME}(/(?:load|unload))\Z"), "/v2/repository/models/{model}"),
    (re.compile(rf"/v1/services/{_NAME}/versions/{_NAME}()\Z"), "/v1/services/{service}/versions/{version}"),
    (re.compile(rf"/v1/services/{_NAME}()\Z"), "/v1/services/{service}"),
    (re.compile(rf"/v1/models/{_NAME}()\Z"), "/v1/models/{model}"),
    (re.compile(rf"/v1/(?:files|batches|jobs)/{_NAME}(/[a-z]+)?\Z"), ""),
)
_FIXED = re.compile(
    r"/|/docs|/openapi\.json|/v2|/v2/health/(?:live|ready)|/v2/models/stats|/v2/repository/index|/v2/logging|/v2/trace/setting"
    r"|/v1/(?:embeddings|completions|chat/completions|responses|moderations|images/(?:generations|edits|variations)"
    r"|audio/(?:speech|transcriptions|translations)|models|services|files|batches|jobs|usage|limits)\Z"
)


@lru_cache(maxsize=2048)
def http_route(path: str) -> str:
    """Return the route of a path, with `{model}` in place of a name; "" for a path that is none of ours."""
    for pattern, route in _ROUTES:
        match = pattern.match(path)
        if match is not None:
            if not route:
                kind = path.split("/")[2]
                route = f"/v1/{kind}/{{id}}"
            return route + (match.group(1) or "")
    return path if _FIXED.match(path) else ""


def http_server(
    method: str, scheme: str, path: str, version: str, status: int, *, otherwise: str = ""
) -> tuple[str, Attributes]:
    """Return the name and the attributes of a SERVER span.

    version: the version of HTTP, "" if unknown. status: 0 if none was sent. otherwise: the route of a path that is none
    of ours.
    """
    known, route = method in METHODS, http_route(path) or otherwise
    found: Attributes = {"http.request.method": method if known else OTHER_METHOD, "url.scheme": scheme}
    if path:
        found["url.path"] = path[:MAX_PATH]
    if route:
        found["http.route"] = route
    if version:
        found["network.protocol.version"] = version
    operation = OPERATIONS.get(path)
    if operation is not None:
        found[GEN_AI["operation"]] = operation
    if status:
        found["http.response.status_code"] = status
    name = method if known else "HTTP"
    return f"{name} {route}" if route else name, found


def gen_ai_use(model: str, tokens_in: int | None, tokens_out: int | None, cached: int | None = None) -> Attributes:
    """Return the attributes of a call of generative AI: its model, "" if it is not, and its tokens, None likewise.

    cached: tokens of the prompt that were found in a cache.
    """
    found: Attributes = {GEN_AI["model"]: model} if model else {}
    if tokens_in is not None:
        found[GEN_AI["input_tokens"]] = tokens_in
    if tokens_out is not None:
        found[GEN_AI["output_tokens"]] = tokens_out
    if cached is not None:
        found[GEN_AI["cached_tokens"]] = cached
    return found


def grpc_code(code: int) -> str:
    """Return the name of a gRPC status, "UNKNOWN" for one that there is not."""
    return CODES[code] if 0 <= code < len(CODES) else "UNKNOWN"


def grpc_failed(code: str) -> bool:
    """Return whether a call with this status is an error of the server."""
    return code in _GRPC_SERVER_ERRORS


def grpc_request(method: str, code: str) -> Attributes:
    """Return the attributes of a gRPC call. method: full name; code: see `grpc_code`."""
    return {"rpc.system.name": "grpc", "rpc.method": method, "rpc.status_code": code}


def grpc_server(method: str, code: str, served_at: tuple[str, int]) -> Attributes:
    """Return the attributes of the SERVER span of a gRPC call. served_at: address and port of the listener."""
    found, (address, port) = grpc_request(method, code), served_at
    if address:
        found["server.address"] = address
    if port:
        found["server.port"] = port
    return found
