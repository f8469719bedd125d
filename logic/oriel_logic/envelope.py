"""The outermost layer: reads who asks and how long there is, and says on every answer where the time went."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from oriel_logic.errors import ClientLeft, DeadlineExceeded, HandlerFailed, LogicError, Outcome, Saturated
from oriel_logic.inbound import Inbound
from oriel_logic.inference import STAGE
from oriel_logic.metrics import Metrics
from oriel_logic.releases import Release
from oriel_logic.replies import Reply, error_reply
from oriel_logic.stages import Ledger
from oriel_wire.context import COST_US, REQUEST_ID, CallContext, ContextPlan, read_headers
from oriel_wire.trace import Span, SpanSink, child, format_traceparent, server_timing

__all__ = ["Envelope", "Visit", "end"]

_log = logging.getLogger(__name__)
Handler = Callable[[Inbound, "Visit"], Awaitable[Reply]]


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request on its way through the layers. `begin` and `outcome` are set on the way; `status` is what left.

    started_s: monotonic seconds at which its head was complete. parent_id: the caller's span, 0 if it named none.
    """

    call: CallContext
    ledger: Ledger
    started_s: float
    parent_id: int = 0
    service: str = ""
    release: Release | None = None
    outcome: Outcome | None = None
    status: int = 0

    def begin(self, release: Release) -> None:
        """This release answers it: it is used until the visit is accounted for."""
        self.release = release
        self.service = release.name
        release.began()


class Envelope:
    """Answers every request: errors become replies, replies are stamped, what became of it is counted and traced.

    At most `max_in_flight` requests at a time. Between the pieces of a streamed answer at most `stream_idle_s` may
    pass; the deadline bounds its first piece.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle = handle
        self._sink = sink
        self._metrics = metrics
        self._default_timeout_s = default_timeout_s
        self._max_in_flight = max_in_flight
        self._stream_idle_s = stream_idle_s
        self._clock = clock
        self.in_flight = 0

    def plan(self, headers: Mapping[str, str], *, trusted: bool) -> ContextPlan:
        """What a head says of its request's context; may be kept for requests with the same head."""
        return read_headers(headers.get, trusted=trusted, sample=self._sink.enabled)

    def visit(self, plan: ContextPlan, started_s: float) -> Visit:
        """The visit of a request whose head came at `started_s`."""
        call = plan.at(started_s, self._default_timeout_s)
        if plan.trace is None:
            return Visit(call=call, ledger=Ledger(call.trace, clock=self._clock), started_s=started_s)
        ledger = Ledger(child(call.trace), clock=self._clock)
        return Visit(call=call, ledger=ledger, started_s=started_s, parent_id=call.trace.span_id)

    async def answer(self, inbound: Inbound, visit: Visit) -> Reply:
        """The stamped answer to one request; it is counted when the answer is whole, or its last piece was taken.

        Raises ClientLeft if nobody waits for one, and CancelledError: in both cases it has been counted.
        """
        self.in_flight += 1
        streams = False
        try:
            reply = await self._reply(inbound, visit)
            visit.status = reply.status
            if reply.pieces is not None:
                streams = True
                pieces = Watched(reply.pieces, visit, self._stream_idle_s, self._streamed(visit))
                reply = replace(reply, pieces=pieces)
            stamp = self._stamp(visit, self._clock() - visit.started_s, streams=streams)
            return Reply(
                status=reply.status,
                body=reply.body,
                content_type=reply.content_type,
                headers=(*reply.headers, *stamp),
                pieces=reply.pieces,
            )
        except (ClientLeft, asyncio.CancelledError):
            visit.outcome = Outcome.CLIENT_LEFT
            raise
        finally:
            if not streams:
                self._account(visit)

    def refuse(self, visit: Visit, error: LogicError, status: int) -> Reply:
        """The stamped answer to what is refused before anybody looked at it; counted."""
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
                reply = replace(reply, pieces=await self._begun(reply.pieces, visit))
            elif visit.outcome is None:
                visit.outcome = Outcome.OK
            return reply
        except ClientLeft:
            raise
        except LogicError as error:
            visit.outcome = error.outcome
            if isinstance(error, HandlerFailed) and error.__cause__ is not None:
                _log.error("request %s: service '%s' failed", visit.call.request_id, visit.service, exc_info=error)
            return error_reply(error, visit.call.request_id)

    async def _begun(self, pieces: AsyncIterator[bytes], visit: Visit) -> AsyncIterator[bytes]:
        """The same pieces, of which the first is there: what goes wrong before it can still be said with a status."""
        try:
            async with asyncio.timeout(visit.call.remaining_s(self._clock())):
                first = await anext(pieces, None)
        except TimeoutError as error:
            await end(pieces)
            raise DeadlineExceeded(visit.ledger.interrupted) from error
        except BaseException:
            await end(pieces)
            raise
        return chained(first, pieces)

    def _streamed(self, visit: Visit) -> Callable[[Outcome], None]:
        def ended(outcome: Outcome) -> None:
            visit.outcome = outcome
            self._account(visit)

        return ended

    def _stamp(self, visit: Visit, seconds: float, *, streams: bool = False) -> list[tuple[str, str]]:
        ledger = visit.ledger
        stages = ledger.timings()
        timing = server_timing([("logic", seconds), *[(f"logic-{name}", duration) for name, duration in stages]])
        if ledger.upstream:
            timing = ", ".join([timing, *ledger.upstream])
        stamp = [
            (REQUEST_ID, visit.call.request_id),
            ("traceresponse", format_traceparent(ledger.root)),
            ("server-timing", timing),
        ]
        if visit.release is not None:
            stamp.append(visit.release.stamp)
        if ledger.cost_us and not streams:  # of a stream most is still to come: the gateway charges it by its time
            stamp.append((COST_US, str(ledger.cost_us)))
        if visit.status == 503 and any(name == STAGE for name, _ in stages):
            stamp.append(("x-oriel-retry", "spent"))  # the reason may be one of not executed, but a model was asked
        return stamp

    def _account(self, visit: Visit) -> None:
        self.in_flight -= 1
        if visit.release is not None:
            visit.release.ended()
        ended = self._clock()
        outcome = visit.outcome or Outcome.HANDLER_FAILED
        self._metrics.observe(visit.service, visit.call.tier, outcome, ended - visit.started_s, visit.ledger.stages)
        if not (visit.call.trace.sampled and self._sink.enabled):
            return
        attributes: dict[str, Any] = {
            "oriel.request_id": visit.call.request_id,
            "oriel.service": visit.service,
            "oriel.tier": visit.call.tier,
            "http.response.status_code": visit.status,
        }
        root = Span(
            name="logic.request",
            context=visit.ledger.root,
            parent_id=visit.parent_id,
            start_s=visit.started_s,
            end_s=ended,
            kind="server",
            attributes=attributes,
            error="" if outcome is Outcome.OK else outcome.value,
        )
        self._sink.record(root)
        for span in visit.ledger.spans():
            self._sink.record(span)


