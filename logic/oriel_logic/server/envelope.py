"""The outermost layer of a request: context, admission, error replies, `Server-Timing`, metrics and traces."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from oriel_logic.bodies.lines import error_event, line
from oriel_logic.bodies.schemas import EVENTS, NDJSON
from oriel_logic.client.inference import STAGE
from oriel_logic.errors import CallerLeft, DeadlineExceeded, HandlerFailed, LogicError, Outcome, Saturated
from oriel_logic.observe.metrics import Metrics
from oriel_logic.observe.stages import Ledger
from oriel_logic.observe.usage import Usage
from oriel_logic.server.failures import close
from oriel_logic.server.inbound import Inbound
from oriel_logic.server.pipeline import Deadline
from oriel_logic.server.replies import Reply, body_of, error_reply, not_ready, reply_of
from oriel_logic.server.visit import Visit, keeps_alone, spans_of
from oriel_wire.context import COST, COST_US, REQUEST_ID, SERVICE_TIER, TICKET, ContextPlan, format_cost, read_headers
from oriel_wire.h1.response import UNBUFFERED
from oriel_wire.observe.semantics import OPERATIONS
from oriel_wire.observe.server_timing import bounded, server_timing
from oriel_wire.observe.trace import SpanSink, child, format_traceparent

_log = logging.getLogger(__name__)
Handler = Callable[[Inbound, Visit], Awaitable[Reply]]
# The last piece of a stream that failed after it began: the error body, as a line or as an event of the name `error`.
ERROR_FRAMES: dict[str, Callable[[bytes], bytes]] = {NDJSON: line, EVENTS: error_event}
# On the service port too: gateways probe the addresses that they call, at the second path where models share the pool.
READY = ("/health/ready", "/v2/health/ready")


class Envelope:
    """Answers every request: errors become replies, replies get their headers, results are counted and traced.

    At most `max_in_flight` requests run at a time; a probe for readiness is answered at once and not counted. At most
    `stream_idle_s` may pass between the pieces of a streamed answer; the deadline bounds its first piece.
    """

    def __init__(
        self,
        handle: Handler,
        *,
        sink: SpanSink,
        metrics: Metrics,
        default_timeout_s: float,
        max_in_flight: int,
        stream_idle_s: float,
        usage: Usage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle = handle
        self._usage = usage or Usage()
        self._sink = sink
        self._metrics = metrics
        self._default_timeout_s = default_timeout_s
        self._max_in_flight = max_in_flight
        self._stream_idle_s = stream_idle_s
        self._clock = clock
        self.in_flight = 0
        self.kept: dict[str, int] = {}  # traces that were kept, by why
        self.ready: Callable[[], tuple[bool, str]] | None = None  # True if probes get 200, else False and the reason

    def plan(self, headers: dict[str, str], *, trusted: bool) -> ContextPlan:
        """Parse the context in a head, and take its ticket out of it: services do not see that."""
        ticket = headers.pop(TICKET, "")
        ticket = ticket if trusted else ""
        plan = read_headers(headers.get, trusted=trusted, sampling=self._sink.sampling, ticket=ticket)
        served_as = headers.get(SERVICE_TIER) if trusted else None
        return replace(plan, service_tier=served_as) if served_as in ("flex", "priority") else plan

    def visit(self, plan: ContextPlan, started_s: float) -> Visit:
        """Open the record of a request's stay in this server. started_s: monotonic time at which its head came."""
        call = plan.at(started_s, self._default_timeout_s)
        if plan.trace is None:
            return Visit(call=call, ledger=Ledger(call.trace, clock=self._clock), started_s=started_s)
        ledger = Ledger(child(call.trace), clock=self._clock)
        return Visit(call=call, ledger=ledger, started_s=started_s, parent_id=call.trace.span_id)

    async def answer(self, inbound: Inbound, visit: Visit) -> Reply:
        """Answer one request; it is counted when the answer is complete or its last piece was taken.

        Raises CallerLeft if nobody waits for the answer, and CancelledError: in both cases it has been counted.
        """
        if inbound.path in READY and self.ready is not None:
            is_ready, reason = self.ready()
            return reply_of({"ready": True}) if is_ready else not_ready(reason)
        self.in_flight += 1
        visit.request = inbound.method, inbound.path
        streams = False
        try:
            reply = await self._reply(inbound, visit)
            visit.status = reply.status
            size = inbound.size_bytes
            visit.bytes_in = len(inbound.body.whole or b"") if size is None else size
            visit.bytes_out = len(reply.body)
            if reply.pieces is not None:
                streams = True
                if reply.content_type.startswith("text/event-stream"):
                    reply = replace(reply, headers=(*reply.headers, *UNBUFFERED))
                if visit.call.trusted:
                    reply = replace(reply, trailers=lambda: cost(visit))
            stamp = self._stamp(visit, self._clock() - visit.started_s, streams=streams)
            return replace(reply, headers=(*reply.headers, *stamp))
        except (CallerLeft, asyncio.CancelledError):
            visit.outcome = Outcome.CALLER_LEFT
            raise
        finally:
            if not streams:
                self._account(visit)

    def refuse(self, visit: Visit, error: LogicError, status: int) -> Reply:
        """Answer a request that was refused before it was dispatched; it is counted."""
        self.in_flight += 1
        visit.outcome, visit.status = error.outcome, status
        reply = error_reply(error, visit.call.request_id)
        self._account(visit)
        stamp = self._stamp(visit, self._clock() - visit.started_s)
        return replace(reply, status=status, headers=(*reply.headers, *stamp))

    async def _reply(self, inbound: Inbound, visit: Visit) -> Reply:
        try:
            if self.in_flight > self._max_in_flight:
                raise Saturated("this server has too many requests under way: try again later", retry_after_s=1.0)
            reply = await self._handle(inbound, visit)
            if reply.pieces is not None:
                watched = Watched(reply, visit, 0.0 if reply.is_bounded else self._stream_idle_s, self._account)
                await watched.begin(visit.call.remaining_s(self._clock()))
                reply = replace(reply, pieces=watched)
            elif visit.outcome is None:
                visit.outcome = Outcome.OK
            return reply
        except CallerLeft:
            raise
        except LogicError as error:
            visit.outcome = error.outcome
            if isinstance(error, HandlerFailed) and error.__cause__ is not None:
                about = visit.call.log_fields(visit.service, error.outcome.value)
                _log.error(
                    "request %s: service '%s' failed", about["request_id"], visit.service, exc_info=error, extra=about
                )
            for each in filter(None, (error, error.__cause__, error.__context__)):
                each.__traceback__ = None  # its frames may hold the error, and only the collector would free them
            return error_reply(error, visit.call.request_id)

    def _stamp(self, visit: Visit, seconds: float, *, streams: bool = False) -> list[tuple[str, str]]:
        ledger = visit.ledger
        stages = ledger.timings()
        own = [("logic", seconds), *[(f"logic-{name}", duration) for name, duration in stages]]
        timing = server_timing([*own, *ledger.reported_s.items()])
        if ledger.upstream:
            timing = bounded(f"{timing}, {ledger.upstream}")
        stamp = [
            (REQUEST_ID, visit.call.request_id),
            ("traceresponse", format_traceparent(ledger.root)),
            ("server-timing", timing),
        ]
        if visit.release is not None:
            stamp.append(visit.release.stamp)
        if visit.call.trusted:  # a stream's cost is known at its end
            stamp += (("trailer", COST),) if streams else cost(visit)
        if visit.status == 503 and any(name == STAGE for name, _ in stages):
            stamp.append(("x-oriel-retry", "spent"))  # the reason may mean "not executed", but a model was called
        return stamp

    def _account(self, visit: Visit) -> None:
        self.in_flight -= 1
        if visit.release is not None:
            visit.release.finished()
            visit.release = None
        visit.ended_s = self._clock()
        outcome = visit.outcome = visit.outcome or Outcome.HANDLER_FAILED
        call, ledger, seconds = visit.call, visit.ledger, visit.ended_s - visit.started_s
        self._metrics.observe(visit.service, call.tier, outcome, seconds, ledger.stages)
        if visit.first_s and visit.tokens is not None and outcome is Outcome.OK:
            times_s, operation = (visit.started_s, visit.first_s, visit.ended_s), OPERATIONS[visit.request[1]]
            self._metrics.observe_generation(operation, visit.target, call.tier, times_s, visit.tokens[2] or 0)
        sizes = visit.bytes_in, visit.bytes_out
        self._usage.account(call, visit.target or visit.service, outcome, ledger, *sizes)
        sink = self._sink
        if not sink.enabled:
            return
        spans = 1 + len(ledger.stages)
        if call.trace.sampled:
            why = "client" if visit.parent_id else "ratio"
        elif keeps_alone(visit):
            why = "error"
            sink.ring.sent(call.trace.trace_id, (visit,))
        else:
            sink.ring.note(call.trace.trace_id, spans_of, (visit,), spans)
            return
        self.kept[why] = self.kept.get(why, 0) + 1
        sink.keep(spans_of, (visit,), spans)


