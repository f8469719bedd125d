"""`infer` over HTTP: the head's plan, the request's own text where it is known, the full codec where it is not.

A text is known when one like it, but for the numbers of its one input, was decoded and fitted before (`Templates`).
Such a request is what that one was with other numbers: it fits, and its answer differs only in numbers as well.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer
from oriel_inference.dataplane import Completion, respond
from oriel_inference.errors import BackendFailed, CallerLeft, InferenceError
from oriel_inference.fitting import Fitted
from oriel_inference.lifecycle import ServingModel
from oriel_inference.servers.encoding import MIN_BYTES, Encodings, negotiate
from oriel_inference.servers.http_call import JSON, HeadPlan, begin, refuse
from oriel_inference.servers.large_json import Converted, LargeJson, Task
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_inference.servers.trail import Trail
from oriel_wire.context import CallContext
from oriel_wire.engine.buffered import Body, Exchange
from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.answers import MAX_NUMBERS, BinaryAnswers, JsonAnswers
from oriel_wire.v2.http import decode_request, encode_response, parse_header_length
from oriel_wire.v2.messages import Array, InferRequest, InferResponse
from oriel_wire.v2.recognise import Template

__all__ = ["HttpInfer"]

BINARY = ("content-type", "application/octet-stream")
HEADER_LENGTH = "inference-header-content-length"
_JSON_LINE = f"{JSON[0]}: {JSON[1]}\r\n"
_BINARY_LINE = f"{BINARY[0]}: {BINARY[1]}\r\n"

_log = logging.getLogger(__name__)

_Answers = JsonAnswers | BinaryAnswers


class _Known:
    """What was found about the requests of one text. picks: positions of the outputs asked for."""

    __slots__ = ("answers", "fitted", "picks")

    def __init__(self, fitted: Fitted, picks: list[int], answers: _Answers) -> None:
        self.fitted = replace(fitted, inputs={})
        self.picks = picks
        self.answers = answers


class HttpInfer:
    """Starts inferences and answers them."""

    def __init__(self, surface: Surface, encodings: Encodings, large_json: LargeJson) -> None:
        self._surface = surface
        self._encodings = encodings
        self._large_json = large_json

    def start(self, exchange: Exchange, model: str, version: str, body: Body) -> None:
        """Answer one request, now or when its batch has run."""
        surface = self._surface
        plan, ctx, trail = begin(surface, exchange)
        try:
            serving = surface.catalog.get(model, version)
            length = None if plan.header_length is None else parse_header_length(plan.header_length)
            found = serving.templates.find(body, length)
            if found is not None:
                exchange.on_abort = self._known(exchange, serving, *found, len(body), plan, ctx, trail)
            else:
                try:
                    exchange.on_abort = self._decoded(exchange, serving, body, length, plan, ctx, trail)
                except TooLarge:
                    exchange.on_abort = self._large(exchange, serving, body, length, plan, ctx, trail)
        except (InferenceError, BadMessage) as refusal:
            error = as_inference_error(refusal)
            refuse(exchange, error, trail.refused(error, model))

    # A text that is known ---------------------------------------------------------------------------------------

    def _known(
        self,
        exchange: Exchange,
        serving: ServingModel,
        template: Template,
        inputs: Mapping[str, Array],
        size: int,
        plan: HeadPlan,
        ctx: CallContext,
        trail: Trail,
    ) -> Callable[[], None]:
        known: _Known = template.note
        dataplane = self._surface.dataplane
        queued_s = dataplane.now()

        def reply(result: Answer | InferenceError) -> None:
            if isinstance(result, InferenceError):
                refused = Completion(queued_s, serving, known.fitted.rows, error=result)
                refuse(exchange, result, trail.ended(refused, serving.spec.name))
                return
            completion = Completion(queued_s, serving, known.fitted.rows, answer=result)
            outputs = [result.outputs[pick] for pick in known.picks]
            packed = plan.accept_encoding and negotiate(plan.accept_encoding)
            plain = type(result.outputs) is not Outputs or result.outputs.plain
            encoded = known.answers.encode(outputs) if plain and not packed else None
            if encoded is None:
                response = respond(serving, template.request.outputs, template.request.id, result.outputs)
                self._answer(exchange, completion, response, template.request, plan, trail)
                return
            body, length = encoded
            lines = trail.answered(completion, result)
            lines += _JSON_LINE if length is None else f"{_BINARY_LINE}{HEADER_LENGTH}: {length}\r\n"
            exchange.respond(200, lines, body)

        call = dataplane.call(
            serving,
            known.fitted,
            inputs,
            ctx,
            queued_s=queued_s,
            size_bytes=size,
            finish=reply,
            request=template.request,
        )
        serving.batcher.submit(call)

        def leave() -> None:
            if serving.batcher.leave(call):
                trail.left(Completion(queued_s, serving, known.fitted.rows, error=CallerLeft()))

        return leave

    # Any text ---------------------------------------------------------------------------------------------------

    def _decoded(
        self,
        exchange: Exchange,
        serving: ServingModel,
        body: Body,
        length: int | None,
        plan: HeadPlan,
        ctx: CallContext,
        trail: Trail,
    ) -> Callable[[], None]:
        model = serving.spec.name
        request = decode_request(model, serving.version, body, length)
        asked = replace(request, inputs=[])  # the numbers are not kept for the sake of the answer

        def reply(completion: Completion) -> None:
            if completion.response is None:
                assert completion.error is not None
                refuse(exchange, completion.error, trail.ended(completion, model))
                return
            self._answer(exchange, completion, completion.response, asked, plan, trail)

        leave = self._surface.dataplane.infer(request, ctx, size_bytes=len(body), reply=reply, left=trail.left)
        # It fits, or it would have been refused.
        if serving.recognises and (answers := _answers(serving, request)) is not None:
            template = serving.templates.learn(body, length, request)
            if template is not None:
                template.note = _Known(serving.fitter.fit(request), *answers)
        return leave

    # More JSON than the loop has time for --------------------------------------------------------------------------

    def _large(
        self,
        exchange: Exchange,
        serving: ServingModel,
        body: Body,
        length: int | None,
        plan: HeadPlan,
        ctx: CallContext,
        trail: Trail,
    ) -> Callable[[], None]:
        """Go on once another process has made binary data of it. Raises QueueFull."""

        def converted(result: Converted | InferenceError) -> None:
            try:
                if isinstance(result, InferenceError):
                    raise result
                (binary,), binary_length = result
                exchange.on_abort = self._decoded(exchange, serving, binary, binary_length, plan, ctx, trail)
            except (InferenceError, BadMessage) as refusal:
                error = as_inference_error(refusal)
                refuse(exchange, error, trail.refused(error, serving.spec.name))
            except Exception:
                # This is another turn of the loop than the one whose caller catches such things.
                _log.exception("a request failed unexpectedly")
                failed = BackendFailed("the server failed on this request")
                refuse(exchange, failed, trail.refused(failed, serving.spec.name))

        leave = self._large_json.submit(Task.REQUEST, [body], length, converted, deadline=ctx.deadline)
        exchange.body = b""  # not needed any more once it is converted

        def left() -> None:
            leave()
            trail.refused(CallerLeft(), serving.spec.name)

        return left

    def _answer(
        self,
        exchange: Exchange,
        completion: Completion,
        response: InferResponse,
        request: InferRequest,
        plan: HeadPlan,
        trail: Trail,
    ) -> None:
        model = response.model_name
        try:
            if sum([output.array.size for output in response.outputs]) > MAX_NUMBERS and _is_numbers(response, request):
                self._answer_large(exchange, completion, response, plan, trail)
                return
            parts, json_length = encode_response(response, request)
        except (InferenceError, BadMessage) as error:
            completion.error = as_inference_error(error)
            refuse(exchange, completion.error, trail.ended(completion, model))
            return
        self._send(exchange, completion, model, parts, json_length, plan, trail)

    def _answer_large(
        self, exchange: Exchange, completion: Completion, response: InferResponse, plan: HeadPlan, trail: Trail
    ) -> None:
        """Another process writes the numbers. Raises BadMessage, QueueFull."""
        model = response.model_name

        def converted(result: Converted | InferenceError) -> None:
            if isinstance(result, InferenceError):
                completion.error = result
                refuse(exchange, result, trail.ended(completion, model))
            else:
                self._send(exchange, completion, model, result[0], None, plan, trail)

        parts, length = encode_response(response, InferRequest(model_name=model, binary_default=True))
        leave = self._large_json.submit(Task.RESPONSE, parts, length, converted, deadline=trail.deadline)

        def left() -> None:
            leave()
            completion.error = CallerLeft()
            trail.left(completion)

        exchange.on_abort = left

    def _send(
        self,
        exchange: Exchange,
        completion: Completion,
        model: str,
        parts: Sequence[bytes | memoryview],
        json_length: int | None,
        plan: HeadPlan,
        trail: Trail,
    ) -> None:
        headers = trail.ended(completion, model)
        if json_length is None:
            headers.append(JSON)
        else:
            headers.append(BINARY)
            headers.append((HEADER_LENGTH, str(json_length)))
        encoding = negotiate(plan.accept_encoding) if plan.accept_encoding else ""
        if not encoding or sum([len(part) for part in parts]) < MIN_BYTES:
            exchange.respond(200, headers, parts)
            return
        headers += (("content-encoding", encoding), ("vary", "accept-encoding"))
        self._encodings.compress(parts, encoding, lambda packed: exchange.respond(200, headers, packed))


def _is_numbers(response: InferResponse, request: InferRequest) -> bool:
    """Whether all of an answer is JSON, and none of it text."""
    binary = [output.binary for output in request.outputs] if request.outputs else [request.binary_default]
    return not any(binary) and all(output.datatype != "BYTES" for output in response.outputs)


def _answers(serving: ServingModel, request: InferRequest) -> tuple[list[int], _Answers] | None:
    """Which of the model's outputs are asked for, and who writes the answers; None if only the full encoder can."""
    order = [output.name for output in serving.spec.outputs]
    if request.outputs is None:
        picks = list(range(len(order)))
        binary = {request.binary_default}
    else:
        picks = [order.index(output.name) for output in request.outputs]
        binary = {output.binary for output in request.outputs}
        if any(output.classification for output in request.outputs):
            return None
    outputs = [(serving.spec.outputs[pick].name, serving.spec.outputs[pick].datatype) for pick in picks]
    kind = BinaryAnswers if binary == {True} else JsonAnswers
    if len(binary) != 1 or not kind.fits(outputs):
        return None
    return picks, kind(serving.spec.name, serving.version, request.id, outputs)
