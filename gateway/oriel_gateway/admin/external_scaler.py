"""Answers KEDA's external scaler protocol from the plans of the pools: docs/scaling.md.

It is served by the HTTP/2 engine of the other ports, within bounds of its own, and reads what only the gateway's loop
writes. A call is a stream; its methods answer at once, without a task.

`StreamIsActive` reports the state when it is opened, and later only that the pool needs a replica at once. It ends with
OK when the gateway stops, and after a while without waiting calls, so that KEDA opens it again within 2 s, perhaps at
another gateway; after an error KEDA would wait for up to 60 s. A proxy that ends silent streams would be such an error,
and every further one doubles that wait.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable
from functools import partial
from math import ceil, inf
from time import monotonic
from typing import Final

from google.protobuf.message import DecodeError, Message

from oriel_gateway.pools.scaling import PoolPlan, ScaledPools
from oriel_wire.engine.grpc_port import Http2Front, PortCall, PortConnection
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.h2.grpc import (
    DEADLINE_EXCEEDED,
    HEAD,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    encode_text,
    prefix,
)
from oriel_wire.h2.grpc_reader import MessageReader
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import ENDED
from oriel_wire.v2.proto.external_scaler_pb2 import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    MetricSpec,
    MetricValue,
    ScaledObjectRef,
)

SERVICE: Final = "externalscaler.ExternalScaler"
METRIC: Final = "replicas"
STREAM_S: Final = (210.0, 270.0)  # shorter than the five minutes after which Envoy ends a silent stream with an error
# A ping is sent after so long without a sign of the peer, and a connection cut that does not answer for so long.
PINGS_S: Final = (20.0, 10.0)
MOST_CALLS: Final = 4096  # over all connections; more are answered RESOURCE_EXHAUSTED
MOST_STREAMS: Final = 2048  # streams per connection: KEDA opens one or two per pool, all over one connection
MESSAGE_BYTES: Final = 64 * 1024
# A connection without a call is closed soon: KEDA always has its streams open.
LIMITS: Final = HttpLimits(max_connections=256, max_kept_bytes=8 << 20, idle_timeout_s=60.0)
_GRACE_S: Final = 1.0
_NO_GRPC: Final = literal(b":status", b"415")
_NO_HTTP1: Final = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_log = logging.getLogger(__name__)


class _Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class ExternalScaler:
    """The server of one gateway. Single writer: the gateway's loop.

    stream_s: bounds of the time after which a stream ends while nothing waits. pings_s: see PINGS_S.
    calls: the calls under way.
    """

    def __init__(
        self,
        pools: ScaledPools,
        *,
        stream_s: tuple[float, float] = STREAM_S,
        pings_s: tuple[float, float] = PINGS_S,
    ) -> None:
        self._pools = pools
        pools.followed = True
        self.stream_s = stream_s
        self.calls: set[ScalerCall] = set()
        self.limits = H2Limits(max_streams=MOST_STREAMS, keepalive_s=pings_s[0], pong_s=pings_s[1])
        self._server: HttpServer | None = None
        self.methods: dict[bytes, Callable[[ScalerCall, bytes], Message | None]] = {
            f"/{SERVICE}/{name}".encode(): method
            for name, method in {
                "IsActive": self._is_active,
                "GetMetricSpec": self._metric_spec,
                "GetMetrics": self._metrics,
                "StreamIsActive": self._stream,
            }.items()
        }

    async def open(self, sock: socket.socket, certificates: Certificates | None = None) -> int:
        """Accept connections; returns the port. certificates: the port's own; None for plain text."""
        self._server = server = HttpServer(LIMITS)
        tls = None if certificates is None else certificates.context
        front = partial(Http2Front, server, lambda _: ScalerConnection(server, self), lambda *_: _NO_HTTP1)
        await server.open(front, sock, tls=tls)
        return server.port

    async def close(self) -> None:
        """End the streams with OK, and stop."""
        for call in list(self.calls):
            call.finish()
        server, self._server = self._server, None
        if server is not None:
            server.lame_duck_s = server.linger_s = 0.0
            await server.drain(_GRACE_S)

    def plan_of(self, request: ScaledObjectRef) -> PoolPlan:
        """Return the plan of the pool that a trigger names. Raises _Refused."""
        target = request.scalerMetadata.get("target", "")
        if not target:
            text = "the metadata of the trigger has no `target`: it is the name of a pool of the policy documents"
            raise _Refused(INVALID_ARGUMENT, text)
        plan = self._pools.plans.get(target)
        if plan is None:
            text = f"`target`: the policy documents have no pool {target[:200]!r} with a `scaling` table"
            raise _Refused(NOT_FOUND, text)
        return plan

    def _available(self, request: ScaledObjectRef) -> PoolPlan:
        plan = self.plan_of(request)
        if not plan.latest.available:
            raise _Refused(UNAVAILABLE, "the demand that all gateways see has not been known for a minute")
        return plan

    def _is_active(self, call: "ScalerCall", data: bytes) -> Message:
        return IsActiveResponse(result=self._available(ScaledObjectRef.FromString(data)).latest.active)

    def _metric_spec(self, call: "ScalerCall", data: bytes) -> Message:
        # refused as well while GetMetrics is: KEDA counts it for a fallback if only GetMetrics fails
        self._available(ScaledObjectRef.FromString(data))
        return GetMetricSpecResponse(metricSpecs=[MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)])

    def _metrics(self, call: "ScalerCall", data: bytes) -> Message:
        value = self._available(GetMetricsRequest.FromString(data).scaledObjectRef).value
        found = MetricValue(metricName=METRIC, metricValue=ceil(value), metricValueFloat=value)
        return GetMetricsResponse(metricValues=[found])

    def _stream(self, call: "ScalerCall", data: bytes) -> None:
        request = ScaledObjectRef.FromString(data)
        call.follow(request, self.plan_of(request))


