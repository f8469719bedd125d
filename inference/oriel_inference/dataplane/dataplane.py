"""Leads a decoded v2 request to its answer: model, fit, deadline, batcher, response. It knows no protocol.

`infer` is synchronous and never waits: the reply comes later on the loop, or immediately if the request is refused.
There is no task per request.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer, Call, Reply
from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.errors import CallerLeft, InferenceError, InvalidRequest, NotSupported
from oriel_inference.fitting import Fitted, RequestFitter, ScanFitter, check_parameters, not_scannable
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_inference.sequences.scan import PARAMETER, is_scan, is_streamed
from oriel_wire.context import CallContext
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.messages import Array, InferRequest, InferResponse, RequestedOutput, Tensor

_log = logging.getLogger(__name__)

Emit = Callable[[InferResponse, Callable[[], None], bool], None]


@dataclass(slots=True, eq=False, repr=False)
class Completion:
    """The outcome of a call.

    answer: set on success, else `error` is set.
    response: set on success, unless the responses came one by one.
    queued_s: the time when the call was queued.
    serving: the version that it was queued for.
    rows: rows of the call.
    """

    queued_s: float
    serving: ServingModel
    rows: int
    _: KW_ONLY
    response: InferResponse | None = None
    answer: Answer | None = None
    error: InferenceError | None = None


def _nobody(_: Completion) -> None:
    pass


class _Inference:
    """An inference in progress: what its answer needs, and no more. Thousands may wait, and the garbage collector walks
    each of their objects, which have left the caches of the processor when their turn comes.

    requested: the requested outputs; None for all.
    spec: the tensors of the answer. streamed: its responses come one by one.
    """

    __slots__ = (
        "call",
        "on_caller_left",
        "queued_s",
        "reply",
        "request_id",
        "requested",
        "rows",
        "serving",
        "spec",
        "streamed",
    )

    call: Call
    spec: ModelSpec
    streamed: bool

    def __init__(
        self,
        serving: ServingModel,
        request: InferRequest,
        rows: int,
        queued_s: float,
        reply: Callable[[Completion], None],
        on_caller_left: Callable[[Completion], None],
    ) -> None:
        self.serving = serving
        self.requested = request.outputs
        self.request_id = request.id
        self.rows = rows
        self.queued_s = queued_s
        self.reply = reply
        self.on_caller_left = on_caller_left

    def finish(self, result: Answer | InferenceError) -> None:
        """Take the batcher's result and call the reply."""
        error: InferenceError | None = None
        response: InferResponse | None = None
        answer: Answer | None = None
        if isinstance(result, InferenceError):
            error = result
        elif self.streamed:
            answer = result
        else:
            try:
                response = respond(self.serving, self.requested, self.request_id, result.outputs, self.spec)
                answer = result
            except InferenceError as refusal:
                error = refusal
        self.reply(Completion(self.queued_s, self.serving, self.rows, response=response, answer=answer, error=error))
        self.reply = self.on_caller_left = _nobody  # they refer to the exchange, which refers to `caller_left`: a cycle

    def caller_left(self) -> None:
        """Remove the call, because its caller went away."""
        if self.serving.batcher.caller_left(self.call):
            self.on_caller_left(Completion(self.queued_s, self.serving, self.rows, error=CallerLeft()))
            self.reply = self.on_caller_left = _nobody


class Dataplane:
    """Starts inferences. now: the clock of the batchers."""

    def __init__(self, catalog: Catalog, now: Callable[[], float]) -> None:
        self._catalog = catalog
        self.now = now

    def parts(self, model: str, version: str) -> set[str]:
        """Return the models of an ensemble's steps, and of their steps if they are ensembles; none for what does not
        serve.
        """
        found: set[str] = set()
        ahead = [(model, version)]
        while ahead:
            try:
                steps = self._catalog.get(*ahead.pop()).spec.steps
            except InferenceError:
                continue
            ahead += [(step.model, str(step.version or "")) for step in steps if step.model not in found]
            found.update(step.model for step in steps)
        return found

    def infer(
        self,
        request: InferRequest,
        ctx: CallContext,
        *,
        size_bytes: int,
        reply: Callable[[Completion], None],
        on_caller_left: Callable[[Completion], None],
        emit: Emit | None = None,
    ) -> Callable[[], None]:
        """Start one inference.

        size_bytes: memory that the request occupies while it waits.
        reply: called with the outcome.
        on_caller_left: called instead of `reply` when the caller leaves.
        emit: receives the responses of a decoupled model, each with a function to call once it is written, and whether
        the model marked it as the last; `reply` then has no response.

        Returns the function to call when the caller leaves. Raises InferenceError or BadMessage; then neither `reply`
        nor `on_caller_left` is called.
        """
        serving = self._catalog.get(request.model_name, request.model_version)
        spec = serving.spec
        streamed = is_streamed(spec, request.parameters)
        if streamed and emit is None:
            why = "is decoupled, its" if spec.decoupled else "is asked for a stream, its"
            raise NotSupported(f"model {spec.name!r} {why} responses come on ModelStreamInfer or generate_stream")
        now = self.now()
        fitter: RequestFitter | ScanFitter = serving.fitter
        # Python models may have a parameter of this name.
        named = PARAMETER in request.parameters and (spec.backend != "python" or spec.sequences is not None)
        if named and is_scan(request.parameters):
            if serving.scans is None:
                raise not_scannable(spec.name)
            fitter, spec = serving.scans, serving.scans.spec
        fitted = fitter.fit(request)
        if serving.wants_source:
            check_parameters(request)

        inference = _Inference(serving, request, fitted.rows, now, reply, on_caller_left)
        inference.call = call = self.call(
            serving,
            fitted,
            ctx,
            request,
            size_bytes=size_bytes,
            finish=inference.finish,
        )
        inference.spec, inference.streamed = spec, streamed
        if streamed and emit is not None:
            call.emit = _relayed(serving, request, emit, spec)
        serving.batcher.submit(call)
        return inference.caller_left

    def call(
        self,
        serving: ServingModel,
        fitted: Fitted,
        ctx: CallContext,
        request: InferRequest,
        *,
        size_bytes: int,
        finish: Reply,
    ) -> Call:
        """Make the batcher's call of a request that fits its model.

        size_bytes: memory that the request occupies while it waits.
        finish: called with the answer or the error.
        request: the client's request; its inputs may be missing.
        """
        queued_s = self.now()
        policy = serving.spec.queue.of(fitted.level)
        deadline, give_up_s = policy.limits(queued_s, ctx.deadline, fitted.timeout_s)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "request %s (id %s): for model %s version %s, %d rows, %d wait there, %.1f ms left",
                ctx.request_id,
                quoted(request.id),
                serving.spec.name,
                serving.version,
                fitted.rows,
                serving.batcher.pending,
                (deadline - queued_s) * 1e3,
            )
        return Call(
            inputs=fitted.inputs,
            rows=fitted.rows,
            signature=fitted.signature,
            arrived_s=queued_s,
            deadline=deadline,
            give_up_s=give_up_s,
            delays=policy.delays,
            reply=finish,
            band=ctx.band,
            tenant=ctx.tenant,
            size_bytes=size_bytes,
            level=fitted.level,
            source=(request, ctx) if serving.wants_source else None,
            request_id=ctx.request_id,
            caller=ctx.tenant or ctx.connection,
            usage=serving.batcher.accounts.of(ctx),
        )


