"""`infer` over HTTP.

The text of a request is recognised if one like it, except for the numbers of its one input, was decoded and checked
before (`Templates`). A recognised request needs no full decoding: it fits the model, and its answer, too, differs only
in numbers. Any other text goes through the full codec.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer, Call
from oriel_inference.catalog import ServingModel
from oriel_inference.dataplane.dataplane import Completion, positions, respond
from oriel_inference.errors import CallerLeft, InferenceError, InvalidRequest, NotLoaded
from oriel_inference.fitting import Fitted
from oriel_inference.servers.encoding import MIN_BYTES, Encodings, negotiate
from oriel_inference.servers.http_call import JSON, HeadPlan, begin, check_expanded, refuse, wait
from oriel_inference.servers.large_json import Converted, LargeJson, Task, Then
from oriel_inference.servers.request_record import RequestRecord
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_wire.context import TENANT, CallContext
from oriel_wire.engine.buffered import Body, Exchange
from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.answers import MAX_NUMBERS, BinaryAnswers, JsonAnswers
from oriel_wire.v2.http import decode_request, encode_response, parse_header_length
from oriel_wire.v2.messages import Array, InferRequest, InferResponse
from oriel_wire.v2.recognise import Template

BINARY = ("content-type", "application/octet-stream")
HEADER_LENGTH = "inference-header-content-length"
_JSON_LINE = f"{JSON[0]}: {JSON[1]}\r\n"
_BINARY_LINE = f"{BINARY[0]}: {BINARY[1]}\r\n"

_Answers = JsonAnswers | BinaryAnswers


class _Recognised:
    """The facts shared by all requests of one text.

    fitted: the checked request, without its inputs. picks: positions of the requested outputs. answers: writes them.
    """

    __slots__ = ("answers", "fitted", "picks")

    def __init__(self, fitted: Fitted, picks: list[int], answers: _Answers) -> None:
        self.fitted = replace(fitted, inputs={})
        self.picks = picks
        self.answers = answers


class HttpInfer:
    """Starts inferences and answers them."""

    def __init__(self, surface: Surface, encodings: Encodings, large_json: LargeJson, mime: str) -> None:
        """mime: see `CloudPaths`; "" for bodies as v2 has them."""
        self.mime = mime
        self.length_line = f"content-type: {mime}" if mime else f"{_BINARY_LINE}{HEADER_LENGTH}: "
        self.surface = surface
        self.encodings = encodings
        self.large_json = large_json

    def start(self, exchange: Exchange, model: str, version: str, body: Body) -> None:
        """Answers one request, now or when its batch has run."""
        plan, ctx, record = begin(self.surface, exchange)
        if self.mime:
            before, found, length = (exchange.head.get("content-type") or "").partition(self.mime)
            plan.header_length = (before or length) if found else None
        _HttpCall(self, exchange, plan, ctx, record).start(model, version, body)


class _HttpCall:
    """One request on its way to the batcher and back. One of the methods up to `convert_and_run` gives it to the
    batcher; `InferenceError` or `BadMessage` from it means that it did not. `_finish` is its only way out.

    The exchange knows this object through `on_abort`, so whatever ends the request clears that: a circle of references
    would keep the body and the tensors in memory until the garbage collector runs.
    """

    __slots__ = (
        "_call",
        "_completion",
        "_ctx",
        "_exchange",
        "_front",
        "_plan",
        "_record",
        "_recognised",
        "_request",
        "_serving",
    )

    _call: Call
    _completion: Completion
    _recognised: _Recognised
    _request: InferRequest
    _serving: ServingModel

    def __init__(
        self,
        front: HttpInfer,
        exchange: Exchange,
        plan: HeadPlan,
        ctx: CallContext,
        record: RequestRecord,
    ) -> None:
        self._front = front
        self._exchange = exchange
        self._plan = plan
        self._ctx = ctx
        self._record = record

    def start(self, model: str, version: str, body: Body) -> None:
        """Gives the request to its model, once that is loaded, or refuses it."""
        surface, plan = self._front.surface, self._plan
        try:
            try:
                self._serving = surface.catalog.get(model, version)
            except NotLoaded:
                again = partial(self.start, model, version, body)
                wait(surface, self._exchange, model, self._record, len(body), again)
                return
            length = None if plan.header_length is None else parse_header_length(plan.header_length)
            forwards = surface.http_headers is not None and self._serving.wants_source
            found = None if forwards else self._serving.templates.find(body, length)
            if found is not None:
                self.run_recognised(*found, len(body))
            else:
                try:
                    self.run(body, length)
                except TooLarge:
                    self.convert_and_run(body, length)
        except Exception as failure:
            self._refuse(failure, model)

    def _refuse(self, failure: Exception, model: str) -> None:
        error = as_inference_error(failure)
        refuse(self._exchange, error, self._record.refused(error, model))

    # Recognised requests ----------------------------------------------------------------------------------------

    def run_recognised(self, template: Template, inputs: Mapping[str, Array], size: int) -> None:
        """Queues a request whose text was recognised. inputs: its numbers. size: bytes of the body."""
        serving = self._serving
        dataplane = self._front.surface.dataplane
        self._recognised = recognised = template.note
        self._request = template.request
        self._call = dataplane.call(
            serving,
            recognised.fitted,
            self._ctx,
            template.request,
            size_bytes=size,
            finish=self._answer_recognised,
        )
        self._call.inputs = inputs
        self._exchange.on_abort = self._caller_left
        serving.batcher.submit(self._call)

    def _answer_recognised(self, result: Answer | InferenceError) -> None:
        serving, recognised = self._serving, self._recognised
        if isinstance(result, InferenceError):
            self._finish(Completion(self._call.arrived_s, serving, recognised.fitted.rows, error=result))
            return
        completion = Completion(self._call.arrived_s, serving, recognised.fitted.rows, answer=result)
        outputs = result.outputs
        plain = type(outputs) is not Outputs or outputs.plain
        if plain and not (self._plan.accept_encoding and negotiate(self._plan.accept_encoding)):
            encoded = recognised.answers.encode([outputs[pick] for pick in recognised.picks])
            if encoded is not None:
                body, length = encoded
                lines = self._record.finished_as_lines(completion, result, len(body))
                lines += _JSON_LINE if length is None else f"{self._front.length_line}{length}\r\n"
                self._exchange.respond(200, lines, body)
                return
        completion.response = respond(serving, self._request.outputs, self._request.id, outputs)
        self._finish(completion)

    def _caller_left(self) -> None:
        if self._serving.batcher.caller_left(self._call):
            rows = self._recognised.fitted.rows
            self._record.caller_left(Completion(self._call.arrived_s, self._serving, rows, error=CallerLeft()))

    # Other requests ---------------------------------------------------------------------------------------------

    def run(self, body: Body, length: int | None) -> None:
        """Decodes and queues a request. length: bytes of the JSON part, None if all of it is JSON.

        Raises TooLarge for more JSON than the event loop has time for.
        """
        serving = self._serving
        surface, size = self._front.surface, len(body)
        shared = surface.shared_inputs(of_tenant=TENANT in self._exchange.head.by_name())
        request = decode_request(serving.spec.name, serving.version, body, length, read=shared)
        if shared is not None:
            shared.check(request.outputs)
            size += shared.size_bytes
        forwards = surface.http_headers is not None and serving.wants_source
        if forwards and surface.http_headers is not None:
            request.parameters |= surface.http_headers.of_head(self._exchange.head)
        self._request = replace(request, inputs=[])  # the answer does not need the numbers
        self._exchange.on_abort = surface.dataplane.infer(
            request, self._ctx, size_bytes=size, reply=self._finish, on_caller_left=self._record.caller_left
        )
        # The request fits the model: `infer` would have refused it otherwise.
        if serving.recognises and not forwards and (answers := _answers(serving, request)) is not None:
            template = serving.templates.learn(body, length, request)
            if template is not None:
                template.note = _Recognised(serving.fitter.fit(request), *answers)

    def _convert(
        self, task: Task, parts: Sequence[bytes | memoryview], length: int | None, then: Then
    ) -> Callable[[], None]:
        ctx, model = self._ctx, self._serving.spec.name
        return self._front.large_json.submit(
            task, parts, length, then, deadline=ctx.deadline, band=ctx.band, tenant=ctx.tenant, model=model
        )

    def convert_and_run(self, body: Body, length: int | None) -> None:
        """Has a helper process turn large JSON into binary data, then runs the request.

        Raises QueueFull, RequestTooLarge.
        """
        check_expanded(self._exchange, len(body) if length is None else length)
        cancel = self._convert(Task.REQUEST, [body], length, self._run_converted)
        self._exchange.body = b""  # not needed any more once it is converted
        self._serving.holds += 1  # it must not be taken out of memory meanwhile

        def caller_left() -> None:
            cancel()
            self._serving.holds -= 1
            self._record.refused(CallerLeft(), self._serving.spec.name)

        self._exchange.on_abort = caller_left

    def _run_converted(self, result: Converted | InferenceError) -> None:
        self._serving.holds -= 1
        try:
            if isinstance(result, InferenceError):
                raise result
            (binary,), length = result
            self.run(binary, length)
        except Exception as failure:
            self._refuse(failure, self._serving.spec.name)

    # Answering --------------------------------------------------------------------------------------------------

    def _finish(self, completion: Completion) -> None:
        """Answers with the completion's response, or with its error, or with the error met while encoding."""
        response = completion.response
        if response is not None:
            try:
                if (regions := self._front.surface.regions) is not None:
                    regions.write(response, self._request.outputs)
                size = sum([output.array.size for output in response.outputs])
                if size > MAX_NUMBERS and _is_numbers(response, self._request):
                    self._encode_elsewhere(completion, response)
                    return
                self._send(completion, *encode_response(response, self._request))
                return
            except (InferenceError, BadMessage) as failed:
                completion.error = as_inference_error(failed)
        assert completion.error is not None
        refuse(self._exchange, completion.error, self._record.finished(completion, self._serving.spec.name))

    def _encode_elsewhere(self, completion: Completion, response: InferResponse) -> None:
        """Has a helper process write the numbers of a large JSON answer. Raises BadMessage, InferenceError."""
        if response.in_shared_memory:
            raise InvalidRequest("with outputs in shared memory, JSON cannot hold so many numbers: ask for binary data")
        self._completion = completion
        request = InferRequest(model_name=response.model_name, binary_default=True)
        parts, length = encode_response(response, request)
        cancel = self._convert(Task.RESPONSE, parts, length, self._finish_encoded)

        def caller_left() -> None:
            cancel()
            completion.error = CallerLeft()
            self._record.caller_left(completion)

        self._exchange.on_abort = caller_left

    def _finish_encoded(self, result: Converted | InferenceError) -> None:
        completion = self._completion
        if isinstance(result, InferenceError):
            completion.response, completion.error = None, result
            self._finish(completion)
        else:
            self._send(completion, result[0], None)

    def _send(self, completion: Completion, parts: Sequence[bytes | memoryview], json_length: int | None) -> None:
        exchange = self._exchange
        exchange.on_abort = None
        size = sum([len(part) for part in parts])
        headers = self._record.finished(completion, self._serving.spec.name, size)
        if json_length is None:
            headers.append(JSON)
        elif self._front.mime:
            headers.append((BINARY[0], f"{self._front.mime}{json_length}"))
        else:
            headers.append(BINARY)
            headers.append((HEADER_LENGTH, str(json_length)))
        encoding = negotiate(self._plan.accept_encoding) if self._plan.accept_encoding else ""
        if not encoding or size < MIN_BYTES:
            exchange.respond(200, headers, parts)
            return
        headers += (("content-encoding", encoding), ("vary", "accept-encoding"))
        self._front.encodings.compress(parts, encoding, lambda packed: exchange.respond(200, headers, packed))


def _is_numbers(response: InferResponse, request: InferRequest) -> bool:
    """Returns whether the whole answer is JSON, and none of its tensors is text."""
    binary = [output.binary for output in request.outputs] if request.outputs else [request.binary_default]
    return not any(binary) and all(output.datatype != "BYTES" for output in response.outputs)


def _answers(serving: ServingModel, request: InferRequest) -> tuple[list[int], _Answers] | None:
    """Returns the positions of the requested outputs and the encoder of the answers; None if only the full encoder can
    write them.
    """
    picks = positions(serving, request)
    if picks is None:
        return None
    binary = {request.binary_default}
    if request.outputs is not None:
        binary = {output.binary for output in request.outputs}
    outputs = [(serving.spec.outputs[pick].name, serving.spec.outputs[pick].datatype) for pick in picks]
    kind = BinaryAnswers if binary == {True} else JsonAnswers
    if len(binary) != 1 or not kind.fits(outputs):
        return None
    return picks, kind(serving.spec.name, serving.version, request.id, outputs)