def cost(visit: Visit) -> tuple[tuple[str, str], ...]:
    """Return what a request has cost so far, for a trusted peer: what the usage ledger says of it too.

    Nobody is charged for its own part if it failed, nor for a copy; the models that it called are charged apart.
    """
    ledger, failed = visit.ledger, visit.outcome not in (None, Outcome.OK)
    if failed or visit.call.unbilled:
        used = format_cost(ledger.device_ns, 0, ledger.device_class)
    else:
        counted = (ledger.device_ns, ledger.cpu_ns, ledger.device_class, ledger.tokens_in, ledger.tokens_out)
        used = format_cost(*counted)
    return (COST_US, str(ledger.cost_us)), (COST, used)


class Watched:
    """The pieces of an answer that is being sent.

    If they fail after the first, one more says why, where the media type has a form for that.
    idle_s: longest time between two of them; 0 if they bound it themselves.
    account: called exactly once with the visit, after the last piece or by `aclose`.
    """

    def __init__(self, reply: Reply, visit: Visit, idle_s: float, account: Callable[[Visit], None]) -> None:
        assert reply.pieces is not None
        self._pieces = reply.pieces
        self._error_frame = ERROR_FRAMES.get(reply.content_type)
        self._visit = visit
        self._idle_s = idle_s
        self._account: Callable[[Visit], None] | None = account
        self._first: bytes | None = None
        self._has_failed = False

    async def begin(self, seconds: float) -> None:
        """Wait for the first piece, at most so long: an error before it can still have a status. Raises LogicError."""
        try:
            async with asyncio.timeout(seconds):
                self._first = await anext(self._pieces, None)
        except BaseException as error:
            await close(self._pieces)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(self._visit.ledger.interrupted) from error
            raise

    def __aiter__(self) -> "Watched":
        return self

    async def __anext__(self) -> bytes:
        piece, self._first = self._first, None
        try:
            if self._has_failed:
                raise StopAsyncIteration
            if piece is None and self._idle_s:
                with Deadline(self._idle_s):
                    piece = await anext(self._pieces)
            elif piece is None:
                piece = await anext(self._pieces)
        except StopAsyncIteration:
            self._end(self._visit.outcome or Outcome.OK)  # a stream that ended with an error piece has recorded it
            raise
        except TimeoutError:
            about = self._visit.call.log_fields(self._visit.service)
            _log.warning("%s: no piece of its answer came for %g s", self._whose(), self._idle_s, extra=about)
            self._end(Outcome.DEADLINE_EXCEEDED)
            raise
        except Exception as error:
            frame = None if isinstance(error, CallerLeft) else self._error_frame
            is_refusal = isinstance(error, LogicError) and not (isinstance(error, HandlerFailed) and error.__cause__)
            if frame is None or not is_refusal:
                about = self._visit.call.log_fields(self._visit.service)
                _log.error("%s failed while it streamed", self._whose(), exc_info=error, extra=about)
            if frame is None or not isinstance(error, LogicError):
                self._end(error.outcome if isinstance(error, LogicError) else Outcome.HANDLER_FAILED)
                raise
            self._visit.outcome, self._has_failed = error.outcome, True
            piece = frame(body_of(error, self._visit.call.request_id))
        self._visit.bytes_out += len(piece)
        return piece

    async def aclose(self) -> None:
        """Stop sending: the caller has left."""
        self._end(Outcome.CALLER_LEFT)
        await close(self._pieces)

    def _end(self, outcome: Outcome) -> None:
        account, self._account = self._account, None
        if account is not None:
            self._visit.outcome = outcome
            account(self._visit)

    def _whose(self) -> str:
        return f"request {self._visit.call.request_id}: service '{self._visit.service}'"
