"""ModelInfer: bytes in, bytes out. Everything besides the tensors is read once per head (`InferMessages`).

A request with a known head differs from the one before it only in its tensors: it fits the same version of the model,
and its answer differs only in shapes and numbers.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer
from oriel_inference.dataplane import Completion, respond
from oriel_inference.errors import BackendFailed, CallerLeft, InferenceError
from oriel_inference.fitting import Fitted
from oriel_inference.lifecycle import ServingModel
from oriel_inference.servers.gather import Gather
from oriel_inference.servers.grpc_call import Context, ContextPlans, abort
from oriel_inference.servers.request_record import RequestRecord
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_wire.context import CallContext
from oriel_wire.engine.grpc_drain import UnderWay
from oriel_wire.engine.large_messages import LARGE_BYTES, LargeMessages
from oriel_wire.engine.pulse import GrpcPulse
from oriel_wire.errors import BadMessage
from oriel_wire.orca import report_form
from oriel_wire.v2.grpc import decode_infer, encode_infer
from oriel_wire.v2.grpc_messages import InferMessages, Pieces, RawAnswers, RequestHead, read
from oriel_wire.v2.messages import InferRequest

_log = logging.getLogger(__name__)

_Ended = tuple[Completion, bytes | None]


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

    def __init__(self, surface: Surface, large: LargeMessages, pulse: GrpcPulse) -> None:
        self._surface = surface
        self._pulse = pulse
        self._large = large
        self._messages = InferMessages()
        self._plans = ContextPlans(surface)
        self._gather: Gather | None = None
        self.under_way = UnderWay()

    async def handle(self, data: bytes, context: Context) -> bytes:
        """Answer one call. Cancelled when the caller leaves or gRPC's own deadline passes: then the call leaves its
        queue at once.
        """
        error: InferenceError
        begun = self.under_way.begin()
        try:
            return await self._infer(data, context)
        except InferenceError as refusal:
            error = refusal
        except Exception:
            # An unexpected error in one call must not affect others, and its text must not show internals to the
            # client.
            _log.exception("a call failed unexpectedly")
            error = BackendFailed("the server failed on this request")
        finally:
            self.under_way.end(begun)
            if len(data) >= LARGE_BYTES:
                self._large.ended(len(data))
        # An aborted call stays in memory with this frame until the garbage collector runs, so it must not hold the
        # message.
        del data
        return await abort(context, error)

    async def _infer(self, data: bytes, context: Context) -> bytes:
        surface = self._surface
        received_s = now = time.monotonic()
        if now >= self._pulse.fresh_until:
            received_s -= self._pulse.call_age_s(context.peer(), now)
        ctx, parent_id, load_format = self._plans.read(context, received_s)
        record = RequestRecord(
            ctx,
            received_s,
            surface.sink,
            surface.meter,
            parent_id=parent_id,
            protocol="grpc",
            size_bytes=len(data),
            load_form=report_form(load_format),
        )
        ended: asyncio.Future[_Ended] = asyncio.get_running_loop().create_future()
        model = ""
        try:
            found = self._messages.find(data)
            if found is not None:
                model = found[0].model_name[:128]
            if found is not None and self._is_current(found[0]):
                leave = self._known(*found, data, ctx, record, ended)
            else:
                if found is not None:
                    request = found[0].request(data, found[1])
                else:
                    message, raw = read(data)
                    model = message.model_name[:128]
                    request = decode_infer(message, raw)
                    del message, raw  # not to be held in memory until the answer
                    self._messages.remember(data, request)
                leave = self._decoded(request, data, ctx, record, ended)
        except (InferenceError, BadMessage) as refusal:
            error = as_inference_error(refusal)
            context.set_trailing_metadata(tuple(record.refused(error, model)))
            raise error from None
        except Exception:
            record.refused(BackendFailed("the server failed on this request"), model)
            raise
        try:
            completion, answer = await ended
        except asyncio.CancelledError:
            leave()
            raise
        context.set_trailing_metadata(tuple(record.ended(completion, model)))
        if answer is None:
            assert completion.error is not None
            raise completion.error
        return answer

    # A head that is known ---------------------------------------------------------------------------------------

    def _is_current(self, head: RequestHead) -> bool:
        """Return whether the cached facts are about the version that serves now. Raises InferenceError if none
        serves.
        """
        known: _Known | None = head.note
        return known is not None and self._surface.catalog.get(head.model_name, head.model_version) is known.serving

    def _known(
        self,
        head: RequestHead,
        pieces: Pieces,
        data: bytes,
        ctx: CallContext,
        record: RequestRecord,
        ended: "asyncio.Future[_Ended]",
    ) -> Callable[[], None]:
        known: _Known = head.note
        serving, fitted = known.serving, known.fitted
        dataplane = self._surface.dataplane
        queued_s = dataplane.now()

        def reply(result: Answer | InferenceError) -> None:
            if ended.done():
                return
            if isinstance(result, InferenceError):
                ended.set_result((Completion(queued_s, serving, fitted.rows, error=result), None))
                return
            completion = Completion(queued_s, serving, fitted.rows, answer=result)
            try:
                if type(result.outputs) is not Outputs or result.outputs.plain:
                    answer = known.answers.encode([result.outputs[pick] for pick in known.picks])
                else:
                    response = respond(serving, known.request.outputs, known.request.id, result.outputs)
                    answer = encode_infer(response).SerializeToString()
            except (BadMessage, InferenceError) as bad:
                completion.error = as_inference_error(bad)
                ended.set_result((completion, None))
                return
            ended.set_result((completion, answer))

        inputs = head.arrays(data, pieces)
        call = dataplane.call(
            serving,
            fitted,
            inputs,
            ctx,
            queued_s=queued_s,
            size_bytes=len(data),
            finish=reply,
            request=known.request,
        )
        self._gathering().submit(serving, call)

        def leave() -> None:
            if serving.batcher.leave(call):
                record.left(Completion(queued_s, serving, fitted.rows, error=CallerLeft()))

        return leave

    def _gathering(self) -> Gather:
        if self._gather is None:
            self._gather = Gather(self._surface.dataplane.now, asyncio.get_running_loop().call_soon)
        return self._gather

    # Any request ------------------------------------------------------------------------------------------------

    def _decoded(
        self,
        request: InferRequest,
        data: bytes,
        ctx: CallContext,
        record: RequestRecord,
        ended: "asyncio.Future[_Ended]",
    ) -> Callable[[], None]:
        def reply(completion: Completion) -> None:
            if ended.done():
                return
            answer: bytes | None = None
            if completion.response is not None:
                try:
                    answer = encode_infer(completion.response).SerializeToString()
                except BadMessage as bad:
                    completion.error = as_inference_error(bad)
            ended.set_result((completion, answer))

        leave = self._surface.dataplane.infer(request, ctx, size_bytes=len(data), reply=reply, left=record.left)
        # The request fits the model: `infer` would have refused it otherwise.
        found = self._messages.find(data)
        serving = self._surface.catalog.get(request.model_name, request.model_version)
        if found is not None and serving.recognises and (picks := _picks(serving, request)) is not None:
            outputs = [(serving.spec.outputs[pick].name, serving.spec.outputs[pick].datatype) for pick in picks]
            answers = RawAnswers(serving.spec.name, serving.version, outputs)
            found[0].note = _Known(serving, request, serving.fitter.fit(request), picks, answers)
        return leave


def _picks(serving: ServingModel, request: InferRequest) -> list[int] | None:
    """Return the positions of the requested outputs; None if they are not the model's own (classification)."""
    order = [output.name for output in serving.spec.outputs]
    if request.outputs is None:
        return list(range(len(order)))
    if any(output.classification for output in request.outputs):
        return None
    return [order.index(output.name) for output in request.outputs]
