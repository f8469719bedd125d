"""The headers that every answer carries, and the spans and the accounting of one request, for HTTP and gRPC alike."""

import logging
import time
from collections.abc import Callable, Iterable

from oriel_inference.batching.call import Answer
from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import CallerLeft, InferenceError
from oriel_inference.models.demand import Demand
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.spans import Ended, Requested, keeps_alone, run_of, spans_of
from oriel_inference.servers.surface import Surface
from oriel_policies.metering.usage import UsageRow
from oriel_wire.context import COST, COST_US, REQUEST_ID, CallContext, format_cost
from oriel_wire.h2.hpack import LENGTHS, field_prefix, literal
from oriel_wire.observe.orca import LOAD_METRICS
from oriel_wire.observe.recall import keep_requested
from oriel_wire.observe.server_timing import server_timing
from oriel_wire.observe.trace import child, format_traceparent
from oriel_wire.observe.unsampled import Noted

_log = logging.getLogger(__name__)

# The beginnings of trailers: names, and the length of a value that is always the same.
_OK_AND_ID = literal(b"grpc-status", b"0") + field_prefix(REQUEST_ID.encode())
_TRACE = field_prefix(b"traceresponse") + b"\x37"
_TIMING = field_prefix(b"server-timing")


def cost_text(device_ns: int, usage: UsageRow | None, tokens: tuple[int, int] = (0, 0)) -> str:
    """Return the value of `x-oriel-cost`: what a call used of which class of device.

    usage: the row that counts it; None if nothing was executed. A copy that nobody is charged for costs nothing.
    tokens: those that a language model read and wrote.
    """
    if usage is None:
        return format_cost(0, 0, "")
    return format_cost(0 if usage.key.why in ("shadow", "repeat") else device_ns, 0, usage.key.device_class, *tokens)


