"""One gRPC call under way, as a coroutine: its permit, its upstream call and its end. `call.http` is its
counterpart.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from time import monotonic

from grpc import aio

from oriel_gateway.call.grpc_recovery import GrpcRecovery
from oriel_gateway.call.lifecycle import LEAST_S
from oriel_gateway.contracts import Host
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.limits import Grant, StreamGrant
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.grpc_errors import broken, reported_cost_us
from oriel_gateway.pools.lending import PermitLending
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.exchanges import Exchange
from oriel_policies.queue import Ticket
from oriel_wire.context import INTERNAL
from oriel_wire.orca import LOAD_FORMAT
from oriel_wire.v2.grpc_names import peek_answer

_ASK_AGAIN_S = 0.01  # the meter knows by then how long a message has to wait
# These belong to the gateway or the transport, or are set anew for the next hop.
_DROPPED = INTERNAL | {
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
    "forwarded",
    "x-real-ip",
}


class _Answer:
    """Waits for the decision of the limiter's ledger on one message."""

    __slots__ = ("decision",)

    def __init__(self) -> None:
        self.decision: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def granted(self) -> None:
        if not self.decision.done():
            self.decision.set_result(None)

    def refuse(self, refused: Refused) -> None:
        if not self.decision.done():
            self.decision.set_exception(refused)


