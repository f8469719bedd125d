"""One gRPC call on its way: the permit, the upstream channel, the end. A coroutine's worth of `call.Call`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from grpc import aio

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import Grant
from oriel_gateway.targets import Target
from oriel_gateway.tracing import Mark
from oriel_policies.documents import Pool, Tenant
from oriel_policies.picking import least_outstanding
from oriel_policies.queue import Ticket
from oriel_wire.context import INTERNAL
from oriel_wire.orca import LOAD_FORMAT

__all__ = ["GrpcCall", "GrpcUpstreams", "answer_metadata"]

STREAM_MAX_S = 600.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
# Ours, the transport's, or set anew for the next hop.
_DROPPED = INTERNAL | {
    LOAD_FORMAT,
    "authorization",
    "proxy-authorization",
    "x-api-key",
    "x-request-id",
    "x-request-timeout-ms",
    "traceparent",
    "tracestate",
    "user-agent",
    "te",
    "content-type",
}


class GrpcAddress(NamedTuple):
    """Where an upstream listens."""

    host: str
    port: int


class GrpcUpstreams:
    """Channels by address, made on first use, with what is outstanding on each."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, int], aio.Channel] = {}
        self._outstanding: dict[tuple[str, int], int] = {}
        self._turn = 0

    def acquire(self, addresses: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], aio.Channel]:
        """The channel with the least outstanding calls; give the address to `release`."""
        self._turn += 1
        address = addresses[least_outstanding([self._outstanding.get(a, 0) for a in addresses], self._turn)]
        channel = self._channels.get(address)
        if channel is None:
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            channel = self._channels[address] = aio.insecure_channel(f"{host}:{address[1]}", options=_OPTIONS)
        self._outstanding[address] = self._outstanding.get(address, 0) + 1
        return address, channel

    def release(self, address: tuple[str, int]) -> None:
        self._outstanding[address] -= 1

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()


