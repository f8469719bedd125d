"""The generate extension: plain JSON in, one JSON object (`generate`) or a stream of events (`generate_stream`) out.

Top-level members, and those of `parameters`, become inputs where the model has one of that name, and parameters
otherwise. Events are `data: <JSON>`. The first event decides the status: a failure before it is a plain refusal, one
after it is one more event with `error`. A client that is slow to read delays a decoupled model, not the server.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import InferenceError, NotLoaded, NotSupported
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_inference.sequences.scan import is_streamed
from oriel_inference.servers.http_call import JSON, begin, check_expanded, json_object, refuse, wait
from oriel_inference.servers.request_record import RequestRecord
from oriel_inference.servers.statuses import as_inference_error, error_body
from oriel_inference.servers.surface import Surface
from oriel_wire.context import COST, COST_US, CallContext
from oriel_wire.engine.buffered import Exchange
from oriel_wire.errors import BadMessage
from oriel_wire.h1.response import UNBUFFERED
from oriel_wire.v2.datatypes import lookup, quoted
from oriel_wire.v2.jsondata import decode_data, encode_data
from oriel_wire.v2.messages import MAX_PARAMETERS, InferRequest, InferResponse, Tensor, too_many

MAX_ELEMENTS = 1 << 18  # more would block the loop: such data belongs in binary tensors
_EVENTS = (("content-type", "text/event-stream; charset=utf-8"), *UNBUFFERED)


def generate(surface: Surface, exchange: Exchange, model: str, version: str, body: bytes, *, stream: bool) -> None:
    """Answer one request, now or when the model has answered."""
    _, ctx, record = begin(surface, exchange)
    _start(surface, exchange, (model, version), body, ctx, record, stream)


def _start(
    surface: Surface,
    exchange: Exchange,
    named: tuple[str, str],
    body: bytes,
    ctx: CallContext,
    record: RequestRecord,
    stream: bool,
) -> None:
    model, version = named
    try:
        try:
            serving = surface.catalog.get(model, version)
        except NotLoaded:
            again = partial(_start, surface, exchange, named, body, ctx, record, stream)
            wait(surface, exchange, model, record, len(body), again)
            return
        check_expanded(exchange, len(body))
        request = decode_generate(model, version, body, serving.spec)
        if surface.http_headers is not None:
            request.parameters |= surface.http_headers.of_head(exchange.head)
        call = _Events(exchange, record, model) if stream else _Single(exchange, record, model)
        call.caller_left = surface.dataplane.infer(
            request,
            ctx,
            size_bytes=len(body),
            reply=call.reply,
            on_caller_left=record.caller_left,
            emit=call.emit if is_streamed(serving.spec, request.parameters) else None,
        )
    except Exception as failure:
        error = as_inference_error(failure)
        refuse(exchange, error, record.refused(error, model))
        return
    exchange.on_abort = call.caller_left


def decode_generate(model: str, version: str, body: bytes, spec: ModelSpec) -> InferRequest:
    """Decode the request for a model. Raises BadMessage or InvalidRequest."""
    document = json_object(body)
    identifier = document.pop("id", None) or ""
    if not isinstance(identifier, str):
        raise BadMessage("id must be text")
    known = {tensor.name: tensor for tensor in spec.inputs}
    nested = {} if "parameters" in known else document.pop("parameters", None) or {}
    if not isinstance(nested, dict):
        raise BadMessage("parameters must be an object")
    for found, what in ((document, "the body: members"), (nested, "parameters")):
        if len(found) > MAX_PARAMETERS:
            raise too_many(found, MAX_PARAMETERS, what)
    request = InferRequest(model_name=model, model_version=version, id=identifier)
    for name, value in (*document.items(), *nested.items()):
        if name in known:
            if any(tensor.name == name for tensor in request.inputs):
                raise BadMessage(f"input {quoted(name)} is given more than once")
            request.inputs.append(_tensor(known[name], value, batched=spec.batched))
        elif name.startswith("triton_"):
            raise BadMessage(f"parameter {quoted(name)}: names that start with triton_ are reserved")
        elif not isinstance(value, str | bool | int | float):
            raise BadMessage(
                f"{quoted(name)} is not an input of the model, and a parameter must be text, number or boolean"
            )
        else:
            request.parameters[name] = value
    return request


def encode_generate(response: InferResponse) -> bytes:
    """Encode a response as one JSON object: identity, and every output as a value, or as a flat list unless it has
    exactly one element.
    """
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version, **response.parameters}
    for output in response.outputs:
        what = f"output {quoted(output.name)}"
        data = encode_data(output.array, lookup(output.datatype, what), output.shape, what)
        if output.array.size == 1:
            document[output.name] = msgspec.Raw(bytes(data)[1:-1]) if isinstance(data, msgspec.Raw) else data[0]
        else:
            document[output.name] = data
    return msgspec.json.encode(document)


def _tensor(known: TensorSpec, value: Any, *, batched: bool) -> Tensor:
    what = f"input {quoted(known.name)}"
    values = value if isinstance(value, list) else [value]
    nested: list[int] = []
    level: Any = values
    while isinstance(level, list):
        nested.append(len(level))
        level = level[0] if level else None
    if math.prod(nested) > MAX_ELEMENTS:
        raise BadMessage(f"{what}: more than {MAX_ELEMENTS} elements, send them as binary data to infer")
    shape = (1, *known.dims) if batched else known.dims
    if len(nested) == len(shape) > 1:
        shape = tuple(nested)
    elif len(nested) > 1:
        shape = (1, *nested) if batched else tuple(nested)
    else:
        fixed = 1
        for dim in shape:
            fixed *= 1 if dim < 0 else dim
        variable = [axis for axis, dim in enumerate(shape) if dim < 0]
        filled = [1 if dim < 0 else dim for dim in shape]
        if variable:
            filled[variable[-1]] = nested[0] // max(1, fixed)
        shape = tuple(filled)
    return Tensor(known.name, known.datatype, shape, decode_data(values, lookup(known.datatype, what), shape, what))


class _Single:
    """A call of `generate`: exactly one response, or a refusal."""

    def __init__(self, exchange: Exchange, record: RequestRecord, model: str) -> None:
        self._exchange = exchange
        self._record = record
        self._model = model
        self._response: InferResponse | None = None
        self.caller_left: Callable[[], None] | None = None

    def emit(self, response: InferResponse, consumed: Callable[[], None], last: bool) -> None:
        consumed()
        if self._response is not None:
            raise NotSupported(f"model {self._model!r} returns more than one response, use generate_stream")
        self._response = response

    def reply(self, completion: Completion) -> None:
        response = completion.response or self._response
        body = b""
        if completion.error is None and response is None:
            completion.error = NotSupported(f"model {self._model!r} returned no response, use generate_stream")
        elif completion.error is None and response is not None:
            try:
                body = encode_generate(response)
            except BadMessage as bad:
                completion.error = as_inference_error(bad)
        headers = self._record.finished(completion, self._model, len(body))
        if completion.error is None:
            self._exchange.respond(200, [*headers, JSON], body)
        else:
            refuse(self._exchange, completion.error, headers)


class _Events:
    """A call of `generate_stream`: every response is sent as it comes."""

    def __init__(self, exchange: Exchange, record: RequestRecord, model: str) -> None:
        self._exchange = exchange
        self._record = record
        self._model = model
        self._unread: list[Callable[[], None]] = []
        self._sent_bytes = 0
        self.caller_left: Callable[[], None] | None = None
        exchange.on_writable = self._caught_up

    def emit(self, response: InferResponse, consumed: Callable[[], None], last: bool) -> None:
        try:
            data = encode_generate(response)
        except BadMessage as bad:
            raise as_inference_error(bad) from bad
        self._send(data)
        if self._exchange.writable:
            consumed()
        else:
            self._unread.append(consumed)

    def reply(self, completion: Completion) -> None:
        if completion.error is None and completion.response is not None:
            try:
                self.emit(completion.response, lambda: None, True)
            except InferenceError as failed:
                completion.error = failed
        headers = self._record.finished(completion, self._model, self._sent_bytes)
        error = completion.error
        if error is not None:
            if not self._exchange.started:
                refuse(self._exchange, error, headers)
                return
            self._send(error_body(error.message, error.outcome, headers[0][1]))
        self._start()
        self._exchange.end("".join([f"{name}: {value}\r\n" for name, value in headers if name in (COST_US, COST)]))

    def _send(self, data: bytes) -> None:
        self._start()
        self._sent_bytes += len(data)
        self._exchange.write(b"data: " + data + b"\n\n")

    def _start(self) -> None:
        if not self._exchange.started:
            self._exchange.start(200, [*self._record.identity(), *self._record.announced, *_EVENTS])

    def _caught_up(self) -> None:
        unread, self._unread = self._unread, []
        for consumed in unread:
            consumed()
