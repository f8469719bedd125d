"""One gRPC upstream address: its channel, its calls under way, and its readiness probe."""

import asyncio
from collections.abc import Callable
from time import monotonic

import grpc
from grpc import aio

from oriel_gateway.pools.endpoints import EndpointState, Reach
from oriel_gateway.pools.grpc_errors import broken, surely_not_executed
from oriel_wire.engine.discovery import Address
from oriel_wire.engine.large_messages import READ_AHEAD
from oriel_wire.v2.grpc_names import append_model

_SERVER_READY = "/inference.GRPCInferenceService/ServerReady"
_MODEL_READY = "/inference.GRPCInferenceService/ModelReady"
_READY, _FAILED = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    READ_AHEAD,
    # A lost connection is made again soon: meanwhile calls are parked or sent to other endpoints.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcEndpoint(EndpointState):
    """A gRPC address of a pool. The channel is made on first use. outstanding: calls under way."""

    def __init__(self, address: Address, *, max_response_bytes: int) -> None:
        super().__init__(address)
        self.host, self.port = address
        self.outstanding = 0
        self.heard = False
        self._max_response_bytes = min(max_response_bytes, 2**31 - 1)
        self._channel: aio.Channel | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self.connect_s = 0.0
        self._connecting_s = 0.0  # since when a call has been waiting for a connection

    @property
    def channel(self) -> aio.Channel:
        """The channel to this address."""
        if self._channel is None:
            host, port = self.address
            options = (*_OPTIONS, ("grpc.max_receive_message_length", self._max_response_bytes))
            name = f"[{host}]" if ":" in host else host
            self._channel = aio.insecure_channel(f"{name}:{port}", options=options)
        return self._channel

    async def probe(self, timeout_s: float, ready: bool, done: Callable[[Reach | None], None]) -> None:
        """Probe the endpoint with `ServerReady`.

        ready: whether the answer counts; False if a connection is enough.
        done: called once with the result, also if the probe is cancelled; None means no usable answer.
        """
        reach: Reach | None = None
        try:
            answer: bytes = await self.channel.unary_unary(_SERVER_READY, None, None)(b"", timeout=timeout_s)
            self._connecting_s = 0.0
            reach = Reach.READY if answer[:2] == b"\x08\x01" or not ready else Reach.NOT_READY
        except aio.AioRpcError as error:
            if surely_not_executed(error):
                reach = Reach.UNREACHABLE
            elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
                reach = Reach.READY  # it speaks gRPC but has no readiness method
            elif error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                reach = Reach.NOT_READY
        finally:
            done(reach)

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        name, _, version = model.partition("/versions/")
        task = asyncio.get_running_loop().create_task(self._model_ready(name, version, timeout_s, done))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _model_ready(
        self, name: str, version: str, timeout_s: float, done: Callable[[bool | None], None]
    ) -> None:
        ready: bool | None = None
        try:
            question = append_model(b"", name, version)
            answer: bytes = await self.channel.unary_unary(_MODEL_READY, None, None)(question, timeout=timeout_s)
            ready = answer[:2] == b"\x08\x01"
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND or (
                error.code() is grpc.StatusCode.UNAVAILABLE and not (surely_not_executed(error) or broken(error))
            ):
                ready = False
        finally:
            done(ready)

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        if self.channel.get_state() is not _READY:
            return False
        self._connecting_s = 0.0
        return True

    async def connect(self, timeout_s: float, deadline: float) -> bool:
        """Connect. Returns False if the connection is refused, or takes longer than `timeout_s` since the first call
        waits.

        Raises TimeoutError at the deadline, which says nothing about the endpoint.
        """
        channel, now = self.channel, monotonic()
        self._connecting_s = self._connecting_s or now
        self.outstanding += 1  # so that the channel is not closed meanwhile
        try:
            ends_s = self._connecting_s + timeout_s
            async with asyncio.timeout(min(ends_s, deadline) - now):
                while (state := channel.get_state(try_to_connect=True)) is not _READY:
                    if state is _FAILED:
                        break
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            if deadline < ends_s:
                raise
            return False
        finally:
            self.outstanding -= 1
        self.connect_s = max(self.connect_s, monotonic() - self._connecting_s) if state is _READY else self.connect_s
        self._connecting_s = 0.0
        return state is _READY

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