class Watched:
    """The pieces of an answer on their way out. `ended` is called exactly once: at their end, or by `aclose`."""

    def __init__(
        self, pieces: AsyncIterator[bytes], visit: Visit, idle_s: float, ended: Callable[[Outcome], None]
    ) -> None:
        self._pieces = pieces
        self._visit = visit
        self._idle_s = idle_s
        self._ended: Callable[[Outcome], None] | None = ended

    def __aiter__(self) -> "Watched":
        return self

    async def __anext__(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s):
                return await anext(self._pieces)
        except StopAsyncIteration:
            self._end(self._visit.outcome or Outcome.OK)  # one that failed well has noted it
            raise
        except TimeoutError:
            _log.warning("%s: no piece of its answer came for %g s", self._whose(), self._idle_s)
            self._end(Outcome.DEADLINE_EXCEEDED)
            raise
        except Exception as error:
            _log.error("%s failed while it streamed", self._whose(), exc_info=error)
            self._end(error.outcome if isinstance(error, LogicError) else Outcome.HANDLER_FAILED)
            raise

    async def aclose(self) -> None:
        """Nobody takes more."""
        self._end(Outcome.CLIENT_LEFT)
        await end(self._pieces)

    def _end(self, outcome: Outcome) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(outcome)

    def _whose(self) -> str:
        return f"request {self._visit.call.request_id}: service '{self._visit.service}'"


async def chained(first: bytes | None, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`first` (None: there was nothing at all), then the rest; closes it too."""
    try:
        if first is not None:
            yield first
            async for piece in rest:
                yield piece
    finally:
        await end(rest)


async def end(pieces: AsyncIterator[bytes]) -> None:
    """End a generator that may be in the middle of its work."""
    closing = getattr(pieces, "aclose", None)
    if closing is not None:
        await closing()
