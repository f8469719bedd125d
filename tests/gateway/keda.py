"""A stand-in for KEDA: it calls an external scaler as KEDA's operator does, for the targets that a test names."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from oriel_wire.v2.proto import external_scaler_pb2 as messages

PATH = "/externalscaler.ExternalScaler/"


def reference(target: str = "p", **more: str) -> messages.ScaledObjectRef:
    metadata = {"scalerAddress": "gateway-scaler:8083", "target": target, **more}
    return messages.ScaledObjectRef(name="o", namespace="oriel", scalerMetadata=metadata)


class Keda:
    """The operator's one connection to the scaler.

    states: what the streams reported, by target, in order.
    ended: the status codes with which the streams ended.
    """

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.states: dict[str, list[bool]] = {}
        self.ended: list[grpc.StatusCode] = []

    async def poll(self, of: str | messages.ScaledObjectRef = "p") -> tuple[float, float, bool]:
        """Make the three calls of a poll. Returns the target size, the metric's value, and whether it is active.

        of: a target, or the whole ScaledObject.
        """
        ref = reference(of) if isinstance(of, str) else of
        spec = await self._ask("GetMetricSpec", ref, messages.GetMetricSpecResponse)
        (one,) = spec.metricSpecs
        asked = messages.GetMetricsRequest(scaledObjectRef=ref, metricName=one.metricName)
        (value,) = (await self._ask("GetMetrics", asked, messages.GetMetricsResponse)).metricValues
        assert value.metricName == one.metricName
        active = await self._ask("IsActive", ref, messages.IsActiveResponse)
        return one.targetSizeFloat, value.metricValueFloat, active.result

    async def _ask(self, method: str, request: Any, answer: Any) -> Any:
        call = self.channel.unary_unary(PATH + method, type(request).SerializeToString, answer.FromString)
        return await call(request)

    async def listen(self, of: str | messages.ScaledObjectRef, woken: Callable[[], None]) -> None:
        """Follow one stream to its end; `woken` is called for each `true`."""
        ref = reference(of) if isinstance(of, str) else of
        call = self.channel.unary_stream(
            PATH + "StreamIsActive",
            messages.ScaledObjectRef.SerializeToString,
            messages.IsActiveResponse.FromString,
        )(ref)
        states = self.states.setdefault(ref.scalerMetadata["target"], [])
        try:
            async for answer in call:
                states.append(answer.result)
                if answer.result:
                    woken()
        except aio.AioRpcError:
            pass
        self.ended.append(await call.code())

    @asynccontextmanager
    async def listening(
        self, *those: str | messages.ScaledObjectRef, woken: Callable[[], None] = lambda: None
    ) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(self.listen(of, woken)) for of in those]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def keda(port: int, credentials: Any = None) -> AsyncIterator[Keda]:
    where = f"localhost:{port}"
    channel = aio.insecure_channel(where) if credentials is None else aio.secure_channel(where, credentials)
    async with channel:
        yield Keda(channel)
