"""Reads the messages of one `ModelStreamInfer` in a task of its own."""

import asyncio
from collections.abc import Callable

from oriel_gateway.call.contracts import DONE, Call
from oriel_gateway.call.grpc_stream import GrpcStreamSide
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.ingress.grpc_incoming import Incoming
from oriel_gateway.ingress.grpc_rules import GrpcLimits, bound_message, no_message
from oriel_gateway.ingress.grpc_view import GrpcView
from oriel_gateway.shared.sequence_steps import follow_sequence
from oriel_wire.v2.grpc_names import append_model, peek_model

__all__ = ["StreamIngress"]


class StreamIngress:
    """The reader of one stream."""

    __slots__ = ("_view", "_begin", "_incoming")

    def __init__(self, view: GrpcView, incoming: Incoming, begin: Callable[[bytes], Call]) -> None:
        """begin: begins the call by its first message. Raises Refused."""
        self._view = view
        self._incoming = incoming
        self._begin = begin

    async def serve(self) -> None:
        """Begin the call with the first message, and send every later one when it may pass."""
        view, incoming = self._view, self._incoming
        try:
            first = await incoming.next_message()
            if first is None:
                raise no_message()
            message, compressed = first
            if compressed:
                message = await view.decompress(message)
            call = self._begin(message)
            stream = call.side
            assert isinstance(stream, GrpcStreamSide)
            await stream.sent.wait()
            while call.state != DONE and not stream.closing:
                further = await incoming.next_message()
                if further is None:
                    stream.end_messages(call)
                    return
                message, compressed = further
                if compressed:
                    message = await view.decompress(message)
                while (model := await self._judge(call, stream, message)) is None:
                    pass  # it was held back
                name, version = peek_model(message)
                if not version and name == call.target.name:
                    version = call.target.version  # the side of a split
                if call.target.plan.sequences:
                    follow_sequence(call, message, f"{name}/versions/{version}" if version else name)
                await stream.send_message(call, model, append_model(message, name, version))
        except Refused as refused:
            view.refuse(refused)

    async def _judge(self, call: Call, stream: GrpcStreamSide, message: bytes) -> str | None:
        """Return the model of a further message that may pass; None if it was held back. Raises Refused.

        A stream outlives keys, tokens and documents: a sender whose key was revoked sends no further message. And a
        stream must not get around the limits of requests, or of a model other than its first.
        """
        view = self._view
        gateway = view.gateway
        tenant = view.identify_again()
        name, version = view.authorise(tenant, message)
        bound_message(len(message), call.gate.pool)
        if not tenant.allowances and not gateway.targets.tiers_differ:
            stream.count_bytes(call, len(message), name)
            return name
        target = view.target_of(tenant, name, version)
        # The tier of the first message's route today counts as well: new documents alone end no stream.
        tier = target.tenant.tier.name
        of_stream = gateway.targets.served(tenant, call.target.plan, view.rpc.tier).tier.name
        if tier != of_stream:
            why = f"this stream is served by tier {of_stream!r}, model {name!r} by {tier!r}: open another for it"
            raise Refused(Outcome.INVALID_REQUEST, why)
        if not tenant.allowances:
            stream.count_bytes(call, len(message), name)
            return name
        wait_s = await stream.further(call, tenant, target, len(message))
        if wait_s > 0.0:
            await asyncio.sleep(min(wait_s, GrpcLimits.PACE_S))
        return name if wait_s <= 0.0 else None
