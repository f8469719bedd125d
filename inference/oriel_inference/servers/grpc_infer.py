"""ModelInfer: bytes in, bytes out. Everything besides the tensors is read once per head (`InferMessages`).

A request with a known head differs from the one before it only in its tensors: it fits the same version of the model,
and its answer differs only in shapes and numbers.
"""

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer, Call
from oriel_inference.catalog import ServingModel
from oriel_inference.dataplane.dataplane import Completion, positions, respond
from oriel_inference.errors import CallerLeft, InferenceError, NotLoaded
from oriel_inference.fitting import Fitted
from oriel_inference.servers.grpc_call import Body, GrpcCall
from oriel_inference.servers.request_record import RequestRecord
from oriel_inference.servers.spans import Requested
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_wire.context import CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc import decode_infer, encode_infer
from oriel_wire.v2.grpc_messages import InferMessages, Pieces, RawAnswers, RequestHead, read
from oriel_wire.v2.messages import InferRequest, RequestedOutput


class _Known:
    """The facts shared by all requests of one head. picks: positions of the requested outputs."""

    __slots__ = ("answers", "fitted", "picks", "request", "serving")

    def __init__(
        self, serving: ServingModel, request: InferRequest, fitted: Fitted, picks: Sequence[int], answers: RawAnswers
    ) -> None:
        self.serving = serving
        # The arrays would keep the whole message in memory.
        self.request = replace(request, inputs=[])
        self.fitted = replace(fitted, inputs={})
        self.picks = picks
        self.answers = answers


