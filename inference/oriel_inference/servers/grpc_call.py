"""What every gRPC method needs of its call: metadata, context, and an end with our sentence and status."""

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc.aio

from oriel_inference.errors import InferenceError
from oriel_inference.servers.peers import address_of_grpc_peer
from oriel_inference.servers.statuses import grpc_status
from oriel_inference.servers.surface import Surface
from oriel_wire.context import CallContext, from_headers

__all__ = ["Context", "abort", "context_of", "metadata_of"]

Context = grpc.aio.ServicerContext[Any, Any]


def metadata_of(context: Context) -> dict[str, str]:
    """Text metadata by name; the first value wins, as over HTTP."""
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found.setdefault(name, value)
    return found


def context_of(surface: Surface, metadata: Mapping[str, str], context: Context, now: float) -> CallContext:
    """Deadline, tier and trace of a call that came at `now`."""
    remaining_s = context.time_remaining()
    return from_headers(
        metadata.get,
        now=now,
        trusted=address_of_grpc_peer(context.peer()) in surface.peers,
        default_timeout_s=surface.default_timeout_s if remaining_s is None else remaining_s,
        sample=False,
    )


async def abort(context: Context, error: InferenceError) -> NoReturn:
    """End the call. Raises AbortError."""
    # An error that a frame of its own traceback holds keeps the whole message until the collector comes.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    await context.abort(grpc_status(error), error.message)
    raise AssertionError("abort does not return")