class GrpcCall:
    """Times are monotonic seconds, 0.0 = not reached. `end` may be called often; the first call counts."""

    protocol = "grpc"
    ahead = -1
    bytes_out = 0
    endpoint: "GrpcAddress | None" = None
    tried: "tuple[GrpcAddress, ...]" = ()

    def __init__(
        self,
        gateway: Gateway,
        method: str,
        tenant: Tenant,
        target: Target,
        mark: Mark,
        metadata: Mapping[str, str],
        size_bytes: int,
        received_s: float,
        deadline: float,
        grant: Grant | None,
    ) -> None:
        self._gateway = gateway
        self._gate = gateway.pools[target.pool]
        self._method = method
        self.tenant = tenant
        self.target = target
        self.mark = mark
        self.received_s = received_s
        self.deadline = deadline
        self.outcome = Outcome.ANSWERED
        self.status = 0
        self.queued_s = self.permit_s = self.sent_s = self.response_s = 0.0
        self.refused: Refused | None = None
        self._metadata = metadata
        self._size_bytes = self._bytes_in = size_bytes
        self.grant = grant
        self.limits: tuple[tuple[str, str], ...] = ()  # `RateLimit` and its policy, for the answer
        self._ticket: Ticket | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._upstream: aio.Call | None = None
        self._ended = False

    @property
    def method(self) -> str:
        """The gRPC method."""
        return self._method

    @property
    def infers(self) -> bool:
        """Whether its messages are `ModelInferRequest`s."""
        return self._method in ("ModelInfer", "ModelStreamInfer")

    @property
    def pool(self) -> Pool:
        """What the documents say of the pool it goes to."""
        return self._gate.pool

    async def permit(self) -> None:
        """Wait for a permit. Raises Refused; cancelled, the place in the queue is free at once (by `end`)."""
        self.queued_s = monotonic()
        tier = self.tenant.tier
        due = min(self.received_s + tier.target_s, self.deadline)
        if self.grant is not None and not self.grant.ready:
            self._waiting = asyncio.get_running_loop().create_future()
            self.grant.waiter = self
            await self._waiting
        self._waiting = asyncio.get_running_loop().create_future()
        gate = self._gate
        if gate.admission.enter():
            self.admitted()
            return
        self.ahead = gate.admission.queue.rows_ahead(tier.band)
        self._ticket = gate.wait(self, self.tenant, self.target.route, due=due, size_bytes=self._size_bytes)
        gate.pump()
        slot = self._gateway.watch(self, self.deadline, self.queued_s)
        try:
            await self._waiting
        finally:
            self._gateway.unwatch(self, slot)

    def admitted(self) -> None:
        self.permit_s = monotonic()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def granted(self) -> None:
        """The limiter's ledger let the call through."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def moved(self, message: bytes) -> None:
        """Bytes that the limiter has not counted yet: an answer, a later message of a stream."""
        if self.grant is not None:
            self.grant.move(len(message), monotonic())

    def heard(self, message: bytes) -> None:
        """A later message of a stream."""
        self._bytes_in += len(message)
        self.moved(message)

    def displaced(self) -> None:
        self._fail(
            Refused(
                Outcome.DISPLACED,
                "a more urgent call took the place in the queue",
                retry_after_s=self._gate.admission.retry_after_s(),
            )
        )

    def expired(self) -> None:
        self._fail(Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for a permit"))

    def _fail(self, refused: Refused) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(refused)

    async def forward_unary(self, upstreams: GrpcUpstreams, method: str, message: bytes) -> bytes:
        """Send and wait for the answer. Raises AioRpcError as the upstream ended it."""
        address, channel = upstreams.acquire(self._gate.pool.grpc_endpoints)
        self.endpoint = GrpcAddress(*address)
        try:
            self.sent_s = now = monotonic()
            send = channel.unary_unary(method, None, None)
            call = send(message, timeout=max(0.0, self.deadline - now), metadata=self._onward())
            self._upstream = call
            answer: bytes = await call
            self.response_s = monotonic()
            self.moved(answer)
            self.bytes_out = len(answer)
            self.end(Outcome.ANSWERED)
            return answer
        finally:
            upstreams.release(address)

    async def forward_stream(
        self, upstreams: GrpcUpstreams, method: str, messages: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Both directions at once; the deadline bounds the first answer, then `STREAM_MAX_S` the whole."""
        address, channel = upstreams.acquire(self._gate.pool.grpc_endpoints)
        self.endpoint = GrpcAddress(*address)
        try:
            self.sent_s = now = monotonic()
            call = channel.stream_stream(method, None, None)(messages, timeout=STREAM_MAX_S, metadata=self._onward())
            self._upstream = call
            answers = aiter(call)
            try:
                async with asyncio.timeout(max(0.0, self.deadline - now)):
                    first = await anext(answers, None)
            except TimeoutError:
                call.cancel()
                raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for the upstream") from None
            if first is not None:
                self.response_s = monotonic()
                self.bytes_out += len(first)
                yield first
                async for answer in answers:
                    self.bytes_out += len(answer)
                    yield answer
            if self.refused is not None:
                raise self.refused
            self.end(Outcome.ANSWERED)
        except asyncio.CancelledError:
            # Either this call was cancelled, or `refuse` cancelled the upstream's half of it.
            task = asyncio.current_task()
            if self.refused is None or (task is not None and task.cancelling()):
                raise
            raise self.refused from None
        finally:
            upstreams.release(address)

    def refuse(self, refused: Refused) -> None:
        """A later message of a stream is not allowed: stop the upstream's half; `forward_stream` raises `refused`.

        Before there is an upstream, the limiter's ledger refused: `permit` raises it.
        """
        self.refused = refused
        if self._upstream is not None:
            self._upstream.cancel()
        else:
            self._fail(refused)

    def _onward(self) -> tuple[tuple[str, str], ...]:
        mark, tenant = self.mark, self.tenant
        onward = [
            (key, value)
            for key, value in self._metadata.items()
            if key not in _DROPPED and not key.startswith("grpc-") and key[:8].replace("_", "-") != "x-oriel-"
        ]
        onward += [
            ("x-request-id", mark.request_id),
            ("x-oriel-tier", tenant.tier.name),
            ("x-oriel-priority", str(tenant.tier.band)),
            ("x-oriel-tenant", tenant.name),
            ("traceparent", mark.traceparent()),
        ]
        if mark.state:
            onward.append(("tracestate", mark.state))
        return tuple(onward)

    def answer_metadata(self) -> tuple[tuple[str, str], ...]:
        """What every answer carries."""
        now = monotonic()
        queue_s = (self.permit_s or now) - self.queued_s if self.queued_s else 0.0
        metadata = answer_metadata(self.mark, queue_s, now - self.sent_s if self.sent_s else 0.0)
        return metadata + self.limits if self.limits else metadata

    def end(self, outcome: Outcome, error: str = "") -> None:
        """Give back the place or the permit, count, trace."""
        if self._ended:
            return
        self._ended = True
        self.outcome = outcome
        if outcome is Outcome.ANSWERED and not self.status:
            self.status = 200
        now = monotonic()
        gateway, gate, tenant = self._gateway, self._gate, self.tenant
        waiting = self._waiting
        if waiting is not None and waiting.done() and not waiting.cancelled():
            with suppress(Refused):
                waiting.exception()
        if not self.permit_s and self._ticket is not None:
            gate.forget(self._ticket)
        if self._ticket is not None:
            self._ticket.payload = None
        streamed = self._method == "ModelStreamInfer" and self.response_s
        gateway.ended(self, now, error, self.response_s if streamed else now, self._bytes_in)
        cost_s = 0.0
        if self.permit_s:
            cost_s = gate.leave(self.target.route, tenant, self._ticket, now - self.permit_s, -1)
        if (grant := self.grant) is not None:
            executed = self.sent_s > 0.0 or outcome is Outcome.ANSWERED
            self.limits = grant.headers(now) if outcome is Outcome.ANSWERED else ()
            grant.settle(int(cost_s * 1e6), executed, now)


def answer_metadata(mark: Mark, queue_s: float, upstream_s: float) -> tuple[tuple[str, str], ...]:
    """Ids and timing, for an answer or a refusal at any stage."""
    timing = f"gateway-queue;dur={queue_s * 1e3:.3f}"
    if upstream_s:
        timing += f", gateway-upstream;dur={upstream_s * 1e3:.3f}"
    return (("x-request-id", mark.request_id), ("traceresponse", mark.traceresponse()), ("server-timing", timing))
