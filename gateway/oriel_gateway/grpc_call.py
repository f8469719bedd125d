"""One gRPC call on its way: the permit, the upstream channel, the end. A coroutine's worth of `call.Call`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from time import monotonic

from grpc import aio

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.targets import Target
from oriel_gateway.tracing import Mark, record_call
from oriel_policies.documents import Tenant
from oriel_policies.picking import least_outstanding
from oriel_policies.queue import Ticket
from oriel_wire.context import INTERNAL
from oriel_wire.orca import LOAD_FORMAT, LOAD_METRICS

__all__ = ["GrpcCall", "GrpcUpstreams", "answer_metadata"]

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
# Ours, the transport's, or set anew for the next hop.
_DROPPED = INTERNAL | {
    LOAD_FORMAT,
    "authorization",
    "x-api-key",
    "x-request-id",
    "x-request-timeout-ms",
    "traceparent",
    "tracestate",
    "user-agent",
    "te",
    "content-type",
}


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
        self.queued_s = self.permit_s = self.sent_s = 0.0
        self.refused: Refused | None = None
        self._metadata = metadata
        self._size_bytes = size_bytes
        self._ticket: Ticket | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._upstream: aio.Call | None = None
        self._ended = False
        self._asked = False  # for a load report
        self._first_s = self._heard_s = 0.0  # of a stream: its first answer, its latest message either way
        self._slot = 0

    @property
    def method(self) -> str:
        """The gRPC method."""
        return self._method

    async def permit(self) -> None:
        """Wait for a permit. Raises Refused; cancelled, the place in the queue is free at once (by `end`)."""
        self.queued_s = monotonic()
        self._waiting = asyncio.get_running_loop().create_future()
        gate = self._gate
        if gate.admission.enter():
            self.admitted()
            return
        self._ticket = gate.wait(
            self,
            self.tenant,
            self.target,
            received_s=self.received_s,
            deadline=self.deadline,
            size_bytes=self._size_bytes,
        )
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

    def displaced(self) -> None:
        self._fail(
            Refused(
                Outcome.DISPLACED,
                "a more urgent call took the place in the queue",
                retry_after_s=self._gate.admission.retry_after_s(),
            )
        )

    def expired(self) -> None:
        if self._first_s:
            now = monotonic()
            if now < (ends_s := self._stream_ends_s()):
                self._slot = self._gateway.watch(self, ends_s, now)
            else:
                self.refuse(
                    Refused(
                        Outcome.DEADLINE_EXCEEDED, "the stream was silent, or went on, for longer than its tier may"
                    )
                )
            return
        self._fail(Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for a permit"))

    def _fail(self, refused: Refused) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(refused)

    async def forward_unary(self, upstreams: GrpcUpstreams, method: str, message: bytes) -> bytes:
        """Send and wait for the answer. Raises AioRpcError as the upstream ended it."""
        address, channel = upstreams.acquire(self._gate.pool.grpc_endpoints)
        try:
            self.sent_s = now = monotonic()
            send = channel.unary_unary(method, None, None)
            call = send(message, timeout=max(0.0, self.deadline - now), metadata=self._onward())
            self._upstream = call
            answer: bytes = await call
            if self._asked:
                self._gate.reported(
                    next((str(v) for k, v in await call.trailing_metadata() if k == LOAD_METRICS), None)
                )
            self.end(Outcome.ANSWERED)
            return answer
        finally:
            upstreams.release(address)

    async def forward_stream(
        self, upstreams: GrpcUpstreams, method: str, messages: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Both directions at once. The deadline bounds the first answer, then the tier says how long the stream may be
        silent in both directions and how long it may last."""
        tier = self.tenant.tier
        address, channel = upstreams.acquire(self._gate.pool.grpc_endpoints)
        try:
            self.sent_s = now = monotonic()
            longest_s = max(0.0, self.deadline - now) + tier.stream_max_s
            call = channel.stream_stream(method, None, None)(
                self._heard(messages), timeout=longest_s, metadata=self._onward()
            )
            self._upstream = call
            answers = aiter(call)
            try:
                async with asyncio.timeout(max(0.0, self.deadline - now)):
                    answer = await anext(answers, None)
            except TimeoutError:
                call.cancel()
                raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for the upstream") from None
            self._first_s = self._heard_s = monotonic()
            slot = self._gateway.watch(self, self._stream_ends_s(), self._first_s)
            self._slot = slot
            try:
                while answer is not None:
                    yield answer
                    answer = await anext(answers, None)
                    self._heard_s = monotonic()
            finally:
                self._gateway.unwatch(self, self._slot)
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

    def _stream_ends_s(self) -> float:
        tier = self.tenant.tier
        return min(self._heard_s + tier.stream_idle_s, self._first_s + tier.stream_max_s)

    async def _heard(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in messages:
            self._heard_s = monotonic()
            yield message

    def refuse(self, refused: Refused) -> None:
        """A later message of a stream is not allowed: stop the upstream's half; `forward_stream` raises `refused`."""
        self.refused = refused
        if self._upstream is not None:
            self._upstream.cancel()

    def _onward(self) -> tuple[tuple[str, str], ...]:
        mark, tenant = self.mark, self.tenant
        onward = [
            (key, value)
            for key, value in self._metadata.items()
            if key not in _DROPPED and not key.startswith(("grpc-", "x-oriel-"))
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
        if self._gate.asks:
            self._gate.asks, self._asked = False, True
            onward.append((LOAD_FORMAT, "text"))
        return tuple(onward)

    def answer_metadata(self) -> tuple[tuple[str, str], ...]:
        """What every answer carries."""
        now = monotonic()
        queue_s = (self.permit_s or now) - self.queued_s if self.queued_s else 0.0
        return answer_metadata(self.mark, queue_s, now - self.sent_s if self.sent_s else 0.0)

    def end(self, outcome: Outcome, error: str = "") -> None:
        """Give back the place or the permit, count, trace."""
        if self._ended:
            return
        self._ended = True
        self.outcome = outcome
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
        seconds = now - self.received_s
        on_time = outcome is Outcome.ANSWERED and seconds <= tenant.tier.target_s
        gateway.stats.ended(gate.name, tenant.tier.name, outcome, self.status, seconds, on_time)
        if self.mark.sampled and gateway.sink.enabled:
            record_call(self, gateway.sink, now, error)
        if self.permit_s:
            good = None if outcome is Outcome.CLIENT_LEFT else outcome is Outcome.ANSWERED
            size_bytes = -1 if self._first_s else self._size_bytes
            gate.leave(self.target, tenant, self._ticket, now - self.permit_s, -1, size_bytes=size_bytes, good=good)


def answer_metadata(mark: Mark, queue_s: float, upstream_s: float) -> tuple[tuple[str, str], ...]:
    """Ids and timing, for an answer or a refusal at any stage."""
    timing = f"gateway-queue;dur={queue_s * 1e3:.3f}"
    if upstream_s:
        timing += f", gateway-upstream;dur={upstream_s * 1e3:.3f}"
    return (("x-request-id", mark.request_id), ("traceresponse", mark.traceresponse()), ("server-timing", timing))
