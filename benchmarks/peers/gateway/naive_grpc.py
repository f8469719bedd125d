"""The gRPC proxy most teams write first: grpc.aio on both sides, messages as bytes, one channel.

naive_grpc.py PORT UPSTREAM_PORT
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio

ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SKIPPED = ("user-agent", "grpc-accept-encoding", "te", "content-type")


class Forward(grpc.GenericRpcHandler):
    """Every method of every service, with one message each way."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        upstream = self.channel.unary_unary(details.method)

        async def forward(message: bytes, context: Any) -> bytes:
            metadata = [(name, value) for name, value in context.invocation_metadata() if name not in SKIPPED]
            answer: bytes = await upstream(message, timeout=context.time_remaining(), metadata=metadata)
            return answer

        return grpc.unary_unary_rpc_method_handler(forward)


async def main() -> None:
    server = grpc.aio.server(options=ANY_SIZE)
    server.add_generic_rpc_handlers((Forward(grpc.aio.insecure_channel(f"127.0.0.1:{sys.argv[2]}", ANY_SIZE)),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
