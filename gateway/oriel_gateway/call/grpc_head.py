"""The head of a gRPC call: what the call keeps of it, and the metadata that a server gets."""

from typing import Final

from oriel_wire.context import INTERNAL
from oriel_wire.h2.grpc import RpcHead
from oriel_wire.h2.hpack import literal
from oriel_wire.observe.orca import LOAD_FORMAT

__all__ = ["SERVICE", "GrpcRequest", "RpcLine", "passed_on", "sent_on"]

SERVICE: Final = "inference.GRPCInferenceService"
# These belong to the gateway or the transport, or are set anew for the next hop.
_DROPPED: Final = frozenset(
    name.encode()
    for name in INTERNAL
    | {
        LOAD_FORMAT,
        "authorization",
        "proxy-authorization",
        "x-api-key",
        "x_api_key",
        "x_api-key",
        "x-api_key",
        "proxy_authorization",
        "x-request-id",
        "x-request-timeout-ms",
        "x-request-tier",
        "traceparent",
        "tracestate",
        "user-agent",
        "te",
        "content-type",
        "content-length",
        "host",
        "forwarded",
        "x-real-ip",
    }
)


class RpcLine:
    """The target of a call, as a request line has it over HTTP/1.1. method: the last part of its path."""

    __slots__ = ("encoded", "method", "path")

    def __init__(self, method: str) -> None:
        self.method = method
        self.path = f"/{SERVICE}/{method}"
        self.encoded = literal(b":path", self.path.encode())


class GrpcRequest:
    """The head of a gRPC call as a call keeps it. Other attributes are those of `oriel_wire.h1.request.RequestHead`.

    served_at: the address and the port of the listener.
    """

    chunked = False
    close = False
    content_length: int | None = None
    expect_continue = False

    __slots__ = ("line", "rpc", "served_at", "timeout")

    def __init__(self, line: RpcLine, rpc: RpcHead, served_at: tuple[str, int]) -> None:
        self.line = line
        self.rpc = rpc
        self.served_at = served_at
        self.timeout = rpc.requested_ms

    @property
    def method(self) -> str:
        """The gRPC method."""
        return self.line.method

    def get(self, name: str) -> str | None:
        """The first value of the metadata with this lower-case name."""
        return self.rpc.get(name)

    def sent_on(self) -> list[tuple[str, str]]:
        """The metadata that the upstream gets."""
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent_on(self.rpc)]


def sent_on(rpc: RpcHead) -> list[tuple[bytes, bytes]]:
    """Return the client's metadata that the upstream gets."""
    return [field for field in rpc.fields if passed_on(field[0])]


def passed_on(name: bytes) -> bool:
    """Return whether the upstream gets a field of the client's metadata."""
    return (
        name not in _DROPPED
        and name[:1] != b":"
        and not name.startswith(b"grpc-")
        and name[:8].replace(b"_", b"-") != b"x-oriel-"
        and name[:12].replace(b"_", b"-") != b"x-forwarded-"
    )
