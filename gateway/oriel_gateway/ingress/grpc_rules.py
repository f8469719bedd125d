"""The gRPC methods that are served, their bounds, and the status of each refusal."""

from typing import ClassVar, Final

from oriel_gateway.call.grpc import SERVICE, RpcLine
from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Pool
from oriel_wire.h2 import grpc

__all__ = [
    "ALIVE_METHODS",
    "CODES",
    "METHODS",
    "MODEL_METHODS",
    "OPERATOR_METHODS",
    "STREAMING",
    "GrpcLimits",
    "bound_message",
    "no_message",
    "too_much_metadata",
]

MODEL_METHODS = frozenset({"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"})
OPERATOR_METHODS = frozenset(
    {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"}
    | {f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")}
)
METHODS: Final = {
    f"/{SERVICE}/{name}".encode(): RpcLine(name) for name in (*MODEL_METHODS, *OPERATOR_METHODS, "ServerMetadata")
}
STREAMING: Final = RpcLine("ModelStreamInfer")
METHODS[f"/{SERVICE}/ModelStreamInfer".encode()] = STREAMING
ALIVE_METHODS: Final = frozenset(
    {b"/grpc.health.v1.Health/Check", f"/{SERVICE}/ServerLive".encode(), f"/{SERVICE}/ServerReady".encode()}
)
CODES: Final = {
    Outcome.INVALID_REQUEST: grpc.INVALID_ARGUMENT,
    Outcome.AMBIGUOUS_CREDENTIALS: grpc.INVALID_ARGUMENT,
    Outcome.UNAUTHENTICATED: grpc.UNAUTHENTICATED,
    Outcome.IDENTITY_UNAVAILABLE: grpc.UNAVAILABLE,
    Outcome.TIER_NOT_ALLOWED: grpc.PERMISSION_DENIED,
    Outcome.NOT_READY: grpc.UNAVAILABLE,
    Outcome.NOT_FOUND: grpc.NOT_FOUND,
    Outcome.METHOD_NOT_ALLOWED: grpc.UNIMPLEMENTED,
    Outcome.TOO_LARGE: grpc.RESOURCE_EXHAUSTED,
    Outcome.ENCODING_UNSUPPORTED: grpc.UNIMPLEMENTED,
    Outcome.RATE_LIMITED: grpc.RESOURCE_EXHAUSTED,
    Outcome.CONCURRENCY_LIMITED: grpc.RESOURCE_EXHAUSTED,
    Outcome.QUOTA_EXCEEDED: grpc.RESOURCE_EXHAUSTED,
    Outcome.QUEUE_FULL: grpc.UNAVAILABLE,
    Outcome.DISPLACED: grpc.UNAVAILABLE,
    Outcome.UPSTREAM_UNREACHABLE: grpc.UNAVAILABLE,
    Outcome.UPSTREAM_BROKEN: grpc.UNAVAILABLE,
    Outcome.INFEASIBLE: grpc.UNAVAILABLE,
    Outcome.DEADLINE_TOO_SHORT: grpc.DEADLINE_EXCEEDED,
    Outcome.DEADLINE_EXCEEDED: grpc.DEADLINE_EXCEEDED,
    Outcome.SERVER_STOPPING: grpc.UNAVAILABLE,
}


class GrpcLimits:
    """Bounds of gRPC calls; those of their connections are in `ingress.h2` and `ingress.h2_connection`."""

    MAX_MESSAGE_BYTES: ClassVar[int] = 64 * 1024 * 1024
    MAX_METADATA_BYTES: ClassVar[int] = 16 * 1024
    FIRST_MESSAGE_S: ClassVar[float] = 10.0
    PACE_S: ClassVar[float] = 1.0  # a message that is held back is checked again after this


def bound_message(size: int, pool: Pool) -> None:
    """Raise Refused TOO_LARGE for a message above the bound of its pool."""
    if size > pool.max_body_bytes:
        raise Refused(Outcome.TOO_LARGE, f"the message is larger than {pool.max_body_bytes} bytes")


def no_message() -> Refused:
    """Return the refusal of a call that carries something else than one message."""
    return Refused(Outcome.INVALID_REQUEST, "the call carries no message, or not exactly one")


def too_much_metadata() -> Refused:
    """Return the refusal of a call whose metadata is too large."""
    return Refused(Outcome.TOO_LARGE, f"the metadata is larger than {GrpcLimits.MAX_METADATA_BYTES} bytes")
