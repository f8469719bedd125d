"""One gRPC upstream address: its channel, what is under way on it, and its readiness probe."""

import asyncio
from collections.abc import Callable

import grpc
from grpc import aio

from oriel_gateway.discovery import Address
from oriel_gateway.endpoints import Reach, Standing
from oriel_gateway.grpc_errors import surely_not_executed

__all__ = ["GrpcEndpoint"]

_SERVER_READY = "/inference.GRPCInferenceService/ServerReady"
_READY, _FAILED = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A connection that was lost is made again soon: calls are parked or sent elsewhere meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcEndpoint(Standing):
    """outstanding: calls under way; the channel is made on first use."""

    def __init__(self, address: Address, *, max_response_bytes: int) -> None:
        super().__init__(address)
        self.host, self.port = address
        self.outstanding = 0
        self.heard = False
        self._max_response_bytes = min(max_response_bytes, 2**31 - 1)
        self._channel: aio.Channel | None = None

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
        """Ask `ServerReady`; ready: False if only the connection counts. `done` is told once, also when cancelled."""
        reach: Reach | None = None
        try:
            answer: bytes = await self.channel.unary_unary(_SERVER_READY, None, None)(b"", timeout=timeout_s)
            reach = Reach.READY if answer[:2] == b"\x08\x01" or not ready else Reach.NOT_READY
        except aio.AioRpcError as error:
            if surely_not_executed(error):
                reach = Reach.UNREACHABLE
            elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
                reach = Reach.READY  # it speaks gRPC and knows no readiness
            elif error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                reach = Reach.NOT_READY
        finally:
            done(reach)

    async def connect(self, timeout_s: float) -> bool:
        """Have a connection, for what cannot be sent twice; False: it is refused. Raises TimeoutError."""
        channel = self.channel
        async with asyncio.timeout(timeout_s):
            while (state := channel.get_state(try_to_connect=True)) is not _READY:
                if state is _FAILED:
                    return False
                await channel.wait_for_state_change(state)
        return True

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
