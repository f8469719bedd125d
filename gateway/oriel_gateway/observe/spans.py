"""Makes the spans of a request that has ended, from the tuple of its decision.

This happens in the thread that sends them, and only for requests whose trace is kept. docs/tracing.md names them all.
"""

from oriel_gateway.errors import Outcome
from oriel_gateway.grpc_codes import CODES
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.decisions import Decided, Plain
from oriel_gateway.observe.objectives import Judged
from oriel_gateway.observe.tracing import Address, Mark
from oriel_wire.semantics import (
    GRPC_SERVICE,
    Attributes,
    grpc_code,
    grpc_failed,
    grpc_request,
    http_server,
)
from oriel_wire.trace import Span, TraceContext, internal_span, server_span


def spans_of(
    plain: Plain, why: str, scheme: str, version: str, code: int = -1, held: tuple[str, float] | None = None
) -> list[Span]:
    """Return the SERVER span of a request, that of its wait in the queue, and one CLIENT span for each attempt.

    plain: a `Decided`. why: `oriel.kept`. scheme: of the client's URL. version: of its protocol, "" if it is not known.
    code: the gRPC status of the upstream, -1 without one. held: the phase of a cold start, and the seconds it took.
    """
    decided = Decided(*plain)
    mark, outcome = decided.mark, decided.outcome
    own = TraceContext(mark.trace_id, mark.span_id, True, mark.state, mark.flags in ("02", "03"))
    if decided.protocol == "grpc":
        method = f"{GRPC_SERVICE}/{decided.method}" if decided.method else "_OTHER"
        status = grpc_code(code if code >= 0 else CODES[outcome] if outcome in CODES else 1 if _left(outcome) else 0)
        name, attributes, failed = method, grpc_request(method, status), grpc_failed(status)
        hop = Hop(name=method, status=status, path="")
    else:
        path = _path(decided)
        number = decided.status or STATUS.get(outcome, 0)
        sent = decided.status if _left(outcome) else number
        name, attributes = http_server(decided.method, scheme, path, version, sent)
        failed = number >= 500 or STATUS.get(outcome, 0) >= 500
        status = str(number)
        hop = Hop(name=decided.method, status=status, path=path)
    attributes |= _about(decided)
    attributes["oriel.kept"] = why
    if failed:
        attributes["error.type"] = status if outcome is Outcome.ANSWERED else outcome.value
    spans = [server_span(name, own, mark.parent_id, decided.received_s, decided.ended_s, attributes, failed)]
    if decided.queued_s and (decided.ahead >= 0 or held is not None):
        spans.append(_queue(decided, own, held))
    for before, (onward, endpoint, start_s, end_s, error) in enumerate(mark.attempts):
        spans.append(hop.span(decided, own, int(onward, 16), endpoint, start_s, end_s, error, before))
    if decided.permit_s and decided.endpoint is not None and decided.sent_s:
        error = "" if outcome is Outcome.ANSWERED or _left(outcome) else outcome.value
        start_s = decided.sent_s if mark.attempts else decided.permit_s
        spans.append(
            hop.span(
                decided,
                own,
                mark.forward_id,
                decided.endpoint,
                start_s,
                decided.ended_s,
                error,
                len(mark.attempts),
                last=True,
            )
        )
    return spans


class Hop:
    """The common part of the CLIENT spans of one request.

    status: how the last attempt was answered.
    """

    def __init__(self, *, name: str, status: str, path: str) -> None:
        self._name = name
        self._status = status
        self._path = path

    def span(
        self,
        decided: Decided,
        own: TraceContext,
        span_id: int,
        endpoint: Address,
        start_s: float,
        end_s: float,
        error: str,
        before: int,
        *,
        last: bool = False,
    ) -> Span:
        """Return the CLIENT span of one attempt. before: how many there were before it."""
        grpc = decided.protocol == "grpc"
        attributes: Attributes = {"server.address": endpoint.host, "server.port": endpoint.port}
        failed = bool(error)
        if grpc:
            attributes |= grpc_request(self._name, self._status if last else "UNAVAILABLE")
            failed = failed or (last and self._status not in ("OK", "CANCELLED"))
        else:
            attributes["http.request.method"] = decided.method
            attributes["url.full"] = f"http://{endpoint.host}:{endpoint.port}{self._path}"
            if last and decided.response_s:
                attributes["http.response.status_code"] = decided.status
                failed = failed or decided.status >= 400
            if before:
                attributes["http.request.resend_count"] = before
        if failed:
            attributes["error.type"] = error or self._status
        if decided.target is not None:
            attributes["oriel.pool"] = decided.target.pool
        return Span(
            name=self._name,
            context=TraceContext(own.trace_id, span_id, True, own.state, own.random),
            parent_id=own.span_id,
            start_s=start_s,
            end_s=end_s,
            kind="client",
            attributes=attributes,
            failed=failed,
        )


def span_count(mark: Mark, permit_s: float, ahead: int) -> int:
    """Return about how many spans `spans_of` makes."""
    return 1 + (permit_s > 0.0) + (ahead >= 0) + len(mark.attempts)


def _queue(decided: Decided, own: TraceContext, held: tuple[str, float] | None) -> Span:
    attributes: Attributes = {} if decided.ahead < 0 else {"oriel.queue.ahead": decided.ahead}
    if held is not None:
        phase, held_s = held
        attributes |= {"oriel.cold_start.phase": phase, "oriel.cold_start.held_ms": round(held_s * 1e3, 3)}
    failed = not decided.permit_s and not _left(decided.outcome)
    if failed:
        attributes["error.type"] = decided.outcome.value
    return internal_span("queue", own, decided.queued_s, decided.permit_s or decided.ended_s, attributes, failed)


def _about(decided: Decided) -> Attributes:
    """Return our own attributes of the SERVER span."""
    found: Attributes = {"oriel.request_id": decided.mark.request_id, "oriel.outcome": decided.outcome.value}
    tenant, target = decided.tenant, decided.target
    if tenant is not None:
        found["oriel.tenant"] = tenant.name
        found["oriel.tier"] = tenant.tier.name
        found["oriel.target_ms"] = round(tenant.tier.target_s * 1e3, 3)
    if target is not None:
        found["oriel.target"] = target.route
        found["oriel.pool"] = target.pool
        if target.kind == "model":
            found["oriel.model"] = target.name
            if target.version:
                found["oriel.model.version"] = target.version
        if target.spills:
            found["oriel.spilled"] = ", ".join([f"{each.pool}: {each.reason}" for each in target.spills])
    if decided.deadline:
        found["oriel.deadline_ms"] = round((decided.deadline - decided.received_s) * 1e3, 3)
    return found if tenant is None else found | _sla_attributes(decided.judged)


def _path(decided: Decided) -> str:
    """Return the canonical path, without its query; "" if the request was refused before it was known."""
    target = decided.target
    if target is None or not target.line:
        return ""
    parts = target.line.decode("latin-1").split(" ", 2)
    return parts[1].partition("?")[0] if len(parts) > 1 else ""


def _left(outcome: Outcome) -> bool:
    return outcome is Outcome.CALLER_LEFT


def _sla_attributes(judged: Judged | None) -> Attributes:
    """Return the attributes that say whether the promise of a request was kept, and what broke it."""
    if judged is None:
        return {"oriel.sla.result": "met"}
    found: Attributes = {"oriel.sla.result": judged.result}
    if judged.cause:
        found["oriel.sla.cause"] = judged.cause
        found["oriel.sla.excess_ms"] = round(judged.excess_s * 1e3, 3)
    return found
