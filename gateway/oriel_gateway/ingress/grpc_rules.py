"""The gRPC methods that are served, their bounds, and the status of each refusal."""

from typing import ClassVar, Final

from oriel_gateway.call.grpc_head import SERVICE, RpcLine
from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Pool
from oriel_wire.h2.grpc import PREFIX_BYTES
from oriel_wire.v2.grpc_names import append_model, model_fields

__all__ = [
    "ALIVE_METHODS",
    "HEALTH_METHODS",
    "METHODS",
    "MODEL_PATHS",
    "OPERATOR_METHODS",
    "STREAMING",
    "GrpcLimits",
    "Message",
    "answered_without_key",
    "bound_message",
    "message_bytes",
    "naming",
    "no_message",
    "too_much_metadata",
    "unprefixed",
]

Message = bytes | list[bytes | memoryview]  # whole, or in pieces that were not copied
_MODEL_METHODS = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer")
MODEL_PATHS: Final = frozenset(f"/{SERVICE}/{name}".encode() for name in (*_MODEL_METHODS, "ModelStreamInfer"))
OPERATOR_METHODS = frozenset(
    {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"}
    | {f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")}
)
METHODS: Final = {
    f"/{SERVICE}/{name}".encode(): RpcLine(name) for name in (*_MODEL_METHODS, *OPERATOR_METHODS, "ServerMetadata")
}
STREAMING: Final = RpcLine("ModelStreamInfer")
METHODS[f"/{SERVICE}/ModelStreamInfer".encode()] = STREAMING
HEALTH_METHODS: Final = frozenset({b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"})
ALIVE_METHODS: Final = frozenset({f"/{SERVICE}/ServerLive".encode(), f"/{SERVICE}/ServerReady".encode()})


class GrpcLimits:
    """Bounds of gRPC calls; those of their connections are in `ingress.h2` and `ingress.h2_connection`."""

    MAX_MESSAGE_BYTES: ClassVar[int] = 64 * 1024 * 1024
    MAX_METADATA_BYTES: ClassVar[int] = 16 * 1024
    FIRST_MESSAGE_S: ClassVar[float] = 10.0
    PACE_S: ClassVar[float] = 1.0  # a message that is held back is checked again after this


def answered_without_key(path: bytes) -> bool:
    """Return whether the gateway itself answers this method, to anybody."""
    return path in HEALTH_METHODS or path in ALIVE_METHODS or path.endswith(b"Health/Check")


def message_bytes(message: Message) -> int:
    """Return the size of a message."""
    return len(message) if isinstance(message, bytes) else sum(map(len, message))


def unprefixed(body: Message) -> tuple[Message, bool]:
    """Return the one message of a body without its prefix, and whether it is compressed. Raises Refused.

    A prefix that is whole is in the first piece.
    """
    start = body if isinstance(body, bytes) else bytes(body[0][:PREFIX_BYTES])
    size = message_bytes(body) - PREFIX_BYTES
    if size != int.from_bytes(start[1:PREFIX_BYTES], "big") or start[0] > 1:
        raise no_message()
    if size > GrpcLimits.MAX_MESSAGE_BYTES:
        raise Refused(Outcome.TOO_LARGE, f"the message is larger than {GrpcLimits.MAX_MESSAGE_BYTES} bytes")
    if isinstance(body, bytes):
        return body[PREFIX_BYTES:], start[0] == 1
    body[0] = memoryview(body[0])[PREFIX_BYTES:]
    return body, start[0] == 1


def naming(message: Message, name: str, version: str) -> Message:
    """Return a message with this name and version in force; see `append_model`."""
    if isinstance(message, bytes):
        return append_model(message, name, version)
    return [*message, model_fields(name, version)]


def bound_message(size: int, pool: Pool) -> None:
    """Raise Refused TOO_LARGE for a message above the bound of its pool."""
    if size > pool.max_body_bytes:
        raise Refused(Outcome.TOO_LARGE, f"the message is larger than {pool.max_body_bytes} bytes")


def no_message() -> Refused:
    """Return the refusal of a call that carries something else than one message."""
    return Refused(Outcome.INVALID_REQUEST, "the call must carry exactly one message")


def too_much_metadata() -> Refused:
    """Return the refusal of a call whose metadata is too large."""
    return Refused(Outcome.TOO_LARGE, f"the metadata is larger than {GrpcLimits.MAX_METADATA_BYTES} bytes")
