"""`ModelStreamInfer`: many requests and their responses on one gRPC stream.

Each message is a request of its own: it has its own deadline (counted from its arrival), queue place and end. Responses
of models with one response per request keep the order of the requests; those of decoupled models are sent as they come.
At most MAX_IN_FLIGHT messages are in progress per stream: then no further message is read, and the flow control of the
client holds them back. A refusal is an `error_message`, and the stream goes on, unless the client asked for
`triton_grpc_error`: then the refusal is the status of the stream and its end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from msgspec.structs import replace

from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import InferenceError, InvalidRequest, NotLoaded, ServerStopping
from oriel_inference.sequences.scan import is_streamed
from oriel_inference.servers.grpc_call import Body, GrpcCall
from oriel_inference.servers.request_record import RequestRecord, cost_text
from oriel_inference.servers.spans import Requested
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_policies.metering.usage import UsageRow
from oriel_wire.context import COST, COST_US, REQUEST_ID, CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.grpc import decode_infer, encode_infer
from oriel_wire.v2.grpc_messages import read
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput
from oriel_wire.v2.proto import v2_pb2

MAX_IN_FLIGHT = 64
QUIET_S = 0.5
LATEST_SHARE = 0.7
FINAL = "triton_final_response"
WANTS_FINAL = "triton_enable_empty_final_response"

_Response = v2_pb2.ModelStreamInferResponse


class StreamFrontend:
    """The method and all open streams."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._open: set[_Stream] = set()
        self._last_s = inf

    def open(self, call: GrpcCall) -> "_Stream":
        """Begin a stream."""
        stream = _Stream(self._surface, call, self._open)
        if self._last_s < inf:
            stream.stop(self._last_s)
        return stream

    def stop(self, drain_s: float) -> None:
        """End the streams because the server drains: a stream ends as soon as nothing of it is in progress and no
        message has come for `QUIET_S`. Late in `drain_s` no message is accepted any more, and only what is in
        progress is answered.
        """
        self._last_s = time.monotonic() + LATEST_SHARE * drain_s
        for stream in list(self._open):
            stream.stop(self._last_s)


class _Slot:
    """One request of a stream.

    ended: the last item that was put, None while the request runs.
    caller_left: cancels its inference; None if there is none to cancel.
    """

    __slots__ = (
        "caller_left",
        "ended",
        "model",
        "ordered",
        "placed",
        "request_id",
        "requested",
        "sent_bytes",
        "sent_final",
        "shared_bytes",
        "version",
        "wants_final",
    )

    def __init__(self) -> None:
        self.ended: _Response | InferenceError | None = None
        self.caller_left: Callable[[], None] | None = None
        self.model = ""
        self.ordered = True
        self.placed = False
        self.request_id = ""
        self.requested: Sequence[RequestedOutput] | None = None
        self.shared_bytes = 0
        self.version = ""
        self.sent_bytes = 0
        self.sent_final = False  # set with a response that has outputs
        self.wants_final = False


