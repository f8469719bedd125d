"""The gRPC status of each outcome, beside `http_status`."""

from typing import Final

from oriel_gateway.errors import Outcome
from oriel_wire.h2 import grpc

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
    Outcome.TOKENS_LIMITED: grpc.RESOURCE_EXHAUSTED,
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
