"""Streams from models: `ModelStreamInfer` over grpcio, one request and all its answers per call.

The request's deadline bounds the first answer; after that the time between two answers and the total time are bounded.
A call that no server has received is sent to another one. grpc is imported with the first stream.
"""

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from oriel_logic.client.endpoints import Endpoint, Endpoints
from oriel_logic.client.upstream_errors import ELSEWHERE
from oriel_logic.errors import (
    DeadlineExceeded,
    LogicError,
    ModelBusy,
    ModelFailed,
    ModelInputWrong,
    ModelUnavailable,
    ModelUnreachable,
)
from oriel_wire.context import CallContext, to_headers
from oriel_wire.engine.discovery import Address
from oriel_wire.engine.large_messages import READ_AHEAD
from oriel_wire.errors import BadMessage
from oriel_wire.trace import TraceContext
from oriel_wire.v2.messages import InferRequest, InferResponse

if TYPE_CHECKING:
    import grpc.aio


STAGE = "stream"
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
IDLE_S = 30.0
MAX_S = 600.0
MAX_ANSWER_BYTES = 64 << 20
RETRY_S = 1.0
NEEDED = ("grpc.aio", "oriel_wire.v2.grpc")
NOT_CONNECTED = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")


class StreamClient:
    """The gRPC port of one inference server. The channel is made on first use and reconnects by itself."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._call: Any = None
        self._channel: grpc.aio.Channel | None = None

    def open(self, metadata: list[tuple[str, str]], timeout_s: float) -> Any:
        """Return a new `grpc.aio.StreamStreamCall`; nothing has been sent."""
        if self._channel is None:
            import grpc.aio

            from oriel_wire.v2.proto import v2_pb2

            host, port = self._address
            self._channel = grpc.aio.insecure_channel(
                f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                options=(
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
                    ("grpc.enable_http_proxy", 0),
                    ("grpc.initial_reconnect_backoff_ms", 250),
                    ("grpc.max_reconnect_backoff_ms", 1000),
                    READ_AHEAD,
                ),
            )
            self._call = self._channel.stream_stream(
                METHOD,
                request_serializer=v2_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=v2_pb2.ModelStreamInferResponse.FromString,
            )
        return self._call(metadata=metadata, timeout=timeout_s)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)


class StreamServers:
    """The gRPC ports of the inference servers, the one with the fewest outstanding calls first.

    idle_s, max_s: the time between two answers, and the total time of one stream.
    """

    def __init__(
        self,
        endpoints: Endpoints[StreamClient],
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_s: float = IDLE_S,
        max_s: float = MAX_S,
    ) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._idle_s = idle_s
        self._max_s = max_s

    async def close(self) -> None:
        await self._endpoints.close()

    async def answers(
        self, request: InferRequest, call: CallContext, trace: TraceContext
    ) -> AsyncGenerator[InferResponse]:
        """Yield every answer to `request` as it arrives.

        Raises DeadlineExceeded, ModelInputWrong, ModelUnavailable, ModelBusy, ModelFailed or ModelUnreachable.
        Cancelled or closed: the inference server sees that the caller left.
        """
        if not len(self._endpoints):
            raise ModelUnreachable("this server has no gRPC address of an inference server: pass --inference-grpc")
        if not all(name in sys.modules for name in NEEDED):
            await asyncio.to_thread(load)
        from oriel_wire.v2.grpc import decode_infer_response, encode_infer_request

        try:
            message = encode_infer_request(request)
        except BadMessage as error:
            raise ModelInputWrong(f"model '{request.model_name}': {error.message}") from error
        tried: list[Endpoint[StreamClient]] = []
        refusal: LogicError | None = None
        while (endpoint := self._endpoints.pick(tried, request.model_name)) is not None:
            tried.append(endpoint)
            endpoint.outstanding += 1
            try:
                one = self._one(endpoint.client, message, request.model_name, call, trace)
                async with contextlib.aclosing(one):
                    async for answer in one:
                        if endpoint.failures:
                            self._endpoints.mark_up(endpoint)
                        yield decode_infer_response(answer)
                return
            except NotExecuted as news:
                if news.refusal is None:
                    self._endpoints.mark_down(endpoint)
                else:
                    self._endpoints.mark_lacking(endpoint, request.model_name)
                    refusal = refusal or news.refusal
            except BadMessage as error:
                sentence = f"an answer of model '{request.model_name}' cannot be read: {error.message}"
                raise ModelFailed(sentence) from error
            finally:
                endpoint.outstanding -= 1
        if refusal is not None:
            raise refusal
        raise ModelUnreachable("no inference server can be reached: try again later", retry_after_s=RETRY_S)

    async def _one(
        self, client: StreamClient, message: Any, model: str, call: CallContext, trace: TraceContext
    ) -> AsyncGenerator[Any]:
        import grpc.aio

        now = self._clock()
        if call.deadline <= now:
            raise DeadlineExceeded(STAGE)
        # With a status instead of a text for errors; the stream is ours alone, so it may end with one.
        metadata = [*to_headers(call, now=now, trace=trace), ("triton_grpc_error", "true")]
        end: Any = grpc.aio.EOF  # type: ignore[attr-defined]
        stream = client.open(metadata, self._max_s)
        try:
            async with asyncio.timeout(call.deadline - now) as limit:
                await stream.write(message)
                await stream.done_writing()
                answer = await stream.read()
            while answer is not end:
                if answer.error_message:
                    raise ModelFailed(f"model '{model}' failed: {answer.error_message[:300]}")
                yield answer.infer_response
                async with asyncio.timeout(self._idle_s) as limit:
                    answer = await stream.read()
            if await stream.code() is not grpc.StatusCode.OK:
                raise refused(model, await stream.code(), await stream.details() or "", await trailing(stream))
        except grpc.aio.AioRpcError as error:
            raise refused(model, error.code(), error.details() or "", error.trailing_metadata()) from error
        except TimeoutError as error:
            if limit.expired():
                raise DeadlineExceeded(STAGE) from error
            raise
        except asyncio.InvalidStateError as error:  # written to after the server had ended the call
            raise refused(model, await stream.code(), await stream.details() or "", await trailing(stream)) from error
        finally:
            stream.cancel()


def load() -> None:
    """Import grpc, which takes about 70 ms and so must not happen on the loop."""
    for name in NEEDED:
        importlib.import_module(name)


class NotExecuted(Exception):
    """Another server may be tried: nothing was sent (refusal: None), or this one does not have the model. Never
    leaves here.
    """

    def __init__(self, refusal: LogicError | None = None) -> None:
        self.refusal = refusal


async def trailing(stream: Any) -> Any:
    return await stream.trailing_metadata()


def refused(model: str, code: Any, details: str, metadata: Any) -> LogicError | NotExecuted:
    """Convert a gRPC status other than OK to an error. Only the status text tells whether it came from the server."""
    sentence = details[:300] or "it gave no reason"
    match code.name:
        case "INVALID_ARGUMENT":
            return ModelInputWrong(f"model '{model}' refused its inputs: {sentence}")
        case "NOT_FOUND":
            return NotExecuted(ModelUnavailable(f"model '{model}' is not served: {sentence}", retry_after_s=RETRY_S))
        case "UNIMPLEMENTED":
            return ModelUnavailable(f"model '{model}' is not served: {sentence}", retry_after_s=RETRY_S)
        case "RESOURCE_EXHAUSTED" if (
            "larger than max" in details
        ):  # the client library's own text about what it received
            return ModelFailed(f"an answer of model '{model}' is larger than {MAX_ANSWER_BYTES} bytes")
        case "RESOURCE_EXHAUSTED":
            return ModelBusy(f"model '{model}': {sentence}", retry_after_s=RETRY_S, too_many=True)
        case "DEADLINE_EXCEEDED":
            return DeadlineExceeded(STAGE)
        case "UNAVAILABLE":
            if details.startswith(NOT_CONNECTED):
                return NotExecuted()
            reason = dict(metadata or ()).get("x-oriel-reason")
            if reason is None:
                return ModelFailed(f"the stream of model '{model}' was cut: try again")
            busy = ModelBusy(f"model '{model}' is not available now: {sentence}", retry_after_s=RETRY_S)
            return NotExecuted(busy) if reason in ELSEWHERE else busy
    return ModelFailed(f"model '{model}' failed: {sentence}")
