"""Makes the spans of one request of the inference server. This happens in the thread that sends them, and only for
requests whose trace is kept.
"""

from typing import NamedTuple

from oriel_inference.batching.call import Answer, BatchTimes, Decoding
from oriel_inference.errors import Outcome
from oriel_inference.servers.statuses import status_number
from oriel_wire.context import CallContext
from oriel_wire.observe.semantics import (
    GEN_AI,
    GRPC_SERVICE,
    NOWHERE,
    Attributes,
    grpc_code,
    grpc_failed,
    grpc_server,
    http_server,
)
from oriel_wire.observe.trace import Span, TraceContext, internal_span, server_span

__all__ = ["Ended", "Requested", "Run", "Step", "keeps_alone", "run_of", "spans_of"]


class Requested(NamedTuple):
    """The request as its caller named it. path: over HTTP. served_at: address and port of the listener, over gRPC."""

    protocol: str
    method: str
    path: str = ""
    served_at: tuple[str, int] = NOWHERE


# The server keeps the trace of a request that failed here, came too late or was left, even if nobody asks for it.
_ALONE = frozenset({Outcome.CALLER_LEFT})


class Step(NamedTuple):
    """One step of an ensemble."""

    model: str
    version: str
    queued_s: float
    run: "Run"


class Run(NamedTuple):
    """The times and the device time of one request in its batch, without its arrays."""

    times: BatchTimes
    device_us: int
    steps: tuple[Step, ...]
    decoding: Decoding | None = None


def run_of(answer: Answer) -> Run:
    """Return what is needed of an answer to trace it."""
    steps = tuple([Step(step.model, step.version, step.queued_s, run_of(step.answer)) for step in answer.steps])
    return Run(answer.times, answer.device_ns // 1000, steps, answer.decoding)


def keeps_alone(outcome: Outcome) -> bool:
    """Return whether the server keeps the trace of a request that ended like this without being asked."""
    return outcome in _ALONE or status_number(outcome, "http") >= 500


class Ended:
    """A request that has ended, as far as its spans tell of it; its arrays are not kept. Times are monotonic seconds.

    own: the position of its span. parent_id: the caller's span, 0 if the trace starts here.
    outcome: the outcome of a refusal, None for an answer.
    queued_s: the time when it came to the queue, 0.0 if it did not.
    run: the batch that ran for it; None if there was none.
    """

    __slots__ = (
        *("ctx", "ended_s", "model", "outcome", "own", "parent_id", "queued_s", "received_s", "requested", "run"),
        "version",
    )

    def __init__(
        self,
        ctx: CallContext,
        requested: Requested,
        own: TraceContext,
        parent_id: int,
        received_s: float,
        ended_s: float,
    ) -> None:
        self.ctx = ctx
        self.requested = requested
        self.own = own
        self.parent_id = parent_id
        self.received_s = received_s
        self.ended_s = ended_s
        self.model = self.version = ""
        self.outcome: Outcome | None = None
        self.queued_s = 0.0
        self.run: Run | None = None


def spans_of(ended: Ended) -> list[Span]:
    """Return the SERVER span of a request, and those of its time in the queue, of its batch and of an ensemble's
    steps.
    """
    own, outcome, queued_s, run, request = ended.own, ended.outcome, ended.queued_s, ended.run, ended.requested
    number = status_number(outcome or Outcome.OK, request.protocol)
    if request.protocol == "http":
        name, attributes = http_server(request.method, "http", request.path, "1.1", number)
        failed = number >= 500
    else:
        name = f"{GRPC_SERVICE}/{request.method}"
        status = grpc_code(number)
        attributes = grpc_server(name, status, request.served_at)
        failed = grpc_failed(status)
    attributes["oriel.request_id"] = ended.ctx.request_id
    if ended.model:
        attributes["oriel.model"] = ended.model
    if ended.version:
        attributes["oriel.model.version"] = ended.version
    if ended.ctx.tier:
        attributes["oriel.tier"] = ended.ctx.tier
    if outcome is not None:
        attributes["oriel.outcome"] = outcome.value
        if failed:
            attributes["error.type"] = outcome.value
    spans = [server_span(name, own, ended.parent_id, (ended.received_s, ended.ended_s), attributes, failed)]
    if not queued_s:
        return spans
    if run is None:
        spans.append(internal_span("queue", own, queued_s, ended.ended_s, {}))
        return spans
    if run.times.started_s - queued_s > 0.0:
        spans.append(internal_span("queue", own, queued_s, run.times.started_s, {}))
    compute = internal_span("compute", own, run.times.started_s, run.times.split_s, _batch(run))
    spans.append(compute)
    _add_steps(spans, run.steps, compute.context)
    return spans


def _add_steps(spans: list[Span], steps: tuple[Step, ...], parent: TraceContext) -> None:
    for step in steps:
        attributes: Attributes = {"oriel.model": step.model, "oriel.model.version": step.version, **_batch(step.run)}
        attributes["oriel.queue_us"] = int((step.run.times.started_s - step.queued_s) * 1e6)
        span = internal_span(f"step {step.model}", parent, step.queued_s, step.run.times.split_s, attributes)
        spans.append(span)
        _add_steps(spans, step.run.steps, span.context)


def _batch(run: Run) -> Attributes:
    attributes: Attributes = {"oriel.batch.rows": run.times.rows, "oriel.device_us": run.device_us}
    if (decoding := run.decoding) is not None:
        attributes[GEN_AI["input_tokens"]], attributes[GEN_AI["output_tokens"]] = (
            decoding.tokens_in,
            decoding.tokens_out,
        )
        attributes["oriel.first_token_us"] = int(decoding.first_token_s * 1e6)
        attributes["oriel.pauses"], attributes["oriel.paused_us"] = decoding.pauses, int(decoding.paused_s * 1e6)
    return attributes
