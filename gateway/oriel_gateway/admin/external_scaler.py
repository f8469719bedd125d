"""Answers KEDA's external scaler protocol from the plans of the pools: docs/scaling.md.

The server is grpcio's, on the gateway's loop: it reads what only this loop writes, and KEDA sends a few calls per
second, so a thread of its own would save nothing and need locks. grpcio is imported only where the port is open. Its
engine bounds messages, metadata and streams, and finds half-open connections by its pings.

A stream reports the state when it is opened, and later only that the pool needs a replica at once. It ends with OK
when the gateway stops, and after a while without waiting calls, so that KEDA opens it again within 2 s, perhaps at
another gateway; after an error KEDA would wait for up to 60 s. A proxy that ends silent streams would be such an error,
and every further one doubles that wait.
"""

import asyncio
import random
from collections.abc import Callable
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any, Final

import grpc
from grpc import aio

from oriel_gateway.pools.scaling import PoolPlan, ScaledPools
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import StartFailed
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
# A ping is sent after so long without traffic, and a connection closed that does not answer for so long.
PINGS_S: Final = (20.0, 10.0)
_GRACE_S: Final = 1.0
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 8192),  # KEDA opens one or two per pool, all over one connection
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # a connection without a call for this long is closed: KEDA always has its streams open
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)
_MOST_CALLS: Final = 16_384  # over all connections; more are answered RESOURCE_EXHAUSTED


class ExternalScaler:
    """The server of one gateway. Single writer: the gateway's loop.

    stream_s: bounds of the time after which a stream ends while nothing waits. pings_s: see PINGS_S.
    """

    def __init__(
        self,
        pools: ScaledPools,
        *,
        stream_s: tuple[float, float] = STREAM_S,
        pings_s: tuple[float, float] = PINGS_S,
    ) -> None:
        self._pools = pools
        self._stream_s = stream_s
        self._wakes: set[asyncio.Event] = set()
        self._stopping = False
        silence_ms, answer_ms = (int(seconds * 1e3) for seconds in pings_s)
        pings = (
            ("grpc.keepalive_time_ms", silence_ms),
            ("grpc.keepalive_timeout_ms", answer_ms),
            ("grpc.http2.ping_timeout_ms", answer_ms),  # a minute if not given, whatever the time-out of keep-alive is
        )
        options = (*_OPTIONS, *pings)
        self._server = aio.server(options=options, maximum_concurrent_rpcs=_MOST_CALLS)
        handlers = {
            "IsActive": _unary(self._is_active, ScaledObjectRef),
            "GetMetricSpec": _unary(self._metric_spec, ScaledObjectRef),
            "GetMetrics": _unary(self._metrics, GetMetricsRequest),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream, ScaledObjectRef.FromString, IsActiveResponse.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def open(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen; returns the port. credentials: None for plain text. Raises StartFailed."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartFailed(f"the scaler's port {address} cannot be opened: another process may use it") from error
        await self._server.start()
        return port

    async def close(self) -> None:
        """End the streams with OK, and stop."""
        self._stopping = True
        for wake in self._wakes:
            wake.set()
        await self._server.stop(_GRACE_S)

    async def _is_active(self, request: ScaledObjectRef, context: Any) -> IsActiveResponse:
        return IsActiveResponse(result=(await self._available(request, context)).latest.active)

    async def _metric_spec(self, request: ScaledObjectRef, context: Any) -> GetMetricSpecResponse:
        # refused as well while GetMetrics is: KEDA counts it for a fallback if only GetMetrics fails
        await self._available(request, context)
        return GetMetricSpecResponse(metricSpecs=[MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)])

    async def _metrics(self, request: GetMetricsRequest, context: Any) -> GetMetricsResponse:
        value = (await self._available(request.scaledObjectRef, context)).value
        found = MetricValue(metricName=METRIC, metricValue=ceil(value), metricValueFloat=value)
        return GetMetricsResponse(metricValues=[found])

    async def _stream(self, request: ScaledObjectRef, context: Any) -> None:
        plan = await self._plan(request, context)
        wake = asyncio.Event()
        plan.listeners.add(wake)
        self._wakes.add(wake)
        try:
            await context.write(IsActiveResponse(result=plan.latest.active))
            ends_s = monotonic() + random.uniform(*self._stream_s)
            while not self._stopping:
                try:
                    async with asyncio.timeout(ends_s - monotonic()):
                        await wake.wait()
                except TimeoutError:
                    if not plan.demand.total.held:
                        return
                    ends_s = monotonic() + self._stream_s[0]
                    continue
                wake.clear()
                if plan.over:
                    # raises an error if the pool is gone; else the stream ends, because another plan has taken over
                    await self._plan(request, context)
                    return
                if not self._stopping:
                    await context.write(IsActiveResponse(result=True))
        finally:
            plan.listeners.discard(wake)
            self._wakes.discard(wake)

    async def _available(self, request: ScaledObjectRef, context: Any) -> PoolPlan:
        plan = await self._plan(request, context)
        if not plan.latest.available:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the demand that all gateways see has not been known for a minute"
            )
        return plan

    async def _plan(self, request: ScaledObjectRef, context: Any) -> PoolPlan:
        target = request.scalerMetadata.get("target", "")
        if not target:
            text = "the metadata of the trigger has no `target`: it is the name of a pool of the policy documents"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        plan = self._pools.plans.get(target)
        if plan is None:
            text = f"`target`: the policy documents have no pool {target[:200]!r} with a `scaling` table"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        assert plan is not None
        return plan


def _unary(work: Callable[..., Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(work, request.FromString, lambda answer: answer.SerializeToString())


def client_credentials(certificates: Certificates, authority: Path) -> Any:
    """Return the credentials with which the port asks clients for certificates that `authority` (PEM) signed.

    certificates: the gateway's own; a new pair is used for new connections. Raises StartFailed.
    """
    try:
        trusted = authority.read_bytes()
    except OSError as error:
        raise StartFailed(f"--scaler-client-ca cannot be read: {error.strerror}") from error

    def current() -> Any:
        chain, key = certificates.pem
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=trusted)

    return grpc.dynamic_ssl_server_credentials(current(), current, require_client_authentication=True)
