"""The headers that every answer carries, and the spans and the accounting of one request, for HTTP and gRPC alike."""

import logging
import time
from collections.abc import Sequence

from oriel_inference.batching.call import Answer, StepRun
from oriel_inference.dataplane import Completion
from oriel_inference.errors import InferenceError
from oriel_inference.servers.meter import Meter
from oriel_policies.metering.usage import UsageRow
from oriel_wire.context import COST, COST_US, REQUEST_ID, CallContext, format_cost
from oriel_wire.h2.hpack import LENGTHS, field_prefix, literal
from oriel_wire.orca import LOAD_METRICS
from oriel_wire.server_timing import server_timing
from oriel_wire.trace import Span, SpanSink, TraceContext, child, format_traceparent

_log = logging.getLogger(__name__)

# The beginnings of trailers: names, and the length of a value that is always the same.
_OK_AND_ID = literal(b"grpc-status", b"0") + field_prefix(REQUEST_ID.encode())
_TRACE = field_prefix(b"traceresponse") + b"\x37"
_TIMING = field_prefix(b"server-timing")


def cost_text(device_ns: int, usage: UsageRow) -> str:
    """Return the value of `x-oriel-cost`: what a call used of which class of device."""
    return format_cost(device_ns, 0, usage.key.device_class)