class GrpcInfer:
    """Handles ModelInfer."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._requested = Requested("grpc", "ModelInfer", "", surface.grpc_address)
        self._messages = InferMessages()

    def start(self, call: GrpcCall, data: Body) -> None:
        """Answer one call, now or when its batch has run. When the caller leaves, the call leaves its queue at once."""
        surface = self._surface
        ctx, parent_id = call.context()
        record = RequestRecord(
            surface,
            ctx,
            self._requested,
            call.arrived_s,
            parent_id=parent_id,
            size_bytes=len(data),
        )
        record.load_form = call.plan.load_form
        self._start(call, data, ctx, record)

    def _start(self, call: GrpcCall, data: Body, ctx: CallContext, record: RequestRecord) -> None:
        surface, size = self._surface, len(data)
        headers, model = surface.grpc_headers, ""
        forwarded = headers.of_call(call.plan.fields, call.own) if headers is not None else None
        try:
            found = self._messages.find(data)
            try:
                if found is not None:
                    model = found[0].model_name[:128]
                    if not forwarded and self._is_current(found[0]):
                        _InferCall(surface, call, record).run_known(*found, data, ctx)
                        return
                    request = found[0].request(data, found[1])
                else:
                    message, raw = read(data)
                    model = message.model_name[:128]
                    shared = surface.shared_inputs(of_tenant=call.plan.of_tenant)
                    request = decode_infer(message, raw, shared)
                    del message, raw  # not to be held in memory until the answer
                    if shared is not None:
                        shared.check(request.outputs)
                        size += shared.size_bytes
                    self._messages.remember(data, request)
                if forwarded:
                    request.parameters |= forwarded
                _InferCall(surface, call, record).run(request, size, ctx)
                if not forwarded:
                    self._learn(request, data)
            except NotLoaded as missing:
                again = partial(self._start, call, data, ctx, record)
                demand = surface.control.demand
                call.on_client_left = record.wait_for_load(demand, missing.model, len(data), again, call.refuse)
        except Exception as failure:
            error = as_inference_error(failure)
            call.refuse(error, record.refused(error, model))

    def _is_current(self, head: RequestHead) -> bool:
        """Return whether the cached facts are about the version that serves now. Raises InferenceError if none
        serves.
        """
        known: _Known | None = head.note
        return known is not None and self._surface.catalog.get(head.model_name, head.model_version) is known.serving

    def _learn(self, request: InferRequest, data: Body) -> None:
        """Keep what holds for all requests with the head of this one, which fits its model."""
        found = self._messages.find(data)
        serving = self._surface.catalog.get(request.model_name, request.model_version)
        if found is not None and serving.recognises and (picks := positions(serving, request)) is not None:
            outputs = [(serving.spec.outputs[pick].name, serving.spec.outputs[pick].datatype) for pick in picks]
            answers = RawAnswers(serving.spec.name, serving.version, outputs)
            found[0].note = _Known(serving, request, serving.fitter.fit(request), picks, answers)


class _InferCall:
    """One request on its way to the batcher and back. One of `run_known` and `run` is called.

    The call knows this object through `on_client_left`, and its end clears that.
    """

    __slots__ = ("_call", "_known", "_record", "_requested", "_submitted", "_surface")

    _known: _Known
    _submitted: Call

    def __init__(self, surface: Surface, call: GrpcCall, record: RequestRecord) -> None:
        self._surface = surface
        self._call = call
        self._record = record
        self._requested: Sequence[RequestedOutput] | None = None

    # Requests with a known head ---------------------------------------------------------------------------------

    def run_known(self, head: RequestHead, pieces: Pieces, data: Body, ctx: CallContext) -> None:
        """Queue a request whose head is known. Raises BadMessage."""
        known: _Known = head.note
        dataplane = self._surface.dataplane
        inputs = head.arrays(data, pieces)
        self._known = known
        self._submitted = submitted = dataplane.call(
            known.serving,
            known.fitted,
            ctx,
            known.request,
            size_bytes=len(data),
            finish=self._finish_known,
        )
        submitted.inputs = inputs
        self._call.on_client_left = self._caller_left
        known.serving.batcher.submit(submitted)

    def _finish_known(self, result: Answer | InferenceError) -> None:
        known = self._known
        serving = known.serving
        if isinstance(result, InferenceError):
            self._finish(Completion(self._submitted.arrived_s, serving, known.fitted.rows, error=result))
            return
        completion = Completion(self._submitted.arrived_s, serving, known.fitted.rows, answer=result)
        outputs = result.outputs
        try:
            if type(outputs) is not Outputs or outputs.plain:
                message = known.answers.encode([outputs[pick] for pick in known.picks])
                self._call.answer(message, self._record.trailers(completion, result, len(message)))
                return
            completion.response = respond(serving, known.request.outputs, known.request.id, outputs)
        except (BadMessage, InferenceError) as bad:
            completion.error = as_inference_error(bad)
        self._finish(completion)

    def _caller_left(self) -> None:
        serving = self._known.serving
        if serving.batcher.caller_left(self._submitted):
            self._record.caller_left(
                Completion(self._submitted.arrived_s, serving, self._known.fitted.rows, error=CallerLeft())
            )

    # Other requests ---------------------------------------------------------------------------------------------

    def run(self, request: InferRequest, size_bytes: int, ctx: CallContext) -> None:
        """Queue a request. size_bytes: memory that it occupies. Raises InferenceError, BadMessage."""
        self._requested = request.outputs
        caller_left = self._surface.dataplane.infer(
            request, ctx, size_bytes=size_bytes, reply=self._finish, on_caller_left=self._record.caller_left
        )
        if not self._call.over:
            self._call.on_client_left = caller_left

    def _finish(self, completion: Completion) -> None:
        """Answer by the outcome."""
        message = b""
        if completion.response is not None:
            try:
                if (regions := self._surface.regions) is not None:
                    regions.write(completion.response, self._requested)
                message = encode_infer(completion.response).SerializeToString()
            except (BadMessage, InferenceError) as bad:
                completion.error = as_inference_error(bad)
        if completion.error is None:
            assert completion.answer is not None
            self._call.answer(message, self._record.trailers(completion, completion.answer, len(message)))
        else:
            self._call.refuse(completion.error, self._record.finished(completion, completion.serving.spec.name))
