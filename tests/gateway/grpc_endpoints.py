"""A gateway before several scripted gRPC endpoints."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.grpc_endpoint import GrpcEndpoint
from oriel_policies.documents import compile_documents
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.trace import ListSink

from .endpoint_pools import first_route, still
from .grpc_streams import INFER
from .stack import GOLD, documents

ANSWER = service_pb2.ModelInferResponse(model_name="digits").SerializeToString()

MESSAGE = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()

CODE = grpc.StatusCode


@dataclass(frozen=True)
class Fails:
    """A gRPC status that a server answers."""

    code: grpc.StatusCode
    words: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


ABSENT = Fails(CODE.NOT_FOUND, "Request for unknown model")

# What a server does with a call: answer at once; answer after so many seconds; call this and answer when it has
Step = Fails | float | Callable[[], Awaitable[Any]] | None


async def never() -> None:
    """A step that never ends, so that the call is not answered."""
    await asyncio.Event().wait()


class Script(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """One of several servers that take turns: each request gets the next step, and an answer when none is left.

    asked: the servers in the order in which they were called.
    """

    def __init__(self, asked: list["Script"], steps: list["Step"]) -> None:
        self.asked, self.steps = asked, steps
        self.left = 0
        self.message = b""  # bytes of the latest request
        self.traceparent = ""  # of the latest request
        self.has = True  # whether this server has the model
        self.questions = 0
        self.states: list[str] = []  # of its models, if it says that it is not ready
        self.server: aio.Server | None = None

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(self.stream)
        if details.method.endswith("ServerReady"):
            return grpc.unary_unary_rpc_method_handler(self.is_ready)
        if details.method.endswith("RepositoryIndex"):
            return grpc.unary_unary_rpc_method_handler(self.index)
        if details.method.endswith("ModelReady"):
            return grpc.unary_unary_rpc_method_handler(self.has_model)
        return grpc.unary_unary_rpc_method_handler(self.unary)

    async def is_ready(self, message: bytes, context: Any) -> bytes:
        return service_pb2.ServerReadyResponse(ready=not self.states).SerializeToString()

    async def index(self, message: bytes, context: Any) -> bytes:
        response = service_pb2.RepositoryIndexResponse()
        for state in self.states:
            response.models.add(name=state, state=state)
        return response.SerializeToString()

    async def has_model(self, message: bytes, context: Any) -> bytes:
        self.questions += 1
        return service_pb2.ModelReadyResponse(ready=self.has).SerializeToString()

    async def unary(self, message: bytes, context: Any) -> bytes:
        self.asked.append(self)
        self.message = message
        self.traceparent = str(dict(context.invocation_metadata()).get("traceparent", ""))
        if not self.has:
            await context.abort(ABSENT.code, ABSENT.words)
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, Fails):
            await context.abort(step.code, step.words, step.metadata)
        try:
            await (step() if callable(step) else asyncio.sleep(step or 0.0))
        except asyncio.CancelledError:
            self.left += 1
            raise
        return ANSWER

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.asked.append(self)
        async for _ in messages:
            yield service_pb2.ModelStreamInferResponse().SerializeToString()


@dataclass
class House:
    channel: aio.Channel
    core: Gateway
    ingress: HttpServer
    asked: list[Script]
    steps: list[Step]
    servers: list[Script] = field(default_factory=list)

    @property
    def these(self) -> EndpointSet[GrpcEndpoint]:
        return self.core.pools["p"].grpc

    async def infer(self, message: bytes = MESSAGE, **metadata: str) -> str:
        """Call the model and return the name of the status code; the error of a failed call is kept in `error`."""
        pairs = (("x-api-key", GOLD), *((name.replace("_", "-"), value) for name, value in metadata.items()))
        try:
            await self.channel.unary_unary(INFER)(message, metadata=pairs)
        except aio.AioRpcError as error:
            self.error = error
            return error.code().name
        return "OK"

    def error_metadata(self) -> dict[str, str]:
        return {str(k): str(v) for k, v in self.error.trailing_metadata() or ()}


@asynccontextmanager
async def house(route: str = "", *, servers: int = 2, calls: int = 0, probed: bool = False) -> AsyncIterator[House]:
    """A gateway with one pool.

    servers: how many servers the pool has.
    calls: how many calls the retry budget has already counted.
    probed: whether the servers are probed.
    """
    asked: list[Script] = []
    steps: list[Step] = []
    scripts = [Script(asked, steps) for _ in range(servers)]
    ports = []
    async with AsyncExitStack() as exits:
        for script in scripts:
            script.server = aio.server()
            script.server.add_generic_rpc_handlers((script,))
            ports.append(script.server.add_insecure_port("127.0.0.1:0"))
            await script.server.start()
            exits.push_async_callback(script.server.stop, 0.0)
        files = documents(ports, pool='probe = "/v2/health/ready"' if probed else 'probe = ""')
        if route:
            files = first_route(files, f'[[routes]]\nmodel = "*"\npool = "p"\n{route}\n')
        core = Gateway(compile_documents(files), limiter=EmbeddedLimiter(), sink=ListSink())
        still(core)
        for _ in range(calls):
            core.pools["p"].retries.requested(monotonic())
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        ingress = await serve_public(core, sock)
        try:
            async with aio.insecure_channel(f"127.0.0.1:{ingress.port}") as channel:
                yield House(channel, core, ingress, asked, steps, scripts)
        finally:
            await ingress.drain(0.0)
            await core.close()