class ScalerCall(PortCall):
    """One call. Single writer: the loop."""

    def __init__(self, connection: "ScalerConnection", scaler: ExternalScaler) -> None:
        super().__init__()
        self._connection = connection
        self._scaler = scaler
        self._reader = MessageReader(MESSAGE_BYTES)
        self._messages: list[bytes] = []
        self._method: Callable[[ScalerCall, bytes], Message | None] | None = None
        self._request: ScaledObjectRef | None = None
        self._plan: PoolPlan | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._full = False  # the peer has to read before it is sent more
        self.ends_s = monotonic() + LIMITS.head_timeout_s
        scaler.calls.add(self)

    def begin(self, fields: list[Field], now: float) -> None:
        """Judge the head."""
        given = dict(fields)
        self._method = self._scaler.methods.get(given.get(b":path", b""))
        if not given.get(b"content-type", b"").startswith(b"application/grpc"):
            self._end(_NO_GRPC)
        elif len(self._scaler.calls) > MOST_CALLS:
            self.refuse(RESOURCE_EXHAUSTED, "too many calls are under way")
        elif self._method is None:
            self.refuse(UNIMPLEMENTED, "Method not found!")

    def received(self, data: bytes | memoryview, end: bool) -> None:
        """Take bytes of the message, and answer when it is whole."""
        self._connection.consumed(self, len(data))
        if self.over:
            return
        reader = self._reader
        try:
            reader.feed(data)
            while (message := reader.next()) is not None:
                if reader.compressed:
                    raise BadMessage("a message is compressed: send messages without compression")
                self._messages.append(bytes(message))
            if end or len(self._messages) > 1:
                if len(self._messages) != 1 or not reader.empty:
                    raise BadMessage("the method takes exactly one message")
                self._run(self._messages.pop())
        except TooLarge as refusal:
            self.refuse(RESOURCE_EXHAUSTED, refusal.message)
        except BadMessage as refusal:
            self.refuse(INVALID_ARGUMENT, refusal.message)

    def _run(self, message: bytes) -> None:
        assert self._method is not None
        self.ends_s = inf
        try:
            answer = self._method(self, message)
        except _Refused as refusal:
            self.refuse(refusal.code, refusal.text)
        except DecodeError:
            self.refuse(INVALID_ARGUMENT, "the message is none of KEDA's external scaler protocol")
        except Exception:
            # An unexpected error in one call must not affect others.
            _log.exception("a call to the external scaler's port failed unexpectedly")
            self.refuse(INTERNAL, "the gateway failed on this call")
        else:
            if answer is not None:
                self.send(answer)
                self.finish()

    # Streams ---------------------------------------------------------------------------------------------------

    def follow(self, request: ScaledObjectRef, plan: PoolPlan) -> None:
        """Report the state of a plan, and then whenever it needs a replica at once."""
        self._request, self._plan = request, plan
        plan.listeners.add(self.replica_needed)
        self.send(IsActiveResponse(result=plan.latest.active))
        self._end_later(random.uniform(*self._scaler.stream_s))

    def replica_needed(self) -> None:
        """The plan needs a replica at once, or is over."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._woken = False
        if self.over or self._plan is None or self._request is None:
            return
        if not self._plan.over:
            if not self._full:
                self.send(IsActiveResponse(result=True))
            return
        try:
            self._scaler.plan_of(self._request)
        except _Refused as refusal:  # the pool is gone
            self.refuse(refusal.code, refusal.text)
        else:  # another plan has taken over
            self.finish()

    def _end_later(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_if_quiet)

    def _end_if_quiet(self) -> None:
        if self._plan is not None and self._plan.demand.total.held:
            self._end_later(self._scaler.stream_s[0])
        else:
            self.finish()

    # The answer ------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Return whether the answer has ended, or the client has left."""
        return self not in self._scaler.calls

    def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if self.sending == 0:
            self._connection.send_headers(self, HEAD, False)
        data = message.SerializeToString()
        self._full = not self._connection.send_data(self, prefix(len(data)) + data, False)

    def too_large(self, message: str) -> None:
        self.refuse(RESOURCE_EXHAUSTED, message)

    def give_up(self) -> None:
        self.refuse(DEADLINE_EXCEEDED, "the message did not arrive in time")

    def room(self) -> None:
        """The client has read what it was sent."""
        self._full = False

    def finish(self) -> None:
        """End the answer with OK."""
        self.refuse(OK, "")

    def refuse(self, code: int, text: str) -> None:
        """End the call with a status."""
        message = literal(b"grpc-message", encode_text(text)) if text else b""
        self._end((HEAD if self.sending == 0 else b"") + literal(b"grpc-status", b"%d" % code) + message)

    def _end(self, block: bytes) -> None:
        if self.over:
            return
        self.client_left()
        self._connection.send_headers(self, block, True)
        if self.receiving != ENDED:
            self._connection.linger(self)

    def client_left(self) -> None:
        """Forget the call: it has ended, or the client has left."""
        self._scaler.calls.discard(self)
        self.ends_s = inf
        if self._timer is not None:
            self._timer.cancel()
        if self._plan is not None:
            self._plan.listeners.discard(self.replica_needed)


class ScalerConnection(PortConnection):
    """One connection of the port."""

    def __init__(self, server: HttpServer, scaler: ExternalScaler) -> None:
        super().__init__(server, scaler.limits)
        self._scaler = scaler

    def new_stream(self, stream_id: int) -> ScalerCall:
        return ScalerCall(self, self._scaler)
