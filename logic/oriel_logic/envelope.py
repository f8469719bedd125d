"""The outermost layer: reads who asks and how long there is, and says on every answer where the time went."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oriel_logic.errors import Outcome, Saturated
from oriel_logic.inference import STAGE
from oriel_logic.metrics import Metrics
from oriel_logic.replies import Reply, error_reply
from oriel_logic.stages import Ledger
from oriel_wire.context import COST_US, REQUEST_ID, CallContext, from_headers
from oriel_wire.trace import Span, SpanSink, child, format_traceparent, parse_traceparent, server_timing

__all__ = ["Envelope", "Visit", "send_reply", "visit_of"]

KEY = "oriel.visit"


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request on its way through the layers. The endpoint sets `service` and `outcome`; `status` is what left."""

    call: CallContext
    ledger: Ledger
    headers: dict[str, str]
    service: str = ""
    outcome: Outcome | None = None
    status: int = 0
    body_read: bool = False


def visit_of(scope: Scope) -> Visit:
    visit: Visit = scope[KEY]
    return visit


class Envelope:
    """ASGI layer. `x-oriel-*` count only from loopback peers; at most `max_in_flight` requests at a time."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        sink: SpanSink,
        metrics: Metrics,
        default_timeout_s: float,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._sink = sink
        self._metrics = metrics
        self._default_timeout_s = default_timeout_s
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = self._clock()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        call = from_headers(
            headers.get,
            now=started,
            trusted=is_loopback(scope.get("client")),
            default_timeout_s=self._default_timeout_s,
            sample=self._sink.enabled,
        )
        continued = parse_traceparent(headers.get("traceparent", "")) is not None
        ledger = Ledger(child(call.trace) if continued else call.trace, clock=self._clock)
        visit = scope[KEY] = Visit(call=call, ledger=ledger, headers=headers)

        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._stamp(visit, self._clock() - started)]
            await send(message)

        self.in_flight += 1
        try:
            if self.in_flight > self._max_in_flight:
                visit.outcome = Outcome.SATURATED
                refused = Saturated("this server has too many requests under way: try again later", retry_after_s=1.0)
                await send_reply(send_stamped, error_reply(refused, call.request_id))
            else:
                await self._app(scope, receive, send_stamped)
        finally:
            self.in_flight -= 1
            self._account(visit, call.trace.span_id if continued else 0, started, self._clock())

    def _stamp(self, visit: Visit, seconds: float) -> list[tuple[bytes, bytes]]:
        stages = visit.ledger.timings()
        named = [(f"logic-{name}", duration) for name, duration in stages]
        timing = ", ".join([server_timing([("logic", seconds), *named]), *visit.ledger.upstream])
        stamp = [
            (REQUEST_ID, visit.call.request_id),
            ("traceresponse", format_traceparent(visit.ledger.root)),
            ("server-timing", timing),
        ]
        if visit.ledger.cost_us:
            stamp.append((COST_US, str(visit.ledger.cost_us)))
        if visit.status == 503 and any(name == STAGE for name, _ in stages):
            stamp.append(("x-oriel-retry", "spent"))  # the reason may be one of not executed, but a model was asked
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in stamp]

    def _account(self, visit: Visit, parent_id: int, started: float, ended: float) -> None:
        if visit.outcome is not None:
            self._metrics.observe(visit.service, visit.outcome, ended - started, visit.ledger.stages)
        if not (visit.call.trace.sampled and self._sink.enabled):
            return
        attributes: dict[str, Any] = {
            "oriel.request_id": visit.call.request_id,
            "oriel.service": visit.service,
            "oriel.tier": visit.call.tier,
            "http.response.status_code": visit.status,
        }
        outcome = visit.outcome or Outcome.OK
        root = Span(
            name="logic.request",
            context=visit.ledger.root,
            parent_id=parent_id,
            start_s=started,
            end_s=ended,
            kind="server",
            attributes=attributes,
            error="" if outcome is Outcome.OK else outcome.value,
        )
        self._sink.record(root)
        for span in visit.ledger.spans():
            self._sink.record(span)


def is_loopback(client: tuple[str, int] | None) -> bool:
    if not client:
        return False
    try:
        address = ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def send_reply(send: Send, reply: Reply) -> None:
    headers = [
        (b"content-type", reply.content_type.encode("latin-1")),
        (b"content-length", str(len(reply.body)).encode()),
        *((name.encode(), value.encode("latin-1")) for name, value in reply.headers),
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
