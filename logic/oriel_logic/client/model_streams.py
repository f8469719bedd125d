"""Streams from models: `ModelStreamInfer` over HTTP/2, one request and all its answers per call.

The request's deadline bounds the first answer, after that the whole stream has a bound. The time between two answers
has none: servers pause a generation for as long as more urgent ones need.
A call that no server has received is sent to another one. Modules that need protobuf are imported with the first
stream.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from oriel_logic.client.endpoints import Endpoint, Endpoints
from oriel_logic.client.upstream_errors import ELSEWHERE, SPENT, check_ticket, error_of
from oriel_logic.errors import DeadlineExceeded, LogicError, ModelFailed, ModelInputWrong, ModelUnreachable
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

    max_s: the total time of a stream whose request names none.
    through_gateway: see `InferenceServers`.
    """

    def __init__(
        self,
        endpoints: Endpoints[GrpcClient],
        *,
        max_s: float = MAX_S,
        through_gateway: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._through_gateway = through_gateway
        self._max_s = max_s

    async def close(self) -> None:
        await self._endpoints.close()

    async def begin(self, request: InferRequest, call: CallContext, stage: Stage, ledger: Ledger) -> "AnswerStream":
        """Send `request` and wait for its first answer, or its end. stage, ledger: get facts and cost.

        Raises DeadlineExceeded, ModelInputWrong, ModelUnavailable, ModelBusy, ModelFailed or ModelUnreachable.
        Cancelled: the inference server sees that the caller left.
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
        if self._through_gateway:
            check_ticket(call)
        refusal: LogicError | None = None
        attempts, resent = self._endpoints.attempts(model, call.deadline), -1
        async for endpoint in attempts:
            resent += 1
            now = monotonic()
            if call.deadline <= now:
                raise DeadlineExceeded(STAGE)
            stage.hop = HopFacts(*endpoint.address, METHOD, "", -1, resent)
            most_s = call.stream_s or self._max_s
            # With a status instead of a text for errors; the stream is ours alone, so it may end with one.
            metadata = [
                *Hop(call, through_gateway=self._through_gateway).headers(now, stage.context),
                ("triton_grpc_error", "true"),
            ]
            called = endpoint.client.call(PATH, metadata, message, most_s)
            ends = now + most_s
            stream = AnswerStream(model, endpoint, called, ends, stage, ledger, read_stream_answer)
            has_begun = False
            try:
                await stream.begin(min(call.deadline, ends))
                self._endpoints.have_answered = has_begun = True
                if endpoint.failures:
                    self._endpoints.mark_up(endpoint)
                return stream
            except UpstreamUnreachable:
                self._endpoints.mark_down(endpoint)
                attempts.try_again()
            except UpstreamUnread:
                attempts.try_again()
            except NotServed as news:
                self._endpoints.mark_lacking(endpoint, model)
                refusal = refusal or news.refusal
                if news.is_restarting:
                    attempts.try_again(RETRY_S)
            finally:
                if not has_begun:
                    stream.close()
        if refusal is not None:
            raise refusal
        raise ModelUnreachable("no inference server can be reached: try again later", retry_after_s=RETRY_S)


@dataclass(slots=True, eq=False, repr=False)
class AnswerStream:
    """The answers of one call that was sent; `close` it in any case, so that the server sees a caller that left.

    ends: monotonic seconds at which the stream ends.
    decode: reads a message of a model, as error text and answer.
    """

    model: str
    endpoint: Endpoint[GrpcClient]
    call: GrpcCall
    ends: float
    stage: Stage
    ledger: Ledger
    decode: Callable[[bytes, str], tuple[str, InferResponse]]
    _first: bytes | None = None
    _is_late: bool = False
    _timer: asyncio.TimerHandle | None = None

    async def begin(self, due: float) -> None:
        """Wait for the first answer. Raises UpstreamUnreachable, UpstreamUnread, NotServed or what `next` raises.

        due: monotonic seconds at which the first answer is due.
        """
        self.endpoint.outstanding += 1
        self._end_at(due)
        self._first = await self._read()
        self._end_at(self.ends)

    async def next(self) -> InferResponse | None:
        """Return the next answer, None after the last one. Raises DeadlineExceeded, or a ModelError."""
        data, self._first = self._first, None
        if data is None:
            try:
                data = await self._read()
            except NotServed as news:  # it stops in the middle: its answers would come again
                raise news.refusal from None
        if data is None:
            return None
        try:
            failure, answer = self.decode(data, self.model)
        except BadMessage as error:
            raise ModelFailed(f"an answer of model '{self.model}' cannot be read: {error.message}") from error
        if failure:
            raise ModelFailed(f"model '{self.model}' failed: {failure[:300]}")
        return answer

    def offer_texts(self, tap: Callable[[bytes], bool]) -> None:
        """Offer answers of one text to `tap` when they come, if `next` waits for one; see `pipeline.BoundModels`."""
        from oriel_wire.v2.grpc_messages import read_known_text

        model = self.model

        def offer(data: bytes) -> bool:
            text = read_known_text(data, model)
            return text is not None and tap(text)

        self.call.tap = offer

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.call.cancel()
        self.endpoint.outstanding -= 1
        self.ledger.reported(*read_cost([b"%b:%b" % field for field in self.call.trailers]))

    async def _read(self) -> bytes | None:
        call = self.call
        try:
            data = await call.read()
        except UpstreamBroken as error:
            if self._is_late or monotonic() >= self.ends:  # the server knows as well when it has to end
                raise DeadlineExceeded(STAGE) from error
            raise cut(self.model) from error
        except TooLarge as error:
            bound = self.endpoint.client.max_message_bytes
            raise ModelFailed(f"an answer of model '{self.model}' is larger than {bound} bytes") from error
        except BadMessage as error:
            raise ModelFailed(f"an answer of model '{self.model}' cannot be read: {error.message}") from error
        if data is None:
            if self.stage.hop is not None:
                self.stage.hop = replace(self.stage.hop, status=call.code)
            if call.code != OK:
                raise refused(self.model, call)
        return data

    def _end_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(due - monotonic(), self._expire)

    def _expire(self) -> None:
        self._is_late = True
        self.call.cancel()


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
