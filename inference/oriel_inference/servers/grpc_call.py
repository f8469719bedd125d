"""What every gRPC method needs: the call's metadata and context, and ending it with an error text and status."""

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc.aio

from oriel_inference.errors import InferenceError, UnknownModel
from oriel_inference.servers.statuses import grpc_status
from oriel_inference.servers.surface import Surface
from oriel_wire.context import TENANT, CallContext, ContextPlan, read_headers
from oriel_wire.engine.peers import address_of_grpc_peer
from oriel_wire.orca import LOAD_FORMAT

MAX_PLANS = 256
MAX_PLAN_BYTES = 2048

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]


def metadata_of(context: Context) -> dict[str, str]:
    """Return the text metadata by name; the first value wins, as over HTTP."""
    return _texts(_metadata(context))


def _metadata(context: Context) -> Metadata:
    found: Any = context.invocation_metadata()
    return tuple(found or ())


def _texts(metadata: Metadata) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in metadata:
        if isinstance(value, str):
            found.setdefault(name, value)
    return found


def context_of(surface: Surface, metadata: Mapping[str, str], context: Context, now: float) -> CallContext:
    """Return deadline, tier and trace of a call that arrived at `now`."""
    remaining_s = context.time_remaining()
    peer = context.peer()
    plan = read_headers(metadata.get, trusted=address_of_grpc_peer(peer) in surface.peers, sample=False)
    return plan.at(now, surface.default_timeout_s if remaining_s is None else remaining_s, peer)


class ContextPlans:
    """Caches the parsed metadata of calls, for callers that send the same metadata each time. Bounded."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._known: dict[tuple[Metadata, bool], tuple[ContextPlan, int, str]] = {}

    def read(self, context: Context, now: float) -> tuple[CallContext, int, str]:
        """Return context, caller's span (0: none) and `endpoint-load-metrics-format` of a call that arrived at
        `now`.
        """
        surface = self._surface
        peer = context.peer()
        trusted = address_of_grpc_peer(peer) in surface.peers
        metadata = _metadata(context)
        found = self._known.get((metadata, trusted))
        if found is None:
            found = self._read(metadata, trusted)
        plan, parent_id, load_format = found
        remaining_s = context.time_remaining()
        ctx = plan.at(now, surface.default_timeout_s if remaining_s is None else remaining_s, peer)
        return ctx, parent_id, load_format

    def _read(self, metadata: Metadata, trusted: bool) -> tuple[ContextPlan, int, str]:
        fields = _texts(metadata)
        plan = read_headers(fields.get, trusted=trusted, sample=False)
        parent_id = plan.trace.span_id if plan.trace is not None else 0
        found = plan, parent_id, fields.get(LOAD_FORMAT, "")
        # Metadata with values of this request alone is never seen again, so it is not cached.
        if plan.trace is None and not plan.request_id and sum(map(len, fields.values())) <= MAX_PLAN_BYTES:
            if len(self._known) >= MAX_PLANS:
                self._known.clear()
            self._known[metadata, trusted] = found
        return found


async def abort(context: Context, error: InferenceError) -> NoReturn:
    """End the call; its trailing metadata has the reason in one word. Raises AbortError.

    An unknown model's near name is left out for a tenant's call: over gRPC nothing shows which names the tenant may
    know.
    """
    if isinstance(error, UnknownModel) and TENANT not in metadata_of(context):
        error = error.with_near_name(lambda name: True)
    context.set_trailing_metadata((*(context.trailing_metadata() or ()), ("x-oriel-reason", error.outcome.value)))
    # An error that a frame of its own traceback refers to keeps the whole message in memory until the garbage collector
    # runs.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    await context.abort(grpc_status(error), error.message)
    raise AssertionError("abort does not return")
