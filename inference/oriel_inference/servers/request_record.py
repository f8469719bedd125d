"""The headers that every answer carries, and the spans and the accounting of one request, for HTTP and gRPC alike."""

import logging
import time
from typing import Any

from oriel_inference.batching.call import Answer
from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import InferenceError, Outcome
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.spans import Requested, keeps_alone, run_of, spans_of
from oriel_policies.metering.usage import UsageRow
from oriel_wire.context import COST, COST_US, REQUEST_ID, CallContext, format_cost
from oriel_wire.h2.hpack import LENGTHS, field_prefix, literal
from oriel_wire.observe.orca import LOAD_METRICS
from oriel_wire.observe.server_timing import server_timing
from oriel_wire.observe.trace import SpanSink, child, format_traceparent

_log = logging.getLogger(__name__)

# The beginnings of trailers: names, and the length of a value that is always the same.
_OK_AND_ID = literal(b"grpc-status", b"0") + field_prefix(REQUEST_ID.encode())
_TRACE = field_prefix(b"traceresponse") + b"\x37"
_TIMING = field_prefix(b"server-timing")


def cost_text(device_ns: int, usage: UsageRow | None) -> str:
    """Return the value of `x-oriel-cost`: what a call used of which class of device.

    usage: the row that counts it; None if nothing was executed. A copy that nobody is charged for costs nothing.
    """
    if usage is None:
        return format_cost(0, 0, "")
    return format_cost(0 if usage.key.why in ("shadow", "repeat") else device_ns, 0, usage.key.device_class)


class RequestRecord:
    """Accounts for one request, from its first byte to its answer. Exactly one of `refused`, `ended`, `answered` and
    `left` is called.

    parent_id: the caller's span, 0 if the trace starts here.
    size_bytes: size of the request as it arrived.
    request: see `spans.Requested`.
    load_form: the form of load report that it asks for in `endpoint-load-metrics-format`, "" for none.
    """

    __slots__ = (
        "_ctx",
        "_load_form",
        "_meter",
        "_parent_id",
        "_protocol",
        "_received_s",
        "_request",
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
        request: Requested,
        load_form: str = "",
    ) -> None:
        self._ctx = ctx
        self._received_s = received_s
        self._sink = sink
        self._meter = meter
        self._parent_id = parent_id
        self._protocol = protocol
        self._request = request
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
                headers.append((COST, cost_text(answer.device_ns, answer.usage)))
        if self._load_form:
            load = self._meter.load_header(completion.serving, self._ctx.band, self._load_form)
            headers.append((LOAD_METRICS, load))
        return headers

    def answered(self, completion: Completion, answer: Answer, size_out: int) -> str:
        """Does what `ended` does for a successful answer, and returns the headers as lines."""
        ctx, span = self._ctx, self._span
        self._meter.finished(ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        if self._sink.enabled:
            self._record_spans(completion, completion.serving.spec.name, None)
        times = answer.times
        lines = (
            f"{REQUEST_ID}: {ctx.request_id}\r\n"
            f"traceresponse: 00-{span.trace_id:032x}-{span.span_id:016x}-0{span.sampled | span.random << 1}\r\n"
            f"server-timing: queue;dur={(times.started_s - completion.queued_s) * 1e3:.3f}, "
            f"compute;dur={(times.split_s - times.started_s) * 1e3:.3f}\r\n"
        )
        if ctx.trusted:
            cost = cost_text(answer.device_ns, answer.usage)
            lines += f"{COST_US}: {answer.cost_us}\r\n{COST}: {cost}\r\n"
        if self._load_form:
            lines += f"{LOAD_METRICS}: {self._meter.load_header(completion.serving, ctx.band, self._load_form)}\r\n"
        return lines

    def trailers(self, completion: Completion, answer: Answer, size_out: int) -> bytes:
        """Does what `ended` does for a successful answer over gRPC, and returns the status and headers as one block."""
        ctx, span = self._ctx, self._span
        self._meter.finished(ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        if self._sink.enabled:
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
            f"00-{span.trace_id:032x}-{span.span_id:016x}-0{span.sampled | span.random << 1}".encode(),
            _TIMING,
            LENGTHS[len(timing)],
            timing,
        ]
        if ctx.trusted:
            parts.append(literal(b"x-oriel-cost-us", b"%d" % answer.cost_us))
            parts.append(literal(b"x-oriel-cost", cost_text(answer.device_ns, answer.usage).encode()))
        if self._load_form:
            load = self._meter.load_header(completion.serving, ctx.band, self._load_form)
            parts.append(literal(LOAD_METRICS.encode(), load.encode("latin-1")))
        return b"".join(parts)

    def left(self, completion: Completion) -> None:
        """Records that the caller went away before its answer."""
        self._meter.finished(self._ctx, completion, self._received_s, self._protocol, self.size_bytes)
        self._record_spans(completion, completion.serving.spec.name, completion.error)

    @property
    def announced(self) -> tuple[tuple[str, str], ...]:
        """The header of a streamed answer whose trailers report its cost: only trusted peers get it."""
        return (("trailer", COST),) if self._ctx.trusted else ()

    def identity(self) -> list[tuple[str, str]]:
        """Returns the headers that every answer has."""
        return [(REQUEST_ID, self._ctx.request_id), ("traceresponse", format_traceparent(self._span))]

    def _record_spans(self, completion: Completion | None, model: str, error: InferenceError | None) -> None:
        if not self._sink.enabled:
            return
        ended_s = time.monotonic()
        request = (
            self._ctx.request_id,
            self._ctx.tier,
            self._span,
            self._parent_id,
            self._protocol,
            self._received_s,
            ended_s,
            model,
        )
        outcome = error.outcome if error is not None else None
        if completion is None:
            self._trace((*request, outcome, 0.0, None, "", self._request), outcome, 1)
            return
        answer = completion.answer
        version = completion.serving.version
        if answer is None:
            self._trace((*request, outcome, completion.queued_s, None, version, self._request), outcome, 2)
            return
        run = run_of(answer)
        self._trace((*request, outcome, completion.queued_s, run, version, self._request), outcome, 3 + len(run.steps))

    def _trace(self, record: tuple[Any, ...], outcome: Outcome | None, spans: int) -> None:
        """Send the spans of a request whose trace is kept; note one that may be asked for later."""
        meter = self._meter
        if self._span.sampled:
            meter.kept["client" if self._parent_id else "ratio"] += 1
            note_kept(meter, record)
            self._sink.keep(spans_of, record, spans)
        elif outcome is not None and keeps_alone(outcome):
            meter.kept["error"] += 1
            self._sink.ring.sent(self._span.trace_id)
            self._sink.keep(spans_of, record, spans)
        else:
            self._sink.ring.note(self._span.trace_id, spans_of, record, spans)


def note_kept(meter: Meter, record: tuple[Any, ...]) -> None:
    """Show a request whose spans are sent as an example of its latency, if it was answered. record: of `spans_of`."""
    _, tier, span, _, _, received_s, ended_s, model, outcome, _, _, version, _ = record
    if outcome is None:
        meter.traced(model, version, tier, ended_s - received_s, span.trace_id)