def _relayed(
    serving: ServingModel, request: InferRequest, emit: Emit, spec: ModelSpec
) -> Callable[[Sequence[Array], Callable[[], None]], None]:
    requested, request_id = request.outputs, request.id

    def relay(outputs: Sequence[Array], consumed: Callable[[], None]) -> None:
        emit(
            respond(serving, requested, request_id, outputs, spec), consumed, type(outputs) is Outputs and outputs.last
        )

    return relay


def respond(
    serving: ServingModel,
    requested: Sequence[RequestedOutput] | None,
    request_id: str,
    found: Sequence[Array],
    spec: ModelSpec | None = None,
) -> InferResponse:
    """Build the response with the requested outputs (None: all) in that order. A Python model may leave some out, and
    give others another datatype than its configuration.

    spec: the tensors of `found`, if they are not those of the model.
    """
    spec = spec or serving.spec
    made = spec.outputs
    if type(found) is Outputs and found.datatypes:
        given = found.datatypes
        made = tuple([replace(each, datatype=given.get(number, each.datatype)) for number, each in enumerate(made)])
    if requested is None:
        outputs = [
            Tensor(known.name, known.datatype, array.shape, array)
            for known, array in zip(made, found, strict=True)
            if array is not None
        ]
    else:
        arrays = {known.name: (known, array) for known, array in zip(made, found, strict=True)}
        outputs = []
        for wanted in requested:
            known, array = arrays[wanted.name]
            if array is None:
                continue
            datatype = known.datatype
            if wanted.classification:
                array = top_classes(array, known, wanted.classification, batched=spec.batched)
                datatype = "BYTES"
            outputs.append(Tensor(known.name, datatype, array.shape, array))
    response = InferResponse(model_name=spec.name, model_version=serving.version, id=request_id, outputs=outputs)
    if type(found) is Outputs:
        response.parameters = found.parameters
    return response


def positions(serving: ServingModel, request: InferRequest) -> list[int] | None:
    """Return the positions of the requested outputs; None if not all of them are in the answer as the model made them:
    classes, shared memory.
    """
    order = [output.name for output in serving.spec.outputs]
    if request.outputs is None:
        return list(range(len(order)))
    if any(output.classification or output.shared is not None for output in request.outputs):
        return None
    return [order.index(output.name) for output in request.outputs]


def top_classes(array: Array, spec: TensorSpec, count: int, *, batched: bool) -> Array:
    """Return the `count` largest values, largest first, as `value:index` or `value:index:label` (BYTES).

    array: [rows, ...] -> [rows, min(count, values per row)]; without a batch dimension, or of a Python model that left
    it out, [...] -> [classes].
    Raises InvalidRequest for an output whose elements are not numbers.
    """
    if array.dtype.kind not in "fiu" or spec.datatype == "BF16":
        raise InvalidRequest(f"output {spec.name[:64]!r} has datatype {spec.datatype}, classes need numbers")
    batched = batched and array.ndim > 0
    rows = array.reshape(len(array), math.prod(array.shape[1:])) if batched else array.reshape(1, array.size)
    count = min(count, rows.shape[1])
    # A stable sort, so that equal values keep the order of their indexes.
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    result = np.empty(order.shape, dtype=object)
    for row, indexes in enumerate(order):
        result[row] = [_class(rows[row, index], int(index), spec.labels) for index in indexes]
    return result if batched else result[0]


def _class(value: np.generic, index: int, labels: tuple[str, ...]) -> bytes:
    text = f"{value:f}:{index}" if isinstance(value, np.floating) else f"{value}:{index}"
    return f"{text}:{labels[index]}".encode() if index < len(labels) else text.encode()