class RequestRecord:
    """Accounts for one request, from its first byte to its answer. Exactly one of `refused`, `ended`, `answered` and
    `left` is called.

    parent_id: the caller's span, 0 if the trace starts here.
    size_bytes: size of the request as it arrived.
    load_form: the form of load report that it asks for in `endpoint-load-metrics-format`, "" for none.
    """

    __slots__ = (
        "_ctx",
        "_load_form",
        "_meter",
        "_parent_id",
        "_protocol",
        "_received_s",
        "_sink",
        "_span",
        "size_bytes",
    )

    def __init__(
        self,
        ctx: CallContext,
        received_s: float,
        sink: SpanSink,
        meter: Meter,
        *,
        parent_id: int,
        protocol: str,
        size_bytes: int,
        load_form: str = "",
    ) -> None:
        self._ctx = ctx
        self._received_s = received_s
        self._sink = sink
        self._meter = meter
        self._parent_id = parent_id
        self._protocol = protocol
        self._load_form = load_form
        self._span = child(ctx.trace) if parent_id else ctx.trace
        self.size_bytes = size_bytes
        if _log.isEnabledFor(logging.DEBUG):
            left_ms = (ctx.deadline - received_s) * 1e3
            _log.debug(
                "request %s: received over %s, %d bytes, %.1f ms left", ctx.request_id, protocol, size_bytes, left_ms
            )

    def refused(self, error: InferenceError, model: str = "") -> list[tuple[str, str]]:
        """Records a refusal before the queue; returns the headers of its answer."""
        self._meter.refused_early(self._ctx, error, model, self._received_s, self._protocol, self.size_bytes)
        self._record_spans(None, model, error)
        return self.identity()

    def ended(self, completion: Completion, model: str, size_out: int = 0) -> list[tuple[str, str]]:
        """Records the end of a request that reached the queue; returns the headers of its answer: identity, the
        durations of its stages, for trusted peers its cost, and the server's load if the request asks for that.

        size_out: bytes of the answer, before any compression.
        """
        self._meter.finished(self._ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        self._record_spans(completion, model, completion.error)
        headers = self.identity()
        answer = completion.answer
        if answer is None:
            headers.append(("server-timing", server_timing([("queue", time.monotonic() - completion.queued_s)])))
        else:
            times = answer.times
            stages = [("queue", times.started_s - completion.queued_s), ("compute", times.split_s - times.started_s)]
            headers.append(("server-timing", server_timing(stages)))
            if self._ctx.trusted:
                headers.append((COST_US, str(answer.cost_us)))
                if answer.usage is not None:
                    headers.append((COST, cost_text(answer.device_ns, answer.usage)))
        if self._load_form:
            load = self._meter.load_header(completion.serving, self._ctx.band, self._load_form)
            headers.append((LOAD_METRICS, load))
        return headers

    def answered(self, completion: Completion, answer: Answer, size_out: int) -> str:
        """Does what `ended` does for a successful answer, and returns the headers as lines."""
        ctx, span = self._ctx, self._span
        self._meter.finished(ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        if span.sampled:
            self._record_spans(completion, completion.serving.spec.name, None)
        times = answer.times
        lines = (
            f"{REQUEST_ID}: {ctx.request_id}\r\n"
            f"traceresponse: 00-{span.trace_id:032x}-{span.span_id:016x}-0{1 if span.sampled else 0}\r\n"
            f"server-timing: queue;dur={(times.started_s - completion.queued_s) * 1e3:.3f}, "
            f"compute;dur={(times.split_s - times.started_s) * 1e3:.3f}\r\n"
        )
        if ctx.trusted:
            lines += f"{COST_US}: {answer.cost_us}\r\n"
            if answer.usage is not None:
                lines += f"{COST}: {cost_text(answer.device_ns, answer.usage)}\r\n"
        if self._load_form:
            lines += f"{LOAD_METRICS}: {self._meter.load_header(completion.serving, ctx.band, self._load_form)}\r\n"
        return lines

    def trailers(self, completion: Completion, answer: Answer, size_out: int) -> bytes:
        """Does what `ended` does for a successful answer over gRPC, and returns the status and headers as one block."""
        ctx, span = self._ctx, self._span
        self._meter.finished(ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        if span.sampled:
            self._record_spans(completion, completion.serving.spec.name, None)
        times = answer.times
        request_id = ctx.request_id.encode()
        timing = (
            f"queue;dur={(times.started_s - completion.queued_s) * 1e3:.3f}, "
            f"compute;dur={(times.split_s - times.started_s) * 1e3:.3f}"
        ).encode()
        parts = [
            _OK_AND_ID,
            LENGTHS[len(request_id)],
            request_id,
            _TRACE,
            f"00-{span.trace_id:032x}-{span.span_id:016x}-0{1 if span.sampled else 0}".encode(),
            _TIMING,
            LENGTHS[len(timing)],
            timing,
        ]
        if ctx.trusted:
            parts.append(literal(b"x-oriel-cost-us", b"%d" % answer.cost_us))
            if answer.usage is not None:
                parts.append(literal(b"x-oriel-cost", cost_text(answer.device_ns, answer.usage).encode()))
        if self._load_form:
            load = self._meter.load_header(completion.serving, ctx.band, self._load_form)
            parts.append(literal(LOAD_METRICS.encode(), load.encode("latin-1")))
        return b"".join(parts)

    def left(self, completion: Completion) -> None:
        """Records that the caller went away before its answer."""
        self._meter.finished(self._ctx, completion, self._received_s, self._protocol, self.size_bytes)
        self._record_spans(completion, completion.serving.spec.name, completion.error)

    def identity(self) -> list[tuple[str, str]]:
        """Returns the headers that every answer has."""
        return [(REQUEST_ID, self._ctx.request_id), ("traceresponse", format_traceparent(self._span))]

    def _record_spans(self, completion: Completion | None, model: str, error: InferenceError | None) -> None:
        if not self._span.sampled or not self._sink.enabled:
            return
        now = time.monotonic()
        attributes: dict[str, str | int | float | bool] = {"oriel.request_id": self._ctx.request_id}
        if model:
            attributes["oriel.model"] = model
        if self._ctx.tier:
            attributes["oriel.tier"] = self._ctx.tier
        if error is not None:
            attributes["oriel.outcome"] = error.outcome.value
        span = Span(
            name="inference.request",
            context=self._span,
            parent_id=self._parent_id,
            start_s=self._received_s,
            end_s=now,
            kind="server",
            attributes=attributes,
            error=error.message if error is not None else "",
        )
        self._sink.record(span)
        if completion is None:
            return
        answer = completion.answer
        if answer is None:
            self._sink.record(self._inner("inference.queue", completion.queued_s, now, {}))
            return
        times = answer.times
        self._sink.record(self._inner("inference.queue", completion.queued_s, times.started_s, {}))
        batch: dict[str, str | int | float | bool] = {"oriel.batch_rows": times.rows, "oriel.cost_us": answer.cost_us}
        batch["oriel.device_us"] = answer.device_ns // 1000
        compute = self._inner("inference.compute", times.started_s, times.split_s, batch)
        self._sink.record(compute)
        if answer.steps:
            self._steps(answer.steps, compute.context)

    def _steps(self, steps: Sequence[StepRun], parent: TraceContext) -> None:
        for step in steps:
            times = step.answer.times
            attributes: dict[str, str | int | float | bool] = {
                "oriel.model": step.model,
                "oriel.model_version": step.version,
                "oriel.queue_us": int((times.started_s - step.queued_s) * 1e6),
                "oriel.batch_rows": times.rows,
                "oriel.cost_us": step.answer.cost_us,
            }
            span = self._inner("inference.step", step.queued_s, times.split_s, attributes, parent)
            self._sink.record(span)
            self._steps(step.answer.steps, span.context)

    def _inner(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: dict[str, str | int | float | bool],
        parent: TraceContext | None = None,
    ) -> Span:
        parent = parent or self._span
        context: TraceContext = child(parent)
        return Span(
            name=name,
            context=context,
            parent_id=parent.span_id,
            start_s=start_s,
            end_s=end_s,
            attributes=attributes,
        )
