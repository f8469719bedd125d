"""Streams from models: `ModelStreamInfer` over HTTP/2, one request and all its answers per call.

The request's deadline bounds the first answer; after that the time between two answers and the total time are bounded.
A call that no server has received is sent to another one. Modules that need protobuf are imported with the first
stream.
"""

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from time import monotonic

from oriel_logic.client.endpoints import Endpoints
from oriel_logic.client.upstream_errors import ELSEWHERE, SPENT, check_ticket, error_of
from oriel_logic.errors import (
    DeadlineExceeded,
    LogicError,
    ModelFailed,
    ModelInputWrong,
    ModelUnreachable,
)
from oriel_logic.observe.stages import HopFacts, Ledger, Stage
from oriel_wire.context import CallContext, Hop
from oriel_wire.discovery.discovery import Address
from oriel_wire.engine.grpc_client import GrpcCall, GrpcClient
from oriel_wire.errors import BadMessage, TooLarge, UpstreamBroken, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h1.response import read_cost
from oriel_wire.h2.grpc import CODES, OK
from oriel_wire.v2.messages import InferRequest, InferResponse

STAGE = "stream"
METHOD = "inference.GRPCInferenceService/ModelStreamInfer"
PATH = f"/{METHOD}".encode()
IDLE_S = 30.0
MAX_S = 600.0
MAX_ANSWER_BYTES = 64 << 20
RETRY_S = 1.0
STATUS = {  # gRPC status -> the HTTP status of the same refusal
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "UNIMPLEMENTED": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
MESSAGES = "oriel_wire.v2.grpc_messages"


def stream_client(address: Address, *, max_answer_bytes: int = MAX_ANSWER_BYTES) -> GrpcClient:
    """The gRPC port of one inference server."""
    return GrpcClient(host=address[0], port=address[1], max_message_bytes=max_answer_bytes)


class StreamServers:
    """The gRPC ports of the inference servers, the one with the fewest outstanding calls first.

    idle_s, max_s: the time between two answers, and the total time of one stream.
    through_gateway: see `InferenceServers`.
    """

    def __init__(
        self,
        endpoints: Endpoints[GrpcClient],
        *,
        idle_s: float = IDLE_S,
        max_s: float = MAX_S,
        through_gateway: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._through_gateway = through_gateway
        self._idle_s = idle_s
        self._max_s = max_s

    async def close(self) -> None:
        await self._endpoints.close()

    async def answers(
        self, request: InferRequest, call: CallContext, stage: Stage, ledger: Ledger
    ) -> AsyncGenerator[InferResponse]:
        """Yield every answer to `request` as it arrives. stage: gets the facts of the hop. ledger: gets its cost.

        Raises DeadlineExceeded, ModelInputWrong, ModelUnavailable, ModelBusy, ModelFailed or ModelUnreachable.
        Cancelled or closed: the inference server sees that the caller left.
        """
        if not len(self._endpoints) and not self._endpoints.have_answered:
            raise ModelUnreachable("this server has no gRPC address of an inference server: pass --inference-grpc")
        if MESSAGES not in sys.modules:  # importing them takes long enough to block the loop
            await asyncio.to_thread(importlib.import_module, MESSAGES)
        from oriel_wire.v2.grpc_messages import encode_request, read_stream_answer

        model = request.model_name
        try:
            message = encode_request(request)
        except BadMessage as error:
            raise ModelInputWrong(f"model '{model}': {error.message}") from error
        refusal: LogicError | None = None
        has_begun = False
        attempts, resent = self._endpoints.attempts(model, call.deadline), -1
        async for endpoint in attempts:
            resent += 1
            stage.hop = HopFacts(*endpoint.address, METHOD, "", -1, resent)
            endpoint.outstanding += 1
            try:
                one = self._one(endpoint.client, message, model, call, stage, ledger)
                async with contextlib.aclosing(one):
                    async for data in one:
                        self._endpoints.have_answered = has_begun = True
                        if endpoint.failures:
                            self._endpoints.mark_up(endpoint)
                        failure, answer = read_stream_answer(data)
                        if failure:
                            raise ModelFailed(f"model '{model}' failed: {failure[:300]}")
                        yield answer
                return
            except UpstreamUnreachable:
                self._endpoints.mark_down(endpoint)
                attempts.try_again()
            except UpstreamUnread:
                attempts.try_again()
            except NotServed as news:
                if has_begun:  # it stops in the middle: its answers would come again
                    raise news.refusal from None
                self._endpoints.mark_lacking(endpoint, model)
                refusal = refusal or news.refusal
                if news.is_restarting:
                    attempts.try_again(RETRY_S)
            except TooLarge as error:
                bound = endpoint.client.max_message_bytes
                raise ModelFailed(f"an answer of model '{model}' is larger than {bound} bytes") from error
            except BadMessage as error:
                raise ModelFailed(f"an answer of model '{model}' cannot be read: {error.message}") from error
            finally:
                endpoint.outstanding -= 1
        if refusal is not None:
            raise refusal
        raise ModelUnreachable("no inference server can be reached: try again later", retry_after_s=RETRY_S)

    async def _one(
        self,
        client: GrpcClient,
        message: Sequence[bytes | memoryview],
        model: str,
        call: CallContext,
        stage: Stage,
        ledger: Ledger,
    ) -> AsyncGenerator[bytes]:
        """Yield the messages of one server."""
        now = monotonic()
        if call.deadline <= now:
            raise DeadlineExceeded(STAGE)
        if self._through_gateway:
            check_ticket(call)
        ends = now + self._max_s
        # With a status instead of a text for errors; the stream is ours alone, so it may end with one.
        metadata = [
            *Hop(call, through_gateway=self._through_gateway).headers(now, stage.context),
            ("triton_grpc_error", "true"),
        ]
        stream = client.call(PATH, metadata, message, self._max_s)
        try:
            until = min(call.deadline, ends)
            while (answer := await next_message(stream, until)) is not None:
                yield answer
                until = min(monotonic() + self._idle_s, ends)
        except UpstreamBroken as error:
            if monotonic() >= ends:  # the server knows as well when it has to end
                raise DeadlineExceeded(STAGE) from error
            raise cut(model) from error
        finally:
            stream.cancel()
            ledger.reported(*read_cost([b"%b:%b" % field for field in stream.trailers]))
        if stage.hop is not None:
            stage.hop = replace(stage.hop, status=stream.code)
        if stream.code != OK:
            raise refused(model, stream)


async def next_message(stream: GrpcCall, until: float) -> bytes | None:
    """Return the next message, None at the end of the stream. Raises DeadlineExceeded if none has come by `until`."""
    if stream.ready:
        return await stream.read()
    limit = asyncio.timeout(until - monotonic())
    try:
        async with limit:
            return await stream.read()
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(STAGE) from error
        raise


class NotServed(Exception):
    """The server does not have the model, but another one may. is_restarting: this one may have it soon. It never
    leaves this module.
    """

    def __init__(self, refusal: LogicError, *, is_restarting: bool) -> None:
        self.refusal = refusal
        self.is_restarting = is_restarting


def cut(model: str) -> ModelFailed:
    return ModelFailed(f"the stream of model '{model}' was cut: try again")


def refused(model: str, stream: GrpcCall) -> LogicError | NotServed:
    """Convert the status other than OK that a call has ended with to an error."""
    trailers = dict(stream.trailers)
    code, reason = CODES[stream.code], trailers.get(b"x-oriel-reason")
    if code == "UNAVAILABLE" and reason is None:
        return cut(model)
    sentence = stream.text[:300] or "it gave no reason"
    if code not in STATUS:
        return ModelFailed(f"model '{model}' failed: {sentence}")
    is_restarting = code == "UNAVAILABLE" and (reason or b"").decode("latin-1") in ELSEWHERE
    is_absent = is_restarting or code == "NOT_FOUND"
    is_restarting = is_restarting and SPENT.encode() not in trailers
    error = error_of(model, STATUS[code], sentence, RETRY_S, STAGE, is_absent=is_absent)
    return NotServed(error, is_restarting=is_restarting) if is_absent else error
