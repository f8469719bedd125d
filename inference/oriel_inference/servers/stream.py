"""`ModelStreamInfer`: many requests and their responses on one gRPC stream.

Each message is a request of its own: it has its own deadline (counted from its arrival), queue place and end. Responses
of models with one response per request keep the order of the requests; those of decoupled models are sent as they come.
At most MAX_IN_FLIGHT messages are in progress per stream: then no further message is read, and the flow control of the
client holds them back. A refusal is an `error_message`, and the stream goes on, unless the client asked for
`triton_grpc_error`: then the refusal is the status of the stream and its end.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from math import inf

import grpc
import grpc.aio
from msgspec.structs import replace

from oriel_inference.dataplane import Completion
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest, ServerStopping
from oriel_inference.servers.grpc_call import Context, abort, context_of, metadata_of
from oriel_inference.servers.request_record import RequestRecord
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_wire.context import COST_US, REQUEST_ID
from oriel_wire.engine.large_messages import LargeMessages
from oriel_wire.engine.pulse import GrpcPulse
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.grpc import SERVICE, decode_infer, encode_infer
from oriel_wire.v2.grpc_messages import read
from oriel_wire.v2.messages import InferRequest, InferResponse
from oriel_wire.v2.proto import v2_pb2

_log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
QUIET_S = 0.5
LATEST_SHARE = 0.7
ERROR_MODE = "triton_grpc_error"
FINAL = "triton_final_response"
WANTS_FINAL = "triton_enable_empty_final_response"

_Response = v2_pb2.ModelStreamInferResponse


class StreamFrontend:
    """The method and all open streams."""

    def __init__(self, surface: Surface, large: LargeMessages, pulse: GrpcPulse) -> None:
        self._surface = surface
        self._pulse = pulse
        self._large = large
        self._open: set[_Stream] = set()
        self._last_s = inf

    def handler(self) -> "grpc.GenericRpcHandler[object, object]":
        """Return the handler to register with a server."""
        method = grpc.stream_stream_rpc_method_handler(self._infer, response_serializer=_Response.SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, {"ModelStreamInfer": method})

    def stop(self, drain_s: float) -> None:
        """End the streams because the server drains: a stream ends as soon as nothing of it is in progress and no
        message has come for `QUIET_S`. Late in `drain_s` no message is accepted any more, and only what is in
        progress is answered.
        """
        self._last_s = time.monotonic() + LATEST_SHARE * drain_s
        for stream in self._open:
            stream.stop(self._last_s)

    async def _infer(self, _: AsyncIterator[bytes], context: Context) -> None:
        stream = _Stream(self._surface, self._large, context, self._pulse)
        stream.stop(self._last_s)
        self._open.add(stream)
        error: InferenceError | None
        try:
            error = await stream.run()
        except Exception:
            # An unexpected error in one stream must not affect others, and its text must not show internals to the
            # client.
            _log.exception("a stream failed unexpectedly")
            error = BackendFailed("the server failed on this stream")
        finally:
            self._open.discard(stream)
        if error is not None:
            await abort(context, error)


class _Slot:
    """One request of a stream.

    ended: the last item that was put, None while the request runs.
    leave: cancels its inference.
    """

    __slots__ = (
        "ended",
        "leave",
        "model",
        "ordered",
        "placed",
        "request_id",
        "sent_final",
        "size_bytes",
        "version",
        "wants_final",
    )

    def __init__(self, size_bytes: int) -> None:
        self.ended: _Response | InferenceError | None = None
        self.leave: Callable[[], None] | None = None
        self.model = ""
        self.ordered = True
        self.placed = False
        self.request_id = ""
        self.size_bytes = size_bytes
        self.version = ""
        self.sent_final = False  # set with a response that has outputs
        self.wants_final = False


class _Stream:
    """One open stream: one task reads, the handler's task writes, and callbacks on the loop add responses in
    between.
    """

    def __init__(self, surface: Surface, large: LargeMessages, context: Context, pulse: GrpcPulse) -> None:
        self._surface = surface
        self._pulse = pulse
        self._large = large
        self._context = context
        metadata = metadata_of(context)
        now = time.monotonic()
        self._ctx = context_of(surface, metadata, context, now)
        self._timeout_s = self._ctx.deadline - now
        remaining_s = context.time_remaining()
        self._ends_s = None if remaining_s is None else now + remaining_s
        self._parent_id = self._ctx.trace.span_id if "traceparent" in metadata else 0
        self._as_status = metadata.get(ERROR_MODE, "").lower() == "true"
        self._slots: set[_Slot] = set()
        self._order: deque[_Slot] = deque()
        self._ready: deque[tuple[_Response | InferenceError, Callable[[], None]]] = deque()
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._wake = asyncio.Event()
        self._all_read = False
        self._heard_s = now
        self._last_s = inf  # no message is accepted after that; finite once the server stops
        self._cost_us = 0
        context.set_trailing_metadata(((REQUEST_ID, self._ctx.request_id),))

    def stop(self, last_s: float) -> None:
        """Stop the stream; messages are accepted until `last_s` (monotonic seconds, inf: always)."""
        self._last_s = last_s
        self._wake.set()

    async def run(self) -> InferenceError | None:
        """Serve the stream to its end; an error becomes its status. If cancelled, everything in progress is
        cancelled.
        """
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read())
                error = await self._write()
                reader.cancel()
                return error
        finally:
            for slot in self._slots:
                if slot.leave is not None:
                    slot.leave()

    async def _read(self) -> None:
        # Not read by the handler's iterator, which holds each message until the next one has come.
        while (data := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            await self._room.acquire()
            self._begin(data)
            del data
        self._all_read = True
        self._wake.set()

    async def _write(self) -> InferenceError | None:
        while True:
            while self._ready:
                response, written = self._ready.popleft()
                if isinstance(response, InferenceError):
                    return response
                await self._context.write(response)
                written()
            if not self._slots:
                if self._all_read:
                    return None
                if self._last_s < inf and time.monotonic() >= min(self._heard_s + QUIET_S, self._last_s):
                    return ServerStopping()
            self._wake.clear()
            if self._last_s == inf:
                await self._wake.wait()
                continue
            with suppress(TimeoutError):  # that nothing comes is no error
                async with asyncio.timeout(QUIET_S):
                    await self._wake.wait()

    # Requests -----------------------------------------------------------------------------------------------------

    def _begin(self, data: bytes) -> None:
        received_s = self._heard_s = now = time.monotonic()
        if now >= self._pulse.fresh_until:
            received_s -= self._pulse.call_age_s(self._context.peer(), now)
        slot = _Slot(len(data))
        self._slots.add(slot)
        deadline = received_s + self._timeout_s
        if self._ends_s is not None:
            deadline = min(deadline, self._ends_s)
        ctx = replace(self._ctx, deadline=deadline)
        record = RequestRecord(
            ctx,
            received_s,
            self._surface.sink,
            self._surface.meter,
            parent_id=self._parent_id,
            protocol="grpc_stream",
            size_bytes=len(data),
        )
        try:
            if now >= self._last_s:
                raise ServerStopping
            request = self._decode(data, slot)
            serving = self._surface.catalog.get(request.model_name, request.model_version)
            slot.version = serving.version
            slot.ordered = not serving.spec.decoupled
            self._place(slot)

            def reply(completion: Completion) -> None:
                self._end(slot, completion)
                record.ended(completion, slot.model)
                self._charge(completion)

            def emit(response: InferResponse, consumed: Callable[[], None], last: bool) -> None:
                response.parameters[FINAL] = last
                slot.sent_final = last
                self._put(_encode(response, slot), consumed)

            slot.leave = self._surface.dataplane.infer(
                request, ctx, size_bytes=len(data), reply=reply, left=record.left, emit=emit
            )
        except (InferenceError, BadMessage) as refusal:
            error = as_inference_error(refusal)
            record.refused(error, slot.model)
            self._refuse(slot, error)
        except Exception:
            # An unexpected error in one message must not end the stream.
            _log.exception("a message of a stream failed unexpectedly")
            error = BackendFailed("the server failed on this request")
            record.refused(error, slot.model)
            self._refuse(slot, error)

    def _decode(self, data: bytes, slot: _Slot) -> InferRequest:
        message, raw = read(data)
        slot.model = message.model_name[:128]
        slot.request_id = message.id
        request = decode_infer(message, raw)
        wants_final = request.parameters.pop(WANTS_FINAL, False)
        if type(wants_final) is not bool:
            raise InvalidRequest(f"parameter {quoted(WANTS_FINAL)} must be true or false")
        slot.wants_final = wants_final
        return request

    def _charge(self, completion: Completion) -> None:
        """Add a message's cost, which trusted peers get for all messages at the end of the stream."""
        if completion.answer is not None and self._ctx.trusted:
            self._cost_us += completion.answer.cost_us
            trailing = (REQUEST_ID, self._ctx.request_id), (COST_US, str(self._cost_us))
            self._context.set_trailing_metadata(trailing)

    # Responses ----------------------------------------------------------------------------------------------------

    def _end(self, slot: _Slot, completion: Completion) -> None:
        if completion.error is not None:
            self._refuse(slot, completion.error)
            return
        response = completion.response
        if response is None:
            # A decoupled model has sent all its responses.
            if slot.wants_final and not slot.sent_final:
                last = v2_pb2.ModelInferResponse(model_name=slot.model, model_version=slot.version, id=slot.request_id)
                last.parameters[FINAL].bool_param = True
                self._put(_Response(infer_response=last), lambda: self._finish(slot))
            else:
                self._finish(slot)
            return
        response.parameters[FINAL] = True
        try:
            slot.ended = _encode(response, slot)
        except InferenceError as error:
            completion.error = error
            self._refuse(slot, error)
            return
        self._flush()

    def _refuse(self, slot: _Slot, error: InferenceError) -> None:
        # The frames of the traceback hold the message, and the slot would hold the frames.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        ended: _Response | InferenceError = error
        if not self._as_status:
            ended = _Response(error_message=error.message)
            if slot.request_id:
                ended.infer_response.id = slot.request_id
        if not slot.ordered:
            self._put(ended, lambda: self._finish(slot))
            return
        slot.ended = ended
        self._place(slot)
        self._flush()

    def _place(self, slot: _Slot) -> None:
        """Start messages in the order in which they came, so that they are queued in that order."""
        if slot.ordered and not slot.placed:
            slot.placed = True
            self._order.append(slot)

    def _flush(self) -> None:
        while self._order and (ended := self._order[0].ended) is not None:
            slot = self._order.popleft()
            self._put(ended, lambda slot=slot: self._finish(slot))  # type: ignore[misc]

    def _put(self, response: _Response | InferenceError, written: Callable[[], None]) -> None:
        self._ready.append((response, written))
        self._wake.set()

    def _finish(self, slot: _Slot) -> None:
        self._slots.discard(slot)
        self._large.ended(slot.size_bytes)
        self._room.release()
        self._wake.set()


def _encode(response: InferResponse, slot: _Slot) -> _Response:
    response.id = slot.request_id
    try:
        return _Response(infer_response=encode_infer(response))
    except BadMessage as bad:
        raise as_inference_error(bad) from bad