class RequestRecord:
    """Accounts for one request, from its first byte to its answer. Exactly one of `refused`, `finished`,
    `finished_as_lines`, `trailers` and `caller_left` is called.

    parent_id: the caller's span, 0 if the trace starts here.
    size_bytes: size of the request as it arrived.
    load_form: the form of load report that it asks for in `endpoint-load-metrics-format`, "" for none.
    """

    __slots__ = (
        "_ctx",
        "_meter",
        "_parent_id",
        "_protocol",
        "_received_s",
        "_requested",
        "_sink",
        "_span",
        "load_form",
        "size_bytes",
    )

    def __init__(
        self,
        surface: Surface,
        ctx: CallContext,
        requested: Requested,
        received_s: float,
        *,
        parent_id: int,
        size_bytes: int,
    ) -> None:
        self._ctx = ctx
        self._received_s = received_s
        self._sink = surface.sink
        self._meter = surface.meter
        self._parent_id = parent_id
        self._requested = requested
        self._protocol = requested.protocol
        self.load_form = ""
        self._span = child(ctx.trace) if parent_id else ctx.trace
        self.size_bytes = size_bytes
        if _log.isEnabledFor(logging.DEBUG):
            left_ms = (ctx.deadline - received_s) * 1e3
            _log.debug(
                "request %s: received over %s, %d bytes, %.1f ms left",
                ctx.request_id,
                requested.protocol,
                size_bytes,
                left_ms,
            )

    def refused(self, error: InferenceError, model: str = "") -> list[tuple[str, str]]:
        """Records a refusal before the queue; returns the headers of its answer."""
        self._meter.refused_early(self._ctx, error, model, self._received_s, self._protocol, self.size_bytes)
        self._record_spans(None, model, error)
        return self.identity()

    def wait_for_load(
        self,
        demand: Demand,
        model: str,
        size_bytes: int,
        resume: Callable[[], None],
        refuse: Callable[[InferenceError, list[tuple[str, str]]], None],
    ) -> Callable[[], None]:
        """Has the request wait for its model to be loaded; returns the function to call when its caller leaves.

        resume: begins it again. refuse: gets an error and the headers of its answer. Raises InferenceError.
        """

        def refused(error: InferenceError) -> None:
            refuse(error, self.refused(error, model))

        stop_waiting = demand.wait(model, self._ctx, size_bytes=size_bytes, resume=resume, refuse=refused)

        def caller_left() -> None:
            stop_waiting()
            self.refused(CallerLeft(), model)

        return caller_left

    def finished(self, completion: Completion, model: str, size_out: int = 0) -> list[tuple[str, str]]:
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
            if (decoding := answer.decoding) is not None:
                stages += [("first_token", decoding.first_token_s), ("paused", decoding.paused_s)]
            headers.append(("server-timing", server_timing(stages)))
            if self._ctx.trusted:
                headers.append((COST_US, str(answer.cost_us)))
                headers.append((COST, cost_text(answer.device_ns, answer.usage, answer.tokens)))
        if self.load_form:
            load = self._meter.load_header(completion.serving, self._ctx.band, self.load_form)
            headers.append((LOAD_METRICS, load))
        return headers

    def finished_as_lines(self, completion: Completion, answer: Answer, size_out: int) -> str:
        """Does what `finished` does for a successful answer, and returns the headers as lines."""
        ctx, span = self._ctx, self._span
        self._meter.finished(ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        if self._sink.enabled or self._meter.traces is not None:
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
        if self.load_form:
            lines += f"{LOAD_METRICS}: {self._meter.load_header(completion.serving, ctx.band, self.load_form)}\r\n"
        return lines

    def trailers(self, completion: Completion, answer: Answer, size_out: int) -> bytes:
        """Does what `finished` does for a successful answer over gRPC; returns the status and headers as one block."""
        ctx, span = self._ctx, self._span
        self._meter.finished(ctx, completion, self._received_s, self._protocol, self.size_bytes, size_out)
        if self._sink.enabled or self._meter.traces is not None:
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
        if self.load_form:
            load = self._meter.load_header(completion.serving, ctx.band, self.load_form)
            parts.append(literal(LOAD_METRICS.encode(), load.encode("latin-1")))
        return b"".join(parts)

    def caller_left(self, completion: Completion) -> None:
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
        traces = self._meter.traces
        if not self._sink.enabled and traces is None:
            return
        ended = Ended(self._ctx, self._requested, self._span, self._parent_id, self._received_s, time.monotonic())
        ended.model = model
        ended.outcome = error.outcome if error is not None else None
        spans = 1
        if completion is not None:
            ended.queued_s, ended.version = completion.queued_s, completion.serving.version
            spans = 2
            if completion.answer is not None:
                ended.run = run_of(completion.answer)
                spans = 3 + len(ended.run.steps)
        if traces is not None:
            traces(ended)
        if self._sink.enabled:
            self._trace(ended, spans)

    def _trace(self, ended: Ended, spans: int) -> None:
        """Send the spans of a request whose trace is kept; note one that may be asked for later."""
        meter = self._meter
        if self._span.sampled:
            meter.kept["client" if self._parent_id else "ratio"] += 1
            note_kept(meter, ended)
            self._sink.keep(spans_of, (ended,), spans)
        elif ended.outcome is not None and keeps_alone(ended.outcome):
            meter.kept["error"] += 1
            self._sink.ring.sent(self._span.trace_id)
            self._sink.keep(spans_of, (ended,), spans)
        else:
            self._sink.ring.note(self._span.trace_id, spans_of, (ended,), spans)


def note_kept(meter: Meter, ended: Ended) -> None:
    """Show a request whose spans are sent as an example of its latency, if it was answered."""
    if ended.outcome is None:
        took_s = ended.ended_s - ended.received_s
        meter.traced(ended.model, ended.version, ended.ctx.tier, took_s, ended.own.trace_id)


def keep_traces(surface: Surface, body: bytes) -> bytes | None:
    """Send the spans of traces that a server in front asks for at their end (`oriel_wire.observe.recall`). Return the
    body of the answer, None for a request that is not valid. body: the body of the request.
    """

    def recalled(found: Iterable[Noted]) -> None:
        for _, build, record, _ in found:
            if build is not None:
                note_kept(surface.meter, *record)

    return keep_requested(surface.sink, body, recalled)