class GrpcCall(GrpcRecovery):
    """A gRPC call. Times are monotonic seconds; 0.0 means not reached. Only the first `end` of a call counts."""

    protocol = "grpc"
    ahead = -1

    def __init__(
        self,
        gateway: Host,
        gate: PoolGate,
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
        self._gate = gate
        gate.calls += 1
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
        self.metadata = metadata
        self.size_bytes = self.bytes_in = size_bytes
        self.grant = grant
        self.limits: tuple[tuple[str, str], ...] = ()  # `RateLimit` and its policy, for the answer
        sticky = target.plan.sticky if target.special else ""
        self.stick = metadata.get(sticky) or "" if sticky else ""
        self.notes: tuple[tuple[str, str], ...] = ()  # for the answer's metadata
        if target.side and "operator" in tenant.scopes:
            self.notes = (("x-oriel-route", f"{target.plan.name}; side={target.side}"),)
        self._ticket: Ticket | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._upstream: aio.Call | None = None
        self._parked = self._ended = False
        self._report_wanted = False  # whether the upstream is asked for a load report
        self._first_s = self._heard_s = 0.0  # of a stream: its first answer, and its latest message in either direction
        self._exchange: Exchange | None = None  # of a stream
        self._lending: PermitLending | None = None
        self._messages = 0  # of a stream
        self._answering = ""  # the model of the latest answer
        self._stream: StreamGrant | None = None  # of a stream whose tenant has limits
        self._slot = 0

    @property
    def method(self) -> str:
        """The gRPC method."""
        return self._method

    @property
    def gateway(self) -> Host:
        """The gateway that received the call."""
        return self._gateway

    @property
    def infers(self) -> bool:
        """Whether its messages are `ModelInferRequest`s."""
        return self._method in ("ModelInfer", "ModelStreamInfer")

    @property
    def gate(self) -> PoolGate:
        """The pool of its route."""
        return self._gate

    async def let_through(self) -> None:
        """Wait for the limiter's ledger, if the call depends on it. Raises Refused."""
        if self.grant is not None and not self.grant.ready:
            self._waiting = asyncio.get_running_loop().create_future()
            self.grant.waiter = self
            await self._waiting

    async def permit(self) -> None:
        """Acquire a permit. Raises Refused. If this is cancelled, `end` leaves the queue at once."""
        if not self.queued_s:
            self.queued_s = monotonic()
        await self.let_through()
        gate = self._gate
        if not gate.grpc.usable:
            await self._endpoint_usable()
        self._waiting = asyncio.get_running_loop().create_future()
        if gate.admission.enter():
            self.admitted()
            self._waiting.result()
            return
        if self._gateway.refusing:
            raise stopping()
        self.ahead = gate.admission.queue.rows_ahead(self.tenant.tier.band)
        self._ticket = gate.join_queue(
            self,
            self.tenant,
            self.target,
            received_s=self.received_s,
            deadline=self.deadline,
            size_bytes=self.size_bytes,
        )
        gate.pump()
        await self._answer_of(self._waiting)

    async def _answer_of(self, waiting: "asyncio.Future[None]") -> None:
        slot = self._gateway.clock.watch(self, self.deadline, self.queued_s)
        try:
            await waiting
        finally:
            self._gateway.clock.unwatch(self, slot)

    async def _endpoint_usable(self) -> None:
        """No endpoint is usable: wait for one without a permit. Raises Refused at the deadline."""
        if self._gateway.refusing:
            raise stopping()
        self._waiting = asyncio.get_running_loop().create_future()
        self._parked = True
        self._gate.grpc.park(self)
        try:
            await self._answer_of(self._waiting)
        finally:
            self._parked = False
            self._gate.grpc.unpark(self)

    def unparked(self) -> None:
        """An endpoint is usable."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def admitted(self) -> None:
        now = monotonic()
        if now >= self.deadline - LEAST_S:  # the permit came before the deadline, but both have waited for the loop
            ticket, self._ticket = self._ticket, None
            self._gate.decline_permit(ticket)
            self.expired()
            return
        self.permit_s = now
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def granted(self) -> None:
        """The call is within its limits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def moved(self, data: bytes, model: str | None = None) -> None:
        """Count bytes for the limits. model: the model of a stream's message; None for an answer."""
        if self._stream is not None:
            self._stream.answered(len(data), self._answering if model is None else model, monotonic())
        elif self.grant is not None:
            self.grant.move(len(data), monotonic())

    async def further(self, tenant: Tenant, target: Target, size_bytes: int) -> float:
        """Count a later message of the stream. Returns 0.0, or the seconds until its rate allows it. Raises Refused."""
        if self._stream is None:  # its tenant has got limits since the stream began
            self._stream = StreamGrant(self.grant, self.target.name, monotonic())
        got = self._gateway.limiter.acquire_further(tenant, target, size_bytes, monotonic(), self._stream.held)
        if isinstance(got, float):
            return got
        added = False
        try:
            if not got.ready:
                got.waiter = answer = _Answer()
                await answer.decision
            if self._exchange is not None:
                self._charge(self._exchange.at_work)
            if not self._ended:
                self._stream.add_message(got, target.name, monotonic())
                added = True
        except Refused as refused:
            if refused.outcome is not Outcome.RATE_LIMITED:
                raise
            return _ASK_AGAIN_S
        finally:
            if not added:
                got.settle(0, False, monotonic())
        return 0.0

    def _charge(self, models: Collection[str]) -> None:
        """Charge the stream's limits for what the server has done for these models, without the time of a suspended
        permit.
        """
        if self._stream is not None:
            now = monotonic()
            until_s = self._lending.held_until_s(now) if self._lending is not None else now
            self._stream.worked(models, until_s, 1.0 / max(1, self._gate.admission.inflight), now)

    def displaced(self) -> None:
        self._fail(
            Refused(
                Outcome.DISPLACED,
                "a more urgent call took the place in the queue",
                retry_after_s=self._gate.admission.retry_after_s(),
            )
        )

    def expired(self) -> None:
        if self._parked or (not self._first_s and not self._gate.grpc.usable):
            message = "no server of this pool could be reached before the deadline"
            self._fail(Refused(Outcome.UPSTREAM_UNREACHABLE, message, retry_after_s=1))
            return
        if self._first_s:
            now = monotonic()
            if now < (ends_s := self._stream_ends_s()):
                self._slot = self._gateway.clock.watch(self, ends_s, now)
            else:
                message = "the stream was silent, or went on, for longer than its tier may"
                self.refuse(Refused(Outcome.DEADLINE_EXCEEDED, message))
            return
        self._fail(Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while waiting for a permit"))

    def stopping(self) -> None:
        """Refuse the call unless its answer has begun, because the gateway is about to end."""
        if not self._first_s:
            self._fail(stopping())

    def _fail(self, refused: Refused) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(refused)

    async def forward_unary(self, method: str, message: bytes) -> bytes:
        """Send the message and return the answer. Raises AioRpcError as the upstream ended the call, or Refused."""
        answer = await self.ask(method, message)
        self.bytes_out = len(answer)
        self.moved(answer)
        self.end(Outcome.ANSWERED)
        return answer

    async def forward_stream(self, method: str, messages: AsyncIterator[tuple[str, bytes]]) -> AsyncIterator[bytes]:
        """Forward both directions at once. messages: each with the model it is for.
        The deadline bounds the first answer; then the tier bounds how long the stream may be silent in both directions,
        and how long it may last.
        """
        tier = self.tenant.tier
        endpoint = await self.connected()
        endpoint.outstanding += 1
        try:
            self.sent_s = now = monotonic()
            if self.tenant.allowances:
                self._stream = StreamGrant(self.grant, self.target.name, now)
            exchange = self._exchange = Exchange(self._gate.habits, self.tenant.name)
            lending = self._lending = PermitLending(self._gate, self.tenant, exchange, self._ticket)
            longest_s = max(0.0, self.deadline - now) + tier.stream_max_s
            call = endpoint.channel.stream_stream(method, None, None)(
                self._admitted(messages), timeout=longest_s, metadata=self._onward()
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
            if answer is not None:
                self.response_s = self._first_s
                endpoint.note_answer(self._first_s, self._first_s - self.sent_s)
            slot = self._gateway.clock.watch(self, self._stream_ends_s(), self._first_s)
            self._slot = slot
            try:
                while answer is not None:
                    endpoint.heard = True
                    self.bytes_out += len(answer)
                    self._answered(exchange, answer)
                    lending.resume()
                    lending.wait_for_client()  # until the client has taken the answer, or sends more
                    yield answer
                    if exchange.unanswered > 0:
                        lending.answer_arrived()
                    else:
                        lending.client_took_answer()
                    answer = await anext(answers, None)
                    self._heard_s = monotonic()
            finally:
                self._gateway.clock.unwatch(self, self._slot)
            if self.refused is not None:
                raise self.refused
            self.cost_us = reported_cost_us(await call.trailing_metadata())
            self.end(Outcome.ANSWERED)
        except aio.AioRpcError as error:
            if not self._first_s or broken(error):
                self._note_error(endpoint, error, self.sent_s)
            raise
        except asyncio.CancelledError:
            # Either this call was cancelled, or `refuse` cancelled its upstream call.
            task = asyncio.current_task()
            if self.refused is None or (task is not None and task.cancelling()):
                raise
            raise self.refused from None
        finally:
            endpoint.outstanding -= 1

    def _stream_ends_s(self) -> float:
        tier = self.tenant.tier
        return min(self._heard_s + tier.stream_idle_s, self._first_s + tier.stream_max_s)

    def _answered(self, exchange: Exchange, answer: bytes) -> None:
        model, final = peek_answer(answer)
        if self._stream is not None:
            self._answering = model
            at_work = exchange.at_work
            self._charge(at_work if final and not model else (*at_work, model) if model not in at_work else at_work)
        exchange.answered(model, final, monotonic())

    async def _admitted(self, messages: AsyncIterator[tuple[str, bytes]]) -> AsyncIterator[bytes]:
        lending, exchange = self._lending, self._exchange
        assert lending is not None and exchange is not None
        async for model, message in messages:
            self._heard_s = monotonic()
            try:
                await lending.admit_message(self.tenant, self.target, len(message))
            except Refused as refused:
                self.refuse(refused)
                return
            self._messages += 1
            if self._stream is not None:
                self._stream.message_sent(model, exchange.at_work, monotonic())
            exchange.sent(model)
            lending.message_sent()
            yield message

    def refuse(self, refused: Refused) -> None:
        """Refuse a later message of a stream by cancelling the upstream call: `forward_stream` raises `refused`.
        Without an upstream call, the limiter's ledger refused the call itself: `permit` raises it."""
        self.refused = refused
        if self._upstream is not None:
            self._upstream.cancel()
        else:
            self._fail(refused)

    def sent_on(self) -> list[tuple[str, str]]:
        """Return the client's metadata that the upstream gets."""
        return [
            (key, value)
            for key, value in self.metadata.items()
            if key not in _DROPPED
            and not key.startswith("grpc-")
            and key[:8].replace("_", "-") != "x-oriel-"
            and key[:12].replace("_", "-") != "x-forwarded-"
        ]

    def _onward(self) -> tuple[tuple[str, str], ...]:
        mark, tenant = self.mark, self.tenant
        onward = self.sent_on()
        onward += [
            ("x-request-id", mark.request_id),
            ("x-oriel-tier", tenant.tier.name),
            ("x-oriel-priority", str(tenant.tier.band)),
            ("x-oriel-tenant", tenant.name),
            ("traceparent", mark.traceparent()),
        ]
        if mark.state:
            onward.append(("tracestate", mark.state))
        if self._gate.wants_load_report:
            self._gate.wants_load_report, self._report_wanted = False, True
            onward.append((LOAD_FORMAT, "text"))
        return tuple(onward)

    def answer_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every answer."""
        now = monotonic()
        queue_s = (self.permit_s or now) - self.queued_s if self.queued_s else 0.0
        return answer_metadata(self.mark, queue_s, now - self.sent_s if self.sent_s else 0.0) + self.limits + self.notes

    def _count(self, outcome: Outcome, now: float, error: str) -> None:
        """Count and record the call."""
        streamed = self._method == "ModelStreamInfer" and self.response_s
        self._gateway.records.ended(self, now, error, self.response_s if streamed else now, self.bytes_in, self.tried)

    def end(self, outcome: Outcome, error: str = "") -> None:
        """Finish the call: leave the queue or release the permit, count and trace it."""
        if self._ended:
            return
        self._ended = True
        self.outcome = outcome
        if outcome is Outcome.ANSWERED and not self.status:
            self.status = 200
        now = monotonic()
        gate, tenant = self._gate, self.tenant
        gate.calls -= 1
        waiting = self._waiting
        if waiting is not None and waiting.done() and not waiting.cancelled():
            with suppress(Refused):
                waiting.exception()
        if not self.permit_s and self._ticket is not None:
            gate.leave_queue(self._ticket)
        if self._ticket is not None:
            self._ticket.payload = None
        self._count(outcome, now, error)
        cost_s = 0.0
        if self._exchange is not None:
            self._charge(self._exchange.at_work)
        if self.permit_s:
            lent_s = self._lending.finish(self.cost_us) if self._lending is not None else 0.0
            late = outcome is not Outcome.ANSWERED and now >= self.deadline and not self._first_s
            left = outcome is Outcome.CALLER_LEFT and not late
            good = None if left else outcome is Outcome.ANSWERED and self.status < 500
            cost_s = gate.release_permit(
                self.target,
                tenant,
                self._ticket if self._lending is None else None,
                now - self.permit_s - lent_s,
                self.cost_us,
                size_bytes=-1 if self._first_s or self.status >= 300 else self.size_bytes,
                good=good,
                late=late,
                messages=max(1, self._messages),
            )
        if (grant := self.grant) is not None:
            executed = self.sent_s > 0.0 or outcome is Outcome.ANSWERED
            self.limits = grant.headers(now) if outcome is Outcome.ANSWERED else ()
            if self._stream is None:
                grant.settle(round(cost_s * 1e6), executed, now)
        if self._stream is not None:
            self._stream.settle(round(cost_s * 1e6), now)


def answer_metadata(mark: Mark, queue_s: float, upstream_s: float) -> tuple[tuple[str, str], ...]:
    """Return ids and timing as metadata, for an answer or for a refusal at any stage."""
    timing = f"gateway-queue;dur={queue_s * 1e3:.3f}"
    if upstream_s:
        timing += f", gateway-upstream;dur={upstream_s * 1e3:.3f}"
    return (("x-request-id", mark.request_id), ("traceresponse", mark.traceresponse()), ("server-timing", timing))