class _Stream:
    """One open stream. open_: all of them; it is among them until its call ends."""

    def __init__(self, surface: Surface, call: GrpcCall, open_: "set[_Stream]") -> None:
        self._surface = surface
        self._call = call
        self._open = open_
        self._requested = Requested("grpc_stream", "ModelStreamInfer", "", surface.grpc_address)
        self._ctx, self._parent_id = call.context()
        headers = surface.grpc_headers
        self._forwarded = headers.of_call(call.plan.fields, call.own) if headers is not None else None
        self._timeout_s = self._ctx.deadline - call.arrived_s
        self._ends_s = call.own_deadline_s
        self._slots: set[_Slot] = set()
        self._order: deque[_Slot] = deque()
        self._ready: deque[tuple[_Response | InferenceError, Callable[[], None]]] = deque()
        self._unread: Callable[[], None] | None = None  # callback of the response that the client has to read first
        self._sending = False
        self._all_read = False
        self._heard_s = time.monotonic()
        self._last_s = inf  # no message is accepted after that; finite once the server stops
        self._timer: asyncio.TimerHandle | None = None
        self._cost_us = self._device_ns = self._tokens_in = self._tokens_out = 0
        self._usage: UsageRow | None = None
        open_.add(self)
        call.on_client_left = self._cancel_all
        call.on_room = self._resume

    def stop(self, last_s: float) -> None:
        """Stop the stream; messages are accepted until `last_s` (monotonic seconds)."""
        self._last_s = last_s
        self._judge_quiet()

    def _judge_quiet(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._send()
        if not self._call.over:
            self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._judge_quiet)

    # The call -----------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """See `Messages`."""
        return len(self._slots) < MAX_IN_FLIGHT

    def request_complete(self) -> None:
        """See `Messages`."""
        self._all_read = True
        self._send()

    def _resume(self) -> None:
        written, self._unread = self._unread, None
        if written is not None:
            written()
        self._send()

    def _send(self) -> None:
        """Send what is ready as far as the client reads it, and end the stream if nothing can follow."""
        if self._sending or self._call.over:
            return
        self._sending = True
        try:
            while self._ready and self._unread is None:
                response, written = self._ready.popleft()
                if isinstance(response, InferenceError):
                    self._finish_with(response)
                    return
                if self._call.send(response.SerializeToString()):
                    written()
                else:
                    self._unread = written
        finally:
            self._sending = False
        if self._slots or self._unread is not None:
            return
        if self._all_read:
            self._finish_with(None)
        elif self._last_s < inf and time.monotonic() >= min(self._heard_s + QUIET_S, self._last_s):
            self._finish_with(ServerStopping())

    def _finish_with(self, error: InferenceError | None) -> None:
        self._cancel_all()
        fields = [(REQUEST_ID, self._ctx.request_id)]
        if self._ctx.trusted:
            cost = cost_text(self._device_ns, self._usage, (self._tokens_in, self._tokens_out))
            fields += [(COST_US, str(self._cost_us)), (COST, cost)]
        if error is None:
            self._call.finish(fields)
        else:
            self._call.refuse(error, fields)

    def _cancel_all(self) -> None:
        """Cancel what is in progress."""
        self._open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        slots, self._slots = self._slots, set()
        for slot in slots:
            if slot.caller_left is not None:
                slot.caller_left()
        self._ready.clear()

    # Requests -----------------------------------------------------------------------------------------------------

    def message(self, data: Body, received_s: float) -> None:
        """Start the request of a message."""
        self._heard_s = now = time.monotonic()
        slot = _Slot()
        self._slots.add(slot)
        ctx = replace(self._ctx, deadline=min(received_s + self._timeout_s, self._ends_s))
        record = RequestRecord(
            self._surface,
            ctx,
            self._requested,
            received_s,
            parent_id=self._parent_id,
            size_bytes=len(data),
        )

        def begin() -> None:
            if now >= self._last_s:
                raise ServerStopping
            request = self._decode(data, slot)
            self._start(slot, request, ctx, record, len(data) + slot.shared_bytes)

        self._attempt(slot, record, begin)

    def _attempt(self, slot: _Slot, record: RequestRecord, begin: Callable[[], None]) -> None:
        """Begin a message, and refuse it if that fails; the stream goes on."""
        try:
            begin()
        except Exception as failure:
            error = as_inference_error(failure)
            record.refused(error, slot.model)
            self._refuse(slot, error)

    def _start(
        self, slot: _Slot, request: InferRequest, ctx: CallContext, record: RequestRecord, size_bytes: int
    ) -> None:
        """Queue the request of a message, for its model or for the load of it. Raises InferenceError, BadMessage."""
        try:
            serving = self._surface.catalog.get(request.model_name, request.model_version)
        except NotLoaded:
            self._place(slot)  # its answer keeps its place in the order, unless the model is decoupled
            again = partial(self._start, slot, request, ctx, record, size_bytes)
            slot.caller_left = record.wait_for_load(
                self._surface.control.demand,
                request.model_name,
                size_bytes,
                lambda: self._attempt(slot, record, again),
                lambda error, _: self._refuse(slot, error),
            )
            return
        slot.version = serving.version
        slot.ordered = not is_streamed(serving.spec, request.parameters)
        if slot.placed and not slot.ordered:
            self._order.remove(slot)
            self._flush()
        self._place(slot)

        def reply(completion: Completion) -> None:
            self._charge(completion)
            self._end(slot, completion)
            record.finished(completion, slot.model, slot.sent_bytes)

        def emit(response: InferResponse, consumed: Callable[[], None], last: bool) -> None:
            response.parameters[FINAL] = last
            slot.sent_final = last
            self._put(self._encode(response, slot), consumed)

        slot.caller_left = self._surface.dataplane.infer(
            request, ctx, size_bytes=size_bytes, reply=reply, on_caller_left=record.caller_left, emit=emit
        )

    def _decode(self, data: Body, slot: _Slot) -> InferRequest:
        message, raw = read(data)
        slot.model = message.model_name[:128]
        slot.request_id = message.id
        shared = self._surface.shared_inputs(of_tenant=self._call.plan.of_tenant)
        request = decode_infer(message, raw, shared)
        if shared is not None:
            shared.check(request.outputs)
            slot.requested, slot.shared_bytes = request.outputs, shared.size_bytes
        wants_final = request.parameters.pop(WANTS_FINAL, False)
        if type(wants_final) is not bool:
            raise InvalidRequest(f"parameter {quoted(WANTS_FINAL)} must be true or false")
        slot.wants_final = wants_final
        if self._forwarded:
            request.parameters |= self._forwarded
        return request

    def _charge(self, completion: Completion) -> None:
        """Add a message's cost, which trusted peers get for all messages at the end of the stream."""
        answer = completion.answer
        if answer is not None:
            self._cost_us += answer.cost_us
            self._device_ns += answer.device_ns
            self._tokens_in += answer.tokens[0]
            self._tokens_out += answer.tokens[1]
            self._usage = answer.usage or self._usage

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
            slot.ended = self._encode(response, slot)
        except InferenceError as error:
            completion.error = error
            self._refuse(slot, error)
            return
        self._flush()

    def _refuse(self, slot: _Slot, error: InferenceError) -> None:
        # The frames of the traceback hold the message, and the slot would hold the frames.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        slot.caller_left = None
        ended: _Response | InferenceError = error
        if not self._call.plan.errors_as_status:
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
        self._send()

    def _finish(self, slot: _Slot) -> None:
        was_full = not self.has_room
        self._slots.discard(slot)
        if was_full:
            self._call.read_on()
        if not self._slots:
            self._send()

    def _encode(self, response: InferResponse, slot: _Slot) -> _Response:
        response.id = slot.request_id
        try:
            if (regions := self._surface.regions) is not None:
                regions.write(response, slot.requested)
            message = encode_infer(response)
        except BadMessage as bad:
            raise as_inference_error(bad) from bad
        slot.sent_bytes += message.ByteSize()
        return _Response(infer_response=message)
