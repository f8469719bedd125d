"""Follows the gateway's external scaler as KEDA does in a cluster: the same signal and plan (docs/scaling.md).

A stream reports at once that a pool needs a process; the wanted number is polled once a second. While the gateway does
not answer, nothing is changed.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from oriel_cli.up.scaled import ScaledUnit
from oriel_wire.engine.grpc_client import GrpcClient
from oriel_wire.errors import WireError
from oriel_wire.h2.grpc import OK
from oriel_wire.v2.proto import external_scaler_pb2 as messages

POLL_S: Final = 1.0
_ANSWER_S: Final = 2.0
_STREAM_S: Final = 3600.0
_MAX_ANSWER_BYTES: Final = 64 * 1024


async def follow(host: str, port: int, units: Sequence[ScaledUnit]) -> None:
    """Scale `units` as the scaler says; does not return."""
    client = GrpcClient(host=host, port=port, max_message_bytes=_MAX_ANSWER_BYTES)
    try:
        async with asyncio.TaskGroup() as group:
            for unit in units:
                follower = _Follower(client, unit)
                group.create_task(follower.listen())
                group.create_task(follower.poll())
    finally:
        await client.close()


class _Follower:
    """Follows the scaler for one pool.

    _wakes: number of times that the stream has reported the need of a process.
    """

    def __init__(self, client: GrpcClient, unit: ScaledUnit) -> None:
        self._client = client
        self._unit = unit
        self._reference = messages.ScaledObjectRef(name=unit.pool, scalerMetadata={"target": unit.pool})
        self._wakes = 0

    async def listen(self) -> None:
        """Wake the pool whenever the stream says so, and open it again when it ends."""
        while True:
            call = self._call("StreamIsActive", self._reference, _STREAM_S)
            try:
                while (answer := await call.read()) is not None:
                    if messages.IsActiveResponse.FromString(answer).result:
                        self._wakes += 1
                        self._unit.wake()
            except (WireError, DecodeError):
                pass
            finally:
                call.cancel()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Run as many processes as the gateway's plan says, polled once a second."""
        request = messages.GetMetricsRequest(scaledObjectRef=self._reference, metricName="replicas")
        while True:
            wakes = self._wakes
            active = await self._answer("IsActive", self._reference, messages.IsActiveResponse)
            metrics = await self._answer("GetMetrics", request, messages.GetMetricsResponse)
            # If the stream has reported something meanwhile, it may be newer than these answers: they are dropped.
            if active is not None and metrics is not None and wakes == self._wakes:
                wanted = round(sum(each.metricValueFloat for each in metrics.metricValues))
                self._unit.want(max(1, wanted) if active.result else wanted if self._unit.minimum else 0)
            await asyncio.sleep(POLL_S)

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        path = f"/externalscaler.ExternalScaler/{method}".encode()
        return self._client.call(path, (), [request.SerializeToString()], timeout_s)

    async def _answer(self, method: str, request: Any, answer: Any) -> Any:
        """Send a call of one message and return its answer; None if no valid answer came in time."""
        call = self._call(method, request, _ANSWER_S)
        try:
            async with asyncio.timeout(_ANSWER_S):
                read = await call.read()
                await call.read()  # reads the status, which follows the message
            return answer.FromString(read) if call.code == OK and read is not None else None
        except (WireError, DecodeError, TimeoutError):
            return None
        finally:
            call.cancel()
